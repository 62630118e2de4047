"""`duat prune-bound`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from duat_cli.cli.shared import options, pruning
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError
from duat_cli.kinds import KINDS, Kind, apart, names_of
from duat_cli.text import plural

if TYPE_CHECKING:
    from duat_cli.analysis.progress import Progress as Heard
    from duat_cli.analysis.prune.run import PruneOutcome
    from duat_cli.analysis.shards.ranks import Ranks
    from duat_cli.cli.shared.presentation import Presentation
    from duat_cli.cli.terminal.output import Target
    from duat_cli.cli.terminal.progress import Progress
    from duat_cli.cli.terminal.talk import Talk
    from duat_cli.results.prune.sets import Plan
    from duat_cli.results.prune.written import Written


EXPORT_SUFFIXES = (".json", ".yaml", ".yml")

Granularity = Annotated[
    str | None,
    options.compute_option(
        "--granularity",
        metavar="LIST",
        show_default=False,
        help="What may go: neuron, head, expert, ffn, attention, block. Several with commas, such as neuron,head, go "
        "into one set, ordered by damage a parameter, if none is a part of another. Default: whatever the model has, a "
        "set of each kind.",
    ),
]
MetricOption = Annotated[
    Literal["hidden", "kl", "nll"] | None,
    options.compute_option(
        "--metric",
        metavar="METRIC",
        show_default=False,
        help="Damage: hidden (relative change of the final hidden states), kl (nats a token, of the next-token "
        "distribution), or nll (change of the loss). Default: kl where there is an LM head, else hidden.",
    ),
]
Probes = Annotated[
    int | None,
    options.compute_option(
        "--probes",
        metavar="K",
        min=2,
        show_default=False,
        help="Random directions of the output that are carried back, for every prompt. Default: 32.",
    ),
]
Measure = Annotated[
    int | None,
    options.compute_option(
        "--measure",
        metavar="N",
        min=0,
        show_default=False,
        help="Terms of every kind to ablate for real: all if there are no more, else a random sample; of whole parts "
        "four times as many. Default: 16.",
    ),
]
Budget = Annotated[
    float, options.compute_option("--budget", metavar="X", help="Largest damage allowed, in the metric's unit.")
]
Ablate = Annotated[
    Literal["zero", "mean"],
    options.compute_option(
        "--ablate",
        metavar="HOW",
        help="What stands in for a removed term: zero, or the mean of its activations over the prompts.",
    ),
]
Confidence = Annotated[
    float, options.compute_option("--confidence", metavar="P", help="Of every interval and of the guarantee.")
]
Exceed = Annotated[
    float,
    options.compute_option(
        "--exceed", metavar="SHARE", help="The guarantee: at most this share of prompts has a damage above the budget."
    ),
]
Holdout = Annotated[
    str | None,
    options.input_option(
        "--holdout",
        metavar="FILE|SHARE",
        show_default=False,
        help="Prompts that test the chosen sets and play no part in choosing: a file, or a share of the prompts "
        "such as 0.5. Default: a bundled set, if the prompts are the bundled ones too.",
    ),
]

Export = Annotated[
    str | None,
    options.output_option(
        "--export",
        metavar="FILE",
        help="Write the chosen set of the one --granularity: .json with module names; .yaml, for blocks, as mergekit "
        "slices.",
    ),
]
Apply = Annotated[
    str | None,
    options.output_option(
        "--apply",
        metavar="DIR",
        help="Write a checkpoint without the chosen set to a new folder; read back and compared with the ablation.",
    ),
]
ChosenSet = Annotated[
    str | None,
    options.output_option(
        "--set",
        metavar="guaranteed|largest|N",
        show_default=False,
        help="The set of --export and --apply: the largest that is guaranteed on held-out prompts, the largest within "
        "the budget on the prompts that chose it, or the N least damaging terms. Default: guaranteed, where prompts "
        "are held out.",
    ),
]


def prune_bound(
    model: options.Model = None,
    prompt: options.Prompts = None,
    prompts: options.PromptsFile = None,
    holdout: Holdout = None,
    max_tokens: options.MaxTokens = None,
    chat: options.Chat = False,
    granularity: Granularity = None,
    metric: MetricOption = None,
    effort: pruning.EffortOption = "default",
    probes: Probes = None,
    measure: Measure = None,
    budget: Budget = 0.1,
    ablate: Ablate = "zero",
    remove: pruning.Remove = None,
    rounds: pruning.Rounds = 1,
    uniform: pruning.Uniform = False,
    repair: pruning.Repair = False,
    calibration: pruning.Calibration = None,
    confidence: Confidence = 0.95,
    exceed: Exceed = 0.1,
    out: options.Out = None,
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    dtype: options.DtypeOption = "float32",
    memory: options.Memory = None,
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    trust_remote_code: options.TrustRemoteCode = False,
    form: options.PageFormatOption = None,
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
    from duat_cli.analysis.opening import ModelRequest, PromptRequest, open_with_calibration
    from duat_cli.analysis.plan.task import PruneOptions, Task, effort_of
    from duat_cli.cli.shared.many import as_rank, processes
    from duat_cli.cli.shared.presentation import Presentation, announce, talk_of
    from duat_cli.cli.terminal.progress import Progress
    from duat_cli.compat.libc import keep_freed_memory
    from duat_cli.loading.model.gpu import use_gpu

    limit = options.parse_memory(memory)
    texts = PromptRequest(prompt, prompts, max_tokens, chat=chat)
    talk = talk_of(quiet, verbose, no_color)
    kinds = parse_kinds(granularity)
    pruning.require_repair(calibration, repair)
    share, of_all = pruning.parse_remove(remove)
    settings = PruneOptions(
        kinds, metric, *effort_of(effort, probes, measure), budget, confidence, exceed, ablate == "mean", uniform,
        repair=repair, joint=apart(kinds), remove=share, of_all=of_all, rounds=rounds, effort=effort,
        whole=out is not None,
    )  # fmt: skip
    task = Task("prune-bound", pruning=settings, processes=1 if out is not None else processes())
    wanted = ModelRequest(model, revision, token, cache_dir, trust_remote_code, dtype, device, limit, task, device_map)
    presentation = Presentation.of_page(output, form, json, no_color, wide=wide)
    chosen = _Chosen.of(export, apply, chosen_set, kinds, ablate)

    def opened(ranks: Ranks | None, progress: Heard) -> PruneOutcome | None:
        if ranks is not None:
            use_gpu(ranks.local)
        loaded, inputs, held_out, fitting = open_with_calibration(wanted, texts, holdout, calibration, progress)
        if apply is not None and loaded.paged is not None:
            raise InputError(
                "--apply: a checkpoint is written from weights that are all in memory, and these are read block by "
                "block; use --export FILE, or run it where the model fits"
            )
        if apply is not None and ablate == "mean":
            from duat_cli.analysis.prune.repair.standing import require_biases

            require_biases(loaded.model, kinds)
        if loaded.paged is None:  # weights that are read block by block leave by being given back
            keep_freed_memory()
        if ranks is None or out is None:
            from duat_cli.analysis.prune.run import prune_bound as compute

            return compute(loaded, inputs, held_out, settings, progress, fitting)
        from duat_cli.analysis.prune.run import begin
        from duat_cli.analysis.shards.prune import prune_into

        begun = begin(loaded, inputs, held_out, settings, progress, fitting, in_parts=True)
        return prune_into(Path(out), begun, max_tokens, ranks, progress)

    if out is not None:
        outcome = as_rank(model, texts, opened, talk)
    else:
        announce(model, talk)
        with Progress(talk) as progress:
            outcome = opened(None, progress)
    return EXIT_SOUND if outcome is None else _shown(outcome, chosen, presentation, talk)  # the first rank has it


def _shown(outcome: PruneOutcome, chosen: _Chosen, presentation: Presentation, talk: Talk) -> int:
    """The report, and what of it is written."""
    from duat_cli.cli.terminal.progress import Progress
    from duat_cli.report.tables.prune.report import render_prune

    report = outcome.report
    try:
        with Progress(talk) as progress:
            written, notes = chosen.write(outcome, progress)
    except BaseException:  # what was computed is shown in any case
        presentation.emit(report, render_prune, talk)
        raise
    presentation.emit(report.model_copy(update={"written": written}), render_prune, talk)
    for note in notes:
        talk.note(note)
    return EXIT_SOUND if report.certificate.exact else EXIT_FINDINGS


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
        kinds: Sequence[Kind],
        ablate: Ablate,
    ) -> _Chosen:
        """Checked before anything is computed."""
        if which is not None:
            if which not in ("guaranteed", "largest") and not (which.isdecimal() and int(which) > 0):
                raise InputError(f"--set '{which}': expected guaranteed, largest or a number of terms")
            if export is None and apply is None:
                raise InputError("--set: says which set is written; give --export FILE or --apply DIR")
        for name, value in (("--export", export), ("--apply", apply)):
            if value is not None and len(kinds) != 1 and not apart(kinds):
                raise InputError(f"{name}: sets of different kinds overlap; choose one, such as --granularity head")
        if ablate != "zero" and export is not None:
            raise InputError(
                "--export: others would set the terms to zero, and the damage of --ablate mean is another; use "
                "--ablate zero"
            )
        if ablate != "zero" and apply is not None and not {"neuron", "head"} >= set(kinds):
            raise InputError(
                "--apply: the means of neurons and heads can stand in biases; of other kinds, use --ablate zero"
            )
        if export is not None and Path(export).suffix not in EXPORT_SUFFIXES:
            raise InputError(f"--export '{export}': expected a name that ends in {', '.join(EXPORT_SUFFIXES)}")
        if export is not None and Path(export).suffix != ".json" and tuple(kinds) != ("block",):
            raise InputError(f"--export '{export}': mergekit slices are for whole blocks; use --granularity block")
        target = None
        if export is not None:
            from duat_cli.cli.terminal.output import Target

            target = Target.of("--export", export)
        if apply is not None:
            from duat_cli.analysis.prune.sets.apply import check_directory

            check_directory(Path(apply))
        return cls(target, None if apply is None else Path(apply), which)

    def write(self, outcome: PruneOutcome, progress: Progress) -> tuple[Written | None, list[str]]:
        """The set that was asked for, and what is to be said of it."""
        if self.export is None and self.apply is None:
            return None, []
        [plan] = outcome.report.plans
        terms = outcome.chosen(plan, self.which)
        said, notes, written = _set_line(plan, len(terms)), list[str](), None
        if self.export is not None:
            self.export.write(outcome.exported(terms, self.export.path.suffix if self.export.path else ".json"))
            known = self.apply is not None or len(terms) in {plan.removed, *(one.removed for one in plan.held_out)}
            notes.append(f"wrote {self.export.path}: {said}" + ("" if known else "; its damage was not measured"))
        if self.apply is not None:
            progress.doing(f"writing {self.apply}")
            written = outcome.applied(terms, self.apply)
            notes += [*written.notes, f"wrote {self.apply} without {said}", _written_line(written)]
            if written.damage is None or written.damage > plan.budget:
                notes.append(f"warning: its damage is above the budget of {plan.budget:g}, see Written")
        return written, notes


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


def _set_line(plan: Plan, removed: int) -> str:
    """Which set is written, and what is known of it."""
    several = "," in plan.granularity
    of = f"{plan.of} {names_of(plan.granularity)}" if several else plural(plan.of, plan.granularity)
    what = f"{removed} of {of}"
    guaranteed = 0 if plan.guarantee is None else plan.guarantee.removed
    if removed == guaranteed:
        beside = "" if guaranteed == plan.removed else f" (the largest within the budget has {plan.removed})"
        return f"the guaranteed set of {what}{beside}"
    if removed == plan.removed and plan.remove is not None:
        whose = "the model" if plan.parameters_of == "all" else "the blocks"
        share = f"{100 * plan.parameters_share:.3g} % of the parameters of {whose}"
        return f"{what}, which hold {share}" + ("; it is not guaranteed" if plan.guarantee else "")
    if removed == plan.removed:
        return f"{what}, the largest set within the budget" + ("; it is not guaranteed" if plan.guarantee else "")
    beyond = f"; the guaranteed set has {guaranteed}" if plan.guarantee and removed > guaranteed else ""
    return f"{what}, as --set says{beyond}"


def _written_line(written: Written) -> str:
    """What became of the set, of the size of the weights, and of the output."""
    parts = [f"{plural(len(written.removed_blocks), 'block')} removed"] if written.removed_blocks else []
    parts += [f"{plural(written.removed_neurons, 'neuron')} a block removed"] if written.removed_neurons else []
    if written.removed_groups:
        groups = plural(written.removed_groups, "key and value head")
        whose = "it" if written.removed_groups == 1 else "them"
        parts.append(f"{groups} a block removed with the heads that use {whose}")
    parts += [f"{plural(written.zeroed, 'term')} zeroed (still stored: no byte saved)"] if written.zeroed else []
    return (
        f"{', '.join(parts)}; weights {_size(written.bytes_before)} -> {_size(written.bytes_after)} in "
        f"{written.dtype}; read back: relative distance of its output from the ablated model's {written.error:.1e}"
    )


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} KB"
