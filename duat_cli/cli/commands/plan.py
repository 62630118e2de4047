"""`duat plan`."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Literal, get_args

from duat_cli.cli.commands import lora_diff
from duat_cli.cli.shared import options
from duat_cli.cli.shared.grouped import Options, grouped
from duat_cli.cli.shared.many import processes
from duat_cli.cli.shared.presentation import Presentation, announce, talk_of
from duat_cli.cli.shared.pruning import Pruning, require_repair
from duat_cli.cli.terminal.progress import Progress
from duat_cli.errors import EXIT_SOUND, EXIT_UNDECIDED, InputError
from duat_cli.kinds import Effort, Extra, MetricName, Patched, Planned

TOKENS_LIMIT = 1_000_000  # most prompts; more would only fill the memory


class Asked(Options):
    """What is planned."""

    tokens: str | None = options.input_option(
        metavar="LIST",
        help="Numbers of tokens instead of texts, such as 512 or 100x32,2048; no tokenizer is read.",
    )
    null: Literal["all", "uniform"] = options.compute_option("all", metavar="WHICH", help="As in duat inspect.")
    spectrum: bool = options.compute_option(help="For inspect: as in duat inspect.")
    terms: bool = options.compute_option(help="For inspect: as in duat inspect.")
    end_to_end: bool = options.compute_option(help="For inspect: as in duat inspect.")
    routing: bool = options.compute_option(help="For inspect: as in duat inspect.")
    tuned: str | None = options.input_option(
        metavar="TUNED", help="For lora-diff: the adapter or the tuned checkpoint. Default: the bundled adapter."
    )
    default_prompts: bool = lora_diff.Asked.default_prompts
    holdout: str | None = Pruning.holdout
    granularity: str | None = Pruning.granularity
    metric: MetricName | None = Pruning.metric
    effort: Effort = Pruning.effort
    probes: int | None = Pruning.probes
    measure: int | None = Pruning.measure
    criteria: bool = Pruning.criteria
    repair: bool = Pruning.repair
    calibration: str | None = Pruning.calibration
    policy: str | None = options.compute_option(metavar="POLICY", help="For check: as in duat check.")
    select: list[str] | None = options.compute_option(metavar="RULE", help="For check: as in duat check.")
    position: Literal["all"] | None = options.compute_option(
        metavar="all", help="For attribute: a target for each token."
    )
    steps: int = options.compute_option(0, metavar="N", min=0, help="For attribute: as in duat attribute.")
    fixed: bool = options.compute_option(help="For compare: as in duat compare.")
    patch: Patched | None = options.compute_option(metavar="WHAT", help="For compare: as in duat compare.")
    time: bool = options.compute_option(
        help="Also estimate how long it takes, from one matrix product and one read that are timed here."
    )


class Loading(options.Loading):
    """No weights are loaded."""

    device: str = options.loading_option(
        "cpu", metavar="DEVICE", help="cpu, or cuda: plan for a GPU's memory; with --memory there need be no GPU."
    )
    device_map: None = None
    trust_remote_code: Literal[False] = False


OPTIONS_OF = {  # command -> options for it alone
    "inspect": ["null", *get_args(Extra)],
    "compare": ["fixed", "patch"],
    "attribute": ["position", "steps"],
    "check": ["policy", "select"],
    "lora-diff": ["tuned", "default_prompts"],
    "prune-bound": [
        "granularity",
        "metric",
        "effort",
        "probes",
        "measure",
        "criteria",
        "repair",
        "calibration",
        "holdout",
    ],
}


@grouped
def plan(
    model: str | None = options.MODEL,
    *,
    command: Planned = options.compute_option(
        "inspect",
        "--for",
        metavar="COMMAND",
        help="inspect, verify, matrix, prune-bound, lora-diff, check, attribute or compare.",
    ),
    texts: options.Texts,
    asked: Asked,
    loading: Loading,
    shown: options.Page,
    voice: options.Voice,
) -> int:
    """How much memory a command will take, and whether its weights fit or are read block by block.

    It reads only config.json and the headers of the weight files; with --time it also estimates how long the command
    takes. Exit code: 0 it can run, 2 it cannot.
    """
    from duat_cli.analysis.clock import Clock
    from duat_cli.api.planning import PlanRequest, plan_report

    for of, names in OPTIONS_OF.items():
        for name in names:
            value = getattr(asked, name)
            if of != command and value not in (getattr(Asked, name).default, "", []):  # "", []: as if not given
                raise InputError(f"--{name.replace('_', '-')}: is of --for {of}, not of {command}")
    require_repair(asked.calibration, asked.repair)
    wanted = loading.request(model)
    pruning = Pruning(**{name: getattr(asked, name) for name in OPTIONS_OF["prune-bound"]})
    alike = {field.name for field in fields(PlanRequest)} & vars(asked).keys() - {"tokens", "select"}
    request = PlanRequest(
        pruning=pruning.settings(),
        model=replace(wanted, device="cpu"),
        texts=texts.request(),
        tokens=_parse_tokens(asked.tokens),
        command=command,
        select=asked.select or [],
        device=loading.device,
        processes=processes(),
        extras=frozenset(name for name in get_args(Extra) if getattr(asked, name)),
        **{name: getattr(asked, name) for name in alike},
    )
    talk = talk_of(voice)
    presentation = Presentation.of(shown, voice)
    clock = Clock()

    announce(model, talk)
    with Progress(talk) as progress:
        report = plan_report(request, clock, progress)

    presentation.emit(report, talk)
    return EXIT_UNDECIDED if report.chosen is None else EXIT_SOUND


def _parse_tokens(text: str | None) -> list[int] | None:
    """'2x32,512' as [32, 32, 512]; None stays None."""
    if text is None:
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d{1,7})x)?(\d{1,7})\s*", part, re.ASCII)
        if match is None or int(match[2]) == 0:
            raise InputError(
                f"--tokens '{text}': '{part}' is no number of tokens from 1 to 9999999; expected such as 512 or 100x32"
            )
        times = int(match[1] or 1)
        if len(counts) + times > TOKENS_LIMIT:
            raise InputError(f"--tokens '{text}': more than {TOKENS_LIMIT} prompts")
        counts += [int(match[2])] * times
    return counts
