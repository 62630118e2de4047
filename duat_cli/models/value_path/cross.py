"""The factors of a decoder block's second operator W'_c: cross-attention, from encoder tokens to decoder tokens.

    W'_c = Σ_h Ĥ_h ⊗ (V_h O_h)ᵀ,   Ĥ_h = t_i H_h[i, k] s_k of N rows and K columns,   V_h (width of the states) x d

so that W'_c e is what the encoder's states e add to the stream, constants aside. V and O are read from weights; the
block's own replay has to give the same, which is the proof.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import fit, gaussian, or_else, random_like, relative_error, wide
from duat_cli.models.instrument.records import CrossCall
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.value_path.beside import Beside, reached
from duat_cli.models.value_path.factors import BlockFactors, Tap, read_output, read_value
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.models.value_path.probed import SEED, accept, missed
from duat_cli.operators.kronecker import HeadFactors


def find_cross_factors(run: BlockRun) -> BlockFactors:
    """V, O and the tap of cross-attention; UnsupportedModelError says why W'_c is no sum of Kronecker products."""
    call, cross = _call(run), run.parts.cross
    assert cross is not None
    tap = _beside(run).tap("what its cross-attention adds")
    output = read_output(run, cross.output_projection, call.attention, tap)
    if cross.value_projection is None:
        raise UnsupportedModelError("its values are no plain view of one linear layer")
    heads = HeadFactors(read_value(run, cross.value_projection), output)
    found = BlockFactors(heads, tap, None, 0.0, "read")
    found = found.fitted(*_reach(run, found))
    cross_operator(run, found)
    return found


def cross_operator(run: BlockRun, known: BlockFactors) -> AttentionOperator:
    """W'_c of this block for this input, compared with what the block's own cross-attention adds."""
    call = _call(run)
    states, target = wide(call.states[0]), wide(call.attention.value[0])  # (K, width), (kv_heads, K, d)
    constant = wide(run.crossed(torch.zeros_like(call.states), stop_at_values=True).values[0][0])
    product = states @ known.heads.value

    def of_others() -> Tensor:
        noise = random_like(call.states)
        made = run.crossed(noise, stop_at_values=True).values[0]
        return fit(wide(noise[0]) @ known.heads.value, wide(made[0]) - constant)

    scale = or_else(fit(product, target - constant), product, of_others)
    value_error = relative_error(scale * product, target - constant)
    token_scale, output_error = known.token_scale, known.error
    if token_scale is None:
        token_scale, output_error = _reach(run, known)
    groups = known.heads.groups
    operator = AttentionOperator(
        rows=call.attention.rows,
        source_scale=scale[..., 0].repeat_interleave(groups, 0),
        token_scale=token_scale,
        values=(scale * product).repeat_interleave(groups, 0),
        factors=known.heads,
        error=max(value_error, output_error),
        allowed=call.attention.allowed,
    )
    operator = replace(operator, error=max(operator.error, _missed(run, operator, known.tap)))
    accept(operator.error, run.input.dtype)
    return operator


def _missed(run: BlockRun, operator: AttentionOperator, tap: Tap) -> float:
    """How far W'_c e is from what the model's own cross-attention moves at the tap, the constants of V and O aside."""
    constant, beside = run.crossed(torch.zeros_like(_call(run).states)).end, _beside(run)
    return missed(operator.image(), *beside.moved(tap, beside.output, constant))


def _reach(run: BlockRun, known: BlockFactors) -> tuple[Tensor, float]:
    """t for this input: a known vector R in place of H V, and what arrives of it at the tap: t_i R O."""
    call = _call(run)
    added = gaussian(tuple(call.attention.output.shape), call.attention.output, SEED)  # (1, N, heads, d)
    nothing = torch.zeros_like(call.states)
    both = torch.cat([added, torch.zeros_like(added)])
    given = run.crossed(torch.cat([nothing, nothing]), attention=both).end
    target, _ = _beside(run).moved(known.tap, given[0], given[1])
    return reached(known, wide(added[0]), target)


def _call(run: BlockRun) -> CrossCall:
    if run.recording.cross is None:
        raise UnsupportedModelError("its cross-attention runs more than once, or not at all")
    return run.recording.cross


def _beside(run: BlockRun) -> Beside:
    return Beside(run, next(k for k, unit in enumerate(run.units) if run.parts.is_cross(unit.module)))
