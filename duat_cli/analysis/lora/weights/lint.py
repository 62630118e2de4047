"""Faults that adapters have in practice, as findings with stable ids; callable on its own.

`lint_adapter(open_adapter(path, name))` needs no base. With an open `BaseWeights` it also checks the fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from torch import Tensor

from duat_cli.analysis.lora.weights.change import Change, Opened, Read, change_of, opened
from duat_cli.checks.rules.adapter import LEVELS
from duat_cli.compat.peft import MEGATRON, MODULE_FIELDS, OWN_LIBRARIES
from duat_cli.loading.adapter.base_weights import EMBEDDINGS, HEADS, VOCABULARY, BaseWeights
from duat_cli.loading.adapter.folder import ADAPTER_CONFIG, AdapterFiles, names, number, patterns
from duat_cli.loading.adapter.keys import Keys
from duat_cli.loading.adapter.parameter import ParameterPlan
from duat_cli.loading.adapter.targets import excluded, lost_modules, unsaved_modules
from duat_cli.loading.quantised.formula import leaf_of
from duat_cli.operators.lowrank import energy, inner, is_zero, nonfinite
from duat_cli.results.lora import LintFinding
from duat_cli.text import listed, plural, shown

LARGE, TOO_LARGE = 1.0, 10.0
"""Limits of ‖ΔW‖_F / ‖W‖_F for a warning and for an error; training rarely moves a matrix by a tenth of its norm."""
RelativeNorm: TypeAlias = "tuple[ParameterPlan, float | None]"
"""A plan, and its `relative_norm`; NaN where the change is undefined."""


def lint_adapter(adapter: AdapterFiles, base: BaseWeights | None = None) -> list[LintFinding]:
    """All findings on an adapter. Reads its tensors, and those of the base that it changes."""
    one = opened(adapter, base)
    return findings(one, base, None if base is None else relative_norms(one, base))


def findings(one: Opened, base: BaseWeights | None, norms: Iterable[RelativeNorm] | None) -> list[LintFinding]:
    """Findings on an opened adapter: errors first, then by rule and place. norms: those of its changes; None where no
    tensor of the base may be read."""
    found = [*_of_plans(one, base), *_of_values(one, None if norms is None else base)]
    if norms is not None:
        found += _magnitude(norms)
        found += [] if base is None else _saved_heads(one, base)
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda f: (order[f.level], f.rule, f.where))


def finding(rule: str, where: str, message: str, level: str | None = None) -> LintFinding:
    """A finding of the rule's own level, or of another."""
    level = LEVELS[rule] if level is None else level
    return LintFinding(rule=rule, level=level, where=where, message=message)  # type: ignore[arg-type]


def _of_plans(one: Opened, base: BaseWeights | None) -> Iterator[LintFinding]:
    """Findings from headers and config."""
    adapter, keys, known = one.adapter, one.keys, one.plans
    for fault in one.faults:
        yield finding(fault.rule, fault.where, fault.text)
    for dialect in keys.dialects:
        yield finding("key-dialect", adapter.name, f"{dialect}: read, but PEFT may drop them without a word")
    yield from _foreign_code(adapter)
    yield from _alpha(adapter)
    yield from _mutated(known)
    yield from _saved(adapter, known)
    yield from _unsaved(adapter, keys, base)
    yield from _unmatched(adapter, keys, base)
    if base is not None:
        yield from _lost(adapter, keys, base)
        yield from _other_classes(one, base)
        yield from _base_name(adapter, base)
    yield from _experts(adapter, known)
    yield from _tied(known, base)


def _foreign_code(adapter: AdapterFiles) -> Iterator[LintFinding]:
    """Findings on modules named in the config, which a runtime may import, and so run; duat imports none of them.

    PEFT 0.21 imports megatron_core where megatron_config is set. It imports auto_mapping's parent_library where it has
    to find the base model's class itself: an adapter saved without a task type names that class there.
    """
    config = adapter.config
    named = {field: config[field] for field in MODULE_FIELDS if config.get(field)}
    megatron = config.get("megatron_core")
    if config.get("megatron_config") or megatron not in (None, MEGATRON):
        named["megatron_core"] = megatron
    mapping = config.get("auto_mapping")
    library = mapping.get("parent_library") if isinstance(mapping, dict) else mapping
    if mapping and not (isinstance(library, str) and library.partition(".")[0] in OWN_LIBRARIES):
        named["auto_mapping"] = library
    for field, value in named.items():
        yield finding("foreign-code", ADAPTER_CONFIG, f"{field} names {shown(value)}, which a runtime may import, and "
                      "so run: duat does not; load the adapter elsewhere only if you trust that module")  # fmt: skip


def _alpha(adapter: AdapterFiles) -> Iterator[LintFinding]:
    field = "alpha" if adapter.method in ("LOHA", "LOKR") else "lora_alpha"
    if adapter.method in ("IA3", "TRAINABLE_TOKENS"):
        return
    if number(adapter, field, 8) == 0 and adapter.method != "ADALORA":
        yield finding("alpha-zero", ADAPTER_CONFIG, f"{field} is 0: scaling is 0, and the adapter changes nothing")
    zero = [pattern for pattern, value in patterns(adapter, "alpha_pattern").items() if value == 0]
    if zero:
        yield finding("alpha-zero", ADAPTER_CONFIG, f"alpha_pattern is 0 for {listed(zero)}: no change there")


def _mutated(known: list[ParameterPlan]) -> Iterator[LintFinding]:
    first = next((plan for plan in known if plan.mutated), None)
    if first is None:
        return
    exact = "duat takes that out again" if first.recomputed else "which cannot be recomputed from the files"
    yield finding(
        "mutated-base", ADAPTER_CONFIG,
        f"init_lora_weights is {shown(first.mutated)}: the adapter was trained on a base less its first B A ({exact}); "
        "a runtime that adds B A to the original base gets another model",
    )  # fmt: skip


def _saved(adapter: AdapterFiles, known: list[ParameterPlan]) -> Iterator[LintFinding]:
    wanted = names(adapter, "modules_to_save")
    embeddings = [p.parameter for p in known if p.kind == "saved" and leaf_of(p.module) in VOCABULARY]
    extra = [p for p in embeddings if not any(_named(p.rpartition(".")[0], name) for name in wanted)]
    if extra:
        yield finding("embedding-saved", adapter.name, f"{listed(extra)} saved whole with the adapter, which "
                      "modules_to_save does not ask for: a copy of the base, or of a resized vocabulary")  # fmt: skip
    for name in wanted:
        hit = [p.module for p in known if p.kind in ("saved", "bias") and "saved" in p.parts]
        caught = sorted({m for m in hit if name in leaf_of(m) and leaf_of(m) != name})
        if caught:
            yield finding("module-saved-by-accident", ADAPTER_CONFIG, f"modules_to_save {shown(name)} also caught "
                          f"{listed(caught)}")  # fmt: skip


def _unsaved(adapter: AdapterFiles, keys: Keys, base: BaseWeights | None) -> Iterator[LintFinding]:
    wanted = names(adapter, "modules_to_save")
    lost = [] if base is None else unsaved_modules(wanted, keys, base)
    if lost:
        yield finding("saved-missing", adapter.name, f"modules_to_save names {listed(lost)}, which have no tensor in "
                      "the file: lost when the adapter was saved; PEFT does not load it")  # fmt: skip
    elif wanted and not keys.saved:
        message = f"modules_to_save names {listed(wanted)}, and the file holds no saved module"
        yield finding("saved-missing", adapter.name, message, "warning")


def _other_classes(one: Opened, base: BaseWeights) -> Iterator[LintFinding]:
    """Finding on a head whose number of classes differs from the base's: the base as stored does not take it."""
    found = [plan.parameter for plan in one.unplaced if base.find(plan.parameter, load=False) is not None]
    if found:
        message = (
            f"{listed(found)}: of another number of classes than the base's: PEFT loads it onto a base that is built "
            "with as many (num_labels, ignore_mismatched_sizes)"
        )
        yield finding("shape-mismatch", one.adapter.name, message, "warning")


def _named(module: str, name: str) -> bool:
    """Whether the module's dotted name ends in this name."""
    return module == name or module.endswith("." + name)


def _unmatched(adapter: AdapterFiles, keys: Keys, base: BaseWeights | None) -> Iterator[LintFinding]:
    stated = adapter.config.get("target_modules")
    if not isinstance(stated, list):  # a regular expression, or 'all-linear', names no module
        return
    have = [target.module for target in keys.targets]
    unmatched = [n for n in stated if isinstance(n, str) and not any(_named(m, n) for m in have)]
    absent = [n for n in unmatched if not _left_out(adapter, n, base)]
    if absent and not adapter.config.get("target_parameters"):
        yield finding("target-unmatched", ADAPTER_CONFIG, f"target_modules {listed(absent)}: no tensor in the file "
                      "belongs to them: absent from the base, or lost when the adapter was saved")  # fmt: skip


def _left_out(adapter: AdapterFiles, name: str, base: BaseWeights | None) -> bool:
    """Whether exclude_modules takes out every module that a target names: PEFT expands 'all-linear' to a list that
    names excluded modules too."""
    tensors = [] if base is None else base.files.tensors
    modules = [module for tensor in tensors if _named(module := tensor.removesuffix(".weight"), name)]
    return all(excluded(adapter.config, module) for module in modules or [name])


def _lost(adapter: AdapterFiles, keys: Keys, base: BaseWeights) -> Iterator[LintFinding]:
    lost = lost_modules(adapter, keys, base)
    if lost:
        yield finding("target-unmatched", adapter.name, f"{plural(len(lost), 'module')} that target_modules match have "
                      f"no tensor in the file: {listed(lost)}: lost when the adapter was saved?")  # fmt: skip


def _base_name(adapter: AdapterFiles, base: BaseWeights) -> Iterator[LintFinding]:
    """Finding on a hub id that is not the base's; a folder's name is not compared."""
    stated = adapter.config.get("base_model_name_or_path")
    if not isinstance(stated, str) or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", stated):
        return
    given = f"{base.source.name} {base.source.path.resolve()}".lower()
    if stated.lower().partition("/")[2] not in given:  # a folder of the hub's cache is named by its id
        yield finding("base-name", ADAPTER_CONFIG, f"base_model_name_or_path is {shown(stated)}, and the base given is "
                      f"{shown(base.source.name)}: fine where that is a copy of it")  # fmt: skip


def _experts(adapter: AdapterFiles, known: list[ParameterPlan]) -> Iterator[LintFinding]:
    stacked = [plan.parameter for plan in known if plan.kind == "expert lora"]
    if stacked:
        yield finding("expert-keys", adapter.name, f"{plural(len(stacked), 'expert parameter')} such as "
                      f"{shown(min(stacked))}: their keys name no parameter, and a runtime that looks for lora_A under "
                      "it drops them")  # fmt: skip


def _tied(known: list[ParameterPlan], base: BaseWeights | None) -> Iterator[LintFinding]:
    if base is None or not base.ties_head:
        return
    inputs = [p for p in known if leaf_of(p.module) in EMBEDDINGS and p.kind != "saved"]
    heads = [p for p in known if leaf_of(p.module) in HEADS and p.kind != "saved"]
    if inputs and heads:
        yield finding("two-tied-deltas", heads[0].module, f"{shown(inputs[0].module)} and {shown(heads[0].module)} "
                      "share one weight and have a change each: merging adds both to it")  # fmt: skip
    elif heads or any(p.kind != "trainable tokens" for p in inputs):
        one, other = (heads[0], "input embedding") if heads else (inputs[0], "output head")
        yield finding("tied-weights", one.module, f"{shown(one.module)} shares its weight with the {other}: merged, "
                      "the change acts there as well; unmerged it does not")  # fmt: skip


def _magnitude(norms: Iterable[RelativeNorm]) -> Iterator[LintFinding]:
    """Findings on matrices whose change is undefined, and on those whose change is larger than they are: one for those
    above 10 times, one for the others."""
    found: dict[str, float] = {}
    undefined: list[str] = []
    for plan, norm in norms:
        if norm is not None and math.isnan(norm):
            undefined.append(plan.parameter)
        elif norm is not None and norm > LARGE:
            found[plan.parameter] = max(norm, found.get(plan.parameter, 0.0))
    if undefined:
        text = f"DoRA divides by a norm of zero, so that the merged weight holds NaN: {listed(undefined)}"
        yield finding("non-finite", undefined[0], text)
    extreme = {name: norm for name, norm in found.items() if norm > TOO_LARGE}
    others = {name: norm for name, norm in found.items() if name not in extreme}
    for group, limit in ((extreme, TOO_LARGE), (others, LARGE)):
        if group:
            name = max(group, key=lambda one: group[one])
            many = f"; {plural(len(group), 'matrix', 'matrices')} above {limit:g}"
            text = f"the change of {shown(name)} is {group[name]:.3g} times its base weight, norm to norm{many}"
            yield finding("magnitude", name, text, "error" if limit == TOO_LARGE else "warning")


def relative_norms(one: Opened, base: BaseWeights) -> Iterator[RelativeNorm]:
    """Relative norms of all changes, with one base tensor in memory at a time."""
    return ((plan, relative_norm(plan, one.read, base)) for plan in one.plans)


def relative_norm(plan: ParameterPlan, read: Read, base: BaseWeights) -> float | None:
    """‖ΔW‖_F / ‖W‖_F for a matrix or a stack of matrices; NaN where ΔW is undefined, None where there is no number."""
    if plan.place is None or len(plan.place.shape) < 2:
        return None
    change = change_of(plan, read, base)
    if change.undefined:
        return math.nan
    return None if change.fault or change.is_zero else ratio(change, energy(base.read(plan.place)))


def ratio(change: Change, size: float) -> float | None:
    """‖ΔW‖_F / ‖W‖_F; None where W is zero or not finite. size: ‖W‖²_F."""
    if not (math.isfinite(size) and size > 0):
        return None
    return math.sqrt(sum(max(0.0, inner(piece, piece)) for piece in change.pieces) / size)


def _saved_heads(one: Opened, base: BaseWeights) -> Iterator[LintFinding]:
    """Finding on a head saved whole where the base's head is its embedding; none where both are saved, and equal, nor
    where the head is a copy of the base's, as PEFT saves it beside a LoRA of the head."""
    saved = {plan.module.rpartition(".")[2]: plan for plan in one.plans if plan.kind == "saved"}
    head = next((plan for leaf, plan in saved.items() if leaf in HEADS), None)
    if head is None or not base.ties_head or change_of(head, one.read, base).is_zero:
        return
    table = next((plan for leaf, plan in saved.items() if leaf in EMBEDDINGS), None)
    if table is not None:
        a, b = one.read(head.parts["saved"]), one.read(table.parts["saved"])
        if a.shape == b.shape and bool((a == b.to(a.dtype)).all()):
            return
    yield finding("tied-weights", head.module, f"{shown(head.module)} is saved whole, and the base ties it to the "
                  "input embedding: a runtime that keeps the tie loses the saved head, or puts it in place of the "
                  "embedding as well")  # fmt: skip


def _of_values(one: Opened, base: BaseWeights | None) -> Iterator[LintFinding]:
    """Findings from the values: NaN, and modules that training never changed. base: None where its tensors must not be
    read."""
    adapter, keys, read = one.adapter, one.keys, one.read
    bad: dict[str, int] = {}
    untouched = []
    for target in keys.targets:
        tensors = {part: read(key) for part, key in target.parts.items()}
        count = sum(nonfinite(tensor) for tensor in tensors.values())
        if count:
            bad[target.module] = count
        elif _is_untouched(tensors, [plan for plan in one.plans if plan.parts is target.parts], read, base):
            untouched.append(target.module)
    for parameter, key in keys.saved.items():
        if count := nonfinite(read(key)):
            bad[parameter] = count
    if bad:
        yield finding("non-finite", adapter.name, f"{plural(sum(bad.values()), 'non-finite value')} (NaN or Inf) in "
                      f"{listed(list(bad))}")  # fmt: skip
    if untouched:
        yield finding("untouched", adapter.name, f"{len(untouched)} of {plural(len(keys.targets), 'module')} with an "
                      f"all-zero B, so no change: {listed(untouched)}")  # fmt: skip


def _is_untouched(tensors: dict[str, Tensor], plans: list[ParameterPlan], read: Read, base: BaseWeights | None) -> bool:
    """Whether a module's B is zero, and nothing else changes it: neither the bias of B nor DoRA's magnitudes, which are
    the base's own norms only as the base's values show."""
    if not any(is_zero(tensors[part]) for part in ("lora_B", "lora_embedding_A") if part in tensors):
        return False
    if "lora_B.bias" in tensors and not is_zero(tensors["lora_B.bias"]):
        return False
    dora = "lora_magnitude_vector" in tensors
    return not dora or (base is not None and all(change_of(plan, read, base).is_zero for plan in plans))
