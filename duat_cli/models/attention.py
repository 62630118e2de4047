"""Attention seen and attention frozen, without touching a model's code.

Two paths lead to the attention matrices H_h:

* *attention interface*: a function registered with transformers delegates to the model's own
  `eager_attention_forward`, so that softcaps, sinks and grouped heads stay the model's.
* *softmax interception*: for models outside the interface, a torch function mode watches the softmax inside
  the attention module and the product that follows it.

Either way one *probe* per run decides what happens: it sees H and V during capture, and it returns
H_frozen V(Z) during replay.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import relative_error, rounding

# Dispatch inside transformers goes by substring: the name must hold neither "sdpa" nor "flash".
INTERFACE_NAME = "duat_capture"

CapturePath = Literal["attention interface", "softmax interception"]


class ForeignAttentionError(UnsupportedModelError):
    """The model does something else for an attention function that it does not know."""


class RowSource(Protocol):
    """Attention matrices by row chunks, so that H need not exist whole."""

    @property
    def heads(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, H[:, rows, :]) with H of shape (heads, rows, N)."""
        ...


@dataclass(frozen=True)
class StoredRows:
    """All of H at once: (heads, N, N)."""

    matrix: Tensor

    @property
    def heads(self) -> int:
        return self.matrix.shape[0]

    @property
    def tokens(self) -> int:
        return self.matrix.shape[-1]

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, self.matrix.shape[1]), self.matrix


@dataclass(frozen=True)
class RecomputedRows:
    """H made anew, `step` rows at a time, from the frozen queries and keys (softmax rows are independent)."""

    weights: Callable[[slice], Tensor]  # rows -> (heads, rows, N)
    heads: int
    tokens: int
    step: int

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, self.tokens, self.step):
            rows = slice(start, min(start + self.step, self.tokens))
            yield rows, self.weights(rows)


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function: H, V and H V for the input at hand."""

    module: nn.Module
    path: CapturePath
    rows: RowSource
    value: Tensor  # (batch, kv_heads, N, d), a view of the value projection's output where the model keeps one
    output: Tensor  # (batch, N, heads, d)


class Probe(Protocol):
    """Who is asked when a model's attention runs."""

    def captured(self, call: AttentionCall) -> None: ...

    def replacement(self, module: nn.Module, value: Tensor) -> Tensor | None:
        """Frozen H applied to `value` (batch, kv_heads, N, d): (batch, N, heads, d); None while capturing."""
        ...


@dataclass
class _Active:
    probe: Probe | None = None
    row_budget: int = 1 << 28  # bytes of H kept whole; above it rows are recomputed
    plain: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)  # modules whose output is H V
    inside_interface: bool = False  # the softmax of the model's own eager function is not to be intercepted


_active = _Active()


def apply_rows(rows: RowSource, value: Tensor) -> Tensor:
    """H V for every head: rows (heads, N, N), value (batch, kv_heads, N, d) to (batch, N, heads, d)."""
    batch, kv_heads, tokens, width = value.shape
    groups = rows.heads // kv_heads
    out = value.new_empty(batch, tokens, rows.heads, width)
    # One product a kv head: all its query heads and all the batch's columns at once.
    columns = value.permute(1, 2, 0, 3).reshape(kv_heads, tokens, batch * width)
    for part, weights in rows.chunks():
        count = part.stop - part.start
        grouped = weights.reshape(kv_heads, groups * count, tokens)
        product = (grouped.to(columns.dtype) @ columns).reshape(kv_heads, groups, count, batch, width)
        out[:, part] = product.permute(3, 2, 0, 1, 4).reshape(batch, count, rows.heads, width)
    return out


def _eager(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The model's own eager attention: the function of that name beside the module's class."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise UnsupportedModelError(f"{type(module).__name__} has no eager attention function beside it")


def _interface(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function transformers calls. Returns no weights, or every block's H would be kept to the end."""
    before, _active.inside_interface = _active.inside_interface, True
    try:
        return _routed(module, query, key, value, attention_mask, kwargs)
    finally:
        _active.inside_interface = before


def _routed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    probe = _active.probe
    eager = _eager(module)
    _refuse_foreign(module, eager, kwargs)
    if probe is None:
        return eager(module, query, key, value, attention_mask, **kwargs)[0], None
    replacement = probe.replacement(module, value)
    if replacement is not None:
        return replacement, None
    call = _captured_call(module, eager, query, key, value, attention_mask, kwargs)
    probe.captured(call)
    return call.output, None


# What transformers hands to every attention function, for those that read it.
_FOR_ALL = {"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "s_aux", "input_ids"}


def _refuse_foreign(module: nn.Module, eager: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Sparse attention hands its choice of keys to unknown functions, and to its own eager one a mask instead."""
    named = inspect.signature(eager).parameters
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and name not in named and name not in _FOR_ALL:
            raise ForeignAttentionError(f"{type(module).__name__} hands `{name}` to attention functions not its own")


def _captured_call(
    module: nn.Module,
    eager: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> AttentionCall:
    heads, tokens = query.shape[1], query.shape[2]
    row_bytes = heads * key.shape[2] * 4
    if row_bytes * tokens <= _active.row_budget:
        output, weights = eager(module, query, key, value, mask, **kwargs)
        if weights is None:
            raise UnsupportedModelError(f"{type(module).__name__}'s eager attention returns no weights")
        weights = _effective(module, weights, value, output)
        return AttentionCall(module, "attention interface", StoredRows(weights[0]), value, output)

    def weights_of(rows: slice) -> Tensor:
        part = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
        output, weights = eager(module, query[:, :, rows], key, value, part, **kwargs)
        assert weights is not None
        return _effective(module, weights, value, output)[0]

    step = max(1, (_active.row_budget // 4) // row_bytes)
    source = RecomputedRows(weights_of, heads, tokens, step)
    return AttentionCall(module, "attention interface", source, value, apply_rows(source, value))


def _effective(module: nn.Module, weights: Tensor, value: Tensor, output: Tensor) -> Tensor:
    """H as the output shows it: some models scale a head's row behind the softmax (sinks outside it).

    weights (1, heads, n, N), output (1, n, heads, d). Modules whose output once was plain H V are not asked again;
    the certificate of the block's replay holds for them as for all.
    """
    if module in _active.plain:
        return weights
    heads, kv_heads = weights.shape[1], value.shape[1]
    mixed = weights.to(value.dtype) @ value.repeat_interleave(heads // kv_heads, 1)  # (1, heads, n, d)
    seen = output.transpose(1, 2)
    if relative_error(mixed, seen) <= rounding(seen.dtype):
        _active.plain.add(module)
        return weights
    square = mixed.square().sum(dim=-1, keepdim=True).clamp_min(torch.finfo(mixed.dtype).tiny)
    return weights * ((mixed * seen).sum(dim=-1, keepdim=True) / square)


def _register() -> None:
    AttentionInterface.register(INTERFACE_NAME, _interface)
    # Without a mask function of the same name the mask would be None: causality lost without an error.
    AttentionMaskInterface.register(INTERFACE_NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@contextlib.contextmanager
def probing(probe: Probe, row_budget: int | None = None) -> Iterator[None]:
    """Route every attention call of instrumented models to `probe` while the context lasts."""
    before = _active.probe, _active.row_budget
    _active.probe = probe
    if row_budget is not None:
        _active.row_budget = row_budget
    try:
        yield
    finally:
        _active.probe, _active.row_budget = before


@contextlib.contextmanager
def interface_installed(model: PreTrainedModel) -> Iterator[bool]:
    """Switch a live model to the capturing attention function; yields whether the model accepted it."""
    _register()
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(INTERFACE_NAME)
        accepted = model.config._attn_implementation == INTERFACE_NAME
    except (ValueError, KeyError, AttributeError, ImportError):
        accepted = False
    try:
        yield accepted
    finally:
        model.set_attn_implementation(before or "eager")


_GATES = {
    torch.sigmoid, Tensor.sigmoid, torch.nn.functional.sigmoid, torch.nn.functional.silu, torch.nn.functional.softplus,
    torch.tanh, Tensor.tanh, torch.nn.functional.tanh,
}  # fmt: skip


class GateFreezer(TorchFunctionMode):
    """Watches the gates of one attention module: what a squashing function gives outside the attention function.

    Not held, every such value is kept in `values`; held, they are returned in the same order, whatever is asked.
    """

    def __init__(self, values: list[Tensor], *, held: bool) -> None:
        super().__init__()
        self._values, self._held, self._calls = values, held, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _GATES or _active.inside_interface:
            return func(*args, **(kwargs or {}))
        if self._held:
            self._calls += 1
            return self._values[self._calls - 1]
        with torch._C.DisableTorchFunction():  # a gate may be made of another
            value = func(*args, **(kwargs or {}))
        self._values.append(value)
        return value


_SOFTMAX = {torch.softmax, torch.nn.functional.softmax, Tensor.softmax, torch._C._nn.__dict__.get("softmax")}
_PRODUCT = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
_SDPA = torch.nn.functional.scaled_dot_product_attention


@dataclass
class SoftmaxInterception(TorchFunctionMode):
    """Watches one attention module's forward: the product that follows its softmax is H V.

    H is the left operand of the first product after the softmax whose last two axes are tokens by tokens,
    so that casts, dropout (off) and head masks between the two stay the model's. `module` names the module
    whose attention it is at the time of the product.
    """

    module: Callable[[], nn.Module]
    _armed: tuple[int, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _active.inside_interface:
            return func(*args, **kwargs)
        if func in _SOFTMAX:
            weights = func(*args, **kwargs)
            if weights.ndim >= 3 and weights.shape[-1] > 1:
                self._armed = tuple(weights.shape[-2:])
            return weights
        if func is _SDPA:
            return self._explicit(*args, **kwargs)
        if self._armed is not None and func in _PRODUCT and tuple(args[0].shape[-2:]) == self._armed:
            self._armed = None
            return self._product(args[0], args[1])
        if self._armed is not None and func is torch.einsum and len(args) == 3:
            return self._einsum(func, args, kwargs)
        return func(*args, **kwargs)

    def _product(self, weights: Tensor, value: Tensor) -> Tensor:
        """weights (…, N, N) @ value (…, N, d): batch 1, any folding of batch and heads."""
        probe = _active.probe
        if probe is None:
            return torch.matmul(weights, value)
        tokens, width = value.shape[-2:]
        standard = value.reshape(1, -1, tokens, width)
        frozen = probe.replacement(self.module(), standard)
        if frozen is None:
            product = torch.matmul(weights, value)
            rows = StoredRows(weights.reshape(-1, *weights.shape[-2:]))
            output = product.reshape(-1, weights.shape[-2], width).transpose(0, 1)[None]  # (1, N, heads, d)
            probe.captured(AttentionCall(self.module(), "softmax interception", rows, standard, output))
            return product
        heads_first = frozen[0].transpose(0, 1)  # (heads, N, d)
        return heads_first.reshape(*weights.shape[:-2], weights.shape[-2], width)

    def _explicit(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *rest: Any,
        **kwargs: Any,
    ) -> Tensor:
        """softmax(Q Kᵀ·scale + mask) V written out, so that its H can be seen and frozen."""
        scale = kwargs.get("scale") or query.shape[-1] ** -0.5
        if key.shape[1] != query.shape[1]:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        scores = query @ key.transpose(-2, -1) * scale
        if kwargs.get("is_causal"):
            rows, columns = scores.shape[-2:]
            keep = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~keep, float("-inf"))
        elif attn_mask is not None:
            scores = (
                scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
            )
        return self._product(torch.softmax(scores, dim=-1), value)

    def _einsum(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An einsum after the softmax is rewritten as the product it stands for, where it is one."""
        equation, first, second = args
        terms = equation.replace(" ", "")
        weights_of = {
            "bnij,bnjd->bnid": (first, second, lambda out: out),
            "bhij,bhjd->bhid": (first, second, lambda out: out),
            "bhqk,bkhd->bqhd": (first, second.transpose(1, 2), lambda out: out.transpose(1, 2)),
            "bhlt,bthd->blhd": (first, second.transpose(1, 2), lambda out: out.transpose(1, 2)),
            "bnij,jbnd->ibnd": (first, second.permute(1, 2, 0, 3), lambda out: out.permute(2, 0, 1, 3)),
            "bnij,bjnd->bind": (first, second.transpose(1, 2), lambda out: out.transpose(1, 2)),
        }.get(terms)
        if weights_of is None or tuple(first.shape[-2:]) != self._armed:
            return func(*args, **kwargs)
        self._armed = None
        weights, value, back = weights_of
        return back(self._product(weights, value))
