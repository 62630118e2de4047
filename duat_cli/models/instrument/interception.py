"""Modes that watch torch functions inside a model's own attention code, and replace some of them.

A replaced function is bound by its full signature. A call with an argument that is not understood is refused, because
dropping it would change the model.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from duat_cli.compat.torch import functions_unwatched, open_to_modes
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.instrument.attention import AttentionCall, StoredRows, Watch, finite_at

_BOUNDED = {
    torch.sigmoid, Tensor.sigmoid, torch.nn.functional.sigmoid, torch.tanh, Tensor.tanh, torch.nn.functional.tanh,
}  # fmt: skip
GATES = _BOUNDED | {torch.nn.functional.silu, torch.nn.functional.softplus}
SOFTMAX = {torch.softmax, torch.nn.functional.softmax, Tensor.softmax}


def _gives_rows(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a softmax is over the last axis of at least three, as one whose rows are weights of tokens is. One over
    another axis weighs the tokens of a window for each channel."""
    x = args[0] if args else kwargs["input"]
    axis, last = kwargs.get("dim", args[1] if len(args) > 1 else -1), x.ndim - 1
    return func in SOFTMAX and last >= 2 and axis in {-1, last}


class GateFreezer(TorchFunctionMode):
    """Watches the gates of one attention module: outputs of squashing functions outside the attention function, and
    weights of the tokens of a window for each channel.

    Without `held`, every such output is appended to `values`. With it, they are returned in order for any input.
    """

    def __init__(self, values: list[Tensor], *, held: bool, apart: Callable[[], bool]) -> None:
        """apart: whether what runs now is left alone."""
        super().__init__()
        self._values, self._held, self._apart, self._calls = values, held, apart, itertools.count()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._holds(func, args, kwargs) or self._apart():
            return func(*args, **kwargs)
        if self._held:
            value = self._values[next(self._calls)].clone()  # the model may write to it, here and below
            return self._for(value, args[0] if args else kwargs["input"])
        with functions_unwatched():  # one gate function may call another
            value = func(*args, **kwargs)
        self._values.append(value.clone())
        return value

    def _holds(self, func: Any, args: Any, kwargs: Any) -> bool:
        return func in GATES or (func in SOFTMAX and not _gives_rows(func, args, kwargs))

    def _for(self, value: Tensor, x: Tensor) -> Tensor:
        """A recorded output, for the input `x` of a replay."""
        return value


class WeightFreezer(GateFreezer):
    """Watches the squashing functions of a block that make the weights of its streams, as `GateFreezer` does gates. An
    FFN's SiLU is left alone. Held values stand once for each item."""

    def _holds(self, func: Any, args: Any, kwargs: Any) -> bool:
        return func in _BOUNDED or func in SOFTMAX

    def _for(self, value: Tensor, x: Tensor) -> Tensor:
        if x.shape == value.shape:
            return value
        return value.repeat(len(x) // len(value), *[1] * (x.ndim - 1))  # items stand in front of prompts


_CLAMPS = {torch.clamp, Tensor.clamp, torch.clip, Tensor.clip, Tensor.clamp_, Tensor.clip_}


@dataclass(frozen=True)
class HeldClamp:
    """One clamp of one pass as an affine map: the identity where it left its input as it was, a constant elsewhere.

    A model that clips queries, keys and values clips none of them on most inputs, but would clip some of the vectors
    of a replay.
    """

    kept: Tensor  # bool
    value: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return torch.where(self.kept, x, self.value)


class ClampFreezer(TorchFunctionMode):
    """Watches the clamps of floating-point tensors in one attention module, outside the attention function.

    Without `held`, every clamp is recorded. With it, they act as recorded, in the same order.
    """

    def __init__(self, watch: Watch, clamps: list[HeldClamp], *, held: bool) -> None:
        super().__init__()
        self._watch, self._clamps, self._held, self._calls = watch, clamps, held, itertools.count()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _CLAMPS or self._watch.inside_interface or not args[0].is_floating_point():
            return func(*args, **kwargs)
        x = args[0]
        if self._held:
            y = self._clamps[next(self._calls)](x)
        else:
            before = x.clone()
            y = func(*args, **kwargs)
            self._clamps.append(HeldClamp(before == y, y.clone()))
        return x.copy_(y) if func in {Tensor.clamp_, Tensor.clip_} else y


_SDPA = torch.nn.functional.scaled_dot_product_attention
_WHOLE = torch.nn.functional.multi_head_attention_forward


def _matmul(input: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return input, other


def _bmm(input: Tensor, mat2: Tensor) -> tuple[Tensor, Tensor]:
    return input, mat2


_PRODUCTS: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {
    torch.matmul: _matmul, Tensor.matmul: _matmul, Tensor.__matmul__: _matmul, torch.bmm: _bmm, Tensor.bmm: _bmm,
}  # fmt: skip


@dataclass(frozen=True)
class _Einsum:
    """An einsum that is H V: the order of axes that makes its values (…, N, d), and the order of the product's axes."""

    value: tuple[int, ...]
    back: tuple[int, ...]


def _einsum_form(equation: Any) -> _Einsum | None:
    """The form of `…ij, (… j d in any order) -> (… i d in any order)`; None for any other equation."""
    found = re.fullmatch(r"(\w+),(\w+)->(\w+)", equation.replace(" ", "")) if isinstance(equation, str) else None
    if found is None or any(len(set(part)) != len(part) for part in found.groups()):
        return None
    weights, value, result = found.groups()
    batch, i, j = weights[:-2], weights[-2:-1], weights[-1:]
    width = "".join(set(value) - set(weights))
    if len(width) != 1 or sorted(value) != sorted(batch + j + width) or sorted(result) != sorted(batch + i + width):
        return None
    return _Einsum(
        tuple(value.index(axis) for axis in batch + j + width),
        tuple((batch + i + width).index(axis) for axis in result),
    )


def _understood(name: str, stand_in: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `stand_in` for the arguments of the function that it replaces. Raises UnsupportedModelError where
    it does not know one of them by name."""
    try:
        inspect.signature(stand_in).bind(*args, **kwargs)
    except TypeError as fault:
        raise UnsupportedModelError(
            f"its attention calls {name} with arguments that duat cannot follow: {fault}"
        ) from fault
    return stand_in(*args, **kwargs)


@dataclass
class SoftmaxInterception(TorchFunctionMode):
    """Watches one attention module's forward: the product that follows its softmax is H V.

    H is the left operand of the first product after the softmax whose last two axes are tokens by tokens, so that
    casts, dropout (off) and head masks between the two stay the model's; a sink, the last column, may be cut off.
    `module` returns the module whose attention it is at the time of the product.
    """

    watch: Watch
    module: Callable[[], nn.Module]
    _armed: tuple[int, int] | None = field(default=None, init=False)
    _scores: Tensor | None = field(default=None, init=False)  # the input of that softmax

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.watch.inside_interface:
            return func(*args, **kwargs)
        if func in SOFTMAX:
            weights = func(*args, **kwargs)
            several = weights.ndim > 1 and (weights.shape[-1] > 1 or weights.shape[-2] == 1)  # or H of one token
            if several and _gives_rows(func, args, kwargs):
                self._armed, self._scores = tuple(weights.shape[-2:]), args[0] if args else kwargs["input"]
            return weights
        if func is _WHOLE and (inside := open_to_modes(func)) is not None:
            with self:
                return inside(*args, **kwargs)
        if func is _SDPA:
            return _understood("scaled_dot_product_attention", self._explicit, args, kwargs)
        if self._armed is None:
            return func(*args, **kwargs)
        return self._behind_softmax(func, args, kwargs)

    def _behind_softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call behind the softmax: H V through the probe if it is that product, else its own result."""
        if func in _PRODUCTS:
            left, right = _understood(func.__name__, _PRODUCTS[func], args, kwargs)
            if self._is_armed(left):
                self._armed = None
                return self._product(left, right, self._scores)
        if func is torch.einsum and len(args) == 3:
            return self._einsum(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_armed(self, weights: Tensor) -> bool:
        """Whether these weights have the shape of the last softmax, or of one whose last column was cut off."""
        rows, columns = self._armed or (0, 0)
        return weights.shape[-2:] in {(rows, columns), (rows, columns - 1)}

    def _product(self, weights: Tensor, value: Tensor, scores: Tensor | None) -> Tensor:
        """weights (…, N, N) @ value (…, N, d), or what the probe returns for it: batch 1, with any folding of batch and
        heads, or windows (W, heads, N, N).

        scores: the input of the softmax, mask included.
        """
        probe, self._scores = self.watch.probe, None
        tokens, width = value.shape[-2:]
        batch = len(value) if value.ndim == 4 else 1
        standard = value.reshape(batch, -1, tokens, width)
        held = {buffer.untyped_storage().data_ptr() for buffer in self.module().buffers()}
        if value.untyped_storage().data_ptr() in held:  # a cache of its own, which the next pass writes to
            standard = standard.clone()
        if self.watch.looked is not None:
            self.watch.looked(weights)
        frozen = probe.replacement(self.module(), standard)
        if frozen is None:
            product = torch.matmul(weights, value)
            rows = StoredRows(weights.reshape(-1, *weights.shape[-2:]))
            output = product.reshape(batch, -1, weights.shape[-2], width).transpose(1, 2)  # (batch, N, heads, d)
            same = scores is not None and scores.numel() == weights.numel()
            finite = finite_at(scores, batch) if scores is not None and same else None
            call = AttentionCall(self.module(), "softmax interception", rows, standard, output, finite=finite)
            probe.captured(call)
            return product.clone()  # some modules add to it in place
        heads_first = frozen.transpose(1, 2)  # (batch, heads, N, d)
        return heads_first.reshape(*weights.shape[:-2], weights.shape[-2], width)

    def _explicit(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """softmax(Q Kᵀ·scale + mask) V written out, so that its H can be seen and frozen.

        The arguments are those of torch's scaled_dot_product_attention.
        """
        if dropout_p > 0:
            raise UnsupportedModelError(f"its attention drops entries at random (dropout_p={dropout_p})")
        if is_causal and attn_mask is not None:
            raise UnsupportedModelError("its attention gives a mask and asks for is_causal; torch allows one")
        if enable_gqa:
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is None:
            return self._product(torch.softmax(scores, dim=-1), value, scores)
        allowed = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if allowed else scores + attn_mask
        nothing = scores.isneginf().all(dim=-1, keepdim=True)  # torch's function gives zeros there, a softmax NaN
        return self._product(torch.softmax(scores, dim=-1).masked_fill(nothing, 0.0), value, scores)

    def _einsum(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an einsum after the softmax, rewritten as the product H V where it is one."""
        equation, weights, value = args
        form = None if kwargs else _einsum_form(equation)
        if form is None or not self._is_armed(weights):
            return func(*args, **kwargs)
        self._armed = None
        return self._product(weights, value.permute(form.value), self._scores).permute(form.back)


class Choices(TorchFunctionMode):
    """Notes whether code that runs under it chooses the largest of several numbers, as routers do."""

    CHOOSING = frozenset((torch.topk, Tensor.topk, torch.argmax, Tensor.argmax, torch.sort, Tensor.sort))

    def __init__(self) -> None:
        super().__init__()
        self.made = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made = self.made or func in self.CHOOSING
        return func(*args, **(kwargs or {}))
