"""IA3, LoHa, LoKr, trainable tokens, and values that replace the base's whole."""

from __future__ import annotations

from collections.abc import Iterator

from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.folder import ADAPTER_CONFIG, AdapterFiles
from duat_cli.loading.adapter.keys import Target
from duat_cli.loading.adapter.parameter import (
    AdapterFault,
    Kind,
    ParameterPlan,
    fault,
    find,
    module_name,
    replicated,
    shape_of,
    stated,
)
from duat_cli.text import listed, shown


def ia3(adapter: AdapterFiles, target: Target, base: BaseWeights | None) -> Iterator[ParameterPlan]:
    """A factor for every output, or, of a feed-forward layer, for every input."""
    place = find(adapter, base, target.module, "weight")
    shape = shape_of(adapter, target, "ia3_l")
    if len(shape) != 2 or 1 not in shape:
        raise fault(
            adapter, "shape-mismatch", f"{shown(target.module)}: ia3_l {list(shape)}: expected one row or column"
        )
    module = module_name(place, target.module)
    by_input = shape[0] == 1 and shape[1] != 1
    inputs_first = False
    if place is not None and base is not None:
        length = max(shape)
        sides = place.shape  # of (out, in) the inputs are side 1
        fits = [turned for turned in (False, True) if sides[int(by_input != turned)] == length]
        if not fits:
            raise fault(adapter, "shape-mismatch", f"{shown(target.module)}: shape mismatch, ia3_l {list(shape)}, the "
                         f"base's weight is {list(sides)}")  # fmt: skip
        known = base.is_transposed(place.tensor)
        stated = adapter.config.get("fan_in_fan_out") is True if known is None else known
        inputs_first = fits[0] if len(fits) == 1 else stated
    yield ParameterPlan(module, f"{module}.weight", "ia3", target.parts, None, None, inputs_first, place=place)
    bias = None if by_input else find(adapter, base, target.module, "bias", needed=False)
    if bias is not None:
        yield ParameterPlan(module, f"{module}.bias", "ia3", target.parts, None, None, place=bias)


def lycoris(adapter: AdapterFiles, target: Target, base: BaseWeights | None) -> ParameterPlan:
    """scaling = alpha / r with the config's rank, since LoKr may store a factor whole."""
    if any(part.endswith(("_t1", "_t2")) for part in target.parts):
        raise fault(adapter, "convolution", f"{shown(target.module)}: a convolution, which is not supported")
    kind: Kind = "loha" if adapter.method == "LOHA" else "lokr"
    first, second = (_product(adapter, target, part) for part in _LYCORIS[kind])
    place = find(adapter, base, target.module, "weight")
    made = first if kind == "loha" else (first[0] * second[0], first[1] * second[1])
    if (kind == "loha" and first != second) or (place is not None and place.shape != made):
        other = list(second) if kind == "loha" and first != second else list(place.shape if place is not None else ())
        raise fault(adapter, "shape-mismatch", f"{shown(target.module)}: shape mismatch, its factors make "
                     f"{list(made)}, against {other}")  # fmt: skip
    rank = int(stated(adapter, "rank_pattern", "r", target.module))
    alpha = stated(adapter, "alpha_pattern", "alpha", target.module)
    module = module_name(place, target.module)
    return ParameterPlan(module, f"{module}.weight", kind, target.parts, rank, alpha / rank, False, place=place)


_LYCORIS = {"loha": ("hada_w1", "hada_w2"), "lokr": ("lokr_w1", "lokr_w2")}


def _product(adapter: AdapterFiles, target: Target, part: str) -> tuple[int, ...]:
    """The shape of a factor that is stored whole, or as a product of two."""
    if part in target.parts:
        whole = shape_of(adapter, target, part)
        if len(whole) != 2:
            raise fault(adapter, "shape-mismatch", f"{shown(target.module)}: {part} {list(whole)}: expected a matrix")
        return whole
    names_ = (f"{part}_a", f"{part}_b")
    if any(name not in target.parts for name in names_):
        raise fault(adapter, "factor-missing", f"{shown(target.module)} has {listed(list(target.parts))}: {part} is "
                     "not whole")  # fmt: skip
    a, b = (shape_of(adapter, target, name) for name in names_)
    if len(a) != 2 or len(b) != 2 or a[1] != b[0]:
        raise fault(adapter, "shape-mismatch", f"{shown(target.module)}: {names_[0]} {list(a)} and {names_[1]} "
                     f"{list(b)} have no product")  # fmt: skip
    return a[0], b[1]


def tokens(adapter: AdapterFiles, target: Target, base: BaseWeights | None) -> ParameterPlan:
    """Rows that replace the embedding's rows of the named tokens."""
    place = find(adapter, base, target.module, "weight")
    rows = shape_of(adapter, target, "trainable_tokens_delta")
    stated = adapter.config.get("token_indices") or adapter.config.get("trainable_token_indices")
    if isinstance(stated, dict):
        stated = next((v for k, v in stated.items() if (target.module == k or target.module.endswith("." + k))), None)
    if not (isinstance(stated, list) and all(type(i) is int and i >= 0 for i in stated)):
        raise fault(
            adapter, "config", f"{shown(target.module)}: {ADAPTER_CONFIG} names no list of token indices for it"
        )
    if len(rows) != 2 or rows[0] != len(stated):
        raise fault(
            adapter, "shape-mismatch", f"{shown(target.module)}: {len(stated)} token indices, but rows {list(rows)}"
        )
    if place is not None and (place.shape[1:] != rows[1:] or max(stated, default=0) >= place.shape[0]):
        raise fault(adapter, "shape-mismatch", f"{shown(target.module)}: shape mismatch, rows {list(rows)} to token "
                     f"{max(stated, default=0)}, the base's table is {list(place.shape)}")  # fmt: skip
    module = module_name(place, target.module)
    return ParameterPlan(
        module, f"{module}.weight", "trainable tokens", target.parts, len(stated), None, True,
        place=place, tokens=tuple(stated),
    )  # fmt: skip


def saved(adapter: AdapterFiles, parameter: str, key: str, base: BaseWeights | None) -> ParameterPlan | AdapterFault:
    """A value that replaces the base's, whole."""
    module, _, leaf = parameter.rpartition(".")
    kind: Kind = "bias" if leaf == "bias" else "saved"
    place = None if base is None else base.find(replicated(adapter, parameter))
    shape = adapter.tensors[key].shape
    resized = place is not None and base is not None and base.is_vocabulary(place) and place.shape[1:] == shape[1:]
    if place is not None and place.shape != shape and not resized:
        return fault(adapter, "shape-mismatch", f"{shown(parameter)}: shape mismatch, the adapter has {list(shape)}, "
                      f"the base has {list(place.shape)}")  # fmt: skip
    name = place.parameter if place is not None else parameter
    return ParameterPlan(
        name.rpartition(".")[0] or module, name, kind, {"saved": key}, place=place, inputs_first="embed" in module
    )
