"""What the sheets of most commands have in common."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing.figure import Verdict
from duat_cli.report.tables import facts, numbers
from duat_cli.results.base import Certificate, Environment, ModelFacts, Skipped
from duat_cli.results.prompts import Prompts
from duat_cli.text import plural


def named(model: ModelFacts) -> str:
    """The model, and the commit that it was read at."""
    return f"{model.name} at {model.revision}" if model.revision else model.name


def loaded(model: ModelFacts, environment: Environment, prompts: Prompts) -> list[str]:
    """What was loaded, what ran, and with which arithmetic."""
    kv = "" if model.kv_heads == model.heads else f" ({model.kv_heads} key/value)"
    return [
        f"{model.model_type} ({facts.architecture(model)}), {numbers.count(model.parameters)} parameters, "
        f"{plural(model.blocks, 'block')}, width {model.hidden_size}, "
        f"{plural(model.heads, 'head')}{kv}{facts.quantised(model.quantised)}",
        f"{facts.tokens(prompts)}; {facts.arithmetic(environment)}",
    ]


def verdict(certificate: Certificate) -> Verdict:
    """The certificate in words."""
    word, _, text = facts.verdict(certificate).plain.partition(": ")
    return Verdict("good" if certificate.exact else "bad", word, text)


def skipped(entries: Sequence[Skipped]) -> tuple[str, list[str]]:
    """What was left out of a report, and why."""
    return "Skipped", [f"{entry.what}: {entry.why}" for entry in entries]
