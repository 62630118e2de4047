"""One block's W' under one prompt, and what the model itself computes there.

The references of the checks come from the model's own code, not from the factors of W': the captured H V of its forward
pass, and what that H V changes where attention meets the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.analysis.decomposition import Decomposition, Step
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Session
from duat_cli.errors import UnsupportedModelError, needed
from duat_cli.loading.prompts import Prompt
from duat_cli.models.budgets import MATRIX_SIDE
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.value_path.factors import own_contribution
from duat_cli.models.value_path.operator import AttentionOperator, one_stream
from duat_cli.models.value_path.probed import gate_of
from duat_cli.models.value_path.streams import WEIGHED
from duat_cli.operators import paper
from duat_cli.operators.kronecker import HeadFactors, KroneckerSum, gram
from duat_cli.operators.pattern import EntryPattern

DENSE_SIDE = MATRIX_SIDE


@dataclass(frozen=True)
class Case:
    """W' of one block under one prompt, and what the model itself computes; in float32 at least."""

    operator: KroneckerSum  # left (heads, N, N), value (kv_heads, M, d), output (heads, d, M)
    origin: str  # how V and O were found: "read" or "probed"
    gram: Tensor  # G, (heads, heads)
    pattern: EntryPattern  # which entries of the maps V_h O_h can be nonzero
    X: Tensor  # (N, M)
    mixed: Tensor  # input of the model's output layer, without its constant, times t: (N, heads, d)
    contribution: Tensor  # what the model's own attention adds, without its constant: (N, M)
    error: float  # certificate's error over the blocks up to this one
    dtype: torch.dtype  # of the model's arithmetic
    by_channel: bool = False  # whether every channel of gated attention is a head here

    @property
    def left(self) -> Tensor:
        """Ĥ, (heads, N, N)."""
        return self.operator.left

    @property
    def value(self) -> Tensor:
        """W_V with shared heads repeated, (heads, M, d)."""
        factors = self.operator.factors
        return factors.value.repeat_interleave(factors.groups, 0)

    @property
    def output(self) -> Tensor:
        """W_O, (heads, d, M)."""
        return self.operator.factors.output

    @property
    def projection(self) -> Tensor:
        """The output projection as torch writes a linear layer, W = W_Oᵀ: (M, heads·d)."""
        return self.output.flatten(0, 1).mT

    @property
    def tokens(self) -> int:
        return self.X.shape[0]

    @property
    def width(self) -> int:
        return self.X.shape[1]

    @property
    def inner(self) -> int:
        """heads·d."""
        return self.output.shape[0] * self.output.shape[1]

    @property
    def side(self) -> int:
        """The longest side of W'_HV, W'_O and W'_HVO."""
        return self.tokens * max(self.width, self.inner)


@dataclass(frozen=True)
class Dense:
    """The matrices written out."""

    W_HV: Tensor  # (N·heads·d, N·M)
    W_O: Tensor  # (N·M, N·heads·d)
    W_HVO: Tensor  # (N·M, N·M)


def capture(
    session: Session, prompt: Prompt, layer: int, progress: Progress, found: Callable[[AttentionOperator, Case], None]
) -> Case:
    """The case of block `layer` under the prompt. found: is called with it while the block is alive."""
    decomposition = Decomposition()
    errors: list[float] = []
    cases: list[Case] = []

    def listen(run: BlockRun) -> None:
        if run.index > layer:
            return
        step = decomposition.advance(run)
        errors.append(step.terms.error)
        if run.index == layer:
            operator, case = _case(session, run, step, max(errors))
            cases.append(case)
            found(operator, case)
        progress(run.index + 1, layer + 1, f"running the prompt up to block {layer}")

    session.sweep(prompt, listen)
    return cases[0]


def _case(session: Session, run: BlockRun, step: Step, error: float) -> tuple[AttentionOperator, Case]:
    """W' of this block, with gates in the H of single channels, and a copy of what the matrices need of it."""
    block = session.structure.block(run.index)
    try:
        if block.factors is not None and block.factors.own:
            raise UnsupportedModelError(
                "its W' reads values that are a UAT term (a mixer's own, or shared), not the stream; "
                "inspect has its numbers"
            )
        operator = one_stream(step.operator(run, block), WEIGHED)  # its image of x is one of the checks of the report
        by_channel, operator = operator.gate is not None, operator.by_channel()
    except UnsupportedModelError as fault:
        reason = f"block {run.index} ({run.parts.name}) has no explicit matrices: {fault}"
        raise UnsupportedModelError(reason) from fault
    known = needed(block.factors)
    mixed, contribution = own_contribution(run, known.tap)
    if known.gated:  # also if all channels of a head have one factor, which is then part of its H
        mixed = mixed * gate_of(run, step.given)[0].transpose(0, 1)
    if by_channel:
        mixed = mixed.flatten(1)[..., None]
    work = torch.promote_types(run.input.dtype, torch.float32)
    factors = HeadFactors(operator.factors.value.to(work), operator.factors.output.to(work))
    return operator, Case(
        operator=KroneckerSum(operator.matrix().left.to(work), factors),
        origin=known.origin,
        gram=gram(factors),
        pattern=EntryPattern(factors),
        X=run.input[0].to(work).clone(),
        mixed=mixed.to(work) * operator.token_scale.to(work)[:, None, None],
        contribution=contribution.to(work),
        error=error,
        dtype=run.input.dtype,
        by_channel=by_channel,
    )


def dense_matrices(case: Case) -> Dense | None:
    """W'_HV, W'_O and W'_HVO entry by entry, W'_HVO not from the other two; None where they are too large."""
    if case.side > DENSE_SIDE:
        return None
    return Dense(
        W_HV=paper.attention_value_matrix(case.left, case.value),
        W_O=paper.attention_output_matrix(case.output, case.tokens),
        W_HVO=paper.attention_matrix(case.left, case.value, case.output),
    )
