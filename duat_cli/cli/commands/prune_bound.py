"""`duat prune-bound`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError
from duat_cli.kinds import KINDS, Kind
from duat_cli.loading.wording import counted

if TYPE_CHECKING:
    from duat_cli.analysis.prune.run import PruneOutcome
    from duat_cli.analysis.prune.sets.apply import Applied
    from duat_cli.cli.shared.presentation import Presentation
    from duat_cli.cli.terminal.output import Target
    from duat_cli.cli.terminal.progress import Progress
    from duat_cli.cli.terminal.talk import Talk
    from duat_cli.results.prune.sets import Plan

EXPORT_SUFFIXES = (".json", ".yaml", ".yml")

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

Export = Annotated[
    str | None,
    typer.Option(
        "--export",
        metavar="FILE",
        rich_help_panel=options.PANEL_OUTPUT,
        help="Write the chosen set of the one --granularity: .json with module names; .yaml, for blocks, as mergekit "
        "slices.",
    ),
]
Apply = Annotated[
    str | None,
    typer.Option(
        "--apply",
        metavar="DIR",
        rich_help_panel=options.PANEL_OUTPUT,
        help="Write a checkpoint without the chosen set to a new folder; read back and compared with the ablation.",
    ),
]
ChosenSet = Annotated[
    str | None,
    typer.Option(
        "--set",
        metavar="guaranteed|largest|N",
        show_default=False,
        rich_help_panel=options.PANEL_OUTPUT,
        help="The set of --export and --apply: the largest that is guaranteed on held-out prompts, the largest within "
        "the budget on the prompts that chose it, or the N least damaging terms. Default: guaranteed, where prompts "
        "are held out.",
    ),
]
Uniform = Annotated[
    bool,
    typer.Option(
        "--uniform",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Sets of neurons take as many of every FFN: then all of them can leave the file.",
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
    uniform: Uniform = False,
    confidence: Confidence = 0.95,
    exceed: Exceed = 0.1,
    device: options.Device = "auto",
    dtype: options.DtypeOption = "float32",
    memory: options.Memory = None,
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    trust_remote_code: options.TrustRemoteCode = False,
    form: options.FormatOption = None,
    json: options.Json = False,
    output: options.Output = None,
    wide: options.Wide = False,
    export: Export = None,
    apply: Apply = None,
    chosen_set: ChosenSet = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """What can be removed, how far the output moves, and with what guarantee.

    Predicts the damage of removing every neuron, head, FFN, attention and block from a few random directions of the
    output, ablates a sample of them for real, and says how good the prediction was. Exit code: 0 done, 1 the
    certificate is not exact, 2 could not tell.
    """
    from duat_cli.analysis.opening import ModelRequest, PromptRequest, open_with_holdout
    from duat_cli.analysis.plan.task import PruneOptions, Task
    from duat_cli.cli.shared.announce import announce
    from duat_cli.cli.shared.presentation import Presentation, talk_of
    from duat_cli.cli.terminal.progress import Progress

    limit = options.parse_memory(memory)
    texts = PromptRequest(prompt, prompts, max_tokens)
    talk = talk_of(quiet, verbose, no_color)
    kinds = parse_kinds(granularity)
    settings = PruneOptions(kinds, metric, probes, measure, budget, confidence, exceed, ablate == "mean", uniform)
    task = Task("prune-bound", pruning=settings)
    wanted = ModelRequest(model, revision, token, cache_dir, trust_remote_code, dtype, device, limit, task)
    presentation = Presentation.of(output, form, json, no_color, wide=wide)
    chosen = _Chosen.of(export, apply, chosen_set, kinds, ablate, presentation)

    announce(model, talk)
    with Progress(talk) as progress:
        loaded, inputs, held_out = open_with_holdout(wanted, texts, holdout, progress)
        if apply is not None and loaded.paged is not None:
            raise InputError(
                "--apply: a checkpoint is written from weights that are all in memory, and these are read block by "
                "block; use --export FILE, or run it where the model fits"
            )
        from duat_cli.analysis.prune.run import prune_bound as compute

        outcome = compute(loaded, inputs, held_out, settings, progress)

    from duat_cli.report.tables.prune.report import render_prune

    presentation.emit(outcome.report, render_prune, talk)
    with Progress(talk) as progress:
        chosen.write(outcome, talk, progress)
    return EXIT_SOUND if outcome.report.certificate.exact else EXIT_FINDINGS


@dataclass(frozen=True)
class _Chosen:
    """Where the chosen set goes, beside the report."""

    export: Target | None
    apply: Path | None
    which: str | None

    @classmethod
    def of(
        cls,
        export: str | None,
        apply: str | None,
        which: str | None,
        kinds: Sequence[str],
        ablate: Ablate,
        presentation: Presentation,
    ) -> _Chosen:
        """Checked before anything is computed."""
        if which is not None:
            if which not in ("guaranteed", "largest") and not (which.isdecimal() and int(which) > 0):
                raise InputError(f"--set '{which}': expected guaranteed, largest or a number of terms")
            if export is None and apply is None:
                raise InputError("--set: says which set is written; give --export FILE or --apply DIR")
        for name, value in (("--export", export), ("--apply", apply)):
            if value is not None and len(kinds) != 1:
                raise InputError(f"{name}: sets of different kinds overlap; choose one, such as --granularity head")
            if value is not None and ablate != "zero":
                raise InputError(
                    f"{name}: others would set the terms to zero, and the damage of --ablate mean is another; "
                    "use --ablate zero"
                )
        if export is not None and Path(export).suffix not in EXPORT_SUFFIXES:
            raise InputError(f"--export '{export}': expected a name that ends in {', '.join(EXPORT_SUFFIXES)}")
        if export is not None and Path(export).suffix != ".json" and tuple(kinds) != ("block",):
            raise InputError(f"--export '{export}': mergekit slices are for whole blocks; use --granularity block")
        target = None
        if export is not None:
            from duat_cli.cli.terminal.output import Target

            target = Target.of("--export", export)
            if presentation.target.path and target.path and presentation.target.path.resolve() == target.path.resolve():
                raise InputError(f"--export '{export}' and --output name the same file")
        if apply is not None:
            from duat_cli.analysis.prune.sets.apply import check_directory

            check_directory(Path(apply))
        return cls(target, None if apply is None else Path(apply), which)

    def write(self, outcome: PruneOutcome, talk: Talk, progress: Progress) -> None:
        """The set that was asked for."""
        if self.export is None and self.apply is None:
            return
        [plan] = outcome.report.plans
        terms = outcome.chosen(plan, self.which)
        said = _set_line(plan, len(terms))
        if self.export is not None:
            self.export.write(outcome.exported(terms, self.export.path.suffix if self.export.path else ".json"))
            talk.note(f"wrote {self.export.path}: {said}")
        if self.apply is not None:
            progress.doing(f"writing {self.apply}")
            applied = outcome.applied(terms, self.apply)
            for note in applied.notes:
                talk.note(note)
            talk.note(f"wrote {self.apply} without {said}")
            talk.note(_applied_line(applied))


def _set_line(plan: Plan, removed: int) -> str:
    """Which set is written, and what is known of it."""
    what = f"{removed} of {counted(plan.of, plan.granularity)}"
    guaranteed = 0 if plan.guarantee is None else plan.guarantee.removed
    if removed == guaranteed:
        beside = "" if guaranteed == plan.removed else f" (the largest within the budget has {plan.removed})"
        return f"the guaranteed set of {what}{beside}"
    if removed == plan.removed:
        return f"{what}, the largest set within the budget" + ("; it is not guaranteed" if plan.guarantee else "")
    beyond = f"; the guaranteed set has {guaranteed}" if plan.guarantee and removed > guaranteed else ""
    return f"{what}, as --set says{beyond}"


def _applied_line(applied: Applied) -> str:
    """What became of the set, of the size of the weights, and of the output."""
    parts = [f"{counted(len(applied.removed_blocks), 'block')} removed"] if applied.removed_blocks else []
    parts += [f"{counted(applied.removed_neurons, 'neuron')} a block removed"] if applied.removed_neurons else []
    parts += [f"{counted(applied.zeroed, 'term')} zeroed (still stored: no byte saved)"] if applied.zeroed else []
    return (
        f"{', '.join(parts)}; weights {_size(applied.bytes_before)} -> {_size(applied.bytes_after)} in "
        f"{applied.dtype}; read back: relative distance of its output from the ablated model's {applied.error:.1e}"
    )


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} KB"


def parse_kinds(text: str | None) -> tuple[Kind, ...]:
    if text is None:
        return KINDS
    found: list[Kind] = []
    for part in text.split(","):
        name = part.strip().lower()
        if name not in KINDS:
            raise InputError(f"--granularity '{text}': '{part.strip()}' is none of {', '.join(KINDS)}")
        found.append(name)
    return tuple(dict.fromkeys(found))
