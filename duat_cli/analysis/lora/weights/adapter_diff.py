"""`duat lora-diff BASE ADAPTER [OTHER]` from the weights alone: the changes by one adapter, or by each of two."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from duat_cli import __version__
from duat_cli.analysis.lora.weights.change import Change, Opened, change_of, opened
from duat_cli.analysis.lora.weights.comparison import compare
from duat_cli.analysis.lora.weights.kinds import compared_kinds, kinds_of
from duat_cli.analysis.lora.weights.lint import RelativeNorm, findings, ratio, relative_norms
from duat_cli.analysis.lora.weights.notable import summarise
from duat_cli.analysis.lora.weights.weight_change import Directions, Numbers, module_change, numbers_of
from duat_cli.analysis.progress import Progress
from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.folder import AdapterFiles
from duat_cli.operators.lowrank import energy
from duat_cli.results.base import Run, Skipped
from duat_cli.results.lora import LintFinding, LoraReport, LoraSummary
from duat_cli.results.weight_change import ModuleChange
from duat_cli.text import listed

CHECKED_ONLY = "with --lint an adapter is checked only"
NOT_READ = "the base's tensors were not read (--no-base)"


@dataclass
class Collected:
    """The changes of one adapter or checkpoint, put into entries one after another."""

    directions: Directions
    modules: list[ModuleChange] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rounded: dict[str, list[str]] = field(default_factory=dict)  # dtype -> parameters that only rounding to it changes
    energy: float | None = 0.0  # Σ‖Δ‖²; None where a change is not known
    base_energy: float | None = 0.0  # Σ‖W‖² of what changes; None where a base tensor was not read

    @property
    def notes(self) -> list[str]:
        """Notes on parameters with another number of rows than the base's, or in a coarser dtype."""
        resized = [module.whole_name for module in self.modules if module.added_rows]
        return [
            *([f"resized: {listed(resized)}; only the common rows are compared"] if resized else []),
            *(f"unchanged up to rounding to {dtype}: {listed(names)}" for dtype, names in self.rounded.items()),
        ]

    def add(
        self, change: Change, stored: Tensor | None, why_no_base: str, stored_energy: float | None = None
    ) -> Numbers | None:
        """Puts one parameter's change into its entry. stored: its base value; stored_energy: its energy, if known."""
        name = change.plan.parameter
        if change.fault and not change.nonfinite:
            self.skipped.append(Skipped(what=name, why=change.fault))
            self.energy = None
            return None
        if change.is_zero:
            self.unchanged.append(name)
            if change.rounded:
                self.rounded.setdefault(change.rounded, []).append(name)
            return None
        numbers = None if change.fault else numbers_of(change, large=self.directions.large)
        self.modules.append(module_change(change, numbers, stored, why_no_base, self.directions, stored_energy))
        if numbers is None:
            self.warnings.append(f"{name}: {change.fault}; its numbers are undefined")
            self.energy = None
            return None
        if self.energy is not None:
            self.energy += numbers.frobenius**2
        relative = self.modules[-1].relative_frobenius
        if relative is None:
            self.base_energy = None
        elif relative and self.base_energy is not None:  # else only its number of rows changed
            self.base_energy += (numbers.frobenius / relative) ** 2
        return numbers


def _changes(one: Opened, base: BaseWeights | None) -> dict[str, Callable[[], Change]]:
    """Parameter -> function that computes its change. A parameter that is also saved whole has a second entry."""
    tuned = {plan.parameter for plan in one.plans if "saved" not in plan.parts}
    names = [p.parameter + (" (saved)" if "saved" in p.parts and p.parameter in tuned else "") for p in one.plans]
    return {
        name: functools.partial(change_of, plan, one.read, base) for name, plan in zip(names, one.plans, strict=True)
    }


def _of(adapter: str, finding: LintFinding) -> LintFinding:
    """The finding with the adapter's name in `where`, for a report on two adapters."""
    return finding if finding.where == adapter else finding.model_copy(update={"where": f"{adapter}: {finding.where}"})


def adapter_report(
    base: BaseWeights,
    adapters: Sequence[AdapterFiles],
    directions: Directions,
    progress: Progress,
    run: Callable[[], Run],
    *,
    read_base: bool = True,
    lint_only: bool = False,
) -> LoraReport:
    """The report on one adapter, or on two of the same base. read_base: whether the base's tensors may be read;
    lint_only: whether to report the adapters' findings alone."""
    values = base if read_base else None
    with base:
        several = []
        for adapter in adapters:
            progress(0, 1, f"reading {adapter.name}")
            several.append(opened(adapter, base))
        lint: list[LintFinding] = []
        collected = [Collected(directions) for _ in several]
        for one, into in zip(several, collected, strict=True):
            norms: Iterable[RelativeNorm] | None = None
            if not lint_only:
                for fault in one.faults:  # no report on half of an adapter, where a part has no meaning
                    raise fault
                norms = _collect(one, values, into, progress)
            elif values is not None:
                norms = relative_norms(one, values)
            faults = findings(one, base, norms)
            lint += faults if len(several) == 1 else [_of(one.adapter.name, each) for each in faults]
        comparison = None
        if len(several) > 1 and not lint_only:
            progress(0, 1, "comparing the adapters")
            compared = compare(adapters[1].name, *[_changes(one, values) for one in several])
            both = compared_kinds(compared, *(one.modules for one in collected))
            comparison = compared.model_copy(update={"kinds": both})
    first, (kinds, *other_kinds) = collected[0], [kinds_of(one.modules) for one in collected]
    mutated = sorted({plan.other_base for one in several for plan in one.plans if plan.other_base})
    warnings = [
        *base.files.warnings,
        *(warning for part in collected for warning in (*part.warnings, *part.notes)),
        *(
            f"init_lora_weights {m}: the change is relative to a base that {m} mutated, not to this one"
            for m in mutated
        ),
    ]
    return LoraReport(
        duat_version=__version__,
        mode="adapter" if len(several) == 1 else "two adapters",
        level="lint" if lint_only else "weights",
        base=base.source.name,
        tuned=adapters[0].name,
        base_quantised=base.files.quantised,
        method=adapters[0].method,
        dtype=base.dtype(),
        modules=first.modules,
        other_modules=collected[1].modules if len(collected) > 1 else None,
        kinds=kinds,
        other_kinds=other_kinds[0] if other_kinds else None,
        unchanged=first.unchanged,
        added=first.added,
        removed=[],
        comparison=comparison,
        summary=LoraSummary.absent(CHECKED_ONLY, notable=[])
        if lint_only
        else summarise(first.modules, kinds, first.energy, first.base_energy, comparison),
        lint=lint,
        skipped=[entry for part in collected for entry in part.skipped],
        warnings=warnings,
        run=run(),
    )


def _collect(one: Opened, base: BaseWeights | None, into: Collected, progress: Progress) -> list[RelativeNorm] | None:
    """Puts all changes into their entries. Returns the relative norms of the matrices' changes, as `findings` takes
    them; None without a base. Each base tensor is read and summed once here; `change_of` reads it again where the
    method needs its values."""
    norms: list[RelativeNorm] = []
    for number, plan in enumerate(one.plans, 1):
        if plan.place is None and "saved" in plan.parts:  # a new head, say
            into.added.append(plan.parameter)
            continue
        change = change_of(plan, one.read, base)
        stored = None
        if base is not None and plan.place is not None and not change.is_zero:
            stored = base.read(plan.place)
        why = NOT_READ if base is None else "the base has no such parameter"
        size = None if stored is None or change.fault else energy(stored)
        into.add(change, stored, why, size)
        if change.undefined:
            norms.append((plan, math.nan))
        elif size is not None and plan.place is not None and len(plan.place.shape) > 1:
            norms.append((plan, ratio(change, size)))
        progress(number, len(one.plans), f"weights of {one.adapter.name}")
    return None if base is None else norms
