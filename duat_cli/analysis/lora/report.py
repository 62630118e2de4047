"""The report of `duat lora-diff` with prompts: the report on the weights, and the results of both models' runs."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from duat_cli.analysis.clock import RunFacts
from duat_cli.analysis.lora.applied import refuse_other_base, refuse_resized, tuned_model
from duat_cli.analysis.lora.eq18 import INPUTS, Eq18Test, Stated
from duat_cli.analysis.lora.findings import Findings
from duat_cli.analysis.lora.ground import Ground, ground_of
from duat_cli.analysis.lora.notable import notable
from duat_cli.analysis.lora.places import NONE_IN_FRONT, Front, FrontNorms, sup_local
from duat_cli.analysis.lora.prediction import Decode
from duat_cli.analysis.lora.prompts import Comparer
from duat_cli.analysis.lora.weights.change import Change, Opened, change_of, opened
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Session, prompt_facts
from duat_cli.analysis.stacks import behind_own_encoder
from duat_cli.cache.tensors import gram_key
from duat_cli.compat.transformers import targets_of
from duat_cli.errors import UnsupportedModelError, needed, or_reason
from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.folder import AdapterFiles, digest_of
from duat_cli.loading.adapter.parameter import ParameterPlan
from duat_cli.loading.checkpoint.source import Source
from duat_cli.loading.checkpoint.stored import most_stored
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.model.processes import Processes
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.modality import stack_of
from duat_cli.models.edits.tuned import own_names
from duat_cli.operators.lowrank import Piece, is_zero
from duat_cli.results.base import Run, Skipped
from duat_cli.results.lora import Eq18, LoraReport, LoraSummary
from duat_cli.results.prompts import Roll, roll_of
from duat_cli.results.weight_change import ModuleChange
from duat_cli.text import listed

_LAYERS = ("lora", "dora", "expert lora", "adalora", "ia3", "loha", "lokr")
"""Kinds of changes that PEFT makes of a layer's output, as long as they are not merged."""


@contextlib.contextmanager
def adapter_pair(
    report: LoraReport, base: BaseWeights, adapter: AdapterFiles, loaded: LoadedModel, progress: Progress
) -> Iterator[Pair]:
    """The base, and the base with the adapter applied. report: the report on the weights alone, in which plans without
    a meaning were refused."""
    with base:
        one = opened(adapter, base)
        refuse_other_base(adapter, one.plans)
        progress(0, 1, "applying the adapter")
        planned = one.by_parameter
        head = own_head(loaded.named, one)
        tuned = tuned_model(loaded, one, base, _changed(planned, report, set(head)))

        def pieces(name: str) -> Change | None:
            return change_of(planned[name][0], one.read, base) if len(planned[name]) == 1 else None

        def stated(name: str) -> Piece | None:
            return _piece([change_of(plan, one.read, base) for plan in planned.get(name, [])])

        yield Pair(report, loaded, tuned, stated, pieces, progress, adapter, next(iter(head.values()), None))


@contextlib.contextmanager
def checkpoint_pair(report: LoraReport, loaded: LoadedModel, tuned: LoadedModel, progress: Progress) -> Iterator[Pair]:
    """The base and a fully tuned checkpoint, whose dW is the difference of the files."""
    sources = [Source(one.files.path, one.name, one.revision) for one in (loaded, tuned)]
    weights = [BaseWeights(source, one.files) for source, one in zip(sources, (loaded, tuned), strict=True)]

    targets = targets_of(loaded.named, report.unchanged)
    in_files = {target: name for name, (target, made) in targets.items() if not made}

    def stated(name: str) -> Piece | None:
        places = [one.find(name, load=False) or one.find(in_files.get(name, name), load=False) for one in weights]
        if places[0] is None or places[1] is None or places[0].shape != places[1].shape:
            raise UnsupportedModelError("the files do not both hold it in one shape under its name")
        old, new = (one.read(place) for one, place in zip(weights, places, strict=True) if place is not None)
        difference = new.double() - old.double()
        return None if is_zero(difference) else difference

    with weights[0], weights[1]:
        yield Pair(report, loaded, tuned, stated, None, progress)


class Pair:
    """Base and tuned model, ready to run, and the report on their weights."""

    def __init__(
        self,
        report: LoraReport,
        loaded: LoadedModel,
        tuned: LoadedModel,
        stated: Stated,
        pieces: Callable[[str], Change | None] | None,
        progress: Progress,
        adapter: AdapterFiles | None = None,
        why_no_head: str | None = None,
    ) -> None:
        """stated: as for `Eq18Test`. pieces: gives a parameter's change, where an adapter makes it, or None where it
        makes several. why_no_head: why the tuned model runs without its own head."""
        self._adapter, self._why_no_head = adapter, why_no_head
        self._norms: FrontNorms | None = None  # once a prompt has run
        self._report, self._stated, self._pieces, self.progress = report, stated, pieces, progress
        self.base = Session(loaded, progress, cache=False)
        self.tuned = Session(tuned, progress, cache=False)
        self._changed = [m.whole_name for m in report.modules]

    @property
    def digest(self) -> str:
        """Hash of the adapter, or of the tuned checkpoint's weights and config."""
        if self._adapter is not None:
            return digest_of(self._adapter)
        return gram_key(self.tuned.fingerprint, self.tuned.loaded.model)

    def comparer(self, decode: Decode, total: int, progress: Progress) -> Comparer:
        """The comparer that runs prompts. total: how many prompts there are in all."""
        return Comparer(*self._grounds, decode, total, progress)

    @property
    def _other_depth(self) -> str:
        """Why blocks are not compared; empty where the models have as many."""
        before, after = self.base.depth, self.tuned.depth
        return "" if before == after else f"{before} in the base, {after} in the tuned checkpoint: not compared"

    @property
    def _rounded(self) -> list[str]:
        """A note where the dtype of the run holds less of the change than the files do."""
        run = self.base.loaded.model.dtype
        stored = {most_stored(one.loaded.files) or run for one in (self.base, self.tuned)}
        factors = {torch.float32} if self._adapter is not None else set()  # an adapter's change, before it is added
        if all(torch.finfo(dtype).eps >= torch.finfo(run).eps for dtype in stored | factors):
            return []
        least, name = f"{torch.finfo(run).eps:.1g} of a weight", self.base.loaded.dtype
        return [
            f"both models run in {name}: a change of less than its rounding, {least}, moves no block, KL or loss; "
            "a wider --dtype shows it"
        ]

    @property
    def _passed_by(self) -> list[str]:
        """A note where the adapter wraps layers that the model never calls."""
        wrapped = {m.whole_name for m in self._report.modules if m.kind in _LAYERS}
        names = [] if self._norms is None else sorted({*self._norms.passed_by()} & wrapped)
        if not names:
            return []
        return [
            f"{listed(names)}: the model's code never calls these layers, so that an adapter of them acts only once it "
            "is merged; the numbers under prompts are of the merged weights"
        ]

    @functools.cached_property
    def _grounds(self) -> tuple[Ground, Ground]:
        self.progress(0, 1, "discovery of both models' structure")
        before, after = ground_of(self.base, layers=True), ground_of(self.tuned, layers=False)
        if self._why_no_head is not None:
            after = replace(after, classes=None, why_no_next_token=self._why_no_head)
        return before, after

    def norms(self, prompt: Prompt) -> FrontNorms | None:
        """Passes that have to go through the base with the first prompt; None for a later one, and for a checkpoint,
        whose largest possible effects are not computed."""
        if self._pieces is None or self._norms is not None:
            return None
        self._norms = FrontNorms(self.base, prompt, self._changed)
        return self._norms

    def head(self) -> LoraReport:
        """The part of the report that does not depend on the prompts, once one has run."""
        base, tuned = self.base, self.tuned
        modules = self._report.modules
        if self._norms is not None and self._pieces is not None:
            norms, model = self._norms.found(), base.loaded.named
            moved = {model.get_submodule(module) for module, _ in own_names(model, self._changed).values()}
            modules = [_with_sup(one, norms.get(one.whole_name), self._pieces, moved) for one in modules]
        apart = [Skipped(what="blocks", why=self._other_depth)] if self._other_depth else []
        said = [note for one in (base.loaded, tuned.loaded) for note in (*one.warnings, *one.value_notes())]
        notes = [note for note in (*said, *self._rounded, *self._passed_by) if note not in self._report.warnings]
        return self._report.model_copy(
            update={
                "level": "prompts",
                "modules": modules,
                "environment": base.environment(),
                "model": base.model_facts(),
                "certificate": base.certificate(0.0),
                "tuned_certificate": tuned.certificate(0.0),
                "skipped": [*self._report.skipped, *apart, *base.skipped()],
                "warnings": [*self._report.warnings, *dict.fromkeys(notes)],
            }
        )

    def eq18(self, prompts: Sequence[Prompt]) -> Eq18Test | None:
        """The test of Eq. 18, on the first of the prompts; None where the models differ in depth, so that their layers
        are not the same by name."""
        if self._other_depth:
            return None
        read = behind_own_encoder(self.tuned.loaded, prompts[:INPUTS])
        return Eq18Test(self._grounds[0], self.tuned, read, self._changed, self._stated)

    def report(self, prompts: Sequence[Prompt], decode: Decode, run: RunFacts) -> LoraReport:
        """The whole report, on prompts that are all in memory."""
        loaded, found = self.base.loaded, Findings()
        processes = Processes(loaded.processes, self.progress, loaded.model)
        compare = self.comparer(decode, len(prompts), processes)
        norms, eq18 = self.norms(prompts[0]), self.eq18(prompts)
        each = list(enumerate(prompts))
        chunks = [each] if self.base.weights is not None else [[one] for one in each]
        first, others = compare(chunks[0], norms, eq18), processes.each(compare, chunks[1:])
        for one in itertools.chain(first, itertools.chain.from_iterable(others)):
            found.add(one)
        head, errors = self.head(), (self.base.plain_error, self.tuned.plain_error)
        facts = run(shared=processes.memory)
        return whole_report(
            head, roll_of(prompt_facts(prompts)), found, errors, None if eq18 is None else eq18.found(), facts
        )


def whole_report(
    head: LoraReport,
    prompts: Roll,
    found: Findings,
    plain_errors: tuple[float, float],
    eq18: Eq18 | None,
    run: Run,
) -> LoraReport:
    """Joins `Pair.head` and the findings. plain_errors: the largest of the base and of the tuned model."""
    return head.model_copy(
        update={
            "prompts": prompts.listed,
            "prompt_set": prompts.facts,
            "blocks": found.blocks,
            "by_prompt": found.order.most,
            "certificate": needed(head.certificate).with_errors(found.base_error, plain_errors[0]),
            "tuned_certificate": needed(head.tuned_certificate).with_errors(found.tuned_error, plain_errors[1]),
            "eq18": eq18,
            "summary": _summary(head.summary, found),
            "run": run,
        }
    )


def own_head(model: Any, one: Opened) -> dict[str, str]:
    """Parameters of an adapter's own head that the base cannot take: for another number of classes, or for a layer that
    the base lacks. Each has the reason why the predictions of the two are not compared."""
    found, prefix = {}, f"{model.base_model_prefix}."
    for plan in one.unplaced:
        name, shape = plan.parameter, one.adapter.tensors[plan.parts["saved"]].shape
        own = or_reason(functools.partial(own_names, model, [name]))
        if isinstance(own, str):
            outermost = name.removeprefix(prefix).partition(".")[0]
            if not any(isinstance(getattr(inner, outermost, None), nn.Module) for inner in (model, stack_of(model))):
                found[name] = f"the adapter has a head of its own, {name}, which the base lacks"
        else:
            old = getattr(model.get_submodule(own[name][0]), own[name][1])
            if old is not None and old.shape != shape:  # none is a bias that the base lacks
                found[name] = f"the models predict {len(old)} and {shape[0]} classes"
    return found


def _changed(planned: Mapping[str, Sequence[ParameterPlan]], report: LoraReport, head: Set[str]) -> list[str]:
    """The parameters that the adapter changes in the model that runs. Raises UnsupportedModelError where a change is
    not defined. head: the parameters of the adapter's own head, which are left out."""
    undefined = [m.whole_name for m in report.modules if m.frobenius_norm is None]
    undefined += [entry.what for entry in report.skipped]
    if undefined:
        raise UnsupportedModelError(
            f"{report.tuned}: the change of {undefined[0]} is not defined, so the tuned model cannot be run"
        )
    for resized in (m for m in report.modules if m.added_rows):
        refuse_resized(report.tuned, resized.whole_name, resized.shape[0], resized.added_rows)
    unchanged = set(report.unchanged)
    moved = (name for name, plans in planned.items() if len(plans) > 1 or name not in unchanged)
    return [name for name in moved if name not in head]


def _piece(changes: list[Change]) -> Piece | None:
    """Sum of all changes of one matrix or vector; None where they change nothing."""
    if any(len(change.pieces) != 1 for change in changes):
        raise UnsupportedModelError("a stack of experts has a change each")
    moving = [change for change in changes if not change.is_zero]
    if len(moving) < 2:
        return moving[0].pieces[0] if moving else None
    return torch.stack([change.dense() for change in moving]).sum(0)


def _with_sup(
    entry: ModuleChange, front: Front | None, pieces: Callable[[str], Change | None], moved: Set[nn.Module]
) -> ModuleChange:
    """The entry with its largest possible effect, or the reason why it has none. It has one where an unchanged norm is
    directly in front of it."""
    why = NONE_IN_FRONT
    if front is not None and entry.parameter == "weight":
        change = pieces(entry.whole_name)
        if front.norm in moved:
            why = "the norm in front changes as well"
        elif change is None:
            why = "the adapter changes this parameter in several ways, each listed by itself"
        elif len(change.pieces) == 1:
            value = sup_local(change.pieces, change.plan.inputs_first, front.gain, front.form)
            reasons = {k: v for k, v in entry.reasons.items() if k != "sup_local"}
            return entry.model_copy(update={"sup_local": value, "reasons": reasons})
    return entry.model_copy(update={"reasons": {**entry.reasons, "sup_local": why}})


def _summary(before: LoraSummary, found: Findings) -> LoraSummary:
    said = found.whole.said
    reasons = {name: why for name, why in before.reasons.items() if name not in said} | found.whole.reasons
    notes = [*notable(found), *before.notable]
    return before.model_copy(update={**said, "answers": found.summary, "notable": notes, "reasons": reasons})
