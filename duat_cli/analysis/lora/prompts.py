"""`duat lora-diff` with prompts: what a change of weights does to each block, exactly, prompt by prompt.

Base and tuned model run the same prompt, both with a certificate. All that the comparison needs of the base's run is
kept for the length of one prompt: Ĥ of every block, the FFN's term, the dynamic bias, the output. Where the weights of
both are read block by block, all prompts go through one block of the base, then the same block of the tuned model.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from duat_cli.analysis.decomposition import Decomposition, Step, crossing
from duat_cli.analysis.lora.ground import Ground
from duat_cli.analysis.lora.prediction import Decode, prompt_change
from duat_cli.analysis.lora.reading import logits_of
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Listener, Session
from duat_cli.analysis.stacks import behind_own_encoder
from duat_cli.compat.transformers import largest_stated
from duat_cli.errors import InputError, needed, or_reason
from duat_cli.loading.prompts import Prompt
from duat_cli.loading.words import Labels
from duat_cli.models.arrays import token_changes, wide
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.lockstep import Guest, Pass, Weights, in_step, one_by_one
from duat_cli.models.terms.branches import ffn_terms
from duat_cli.models.value_path.factors import BlockFactors
from duat_cli.models.value_path.operator import AttentionOperator, one_stream
from duat_cli.models.value_path.streams import DIFFERS
from duat_cli.operators.kronecker import KroneckerSum
from duat_cli.operators.operator_change import gram_of_changes, split
from duat_cli.results.lora import BlockChange, OperatorChange, PromptChange, TermsChange

KEPT_BYTES = 4 << 30  # most that is kept of one prompt's base run
SCALE_OPEN = "V and O were found with unit vectors: their scale is open, routing and weights cannot be told apart"
ZERO = "the base's is zero"
OTHER_SHAPE = "it has another shape in the tuned model"
NO_LABELS = "the models predict classes, and the true ones are not known"


class Operator(NamedTuple):
    """W' or W'_c of one block under one prompt."""

    matrix: KroneckerSum | str  # or why there is none
    read: bool  # whether V and O were read from weights, so that their scale is known


@dataclass(frozen=True)
class Kept:
    """Results of one block under one prompt, kept for the comparison."""

    operator: Operator
    cross: Operator | None  # W'_c; None without cross-attention
    ffn: Tensor | str  # what each FFN adds to the stream, as one vector, or why it is not known
    dynamic: Tensor | None
    pre: Tensor | None
    pre_reason: str | None
    output: Tensor
    error: float  # of the certificate


@dataclass(frozen=True)
class Compared:
    """Results of one prompt."""

    blocks: list[BlockChange]
    """Changes of the blocks; empty where the models differ in their number of blocks."""
    base_error: float
    """Error of the base's certificate, the largest over the blocks; `tuned_error` is that of the tuned model."""
    tuned_error: float
    change: PromptChange


class Beside(Protocol):
    """Passes that go through a model beside the prompts; the hooks that they need are on within `attached`."""

    passes: list[Pass]

    def attached(self) -> contextlib.AbstractContextManager[None]: ...


@dataclass
class _Row:
    """One prompt on its way through both models, the base first."""

    read: tuple[Prompt, Prompt]  # decoders read the states of their own encoders
    kept: dict[int, Kept] = field(default_factory=dict)  # the base's blocks, each until the tuned model's block has run
    blocks: list[BlockChange] = field(default_factory=list)
    errors: list[float] = field(default_factory=lambda: [0.0, 0.0])  # certificate errors of base and tuned model
    streams: list[Tensor | None] = field(default_factory=lambda: [None, None])  # outputs of the last blocks
    outputs: list[Any] = field(default_factory=list)  # return values of the stacks

    @property
    def moved(self) -> float:
        """How far the last block's output moved, relative to its size in the base."""
        before, after = (wide(stream) for stream in self.streams if stream is not None)
        size = float(before.norm())
        return float((after - before).norm()) / size if size else 0.0


class Comparer:
    """Compares base and tuned model on prompts; keeps what depends on a pair of blocks alone."""

    def __init__(self, before: Ground, after: Ground, decode: Decode, total: int, progress: Progress) -> None:
        """before, after: the base and the tuned model. total: how many prompts there are in all."""
        self._grounds, self._sessions = (before, after), (before.session, after.session)
        self._paired = before.session.depth == after.session.depth
        self._decode, self._total, self._progress = decode, total, progress
        self._grams: dict[int, Tensor] = {}

    def __call__(
        self, chunk: Sequence[tuple[int, Prompt]], with_base: Beside | None = None, with_tuned: Beside | None = None
    ) -> list[Compared]:
        """Results of these prompts, given with their numbers. with_base, with_tuned: passes that go through that model
        beside the first prompts that run."""
        found, beside = list[Compared](), (with_base, with_tuned)
        for some in self._side_by_side(chunk):
            with contextlib.ExitStack() as stack:
                for one in beside:
                    stack.enter_context(contextlib.nullcontext() if one is None else one.attached())
                rows = self._rows(some, [[] if one is None else one.passes for one in beside])
            beside = None, None
            for (number, prompt), row in zip(some, rows, strict=True):
                logits = self._logits(row)
                order = self._order if self._classes else None
                change = prompt_change(number, prompt, row.moved, logits, self._decode, order, self._why_no_loss)
                found.append(Compared(row.blocks, row.errors[0], row.errors[1], change))
        return found

    @property
    def _classes(self) -> bool:
        """Whether both models are classifiers, and of the same kind: of a whole text, or of each token."""
        before, after = (ground.classes for ground in self._grounds)
        return before is not None and before == after

    @functools.cached_property
    def _order(self) -> list[int] | str:
        """The tuned model's numbers of the base's classes, or why these are other classes."""
        before, after = (Labels(session.loaded.model.config) for session in self._sessions)
        return before.order_in(after)

    @property
    def _why_no_loss(self) -> str | None:
        """Why no prompt has a loss though it has logits; None where prompts have one."""
        return NO_LABELS if self._classes else self._grounds[0].why_no_loss or self._grounds[1].why_no_loss

    @property
    def _weights(self) -> tuple[Weights, Weights] | None:
        """Weights of both models, where they go through each block in turn; else None."""
        before, after = (session.weights for session in self._sessions)
        return (before, after) if self._paired and before is not None and after is not None else None

    def _side_by_side(self, chunk: Sequence[tuple[int, Prompt]]) -> list[list[tuple[int, Prompt]]]:
        """The prompts, split into groups that go through both models at once."""
        if self._weights is None:
            return [[one] for one in chunk]
        return [[chunk[place] for place in wave] for wave in self._sessions[0].waves([prompt for _, prompt in chunk])]

    def _rows(self, chunk: Sequence[tuple[int, Prompt]], beside: Sequence[Sequence[Pass]]) -> list[_Row]:
        """Runs prompts side by side: all go through a block of the base, then of the tuned model, then through the next
        block, so that only one block of the base's run is kept. Where weights are in memory, `chunk` is one prompt,
        which goes through the whole base, then through the tuned model. beside: passes that go along with either
        model."""
        read, weights = [prompt for _, prompt in chunk], self._weights
        sides = read, behind_own_encoder(self._sessions[1].loaded, read)
        rows = [_Row(both) for both in zip(*sides, strict=True)]
        blocks = len(self._sessions[0].structure.calls)
        done = itertools.count(chunk[0][0] * blocks + 1)

        def listener(side: int, place: int) -> Listener:
            decomposition, row = Decomposition(), rows[place]

            def listen(run: BlockRun) -> None:
                self._take(side, row, run, decomposition.advance(run))
                if side and weights is not None:
                    which = f"prompt {chunk[place][0] + 1} of {self._total}"
                    self._progress(next(done), self._total * blocks, f"both models, {which}")

            return listen

        def sweep(side: int) -> None:
            self._sessions[side].sweep_all(
                sides[side],
                functools.partial(listener, side),
                lambda place, output: rows[place].outputs.append(output),
                None if weights is None else lambda _found: Guest(beside[side]),
            )

        if weights is not None:
            in_step(weights[0], lambda: sweep(0), weights[1], lambda: sweep(1))
            return rows
        [(number, prompt)] = chunk
        if self._paired:
            _check_room(self._sessions[0], prompt)
        for side, what in enumerate(("base model", "tuned model")):
            self._progress(2 * number + side, 2 * self._total, f"{what}, prompt {number + 1} of {self._total}")
            sweep(side)
        one_by_one([*beside[0], *beside[1]])
        return rows

    def _take(self, side: int, row: _Row, run: BlockRun, step: Step) -> None:
        """Takes one block of the base (side 0) or of the tuned model (1) under one prompt."""
        found = _keep(self._grounds[side], run, step)
        row.errors[side], row.streams[side] = max(row.errors[side], found.error), found.output
        if self._paired and side:
            row.blocks.append(_block(self._sessions[0], run.index, row.kept.pop(run.index), found, self._grams))
        elif self._paired:
            row.kept[run.index] = found

    def _logits(self, row: _Row) -> tuple[Tensor, Tensor] | str:
        """Logits of both models, or why they are not logits of the next token or of classes."""
        if not self._classes:
            without = sorted(self._grounds, key=lambda ground: ground.classes is not None)
            if whys := [ground.why_no_next_token for ground in without if ground.why_no_next_token is not None]:
                return whys[0]  # a classifier's reason says the least, so it comes last
        p, q = (logits_of(*one) for one in zip(self._sessions, row.outputs, row.read, strict=True))
        return p, q


def _check_room(base: Session, prompt: Prompt) -> None:
    tokens = prompt.input_ids.shape[1]
    heads = largest_stated(base.loaded.model.config, "num_attention_heads") or 1
    size = len(base.structure.calls) * heads * tokens**2 * 4
    if size > KEPT_BYTES:
        most = int((KEPT_BYTES / (4 * heads * len(base.structure.calls))) ** 0.5)
        way = f"use --max-tokens {most}" if prompt.prepared is None else f"{most} fit"
        raise InputError(
            f"a prompt of {tokens} tokens: its attention matrices take {size >> 20} MiB in {len(base.structure.calls)} "
            f"blocks, more than {KEPT_BYTES >> 20}; {way}"
        )


def _keep(ground: Ground, run: BlockRun, step: Step) -> Kept:
    block = ground.session.structure.block(run.index)

    def found(operator: Callable[[], AttentionOperator], known: BlockFactors | None) -> Operator:
        matrix = or_reason(lambda: one_stream(operator(), DIFFERS).by_channel().matrix())
        return Operator(matrix, known is not None and known.origin == "read")

    crosses = run.parts.cross is not None
    return Kept(
        operator=found(lambda: ground.session.operator(run, step), block.factors),
        cross=found(lambda: needed(crossing(run, block)), block.cross) if crosses else None,
        ffn=or_reason(lambda: ffn_terms(run, ground.branches[run.parts.module])),
        dynamic=None if step.dynamic_bias is None else step.dynamic_bias.clone(),
        pre=None if step.pre_activation is None else step.pre_activation.clone(),
        pre_reason=step.terms.pre_activation_reason,
        output=run.output[0].clone(),
        error=step.terms.error,
    )


def _block(base: Session, index: int, before: Kept, after: Kept, grams: dict[int, Tensor]) -> BlockChange:
    return BlockChange(
        index=index,
        name=base.structure.block(index).parts.name,
        operator=_operator(2 * index, before.operator, after.operator, grams),
        cross=None
        if before.cross is None or after.cross is None
        else _operator(2 * index + 1, before.cross, after.cross, grams),
        terms=_terms(before, after),
        base_certificate=before.error,
        tuned_certificate=after.error,
    )


def _operator(key: int, before: Operator, after: Operator, grams: dict[int, Tensor]) -> OperatorChange:
    """The change. grams: by `key`, which is another one for every operator of the model."""
    a, b = before.matrix, after.matrix
    if isinstance(a, str):
        return OperatorChange.absent(a)
    if isinstance(b, str):
        return OperatorChange.absent(b)
    if a.left.shape != b.left.shape or a.factors.value.shape != b.factors.value.shape:
        return OperatorChange.absent("the two operators have other shapes")
    if key not in grams:  # depends on the weights alone
        grams[key] = gram_of_changes(a.factors, b.factors)
    norms = split(a.left, b.left, grams[key])
    if norms.base == 0.0:
        return OperatorChange.absent(ZERO)
    told = before.read and after.read
    return OperatorChange.explained(
        SCALE_OPEN,
        relative_change=norms.total / norms.base,
        routing=norms.routing / norms.base if told else None,
        weights=norms.weights / norms.base if told else None,
        interaction=norms.interaction / norms.base if told else None,
    )


def _terms(before: Kept, after: Kept) -> TermsChange:
    values: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    ffns = [None if isinstance(one.ffn, str) else one.ffn for one in (before, after)]
    why_no_ffn = next((one.ffn for one in (before, after) if isinstance(one.ffn, str)), ZERO)
    pairs = {
        "ffn": (ffns[0], ffns[1], ffns[0], why_no_ffn),
        "dynamic_bias": (before.dynamic, after.dynamic, before.pre, before.pre_reason or "the tuned block has none"),
        "output": (before.output, after.output, before.output, ZERO),
    }
    for name, (a, b, whole, why) in pairs.items():
        values[name] = None
        if a is None or b is None or whole is None:
            reasons[name] = why
        elif a.shape != b.shape:
            reasons[name] = OTHER_SHAPE
        elif size := float(wide(whole).norm()):
            values[name] = float((wide(b) - wide(a)).norm()) / size
        else:
            reasons[name] = ZERO
    if "output" in reasons:
        reasons["output_token_median"] = reasons["output"]
    else:
        values["output_token_median"] = float(token_changes(before.output, after.output).quantile(0.5))
    return TermsChange(**values, reasons=reasons)
