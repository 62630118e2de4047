"""The factors of a block's second operator W'_c: that of its cross-attention, or of a token mixer beside its attention.

For cross-attention, from encoder tokens to decoder tokens,

    W'_c = Σ_h Ĥ_h ⊗ (V_h O_h)ᵀ,   Ĥ_h = t_i H_h[i, k] s_k of N rows and K columns,   V_h (width of the states) x d

so that W'_c e is what the encoder's states e add to the stream, constants aside; V and O are read from weights. For a
mixer without softmax

    W'_c = Σ_h Ĥ_h (g_h ∘ ·) ⊗ O_hᵀ,   H_h of the mixer's own kernel, g the factors of its channels, O its output layer

so that W'_c u is what the mixer adds, where u (N, channels) are its own values, a UAT term.

Either is one of the block's units, so a replay takes its output as given. Its tap and its scale t follow from replays
with other outputs in its place, while the block's own attention and its other units give zeros. The proof is that its
real output makes the same change at the tap as W'_c.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError, needed
from duat_cli.models.arrays import fit, gaussian, or_else, random_like, relative_error, wide
from duat_cli.models.block.parts import CrossAttention, Projection, SecondMixer
from duat_cli.models.block.slots import parted
from duat_cli.models.instrument.attention import AttentionCall
from duat_cli.models.instrument.functions.positions import positions
from duat_cli.models.instrument.records import Replay
from duat_cli.models.instrument.rig import BlockRun, zero_given
from duat_cli.models.value_path.factors import BlockFactors, Tap, choice_of_channels, meeting, read_output, read_value
from duat_cli.models.value_path.operator import AttentionOperator, gated_rows
from duat_cli.models.value_path.probed import SEED, accept, missed
from duat_cli.operators.kronecker import HeadFactors


def find_second_factors(run: BlockRun) -> BlockFactors:
    """V, O and the tap. Raises UnsupportedModelError saying why W'_c is no sum of Kronecker products."""
    beside = _beside(run)
    tap = beside.tap()
    output = read_output(run, beside.projection, beside.attention, tap)
    heads = HeadFactors(beside.value(), output)
    found = BlockFactors(heads, tap, "read", gated=beside.own, own=beside.own)
    found = found.fitted(*beside.reach(found))
    beside.operator(found)
    return found


def second_operator(run: BlockRun, known: BlockFactors) -> AttentionOperator:
    """W'_c of this block for this input, compared with the result of the block's own code."""
    return _beside(run).operator(known)


def _beside(run: BlockRun) -> _Beside:
    if run.parts.cross is not None:
        return _Cross(run, run.parts.cross)
    return _Mixer(run, needed(run.parts.second))


class _Beside(ABC):
    """Cross-attention or a mixer beside attention, in one block on one input."""

    what: str
    own: bool
    """Whether V reads the module's own values, a UAT term, whose channels are scaled in front of O."""

    def __init__(
        self, run: BlockRun, module: nn.Module, attention: AttentionCall, projection: Projection | None
    ) -> None:
        """projection: the layer from which O is read."""
        self.run, self.attention, self.projection = run, attention, projection
        self._place = next(k for k, unit in enumerate(run.units) if unit.module is module)
        self._output = run.units[self._place].output

    @abstractmethod
    def value(self) -> Tensor:
        """V, (kv_heads, width, d)."""

    @abstractmethod
    def gate(self) -> Tensor | None:
        """The factors of the channels of H V in front of O, (1, N, heads, d); None: ones."""

    @abstractmethod
    def given(self, mixed: Tensor) -> Tensor:
        """The module's output where its H V is `mixed`, (1, N, heads, d)."""

    @abstractmethod
    def nothing(self) -> Tensor:
        """The module's output where its values are only their constants."""

    @abstractmethod
    def unchecked(self, known: BlockFactors, token_scale: Tensor) -> AttentionOperator:
        """W'_c with the error of its values only, not compared with the block's own code."""

    def operator(self, known: BlockFactors) -> AttentionOperator:
        """W'_c, as returned by `second_operator`."""
        token_scale, error = (known.token_scale, known.error) if known.token_scale is not None else self.reach(known)
        operator = self.unchecked(known, token_scale)
        error = max(error, missed(operator.image(), *self._moved(known.tap, self._output, self.nothing())))
        operator = replace(operator, error=max(operator.error, error))
        accept(operator.error, self.run.input.dtype)
        return operator

    def reach(self, known: BlockFactors) -> tuple[Tensor, float]:
        """t for this input, (N,), and the relative error of its fit: of known vectors R in place of H V, t_i R O
        arrives at the tap."""
        mixed, gate = gaussian(tuple(self.attention.output.shape), self.attention.output, SEED), self.gate()
        target, _ = self._moved(known.tap, self.given(mixed), self.given(torch.zeros_like(mixed)))
        reaching = wide((mixed if gate is None else mixed * gate)[0])
        direction = torch.einsum("nhd,hdm->nm", reaching, known.heads.output)
        scale = fit(direction, target)
        return scale[:, 0], relative_error(scale * direction, target)

    def tap(self) -> Tap:
        """The place where it meets the stream. Raises UnsupportedModelError where it does not."""
        zero, silent = torch.zeros_like(self.run.input), torch.zeros_like(self._output)
        stream = gaussian(tuple(zero.shape), zero, SEED + 1)
        replay = self._replay(torch.cat([zero, stream, zero]), [silent, silent, random_like(silent)])
        found = meeting(self.run, replay, stream)
        if found is None:
            raise UnsupportedModelError(f"{self.what} reaches the stream only through a nonlinear unit")
        return found

    def _moved(self, tap: Tap, output: Tensor, nothing: Tensor) -> tuple[Tensor, float]:
        """The difference that two outputs of the module make at the tap, (N, M), and how much of it may be rounding."""
        zero = torch.zeros_like(self.run.input)
        seen = tap.read(self._replay(torch.cat([zero, zero]), [output, nothing]))
        size = max(float(wide(each).norm()) for each in seen)
        return wide(seen[0]) - wide(seen[1]), 4 * torch.finfo(self.run.input.dtype).eps * size

    def _replay(self, items: Tensor, outputs: list[Tensor]) -> Replay:
        given = zero_given(self.run, len(items))
        given[self._place] = torch.stack([one.reshape(self._output.shape) for one in outputs])
        return self.run.silent(items, given)


class _Cross(_Beside):
    what, own = "what its cross-attention adds", False

    def __init__(self, run: BlockRun, parts: CrossAttention) -> None:
        if run.recording.cross is None:
            raise UnsupportedModelError("its cross-attention runs more than once, or not at all")
        self._parts, self._states = parts, run.recording.cross.states
        super().__init__(run, parts.module, run.recording.cross.attention, parts.output_projection)

    def value(self) -> Tensor:
        if self._parts.value_projection is None:
            raise UnsupportedModelError("its values are no plain view of one linear layer")
        return read_value(self.run, self._parts.value_projection)

    def gate(self) -> None:
        return None

    def given(self, mixed: Tensor) -> Tensor:
        return self.run.crossed(torch.zeros_like(self._states), attention=mixed).end

    def nothing(self) -> Tensor:
        return self.run.crossed(torch.zeros_like(self._states)).end

    def unchecked(self, known: BlockFactors, token_scale: Tensor) -> AttentionOperator:
        states, target = wide(self._states[0]), wide(self.attention.value[0])  # (K, width), (kv_heads, K, d)
        constant = self._values(torch.zeros_like(self._states))
        product = states @ known.heads.value

        def of_others() -> Tensor:
            noise = random_like(self._states)
            return fit(wide(noise[0]) @ known.heads.value, self._values(noise) - constant)

        scale = or_else(fit(product, target - constant), product, of_others)
        groups = known.heads.groups
        return AttentionOperator(
            rows=self.attention.rows,
            source_scale=scale[..., 0].repeat_interleave(groups, 0),
            token_scale=token_scale,
            values=(scale * product).repeat_interleave(groups, 0),
            factors=known.heads,
            error=relative_error(scale * product, target - constant),
            allowed=positions(self.run, self.attention),
        )

    def _values(self, states: Tensor) -> Tensor:
        """The values that it makes of other states, (kv_heads, K, d)."""
        return wide(self.run.crossed(states, stop_at_values=True).values[0][0])


class _Mixer(_Beside):
    what, own = "what the mixer beside its attention adds", True

    def __init__(self, run: BlockRun, parts: SecondMixer) -> None:
        self._call = run.second
        super().__init__(run, parts.form.module, self._call.attention(), parts.output_projection)

    def value(self) -> Tensor:
        return choice_of_channels(self.attention.value)

    def gate(self) -> Tensor:
        return self._call.by_head(self._call.gate)

    def given(self, mixed: Tensor) -> Tensor:
        return parted(self._call.returning(mixed))[0]

    def nothing(self) -> Tensor:
        return self.given(torch.zeros_like(self.attention.output))

    def unchecked(self, known: BlockFactors, token_scale: Tensor) -> AttentionOperator:
        scaled = wide(self.gate()[0]).transpose(0, 1).contiguous()  # (heads, N, d)
        rows, gate, head_gate = gated_rows(self.attention.rows, scaled)
        return AttentionOperator(
            rows=rows,
            source_scale=torch.ones_like(scaled[..., 0]),
            token_scale=token_scale,
            values=wide(self.attention.value[0]),
            factors=known.heads,
            error=0.0,
            allowed=self.attention.allowed,
            own=True,
            gate=gate,
            head_gate=head_gate,
        )
