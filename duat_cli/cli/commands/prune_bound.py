"""`duat prune-bound`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from duat_cli.cli.shared import options
from duat_cli.cli.shared.grouped import Options, grouped
from duat_cli.cli.shared.many import as_rank, processes
from duat_cli.cli.shared.presentation import Presentation, Target, announce, talk_of
from duat_cli.cli.shared.pruning import Pruning
from duat_cli.cli.terminal.progress import Progress
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError
from duat_cli.kinds import apart, names_of
from duat_cli.text import expanded, plural

if TYPE_CHECKING:
    from duat_cli.analysis.plan.task import PruneOptions
    from duat_cli.analysis.prune.run import PruneOutcome
    from duat_cli.analysis.shards.ranks import Ranks
    from duat_cli.loading.model.load import LoadedModel
    from duat_cli.results.prune.sets import Plan
    from duat_cli.results.prune.written import Written


EXPORT_SUFFIXES = (".json", ".yaml", ".yml")


class ChosenSet(Options):
    """Which set is written, and where."""

    export: str | None = options.output_option(
        metavar="FILE",
        help="Write the chosen set of the one --granularity: as .json with module names or, for blocks, as .yaml with "
        "mergekit slices.",
    )
    apply: str | None = options.output_option(
        metavar="DIR",
        help="Write a checkpoint without the chosen set to a new folder; it is read back and compared with the "
        "ablation.",
    )
    which: str | None = options.output_option(
        None,
        "--set",
        metavar="guaranteed|largest|N",
        help="The set that --export and --apply write: the largest that is guaranteed on held-out prompts, the "
        "largest within the budget on the prompts that chose it, or the N least damaging terms. Default: guaranteed, "
        "if prompts are held out.",
    )

    @property
    def named(self) -> int | None:
        """How many terms go, if --set is a number; else None."""
        return int(self.which) if self.which is not None and self.which.isdecimal() else None

    def check(self, settings: PruneOptions) -> None:
        """Raises InputError for options that make no sense or cannot be written, before anything is computed."""
        export, apply, which, kinds = self.export, self.apply, self.which, settings.kinds
        suffix = Path(export or "").suffix
        if which is not None:
            if which not in ("guaranteed", "largest") and not self.named:
                raise InputError(f"--set '{which}': expected guaranteed, largest or a number of terms")
            if export is None and apply is None:
                raise InputError("--set: says which set is written; give --export FILE or --apply DIR")
        for name, value in (("--export", export), ("--apply", apply)):
            if value is not None and len(kinds) != 1 and not apart(kinds):
                raise InputError(f"{name}: sets of different kinds overlap; choose one, such as --granularity head")
        if settings.ablate_mean and export is not None:
            raise InputError(
                "--export: others would set the terms to zero, and the damage of --ablate mean is another; use "
                "--ablate zero"
            )
        if settings.ablate_mean and apply is not None and not {"neuron", "head"} >= set(kinds):
            raise InputError(
                "--apply: the means of neurons and heads can stand in biases; of other kinds, use --ablate zero"
            )
        if export is not None and suffix not in EXPORT_SUFFIXES:
            raise InputError(f"--export '{export}': expected a name that ends in {', '.join(EXPORT_SUFFIXES)}")
        if export is not None and suffix != ".json" and tuple(kinds) != ("block",):
            raise InputError(f"--export '{export}': mergekit slices are for whole blocks; use --granularity block")
        if export is not None:
            Target.of("--export", export)
        if apply is not None:
            from duat_cli.analysis.prune.sets.apply import check_directory

            check_directory(expanded(apply))

    def require(self, loaded: LoadedModel, settings: PruneOptions, *, tested: bool) -> None:
        """Raises InputError where the model has no such set, before computing. tested: whether prompts are held out."""
        from duat_cli.analysis.plan.task import NO_HOLDOUT
        from duat_cli.analysis.prune.writable import require_writable

        if self.which == "guaranteed" and not tested:
            raise InputError(f"--set guaranteed: {NO_HOLDOUT}")
        if self.apply is not None and loaded.paged is not None:
            raise InputError(
                "--apply: a checkpoint is written from weights that are all in memory, and these are read block by "
                "block; use --export FILE, or run it where the model fits"
            )
        sliced = self.export is not None and not self.export.endswith(".json")
        if loaded.whole is not None and (self.apply is not None or sliced):
            raise InputError(
                f"{'--apply' if self.apply is not None else '--export'}: writes whole models, and --stack "
                f"{loaded.stack} is a part of one; use --export FILE.json"
            )
        if self.apply is not None:
            require_writable(loaded, settings.kinds, self.named, means=settings.ablate_mean)

    def write(self, outcome: PruneOutcome, progress: Progress) -> tuple[Written | None, list[str]]:
        """Writes the set that was asked for; returns the written checkpoint, if any, and lines to report."""
        if self.export is None and self.apply is None:
            return None, []
        [plan] = outcome.report.plans
        terms = outcome.chosen(plan, self.which)
        said, notes, written = _set_line(plan, len(terms)), list[str](), None
        if self.export is not None:
            file = expanded(self.export)
            Target("--export", file).write(outcome.exported(terms, file.suffix))
            known = self.apply is not None or len(terms) in {plan.removed, *(one.removed for one in plan.held_out)}
            notes.append(f"wrote {file}: {said}" + ("" if known else "; its damage was not measured"))
        if self.apply is not None:
            folder = expanded(self.apply)
            progress.doing(f"writing {folder}")
            written = outcome.applied(terms, folder)
            notes += [*written.notes, f"wrote {folder} without {said}", _written_line(written)]
            if written.damage is None or written.damage > plan.budget:
                notes.append(f"warning: its damage is above the budget of {plan.budget:g}, see Written")
        return written, notes


@grouped
def prune_bound(
    model: str | None = options.MODEL,
    *,
    asked: Pruning,
    files: options.OneStack,
    loading: options.Loading,
    shown: options.Page,
    wide: bool = options.WIDE,
    chosen_set: ChosenSet,
    voice: options.Voice,
) -> int:
    """What can be removed, how far the output moves, and with what guarantee.

    Predicts the damage of removing every neuron, head, FFN, attention and block from a few random directions of the
    output, ablates a sample of them for real, and says how good the prediction was. Exit code: 0 done, 1 the
    certificate is not exact, 2 could not tell.
    """
    from duat_cli.analysis.opening import PromptRequest
    from duat_cli.analysis.plan.task import Task
    from duat_cli.analysis.prune.opening import open_with_calibration
    from duat_cli.compat.libc import keep_freed_memory
    from duat_cli.loading.model.gpu import use_gpu

    wanted = loading.request(model)
    talk, settings, out, given = talk_of(voice), asked.settings(), asked.out, files.given()
    if out is not None:
        options.refuse_stack(given)
    known = given if out is None else None  # results are kept of texts
    texts = PromptRequest(asked.prompt, asked.prompts, asked.max_tokens, known, chat=asked.chat)
    task = Task("prune-bound", pruning=settings, processes=1 if out is not None else processes())
    wanted = replace(wanted, task=task)
    presentation = Presentation.of(shown, voice, wide=wide)
    chosen_set.check(settings)
    settings = replace(settings, named=chosen_set.named)

    def opened(ranks: Ranks | None, progress: Progress) -> PruneOutcome | None:
        if ranks is not None:
            use_gpu(ranks.local)
        loaded, inputs, held_out, fitting = open_with_calibration(
            wanted, texts, asked.holdout, asked.calibration, progress
        )
        chosen_set.require(loaded, settings, tested=bool(held_out))
        if loaded.paged is None:  # weights read block by block must go back to the system
            keep_freed_memory()
        if ranks is None or out is None:
            from duat_cli.analysis.prune.run import prune_bound as compute

            return compute(loaded, inputs, held_out, settings, progress, fitting)
        from duat_cli.analysis.prune.run import begin
        from duat_cli.analysis.shards.prune import prune_into

        begun = begin(loaded, inputs, held_out, settings, progress, fitting, in_parts=True)
        return prune_into(expanded(out), begun, asked.max_tokens, ranks, progress)

    if out is not None:
        outcome = as_rank(model, texts, opened, talk)
    else:
        announce(model, talk)
        with Progress(talk) as progress:
            outcome = opened(None, progress)
    if outcome is None:
        return EXIT_SOUND  # the first rank has it

    report = outcome.report
    try:
        with Progress(talk) as progress:
            written, notes = chosen_set.write(outcome, progress)
    except BaseException:  # the computed report is shown in any case
        presentation.emit(report, talk)
        raise
    presentation.emit(report.model_copy(update={"written": written}), talk)
    for note in notes:
        talk.note(note)
    return EXIT_SOUND if report.certificate.exact else EXIT_FINDINGS


def _set_line(plan: Plan, removed: int) -> str:
    """A line on which set is written, and what is known of it."""
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
    """A line on the written set, the size of the weights, and the output's distance from the ablated model's."""
    return (
        f"{written.gone}; weights {_size(written.bytes_before)} -> {_size(written.bytes_after)} in "
        f"{written.dtype}; read back: relative distance of its output from the ablated model's {written.error:.1e}"
    )


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} KB"
