"""IA3, LoHa, LoKr, trainable tokens, and values that replace the base's as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.folder import ADAPTER_CONFIG, AdapterFiles
from duat_cli.loading.adapter.parameter import AdapterFault, Kind, ParameterPlan, Wrapped, fault, replicated, stated
from duat_cli.text import listed, shown


def ia3(one: Wrapped) -> Iterator[ParameterPlan]:
    """IA3: a factor for every output; in a feed-forward layer, for every input."""
    place = one.find("weight")
    shape = one.shape("ia3_l")
    if len(shape) != 2 or 1 not in shape:
        raise one.fault("shape-mismatch", f": ia3_l {list(shape)}: expected one row or column")
    by_input = shape[0] == 1 and shape[1] != 1
    inputs_first = False
    if place is not None:
        length = max(shape)
        sides = place.shape  # in (out, in) the inputs are side 1
        fits = [turned for turned in (False, True) if sides[int(by_input != turned)] == length]
        if not fits:
            raise one.fault("shape-mismatch", f": shape mismatch, ia3_l {list(shape)}, the base's weight is "
                            f"{list(sides)}")  # fmt: skip
        inputs_first = fits[0] if len(fits) == 1 else one.square_inputs_first(place)
    weight = one.plan("ia3", place, inputs_first=inputs_first)
    yield weight
    bias = None if by_input else one.find("bias", needed=False)
    if bias is not None:
        yield ParameterPlan(weight.module, f"{weight.module}.bias", "ia3", weight.parts, place=bias)


def lycoris(one: Wrapped) -> ParameterPlan:
    """LoHa or LoKr. scaling = alpha / r with the config's rank, because LoKr may store a factor as one matrix."""
    adapter, target = one.adapter, one.target
    if any(part.endswith(("_t1", "_t2")) for part in target.parts):
        raise one.fault("convolution", ": a convolution, which is not supported")
    kind: Kind = "loha" if adapter.method == "LOHA" else "lokr"
    first, second = (_product(one, part) for part in _LYCORIS[kind])
    place = one.find("weight")
    made = first if kind == "loha" else (first[0] * second[0], first[1] * second[1])
    if (kind == "loha" and first != second) or (place is not None and place.shape != made):
        other = list(second) if kind == "loha" and first != second else list(place.shape if place is not None else ())
        raise one.fault("shape-mismatch", f": shape mismatch, its factors make {list(made)}, against {other}")
    rank = int(stated(adapter, "rank_pattern", "r", target.module))
    alpha = stated(adapter, "alpha_pattern", "alpha", target.module)
    return one.plan(kind, place, rank=rank, scaling=alpha / rank)


_LYCORIS = {"loha": ("hada_w1", "hada_w2"), "lokr": ("lokr_w1", "lokr_w2")}


def _product(one: Wrapped, part: str) -> tuple[int, ...]:
    """The shape of a factor that is stored as one matrix, or as a product of two."""
    parts = one.target.parts
    if part in parts:
        whole = one.shape(part)
        if len(whole) != 2:
            raise one.fault("shape-mismatch", f": {part} {list(whole)}: expected a matrix")
        return whole
    names_ = (f"{part}_a", f"{part}_b")
    if any(name not in parts for name in names_):
        raise one.fault("factor-missing", f" has {listed(list(parts))}: {part} is not whole")
    a, b = (one.shape(name) for name in names_)
    if len(a) != 2 or len(b) != 2 or a[1] != b[0]:
        raise one.fault("shape-mismatch", f": {names_[0]} {list(a)} and {names_[1]} {list(b)} have no product")
    return a[0], b[1]


def tokens(one: Wrapped) -> ParameterPlan:
    """Trainable tokens: rows that replace the embedding's rows of the named tokens."""
    config, name = one.adapter.config, one.target.module
    place = one.find("weight")
    rows = one.shape("trainable_tokens_delta")
    stated = config.get("token_indices") or config.get("trainable_token_indices")
    if isinstance(stated, dict):
        stated = next((v for k, v in stated.items() if (name == k or name.endswith("." + k))), None)
    if not (isinstance(stated, list) and all(type(i) is int and i >= 0 for i in stated)):
        raise one.fault("config", f": {ADAPTER_CONFIG} names no list of token indices for it")
    if twice := [i for i, count in Counter(stated).items() if count > 1]:
        raise one.fault("config", f": token {twice[0]} is named twice: which of its rows counts is not defined")
    if len(rows) != 2 or rows[0] != len(stated):
        raise one.fault("shape-mismatch", f": {len(stated)} token indices, but rows {list(rows)}")
    if place is not None and (place.shape[1:] != rows[1:] or max(stated, default=0) >= place.shape[0]):
        raise one.fault("shape-mismatch", f": shape mismatch, rows {list(rows)} to token {max(stated, default=0)}, the "
                        f"base's table is {list(place.shape)}")  # fmt: skip
    return one.plan("trainable tokens", place, rank=len(stated), inputs_first=True, tokens=tuple(stated))


def saved(adapter: AdapterFiles, parameter: str, key: str, base: BaseWeights | None) -> ParameterPlan | AdapterFault:
    """The plan for a value that replaces the base's as a whole, or the fault."""
    module, _, leaf = parameter.rpartition(".")
    kind: Kind = "bias" if leaf == "bias" else "saved"
    place = None if base is None else base.find(replicated(adapter, parameter))
    shape = adapter.tensors[key].shape
    resized = place is not None and base is not None and base.is_vocabulary(place) and place.shape[1:] == shape[1:]
    if place is not None and base is not None and base.has_row_a_class(place) and place.shape[1:] == shape[1:]:
        place = place if place.shape == shape else None  # a head for other classes replaces the base's
    elif place is not None and place.shape != shape and not resized:
        return fault(adapter, "shape-mismatch", f"{shown(parameter)}: shape mismatch, the adapter has {list(shape)}, "
                      f"the base has {list(place.shape)}")  # fmt: skip
    name = place.parameter if place is not None else parameter
    turned = place is not None and len(place.shape) == 2 and base is not None and base.inputs_first(place.tensor)
    return ParameterPlan(
        name.rpartition(".")[0] or module, name, kind, {"saved": key}, place=place, inputs_first=turned
    )
