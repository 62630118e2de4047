"""The factors of W' for a captured block: Ĥ_h = t_i H_h[i, j] s_j, and the head factors V_h, O_h.

V and O are read from weights where memory shows the place (projections.py), else found by passing unit vectors through
the frozen block. The per-token scales s (norms in front) and t (norms behind, on the branch) are fitted to the block's
own results. The residual of that fit is the proof: a wrong factor, read or probed, cannot fit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import (
    fit_heads,
    gaussian,
    in_narrow,
    moved,
    or_else,
    random_like,
    relative_error,
    relative_errors,
    tolerance_for,
    wide,
)
from duat_cli.models.block.linears import stored_matrix
from duat_cli.models.block.norms import NormForm
from duat_cli.models.block.parts import Projection
from duat_cli.models.budgets import CHANNEL_HEADS
from duat_cli.models.instrument.attention import AttentionCall, MadeRows
from duat_cli.models.instrument.functions.positions import positions
from duat_cli.models.instrument.records import Replay
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.value_path.offsets import offsets_of, probe_values, source_scale, values_by_offset
from duat_cli.models.value_path.operator import AttentionOperator, gated_rows
from duat_cli.models.value_path.probed import (
    SEED,
    SEVERAL,
    UNMOVED,
    accept,
    gate_of,
    made_by_units,
    missed,
    probe_output,
    probe_value,
    reached_by_large,
    refuse_cancelled,
    tokens_mixed,
    values_of,
)
from duat_cli.models.value_path.streams import Reached, reaching_weights, reading_weights, spread, weighed
from duat_cli.operators.kronecker import HeadFactors, at_offsets

NO_MIXING = "it has no token mixer, so no token reaches another"
THROUGH_UNIT = "what its attention adds reaches the stream only through a nonlinear unit"
SMALL = "what its attention adds to the stream is so small that rounding hides where it arrives"
OUTPUT = -1  # the last of `Replay.places`: the block's output
MERGES = "it has no attention: a held affine map makes other tokens of the stream, of another number or width"


@dataclass(frozen=True)
class Tap:
    """The place where attention's contribution meets the stream: a point of the replay, or the block's output."""

    place: int  # index into Replay.places
    branch_norms: bool  # whether a norm stands on the branch in front of it, so that t depends on the input
    on_stream: bool  # whether the stream arrives there unchanged up to a factor: no layer stands between

    def read(self, replay: Replay) -> Tensor:
        return replay.places[self.place][1]


@dataclass(frozen=True)
class BlockFactors:
    """The parts of one block's W' that do not depend on the input."""

    heads: HeadFactors
    tap: Tap
    origin: str  # "read" or "probed"
    token_scale: Tensor | None = None  # t where it is the same for every input: (1,)
    error: float = 0.0  # relative residual of the fit of O and t
    gated: bool = False  # whether the channels of the heads' outputs are scaled, token by token, in front of O
    own: bool = False  # whether V does not read the stream: it selects channels of values that a UAT term makes
    offsets: tuple[int, ...] = (0,)  # of values made of several tokens: V and O of every head stand once per offset

    def fitted(self, scale: Tensor, error: float, reached: Tensor | None = None) -> BlockFactors:
        """These factors with t, (N,), as fitted for one input, if t is the same for all tokens and reaches one stream
        alone (else reached: its weights), and the fit's error."""
        return replace(self, token_scale=_constant_scale(scale, self.tap) if reached is None else None, error=error)

    @property
    def reaching(self) -> Tensor:
        """O of each head once, (heads, d, M)."""
        return self.heads.output[: self.heads.heads // len(self.offsets)]


@dataclass(frozen=True)
class Base:
    """A replay of a block with its inputs; its first item is the reference point of every difference."""

    items: Tensor  # (items, N, M)
    given: list[Tensor]
    replay: Replay


def operator_of(run: BlockRun, known: BlockFactors, base: Base) -> AttentionOperator:
    """W' of this block for this input. Raises UnsupportedModelError where its factors do not fit."""
    call = run.attention[0]
    product, target = wide(call.value[0]), wide(call.value[0])  # (kv_heads, N, d); s: (kv_heads, N, 1)
    scale, value_errors, read = torch.ones_like(product[..., :1]), [0.0] * run.prompts, None
    if len(known.offsets) > 1:
        product = known.heads.values_of(wide(run.input[0]))
        target = wide(values_by_offset(run, run.input, known.offsets))
        scale, value_error = source_scale(product, target, known.offsets)
        value_errors = [value_error] * run.prompts
    elif not known.own:
        read, read_error = reading_weights(run, known.heads) if run.parts.streams > 1 else (None, 0.0)
        product = difference = known.heads.values_of(weighed(wide(run.input[0]), read))
        if not run.parts.homogeneous:
            difference = product - known.heads.values_of(weighed(wide(base.items[0]), read))
            target = target - wide(base.replay.values[0][0])
        scale = or_else(fit_heads(difference, target), difference, lambda: _of_others(run, known, read))
        value_errors = [max(read_error, e) for e in relative_errors(scale * difference, target, run.prompts, axis=1)]
    gate, gate_error = gate_of(run, base.given) if known.gated else (None, 0.0)
    token_scale, reached, output_errors = known.token_scale, None, [known.error] * run.prompts
    if token_scale is None:
        token_scale, reached, output_errors = _reach(run, known, gate, base)
    errors = [max(*each, gate_error) for each in zip(value_errors, output_errors, strict=True)]
    groups = known.heads.groups
    ungated = call.rows
    if (times := len(known.offsets)) > 1:
        ungated = MadeRows(ungated, ungated.heads * times, lambda _, H: at_offsets(H, known.offsets))
        gate = None if gate is None else gate.repeat(times, 1, 1)
    rows, gate, head_gate = gated_rows(ungated, gate)
    operator = AttentionOperator(
        rows=rows,
        source_scale=scale[..., 0].repeat_interleave(groups, 0),
        token_scale=token_scale,
        values=(scale * product).repeat_interleave(groups, 0),
        factors=known.heads,
        error=max(errors),
        allowed=positions(run),
        gate=gate,
        own=known.own,
        each=tuple(errors),
        offsets=known.offsets,
        head_gate=head_gate,
        ungated=None if head_gate is None else ungated,
        read=read,
        reached=reached,
    )
    accept(operator.error, run.input.dtype)
    return operator


def _of_others(run: BlockRun, known: BlockFactors, read: Tensor | None) -> Tensor:
    """s fitted to the frozen block's values for random vectors in place of the tokens', of which some may be zero."""
    zero, noise = torch.zeros_like(run.input), random_like(run.input)
    made = wide(values_of(run, noise)[0]) - wide(values_of(run, zero)[0])
    return fit_heads(known.heads.values_of(weighed(wide(noise[0]), read)), made)


def own_contribution(run: BlockRun, tap: Tap) -> tuple[Tensor, Tensor]:
    """H V(x) - H V(0), (N, heads, d), and the change that it makes at the tap, (N, M): by the model's own code.

    The frozen block is replayed twice on a zero stream, once with the captured H V of x in place of attention's result
    and once with H V of a zero input, and the two are subtracted at the tap. The stream is zero, so it hides nothing;
    the constants in H V of a zero input (biases of V, offsets of norms), which stand outside W', cancel. H V of a zero
    input is zero for a homogeneous block, which discovery proved to the bit.
    """
    zero = torch.zeros_like(run.input)
    own = run.attention[0].output  # (1, N, heads, d)
    constant = torch.zeros_like(own) if run.parts.homogeneous else run.replay(zero).mixed[0]
    replay = run.replay(torch.cat([zero, zero]), attention=torch.cat([own, constant]))
    seen = tap.read(replay)
    return (own - constant)[0], seen[0] - seen[1]


def checked(operator: AttentionOperator, run: BlockRun, tap: Tap) -> AttentionOperator:
    """`operator` with the error of W' x' against the model's own attention; refused beyond the tolerance.

    The model's contribution is a difference of two images that both hold the constants outside W' (biases of V); what
    rounding in the dtype leaves of these constants is no error of W'.
    """
    whole = wide(run.attention[0].output[0]).transpose(0, 1)
    if operator.gate is not None:
        whole = whole * operator.gate[: len(whole)]
    if operator.token_scale.numel() > 1:
        whole = whole * operator.token_scale[:, None]
    output = operator.factors.output[: len(whole)]
    rounded = 4 * torch.finfo(run.input.dtype).eps * float(torch.einsum("hnd,hdm->nm", whole, output).norm())
    image, own = spread(operator.image(), operator.reached), wide(own_contribution(run, tap)[1])
    error = missed(image, own, rounded)
    if error > tolerance_for(run.input.dtype):
        refuse_cancelled(image, own, whole, output, run.input.dtype)
    accept(error, run.input.dtype)
    return replace(operator, error=max(operator.error, error))


def _reach(run: BlockRun, known: BlockFactors, gate: Tensor | None, base: Base) -> Reached:
    """As `reaching_weights`, for a known R that is added to H V: t_i u_i (g_i ∘ R) O arrives."""
    mixed = base.replay.mixed[0][:1]  # (1, N, heads, d)
    # R has the size of H V; own values are zero in the base, so there H V of the run is taken, lest the stream hide R
    added = random_like(run.attention[0].output if known.own else mixed, SEED)
    moved = run.replay(base.items[:1], [g[:1] for g in base.given], attention=mixed + added)
    target = wide(known.tap.read(moved)[0]) - wide(known.tap.read(base.replay)[0])
    reaching = wide(added[0]) if gate is None else wide(added[0]) * gate.transpose(0, 1)
    direction = torch.einsum("nhd,hdm->nm", reaching, known.reaching)
    return reaching_weights(direction, target, run.prompts)


def find_factors(run: BlockRun, base: Base) -> BlockFactors:
    """V, O and the tap of this block. Raises UnsupportedModelError saying why W' is no sum of Kronecker products."""
    if not run.attention:
        alone = NO_MIXING if run.output.shape == run.input.shape else MERGES
        unproved = f"its token mixer has no form that could be proved{in_narrow(run.input.dtype)}"
        raise UnsupportedModelError(unproved if run.parts.mixing else alone)
    if len(run.attention) != 1:
        calls = f"it calls attention {len(run.attention)} times; W' is defined for one call"
        raise UnsupportedModelError(f"{calls}{in_narrow(run.input.dtype)}")
    tokens = run.input.shape[1]
    if run.parts.mixer is not None and not run.parts.mixer.affine:
        return _own_values(run, base)
    if run.attention[0].rows.tokens != tokens or run.attention[0].value.shape[2] != tokens:
        if torch.equal(values_of(run, torch.zeros_like(run.input)), values_of(run, random_like(run.input))):
            raise UnsupportedModelError(UNMOVED)  # that is why the tokens at the places of its windows are not known
        other = "its attention reaches other vectors than the block's own tokens"
        raise UnsupportedModelError(f"{other}{in_narrow(run.input.dtype)}")
    if made_by_units(run):
        return _own_values(run, base)
    tap = _find_tap(run)
    # Where the stream arrives nowhere unchanged, O is read, and its fit is the proof. O probed at the block's output
    # includes the layers that lead back to the stream (a bottleneck around attention).
    probed = tap if tap.on_stream or run.parts.streams > 1 else Tap(OUTPUT, True, on_stream=False)
    faults: list[str] = []
    for origin, gated, value, output in (
        ("read", False, read_value, _read_output),
        ("probed", False, probe_value, _probe_output),
        ("read", True, read_value, _read_output),
        ("probed", True, probe_value, _read_output),
        ("probed", True, read_value, _probe_output),
    ):
        try:
            met = probed if origin == "probed" else tap
            gate = gate_of(run, base.given)[0] if gated else None
            factors = BlockFactors(HeadFactors(value(run), output(run, met, gate)), met, origin, gated=gated)
            scale, reached, [error] = _reach(run, factors, gate, base)
            found = factors.fitted(scale, error, reached)
            accept(error, run.input.dtype)
            operator_of(run, found, base)
        except UnsupportedModelError as fault:
            faults.append(str(fault))
        else:
            return found
    why = tokens_mixed(run, tap.read)
    if why == SEVERAL:
        try:
            return _by_offset(run, base)
        except UnsupportedModelError as fault:
            raise UnsupportedModelError(f"{why}; taken apart by their distances, {fault}") from fault
    raise UnsupportedModelError(why or faults[min(1, len(faults) - 1)])


def _own_values(run: BlockRun, base: Base) -> BlockFactors:
    """Factors of attention whose values are made by a UAT term, no affine map of the stream. V selects the channels of
    a head, or makes the values of a latent that an earlier block hands on."""
    latent = run.parts.handed == "latent"
    value = read_value(run) if latent else choice_of_channels(run.attention[0].value)
    return _with_value(run, value, "read", base, own=True)


def _by_offset(run: BlockRun, base: Base) -> BlockFactors:
    """Factors of attention whose values are an affine map of several tokens' streams: V and O stand once per offset."""
    offsets = offsets_of(run)
    return _with_value(run, probe_values(run, offsets), "probed", base, offsets=offsets)


def _with_value(
    run: BlockRun, value: Tensor, origin: str, base: Base, *, own: bool = False, offsets: tuple[int, ...] = (0,)
) -> BlockFactors:
    """Factors with this V, and with O read behind the gate."""
    tap, gate = _find_tap(run), gate_of(run, base.given)[0]
    heads = HeadFactors(value, _read_output(run, tap, gate).repeat(len(offsets), 1, 1))
    factors = BlockFactors(heads, tap, origin, own=own, gated=True, offsets=offsets)
    scale, reached, [error] = _reach(run, factors, gate, base)
    found = factors.fitted(scale, error, reached)
    operator_of(run, found, base)
    return found


def choice_of_channels(like: Tensor) -> Tensor:
    """V that selects the channels of each head, (heads, heads d, d), for values (1, heads, N, d)."""
    _, heads, _, width = like.shape
    if width == 1 and heads > CHANNEL_HEADS:
        raise UnsupportedModelError(
            f"its kernel treats each of {heads} channels by itself: measured up to {CHANNEL_HEADS} heads of one channel"
        )
    return _choice(heads, width, wide(like).dtype, like.device)


@functools.lru_cache(maxsize=1)
def _choice(heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """V of `choice_of_channels`, kept for all blocks: for thousands of channels it takes up to 256 MiB."""
    side = torch.eye(heads * width, dtype=dtype, device=device)
    return side.reshape(-1, heads, width).transpose(0, 1)


def _constant_scale(scale: Tensor, tap: Tap) -> Tensor | None:
    """t as one number, (1,), where no norm stands on the branch and it is the same for all tokens; else None."""
    if tap.branch_norms:
        return None
    middle = scale.median()
    if not torch.allclose(scale, middle.expand_as(scale), rtol=tolerance_for(scale.dtype), atol=0.0):
        return None
    is_one = abs(float(middle) - 1) <= 8 * torch.finfo(scale.dtype).eps  # what a fit leaves of it
    return torch.ones_like(middle[None]) if is_one else middle[None]


def _find_tap(run: BlockRun) -> Tap:
    """The tap of attention over the block's own tokens."""
    out = run.attention[0].output
    silent = torch.zeros_like(out)
    noise = gaussian(tuple(out.shape), out, SEED)
    zero = torch.zeros_like(run.input)
    stream = gaussian(tuple(zero.shape), zero, SEED + 1)
    replay = run.replay(torch.cat([zero, stream, zero]), attention=torch.cat([silent, silent, noise]))
    found = meeting(run, replay, stream)
    if found is None:
        reached = reached_by_large(run, noise)
        if any(reached):
            raise UnsupportedModelError(SMALL if reached[-1] else THROUGH_UNIT)
        return Tap(OUTPUT, branch_norms=False, on_stream=True)  # attention adds nothing at all
    return found


def meeting(run: BlockRun, replay: Replay, stream: Tensor) -> Tap | None:
    """The first point that both the stream and an attention's output reach: one that the stream reaches unchanged, else
    any. replay: of three items: zeros, `stream` alone, an output of attention alone."""
    branch_norms, found = False, []
    for place, (module, values) in enumerate(replay.places):
        from_stream, from_attention = moved(values, 1), moved(values, 2)
        if from_stream and from_attention:
            found.append(Tap(place, branch_norms, _is_multiple(values[1] - values[0], stream[0])))
        branch_norms = branch_norms or (from_attention and not from_stream and module in run.parts.norms)
    return next((tap for tap in found if tap.on_stream), found[0] if found else None)


def _is_multiple(change: Tensor, stream: Tensor) -> bool:
    if change.shape != stream.shape:
        return False
    factor = (wide(change) * wide(stream)).sum() / wide(stream).square().sum()
    return relative_error(factor * wide(stream), wide(change)) <= tolerance_for(change.dtype)


def read_value(run: BlockRun, projection: Projection | None = None) -> Tensor:
    """V, (kv_heads, width, d), with the gain of a norm in front. projection: None for the block's own."""
    mixer = run.parts.mixer if projection is None else None
    projection = projection or run.parts.value_projection
    if projection is None:
        raise UnsupportedModelError("its values are no plain view of one linear layer")
    matrix = stored_matrix(projection.linear, run.input.dtype)  # (M, C)
    matrix = matrix[:, projection.columns].permute(1, 0, 2)  # (kv_heads, M, d)
    matrix = matrix if mixer is None else mixer.behind.held(matrix)
    if projection.norm is None:
        return matrix
    form = run.parts.norms[projection.norm]
    matrix = matrix * _gain(form, matrix.shape[1])[:, None]
    return matrix - matrix.mean(dim=1, keepdim=True) if form.centered else matrix


def _read_output(run: BlockRun, tap: Tap, _gate: Tensor | None) -> Tensor:
    return read_output(run, run.parts.output_projection, run.attention[0], tap)


def read_output(run: BlockRun, projection: Projection | None, call: AttentionCall, tap: Tap) -> Tensor:
    """O, (heads, d, M), with the gain of a norm behind it."""
    _, _, heads, width = call.output.shape
    if projection is None:
        raise UnsupportedModelError("no linear layer takes its concatenated heads")
    matrix = stored_matrix(projection.linear, run.input.dtype)
    if matrix.shape != (heads * width, run.input.shape[-1] // run.parts.streams):
        raise UnsupportedModelError("its output projection does not lead from the concatenated heads to the stream")
    matrix = matrix.reshape(heads, width, -1)
    if projection.norm is None or not tap.branch_norms:
        return matrix
    form = run.parts.norms[projection.norm]
    return form.centre(matrix) * _gain(form, matrix.shape[-1])


def _gain(form: NormForm, width: int) -> Tensor:
    if form.gain.numel() != width:
        raise UnsupportedModelError("a norm beside its attention has a gain that depends on the token")
    return form.gain.reshape(width)


def _probe_output(run: BlockRun, tap: Tap, gate: Tensor | None) -> Tensor:
    return probe_output(run, tap.read, gate)
