"""Gradients of outputs of the frozen network, carried back block by block through its own replay.

With every dynamic parameter frozen a block is x ↦ T x + c + U f, an affine map, so that its gradient is the same
everywhere: one replay of a stream of zeros gives c and, differentiated, Tᵀλ and Uᵀλ. Two readings go side by side.
*Total*: through all that follows, the values of later attention included. *Direct*: past all later attention, along the
residual stream alone. Each block runs once more from its recorded input, so that one block's tensors are alive at a
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import relative_error, tolerance_for
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.instrument.records import CrossCall, Replay, UnitCall
from duat_cli.models.instrument.rig import BlockRun, Rig
from duat_cli.models.sweep.detached import without_gradient
from duat_cli.models.sweep.gradients import pulled
from duat_cli.models.sweep.passes import BlockCall
from duat_cli.models.terms.sites import Site, Sites, watching

Reading = Literal["total", "direct"]
FAR = 10.0  # tolerances: in float32 a block's products, which cancel, missed by a quarter of one at most
READINGS: tuple[Reading, ...] = "total", "direct"


@dataclass(frozen=True)
class Held:
    """What one call of a site held: neurons' activations, or experts' routing weights."""

    site: Site
    value: Tensor
    index: Tensor | None  # the expert of every routing weight


@dataclass(frozen=True)
class Gradients:
    """One reading's gradients in one block, targets in front."""

    before: Tensor  # at the block's input, (targets, 1, N, M)
    units: list[Tensor]  # at what each unit call gives, (targets, *its output's shape)
    heads: list[Tensor]  # at H V, an attention call: (targets, 1, N, heads, d)
    constant: Tensor  # ⟨λ, c⟩, (targets,) float64: c is what the block gives for zeros, its units their biases alone
    together: Tensor  # ⟨λ, U f⟩, (targets,) float64: what all units' outputs, less their biases, are in its output
    encoder: Tensor | None = None  # ⟨λ, C e_k⟩ of every state e_k, C its cross-attention, H held, (targets, K) float64


@dataclass(frozen=True)
class BlockAdjoint:
    """One block call."""

    number: int
    run: BlockRun
    total: Gradients
    direct: Gradients
    held: list[Held]  # in call order
    static: list[Tensor]  # as of `static_outputs`


class Adjoint:
    """The gradients of some targets of one prompt, at the output of the block that is next."""

    def __init__(self, structure: ModelStructure, sites: Sites, calls: Sequence[BlockCall], at: Tensor) -> None:
        """calls: of the recorded pass. at: the gradients at the last block's output, (targets, 1, N, M)."""
        self._structure, self._sites, self._calls = structure, sites, calls
        self.at: dict[Reading, Tensor] = {"total": at, "direct": at}

    def through(self, number: int) -> BlockAdjoint:
        """Take the gradients through a block, downwards; its weights are in memory."""
        call, proved = self._calls[number], self._structure.block(number)
        watched = [s for s in self._sites[proved.parts.module].sites if s.kind in ("neuron", "expert")]
        held: list[Held] = []
        found: list[BlockAdjoint] = []

        def see(site: Site, value: Tensor, index: Tensor | None) -> None:
            if not listening:
                held.append(Held(site, value, index))

        listening: list[bool] = []

        def listen(run: BlockRun) -> None:
            listening.append(True)
            run.index = number
            if not relative_error(run.output, call.after) <= tolerance_for(run.output.dtype):
                raise UnsupportedModelError(
                    f"block {number} ({run.parts.name}) gives something else when it runs once more from its input: it "
                    "reads more of the blocks in front of it than their hidden states"
                )
            static = static_outputs(run)
            total, direct = (self._gradients(run, reading, static) for reading in READINGS)
            if _misses(self.at["total"], run, total):
                raise without_gradient(f"block {number} ({run.parts.name})")
            found.append(BlockAdjoint(number, run, total, direct, held, static))

        rig = Rig(self._structure.part, [proved.parts], interface=self._structure.interface, whole=True)
        args, kwargs = proved.parts.hidden.put(call.args, call.kwargs, call.before.clone())  # blocks may write to it
        with rig.active(), watching(watched, see):
            rig.run(lambda: proved.parts.module(*args, **kwargs), listen)
        self.at = {"total": found[0].total.before, "direct": found[0].direct.before}
        return found[0]

    def _gradients(self, run: BlockRun, reading: Reading, static: list[Tensor]) -> Gradients:
        probes = self.at[reading]
        cut = None
        if reading == "direct" and run.attention:
            cut = torch.zeros_like(run.attention[0].output).requires_grad_()

        def replayed(given: list[Tensor]) -> tuple[Tensor, Replay]:
            x = torch.zeros_like(run.input).requires_grad_()
            return x, run.replay(x.clone(), given, attention=cut)  # blocks may write to it

        with torch.enable_grad():
            given = [bias[None].clone().requires_grad_() for bias in static]
            x, replay = replayed(given)
            output = replay.end
        leaves = [x, *given]
        grads = _pulled(output, [*leaves, *replay.mixed], probes)
        at_units, at_heads = [g.squeeze(1) for g in grads[1 : len(leaves)]], grads[len(leaves) :]
        constant = products(probes, output)
        together = torch.zeros_like(constant)
        if run.parts.arrives:
            for unit, bias, gradient in zip(run.units, static, at_units, strict=True):
                together = together + products(gradient, unit.output - bias)
        elif run.units:
            with torch.enable_grad():  # what units give may multiply what heads give
                # leaves, as what heads give may be made of nothing but these
                _, whole = replayed([u.output[None].detach().requires_grad_() for u in run.units])
            at_heads = _pulled(whole.end, whole.mixed, probes)
            together = products(probes, whole.end - output)
        return Gradients(grads[0], at_units, at_heads, constant, together, _of_states(run, at_units))


def _misses(at: Tensor, run: BlockRun, found: Gradients) -> bool:
    """Whether ⟨λ, output⟩ is far from ⟨Tᵀλ, x⟩ + ⟨λ, c⟩ + ⟨λ, U f⟩, by what rounding does to its products.

    The replay itself is proved to give the output; a gradient that something detaches misses what goes through there.
    """
    parts = products(found.before, run.input) + found.constant + found.together
    size = (at.double() * run.output.double()).abs().flatten(1).sum(dim=1)
    return bool(((products(at, run.output) - parts).abs() > FAR * tolerance_for(run.output.dtype) * size).any())


def _pulled(output: Tensor, inputs: list[Tensor], probes: Tensor) -> list[Tensor]:
    """As `pulled`; zero as well at what no gradient reaches because it depends on no leaf."""
    reached = [x for x in inputs if x.requires_grad]
    found = iter(pulled(output, reached, probes) if reached and output.requires_grad else ())
    return [next(found, x.new_zeros(len(probes), *x.shape)) if x.requires_grad else x.new_zeros(len(probes), *x.shape)
            for x in inputs]  # fmt: skip


def static_outputs(run: BlockRun) -> list[Tensor]:
    """What of each unit call's output is static: its last layer's bias, or zero, or what cross-attention gives for
    states of zeros; in the output's shape."""
    found = []
    for unit in run.units:
        bias = run.parts.unit_biases.get(unit.module)
        if run.parts.is_cross(unit.module):
            found.append(cross_output(run, unit, torch.zeros_like(cross_call(run).states)).detach())
        else:
            found.append(torch.zeros_like(unit.output) if bias is None else bias.to(unit.output).expand_as(unit.output))
    return found


def cross_output(run: BlockRun, unit: UnitCall, states: Tensor) -> Tensor:
    """What cross-attention, that unit, gives for these states of the encoder, H held; in the shape of its output."""
    return run.crossed(states).end.reshape(unit.output.shape)


def cross_call(run: BlockRun) -> CrossCall:
    """The one call of cross-attention."""
    if run.recording.cross is None:
        raise UnsupportedModelError(f"block {run.index}: its cross-attention runs more than once, or not at all")
    return run.recording.cross


def _of_states(run: BlockRun, at_units: list[Tensor]) -> Tensor | None:
    """What cross-attention brings of each of the encoder's states, of which it is an affine map."""
    if run.parts.cross is None:
        return None
    place, unit = next((k, unit) for k, unit in enumerate(run.units) if run.parts.is_cross(unit.module))
    states = cross_call(run).states.detach().clone().requires_grad_()
    with torch.enable_grad():
        output = cross_output(run, unit, states)
    (back,) = pulled(output, [states], at_units[place].reshape(-1, *output.shape))
    return (back.double() * states.detach().double()).sum(dim=-1).flatten(1)


def products(gradients: Tensor, value: Tensor) -> Tensor:
    """⟨gradient, value⟩ for every gradient, (targets, *value.shape) to (targets,), in float64."""
    return (gradients.double() * value.detach().double()).flatten(1).sum(dim=1)
