"""Capture and freezing of attention, without touching a model's code.

Two paths lead to the attention matrices H_h:

* *attention interface*: a function registered with transformers delegates to the model's own
  `eager_attention_forward`, so that softcaps, sinks and grouped heads stay the model's.
* *softmax interception*: for models outside the interface, a torch function mode watches the softmax inside
  the attention module and the product that follows it (interception.py).

On either path one *probe* per model is asked: it is given H and V during capture, and it returns
H_frozen V(Z) during replay.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from duat_cli.compat.transformers import (
    ATTENTION_ARGUMENTS,
    attention_configs,
    attention_implementation,
    eager_attention,
    register_attention,
    set_attention_implementation,
)
from duat_cli.errors import UnsupportedModelError, needed
from duat_cli.models.arrays import fit, relative_error, rounding
from duat_cli.models.holding import holding
from duat_cli.models.instrument.calls import taken_by
from duat_cli.models.instrument.windows import WindowRows, Windows

INTERFACE_NAME = "duat_capture"

CapturePath = Literal["attention interface", "softmax interception", "frozen kernel"]


class ForeignAttentionError(UnsupportedModelError):
    """The model computes something else under an attention function that it does not know."""


class RowSource(Protocol):
    """Attention matrices in chunks of rows, so that H need not be in memory whole."""

    @property
    def heads(self) -> int: ...

    @property
    def tokens(self) -> int:
        """Number of rows of H: the tokens that read."""
        ...

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields (rows, H[:, rows, :]), the second of shape (heads, rows, N); (heads, rows, K) in cross-attention over
        K tokens of an encoder."""
        ...


@dataclass(frozen=True)
class StoredRows:
    """All of H in memory: (heads, N, N)."""

    matrix: Tensor

    @property
    def heads(self) -> int:
        return self.matrix.shape[0]

    @property
    def tokens(self) -> int:
        return self.matrix.shape[1]

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, self.matrix.shape[1]), self.matrix


@dataclass(frozen=True)
class RecomputedRows:
    """H recomputed, `step` rows at a time, from the frozen queries and keys (softmax rows are independent)."""

    weights: Callable[[slice], Tensor]  # rows -> (heads, rows, N)
    heads: int
    tokens: int
    step: int

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, self.tokens, self.step):
            rows = slice(start, min(start + self.step, self.tokens))
            yield rows, self.weights(rows)


@dataclass(frozen=True)
class MadeRows:
    """H computed from the rows of another source."""

    source: RowSource
    heads: int
    made: Callable[[slice, Tensor], Tensor]  # (rows, the source's H at these rows) -> (heads, rows, N)

    @property
    def tokens(self) -> int:
        return self.source.tokens

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        for rows, weights in self.source.chunks():
            yield rows, self.made(rows, weights)


@dataclass(frozen=True)
class ScoreInputs:
    """The arguments that the attention interface makes scores of, as the model's own function was given them."""

    query: Tensor  # (batch, heads, N, d), positions and norms included
    key: Tensor  # (batch, kv_heads, N, d)
    mask: Tensor | None  # added to the scores, or boolean: (1, 1 or heads, N or 1, N)
    options: dict[str, Any]  # the function's keywords: scaling, softcap, sinks and others


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function: H, V and H V for the input at hand.

    A model may put windows of tokens into the batch. Such a call is captured with W windows as the batch of its value
    and output, and with the heads of all windows in its rows; `by_heads` makes it one call of batch 1.
    """

    module: nn.Module
    path: CapturePath
    rows: RowSource
    value: Tensor  # (batch, kv_heads, N, d), a view of the value projection's output where the model keeps one
    output: Tensor  # (batch, N, heads, d)
    allowed: Tensor | None = None  # positions that the mask leaves to some head, (N, K) bool; None: no mask was seen
    scored: ScoreInputs | None = None  # None: its softmax was intercepted, behind the scores
    finite: Tensor | None = None  # where an intercepted softmax has scores above those of a mask, (batch, N, K) bool
    windows: Windows | None = None  # layout of value and output in the model's code; None: batch 1, by token

    def by_heads(self) -> AttentionCall:
        """This call with the windows of a batch as additional heads."""
        if len(self.value) == 1:
            return self
        windows = Windows(len(self.value))
        value, output = windows.inward(self.value), windows.inward_mixed(self.output)
        return replace(self, value=value, output=output, windows=windows)


class Probe(Protocol):
    """The object that is asked when a model's attention runs."""

    def captured(self, call: AttentionCall) -> None: ...

    def replacement(self, module: nn.Module, value: Tensor) -> Tensor | None:
        """Frozen H applied to `value` (batch, kv_heads, N, d): (batch, N, heads, d); None during capture."""
        ...


ROW_BUDGET = 1 << 28  # bytes of H kept whole; above it rows are recomputed


@dataclass
class Watch:
    """One model under instruments. Several can be at the same time, because each attention module has its own watch."""

    probe: Probe
    inside_interface: bool = False  # whether to leave softmax alone, as that of the model's own eager function
    asked: Callable[[Tensor, Tensor], None] | None = None  # given queries and keys at the interface, before the probe
    looked: Callable[[Tensor], None] | None = None  # given the weights behind an intercepted softmax, before the probe


_watches: weakref.WeakKeyDictionary[nn.Module, Watch] = weakref.WeakKeyDictionary()
_plain: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules whose output was seen to be H V
_alone: contextvars.ContextVar[bool] = contextvars.ContextVar("alone", default=False)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """While active, attention modules run their own eager function, which takes the same operations every time."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def mixed_by(rows: RowSource, value: Tensor, windows: Windows | None) -> Tensor:
    """H V by token, (items, N, heads, d), for values in the layout of the model's code."""
    if isinstance(rows, WindowRows):
        return rows.mix(value)
    return apply_rows(rows, value if windows is None else windows.inward(value))


def apply_rows(rows: RowSource, value: Tensor) -> Tensor:
    """H V for every head: rows (heads, N, K), value (batch, kv_heads, K, d) to (batch, N, heads, d)."""
    if torch.is_grad_enabled() and value.requires_grad:
        mixed: Tensor = _Mixed.apply(value, rows)
        return mixed
    batch, kv_heads, tokens, width = value.shape
    groups = rows.heads // kv_heads
    out = value.new_empty(batch, rows.tokens, rows.heads, width)
    # One product per kv head, over all its query heads and all columns of the batch.
    columns = value.permute(1, 2, 0, 3).reshape(kv_heads, tokens, batch * width)
    for part, weights in rows.chunks():
        count = part.stop - part.start
        grouped = weights.reshape(kv_heads, groups * count, tokens)
        product = (grouped.to(columns.dtype) @ columns).reshape(kv_heads, groups, count, batch, width)
        out[:, part] = product.permute(3, 2, 0, 1, 4).reshape(batch, count, rows.heads, width)
    return out


class _Mixed(torch.autograd.Function):
    """`apply_rows` with a gradient that asks for H again, chunk by chunk; a graph would keep all of H in memory."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, rows: RowSource) -> Tensor:
        ctx.rows, ctx.kv_heads = rows, value.shape[1]
        return apply_rows(rows, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Hᵀ g, summed over the heads that share values: (batch, N, heads, d) to (batch, kv_heads, N, d)."""
        (gradient,), kv_heads, rows = gradients, ctx.kv_heads, ctx.rows
        groups, total = rows.heads // kv_heads, 0
        for part, weights in rows.chunks():
            count, tokens = weights.shape[1:]
            grouped = weights.reshape(kv_heads, groups * count, tokens).to(gradient.dtype)
            by_head = gradient[:, part].reshape(len(gradient), count, kv_heads, groups, -1)
            shares = by_head.permute(0, 2, 3, 1, 4).reshape(len(gradient), kv_heads, groups * count, -1)
            total = total + grouped.transpose(1, 2) @ shares  # (batch, kv_heads, N, d)
        return total, None  # type: ignore[return-value]


def _eager(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The model's own eager attention: the function of that name beside the module's class."""
    function = eager_attention(module)
    if function is None:
        raise UnsupportedModelError(f"{type(module).__name__} has no eager attention function beside it")
    return function


def _interface(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls. It returns no weights: the H of every block would be kept to the end."""
    eager = _eager(module)
    _refuse_foreign(module, eager, kwargs)
    watch = None if _alone.get() else _watches.get(module)
    if watch is None:
        return eager(module, query, key, value, attention_mask, **kwargs)[0], None
    with holding(watch, inside_interface=True):
        if watch.asked is not None:
            watch.asked(query, key)
        replacement = watch.probe.replacement(module, value)
        if replacement is not None:
            return replacement, None
        call = _captured_call(module, eager, query, key, value, attention_mask, kwargs)
        watch.probe.captured(call)
        return call.output, None


def _refuse_foreign(module: nn.Module, eager: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Refuses tensors that the eager function does not take, such as the choice of keys of a sparse attention."""
    named = taken_by(eager)
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and name not in named and name not in ATTENTION_ARGUMENTS:
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
    scored, windows = ScoreInputs(query, key, mask, kwargs), len(query)
    allowed = allowed_by(mask, tokens, key.shape[2]) if windows == 1 else None

    def attend(rows: slice) -> tuple[Tensor, Tensor]:
        part = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
        output, weights = eager(module, query[:, :, rows], key, value, part, **kwargs)
        if weights is None:
            raise UnsupportedModelError(f"{type(module).__name__}'s eager attention returns no weights")
        return output, _effective(module, weights, value, output)

    source: RowSource
    if row_bytes * tokens <= ROW_BUDGET or windows > 1:
        output, weights = attend(slice(None))
        source = StoredRows(weights.flatten(0, 1))
    else:
        step = max(1, (ROW_BUDGET // 4) // row_bytes)
        source = RecomputedRows(lambda rows: attend(rows)[1][0], heads, tokens, step)
        output = apply_rows(source, value)
    return AttentionCall(module, "attention interface", source, value, output, allowed, scored)


def at_zero_queries(call: AttentionCall) -> Tensor:
    """The positions, (N, K) bool, that the model's own function gives a weight in some head when queries are zero.

    call: one at the attention interface.
    """
    given, eager = needed(call.scored), _eager(call.module)
    batch, heads, tokens, _ = given.query.shape
    step, found = max(1, ROW_BUDGET // (4 * batch * heads * given.key.shape[2] * 4)), []
    for start in range(0, tokens, step):
        rows = slice(start, start + step)
        mask = given.mask if given.mask is None or given.mask.shape[-2] == 1 else given.mask[..., rows, :]
        nothing = torch.zeros_like(given.query[:, :, rows])
        _, weights = eager(call.module, nothing, given.key, given.key, mask, **given.options)
        assert weights is not None  # the capture refuses a function that gives none
        found.append((weights.flatten(0, 1) != 0).any(dim=0))
    return torch.cat(found)


def allowed_by(mask: Tensor | None, tokens: int, sources: int) -> Tensor | None:
    """The positions, (N, K) bool, that a mask (1, 1 or heads, N or 1, K), boolean or added, leaves to a head."""
    if mask is None or mask.shape[-1] != sources:
        return None
    kept = mask if mask.dtype == torch.bool else _above(mask)
    some = kept[0, 0] if kept.shape[1] == 1 else kept[0].any(dim=0)
    return some.expand(tokens, sources)


def finite_at(scores: Tensor, batch: int) -> Tensor:
    """The positions at which scores (…, N, K) of some head are above a mask's, by item of a batch: (batch, N, K)."""
    return _above(scores).reshape(batch, -1, *scores.shape[-2:]).any(dim=1)


def _above(scores: Tensor) -> Tensor:
    return scores > torch.finfo(scores.dtype).min / 4


def _effective(module: nn.Module, weights: Tensor, value: Tensor, output: Tensor) -> Tensor:
    """H as the output shows it: some models scale the rows of a head behind the softmax (sinks outside it).

    weights (W, heads, n, N), output (W, n, heads, d). A module whose output was plain H V once is not tested again;
    the certificate of the block's replay covers it like any other.
    """
    if module in _plain:
        return weights
    heads, kv_heads = weights.shape[1], value.shape[1]
    mixed = weights.to(value.dtype) @ value.repeat_interleave(heads // kv_heads, 1)  # (1, heads, n, d)
    seen = output.transpose(1, 2)
    if relative_error(mixed, seen) <= rounding(seen.dtype):
        _plain.add(module)
        return weights
    return weights * fit(mixed, seen)


@contextlib.contextmanager
def watched(modules: Iterable[nn.Module], watch: Watch) -> Iterator[None]:
    """While active, `watch` is asked about every attention call of these modules."""
    before = {module: _watches.get(module) for module in modules}
    _watches.update(dict.fromkeys(before, watch))
    try:
        yield
    finally:
        for module, known in before.items():
            if known is None:
                del _watches[module]
            else:
                _watches[module] = known


class Interface:
    """Switches a live model to the capturing attention function and back, each time a pass is entered and left."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._switched: list[tuple[Any, str | None, str | None]] = []  # config, own and capturing implementation

    @contextlib.contextmanager
    def installed(self) -> Iterator[bool]:
        """While active, the model is switched; yields whether it accepted the function."""
        if not self._switched:
            register_attention(INTERFACE_NAME, _interface)
            before = [(config, attention_implementation(config)) for config in attention_configs(self._model)]
            with contextlib.suppress(ValueError, KeyError, AttributeError, ImportError):
                self._model.set_attn_implementation(INTERFACE_NAME)
            self._switched = [(config, name, attention_implementation(config)) for config, name in before]
        for config, _, new in self._switched:
            set_attention_implementation(config, new)
        try:
            yield self._switched[0][2] == INTERFACE_NAME
        finally:
            for config, name, _ in self._switched:
                set_attention_implementation(config, name)
