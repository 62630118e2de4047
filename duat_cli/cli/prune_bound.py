"""`duat prune-bound`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from duat_cli.cli import options
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError

if TYPE_CHECKING:
    from duat_cli.analysis.prune import PruneOptions
    from duat_cli.models.sites import Kind

ALL_KINDS = ("neuron", "head", "expert", "ffn", "attention", "block")

Granularity = Annotated[
    str | None,
    typer.Option(
        "--granularity",
        metavar="LIST",
        show_default=False,
        rich_help_panel=options.PANEL_COMPUTE,
        help="What may go: neuron, head, expert, ffn, attention, block; several with commas. "
        "Default: whatever the model has.",
    ),
]
MetricOption = Annotated[
    Literal["hidden", "kl", "nll"] | None,
    typer.Option(
        "--metric",
        metavar="METRIC",
        show_default=False,
        rich_help_panel=options.PANEL_COMPUTE,
        help="Damage: hidden (relative change of the final hidden states), kl (nats a token, of the next-token "
        "distribution), or nll (change of the loss). Default: kl where there is an LM head, else hidden.",
    ),
]
Probes = Annotated[
    int,
    typer.Option(
        "--probes",
        metavar="K",
        min=2,
        rich_help_panel=options.PANEL_COMPUTE,
        help="Random directions of the output that are carried back, for every prompt.",
    ),
]
Measure = Annotated[
    int,
    typer.Option(
        "--measure",
        metavar="N",
        min=0,
        rich_help_panel=options.PANEL_COMPUTE,
        help="Terms of every kind to ablate for real: all if there are no more, else a random sample.",
    ),
]
Budget = Annotated[
    float,
    typer.Option(
        "--budget",
        metavar="X",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Largest damage allowed, in the metric's unit.",
    ),
]
Ablate = Annotated[
    Literal["zero", "mean"],
    typer.Option(
        "--ablate",
        metavar="HOW",
        rich_help_panel=options.PANEL_COMPUTE,
        help="What stands in for a removed term: zero, or the mean of its activations over the prompts.",
    ),
]
Confidence = Annotated[
    float,
    typer.Option(
        "--confidence",
        metavar="P",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Of every interval and of the guarantee.",
    ),
]
Exceed = Annotated[
    float,
    typer.Option(
        "--exceed",
        metavar="SHARE",
        rich_help_panel=options.PANEL_COMPUTE,
        help="The guarantee: at most this share of prompts has a damage above the budget.",
    ),
]
Holdout = Annotated[
    str | None,
    typer.Option(
        "--holdout",
        metavar="FILE|SHARE",
        show_default=False,
        rich_help_panel=options.PANEL_INPUT,
        help="Prompts that test the chosen sets and play no part in choosing: a file, or a share of the prompts "
        "such as 0.5. Default: a bundled set, if the prompts are the bundled ones too.",
    ),
]


def prune_bound(
    model: options.Model = None,
    prompt: options.Prompts = None,
    prompts: options.PromptsFile = None,
    holdout: Holdout = None,
    max_tokens: options.MaxTokens = None,
    granularity: Granularity = None,
    metric: MetricOption = None,
    probes: Probes = 32,
    measure: Measure = 24,
    budget: Budget = 0.1,
    ablate: Ablate = "zero",
    confidence: Confidence = 0.95,
    exceed: Exceed = 0.1,
    device: options.Device = "auto",
    dtype: options.DtypeOption = "float32",
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    trust_remote_code: options.TrustRemoteCode = False,
    form: options.FormatOption = None,
    json: options.Json = False,
    output: options.Output = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """What can be removed, how far the output moves, and with what guarantee.

    Predicts the damage of removing every neuron, head, FFN, attention and block from one sketch, ablates a sample of
    them for real, and says how good the prediction was. Exit code: 0 done, 1 the certificate is not exact, 2 could
    not tell.
    """
    from duat_cli.cli.presentation import Presentation, talk_of
    from duat_cli.cli.progress import Progress
    from duat_cli.cli.session import ModelOptions, PromptOptions, open_with_holdout

    wanted = ModelOptions(model, revision, token, cache_dir, trust_remote_code, dtype, device)
    texts = PromptOptions(prompt, prompts, max_tokens)
    talk = talk_of(quiet, verbose, no_color)
    kinds = _kinds(granularity)
    _check(budget, confidence, exceed)
    presentation = Presentation.of(output, form, json, no_color)

    with Progress(talk) as progress:
        loaded, inputs, held_out = open_with_holdout(wanted, texts, holdout, talk, progress)
        from duat_cli.analysis.prune import PruneOptions
        from duat_cli.analysis.prune import prune_bound as compute

        settings: PruneOptions = PruneOptions(
            kinds=kinds,
            metric=metric,
            probes=probes,
            measure=measure,
            budget=budget,
            confidence=confidence,
            exceed=exceed,
            ablate_mean=ablate == "mean",
        )
        outcome = compute(loaded, inputs, held_out, settings, progress)

    from duat_cli.report.prune_table import render_prune

    presentation.emit(outcome.report, render_prune, talk)
    return EXIT_SOUND if outcome.report.certificate.exact else EXIT_FINDINGS


def _kinds(text: str | None) -> tuple[Kind, ...]:
    if text is None:
        return ALL_KINDS  # type: ignore[return-value]
    found: list[Kind] = []
    for part in text.split(","):
        name = part.strip().lower()
        if name not in ALL_KINDS:
            raise InputError(f"--granularity '{text}': '{part.strip()}' is none of {', '.join(ALL_KINDS)}")
        found.append(name)  # type: ignore[arg-type]
    return tuple(dict.fromkeys(found))


def _check(budget: float, confidence: float, exceed: float) -> None:
    if not math.isfinite(budget) or budget <= 0:
        raise InputError(f"--budget {budget:g}: expected a number above 0, in the metric's unit")
    for name, value in (("--confidence", confidence), ("--exceed", exceed)):
        if not 0 < value < 1:
            raise InputError(f"{name} {value:g}: expected a number between 0 and 1, such as 0.95")
