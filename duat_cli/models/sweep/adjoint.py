"""Gradients of outputs of the frozen network, carried back block by block through its own replay.

With every dynamic parameter frozen a block is an affine map, x ↦ T x + c + U f, so its gradient is the same everywhere:
one replay of a zero stream gives c and, differentiated, Tᵀλ and Uᵀλ. Two readings are computed side by side. *Total*:
through everything that follows, the values of later attention included. *Direct*: past all later attention, along the
residual stream alone. Each block runs once more from its recorded input, so that only one block's tensors are alive at
a time.
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
from duat_cli.models.sweep.gradients import SiteCall, pulled
from duat_cli.models.sweep.passes import BlockCall
from duat_cli.models.terms.sites import Site, Sites, watching

Reading = Literal["total", "direct"]
FAR = 10.0  # in tolerances; in float32 a block's products, which cancel, were off by at most a quarter of one
READINGS: tuple[Reading, ...] = "total", "direct"


@dataclass(frozen=True)
class Gradients:
    """The gradients of one reading in one block; the first axis is the targets."""

    before: Tensor  # at the block's input, (targets, 1, N, M)
    units: list[Tensor]  # at the output of each unit call, (targets, *its output's shape)
    heads: list[Tensor]  # at H V of each attention call, (targets, 1, N, heads, d)
    constant: Tensor  # ⟨λ, c⟩, (targets,) float64; c: the output for a zero stream when units give only their biases
    together: Tensor  # ⟨λ, U f⟩, (targets,) float64; U f: the share of all units' outputs, less their biases
    encoder: Tensor | None  # ⟨λ, C e_k⟩ of every state e_k; C: cross-attention, H held; (targets, K) float64


@dataclass(frozen=True)
class BlockAdjoint:
    """The gradients of both readings in one block call, and its replay."""

    number: int
    run: BlockRun
    total: Gradients
    direct: Gradients
    held: list[SiteCall]  # in call order
    static: list[Tensor]  # from `static_outputs`


class Adjoint:
    """The gradients of some targets of one prompt, at the output of the next block to go through."""

    def __init__(self, structure: ModelStructure, sites: Sites, calls: Sequence[BlockCall], at: Tensor) -> None:
        """calls: those of the recorded pass. at: the gradients at the last block's output, (targets, 1, N, M)."""
        self._structure, self._sites, self._calls = structure, sites, calls
        self.at: dict[Reading, Tensor] = {"total": at, "direct": at}

    def through(self, number: int) -> BlockAdjoint:
        """Takes the gradients through a block, from its output to its input; its weights are in memory."""
        call, proved = self._calls[number], self._structure.block(number)
        watched = [s for s in self._sites[proved.parts.module].sites if s.kind in ("neuron", "expert")]
        held: list[SiteCall] = []
        found: list[BlockAdjoint] = []

        def see(site: Site, value: Tensor, index: Tensor | None) -> None:
            if not listening:
                held.append(SiteCall(site, value, index))

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
            with torch.enable_grad():  # outputs of units may multiply those of heads
                # as leaves, because the outputs of heads may depend on nothing else
                _, whole = replayed([u.output[None].detach().requires_grad_() for u in run.units])
            at_heads = _pulled(whole.end, whole.mixed, probes)
            together = products(probes, whole.end - output)
        return Gradients(grads[0], at_units, at_heads, constant, together, _of_states(run, at_units))


def _misses(at: Tensor, run: BlockRun, found: Gradients) -> bool:
    """Whether ⟨λ, output⟩ is far from ⟨Tᵀλ, x⟩ + ⟨λ, c⟩ + ⟨λ, U f⟩, compared with the rounding of its products.

    The replay is proved to give the output, so a detached tensor is the cause: its share of the gradient is missing.
    """
    parts = products(found.before, run.input) + found.constant + found.together
    size = (at.double() * run.output.double()).abs().flatten(1).sum(dim=1)
    return bool(((products(at, run.output) - parts).abs() > FAR * tolerance_for(run.output.dtype) * size).any())


def _pulled(output: Tensor, inputs: list[Tensor], probes: Tensor) -> list[Tensor]:
    """As `pulled`, also with zeros for inputs without a graph, which depend on no leaf."""
    reached = [x for x in inputs if x.requires_grad]
    found = iter(pulled(output, reached, probes) if reached and output.requires_grad else ())
    return [next(found, x.new_zeros(len(probes), *x.shape)) if x.requires_grad else x.new_zeros(len(probes), *x.shape)
            for x in inputs]  # fmt: skip


def static_outputs(run: BlockRun) -> list[Tensor]:
    """The static part of each unit call's output, in the output's shape: the bias of its last layer, or zero; of
    cross-attention, its output for zero states."""
    found = []
    for unit in run.units:
        bias = run.parts.unit_biases.get(unit.module)
        if run.parts.is_cross(unit.module):
            found.append(cross_output(run, unit, torch.zeros_like(cross_call(run).states)).detach())
        else:
            found.append(torch.zeros_like(unit.output) if bias is None else bias.to(unit.output).expand_as(unit.output))
    return found


def cross_output(run: BlockRun, unit: UnitCall, states: Tensor) -> Tensor:
    """The output of cross-attention, which is this unit, for these states of the encoder with H held; in the shape of
    its recorded output."""
    return run.crossed(states).end.reshape(unit.output.shape)


def cross_call(run: BlockRun) -> CrossCall:
    """The one call of cross-attention. Raises UnsupportedModelError unless there is exactly one."""
    if run.recording.cross is None:
        raise UnsupportedModelError(f"block {run.index}: its cross-attention runs more than once, or not at all")
    return run.recording.cross


def _of_states(run: BlockRun, at_units: list[Tensor]) -> Tensor | None:
    """`Gradients.encoder`: the share of each encoder state in the output of cross-attention, affine in the states."""
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
