"""`duat check` as evaluation results for a model card's metadata: the `model-index` that the hub reads from README.md.

The hub has a second form, `.eval_results/*.yaml`, which only takes scores on datasets that are registered with it as
benchmarks. Prompts of duat are none, so its numbers can only go into `model-index`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from duat_cli.report.tables import facts
from duat_cli.results.behaviour import Behaviour
from duat_cli.results.check import CheckReport, UndecidedReport
from duat_cli.results.meaning import meaning_of
from duat_cli.results.prompts import all_prompts, set_of
from duat_cli.text import clean, plural

_TASKS = {
    "next token": ("text-generation", "Text Generation"),
    "masked token": ("fill-mask", "Fill-Mask"),
    "class": ("other", "Classification"),  # classification of texts, pictures or sounds
    "token class": ("token-classification", "Token Classification"),
    "embedding": ("feature-extraction", "Feature Extraction"),
}
_OTHER = ("other", "Other")


def render_eval_results(report: CheckReport) -> str:
    """YAML with the key `model-index`: one result, on the prompts of the report, with all its metrics.

    Metrics without a value are left out; without a forward pass, only the counts of findings remain.
    """
    import yaml  # of this form alone

    task, name = _TASKS[report.behaviour.predicts] if report.behaviour else _OTHER
    result = {"task": {"type": task, "name": name}, "dataset": _dataset(report), "metrics": list(_metrics(report))}
    index = {"model-index": [{"name": model_name(report.model.name), "results": [result]}]}
    return yaml.safe_dump(index, sort_keys=False, allow_unicode=True, width=120)


def undecided_eval_results(report: UndecidedReport) -> str:
    """A YAML comment with the reason why there is no result."""
    return f"# duat check could not tell: {clean(report.error.message)}\n"


def model_name(name: str) -> str:
    """The last part of a hub id or a path."""
    return clean(PurePath(name).name or name)


def _dataset(report: CheckReport) -> dict[str, Any]:
    if not report.prompts:
        return {"name": "the weight files, without a forward pass", "type": "weights"}
    found = set_of(all_prompts(report))
    arguments = {"prompts": found.count, "tokens": found.tokens, "sha256": found.sha256}
    return {"name": facts.counted(found), "type": "prompts", "args": arguments}


def _metrics(report: CheckReport) -> Iterator[dict[str, Any]]:
    made: dict[str, Any] = {"duat": report.duat_version}
    if report.environment is not None:
        made |= {"transformers": report.environment.transformers, "dtype": report.environment.dtype}
    behaviour = report.behaviour
    if behaviour is not None:
        for field, kind, name in (
            ("loss_per_token", "loss", "loss per token"),
            ("loss_per_byte", "loss_per_byte", "loss per byte"),
        ):
            if (value := getattr(behaviour, field)) is not None:
                unit = meaning_of(Behaviour, field).unit
                yield _metric(kind, value, f"{name}, {unit.partition(' ')[0]}", made | {"unit": unit})
    certificate = report.certificate
    if certificate is not None:
        limit = made | {"tolerance": certificate.tolerance}
        yield _metric("duat_error", certificate.relative_error, "relative error of the DUAT form", limit)
        yield _metric("duat_plain_error", certificate.plain_error, "relative error under duat's instruments", limit)
    about = made | {"policy": ", then ".join(map(clean, report.policy))}
    count = report.counts
    ran = plural(count.passed + count.failed + count.warned, "outcome")
    yield _metric("failed_checks", count.failed, f"checks that failed, of {ran}", about)
    yield _metric("warned_checks", count.warned, f"checks that warned, of {ran}", about)


def _metric(kind: str, value: float, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    # arguments are copied: one object twice would be an alias in YAML
    return {"type": kind, "value": value, "name": name, "args": dict(arguments)}
