"""The parts of some targets of one prompt, block by block: inner products of contributions with the target's gradient.

    y = Σ_t ⟨λ_0[t], x_0[t]⟩ + Σ_j ⟨λ_j, c_j⟩ + Σ_j Σ_t ⟨U_jᵀλ_j[t], f_j[t]⟩ + b        total reading
    y = Σ_t ⟨μ_0[t], x_0[t]⟩ + Σ_j (⟨μ_j, c'_j⟩ + Σ_h ⟨μ_jh, H_jh V_jh x_{j-1}⟩ + ⟨μ_jU, f_j⟩) + b       direct reading

The gradient λ is carried through all later frozen blocks, μ along the residual stream only. A unit's output bias counts
as static, as in the sum of `duat inspect`. Products are summed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from duat_cli.analysis.attribute.experts import KnownExperts, expert_parts
from duat_cli.errors import UnsupportedModelError, needed
from duat_cli.models.arrays import tolerance_for
from duat_cli.models.instrument.records import UnitCall
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.adjoint import BlockAdjoint, Gradients, products
from duat_cli.models.sweep.gradients import SiteCall, pulled
from duat_cli.models.terms.sites import Site


@dataclass(frozen=True)
class Inner:
    """Parts within a unit in both readings, float64."""

    total: Tensor  # (targets, parts)
    direct: Tensor  # (targets, parts)


@dataclass(frozen=True)
class UnitParts:
    """Parts of one call of an FFN unit, float64; targets are the first axis."""

    name: str  # of its class
    mixes: bool  # whether it mixes tokens, and so is no FFN
    total: Tensor  # (targets,)
    direct: Tensor  # (targets,)
    tokens: Tensor | None  # total reading by token, (targets, N); None where its output has no axis of tokens
    site: Site | None  # of its neurons, or of the experts that they are in
    neurons: Inner | None
    experts: Inner | None
    in_expert: int | None = None  # neurons per expert, if `neurons` are those of all experts in turn
    why: str | None = None  # why `neurons` is None


@dataclass(frozen=True)
class BlockParts:
    """Parts of one block. encoder: what its cross-attention brings from each encoder state, (targets, states)."""

    number: int
    static: Tensor  # (targets,)
    static_direct: Tensor  # biases outside attention only: H V x includes those of V
    heads: Tensor  # total, (targets, heads); heads of all attention calls
    heads_direct: Tensor
    units: list[UnitParts]
    encoder: Inner | None = None


@dataclass
class PromptParts:
    """Parts of some targets of one prompt."""

    output: Tensor  # y of each target, from the model's own output, (targets,) float64
    head: Tensor  # b, (targets,)
    blocks: list[BlockParts] = field(default_factory=list)  # from the first block on; complete once all are through
    tokens: Tensor = field(default_factory=lambda: torch.empty(0))  # total, (targets, N)
    tokens_direct: Tensor = field(default_factory=lambda: torch.empty(0))

    def sums(self) -> tuple[Tensor, Tensor]:
        """The two readings as lists of addends, (targets, addends) each."""
        total, direct = [self.tokens], [self.tokens_direct]
        for block in self.blocks:
            total += [block.static[:, None], *(u.total[:, None] for u in block.units)]
            direct += [block.static_direct[:, None], block.heads_direct, *(u.direct[:, None] for u in block.units)]
            if block.encoder is not None:
                total.append(block.encoder.total)
                direct.append(block.encoder.direct)
        return torch.cat([*total, self.head[:, None]], dim=1), torch.cat([*direct, self.head[:, None]], dim=1)

    def residuals(self) -> tuple[Tensor, Tensor]:
        """|sum - y| divided by the largest absolute partial sum, (targets,) for each reading."""
        total, direct = self.sums()
        return _residual(total, self.output), _residual(direct, self.output)


def _residual(addends: Tensor, output: Tensor) -> Tensor:
    largest = torch.maximum(addends.cumsum(dim=1).abs().amax(dim=1), output.abs())
    difference = (addends.sum(dim=1) - output).abs()
    return torch.where(difference == 0, difference, difference / largest)


def block_parts(block: BlockAdjoint, known: KnownExperts) -> BlockParts:
    """The parts of one block."""
    run = block.run
    calls: dict[nn.Module, int] = {}
    units = []
    encoder = None
    if block.total.encoder is not None and block.direct.encoder is not None:
        encoder = Inner(block.total.encoder, block.direct.encoder)
    for k, unit in enumerate(run.units):
        if run.parts.is_cross(unit.module):
            continue
        call = calls[unit.module] = calls.get(unit.module, -1) + 1
        units.append(_unit_parts(block, k, unit, call, known))
    both: list[UnitParts | Inner] = [*units, *([] if encoder is None else [encoder])]
    if not all(_add_up(both, reading, whole) for reading, whole in (("total", block.total), ("direct", block.direct))):
        if encoder is not None:
            raise UnsupportedModelError(
                f"block {block.number}: its output is not linear in what its cross-attention and its FFN give"
            )
        units = [_joined(units, block)]
    return BlockParts(
        number=block.number,
        static=block.total.constant,
        static_direct=block.direct.constant,
        heads=_heads(run, block.total),
        heads_direct=_heads(run, block.direct),
        units=units,
        encoder=encoder,
    )


def _add_up(units: Sequence[UnitParts | Inner], reading: str, whole: Gradients) -> bool:
    """Whether the block's output is linear in the outputs of its units; some blocks multiply outputs of two units."""
    each = [getattr(unit, reading) for unit in units]
    parts = torch.stack([p if p.ndim == 1 else p.sum(dim=1) for p in each]) if each else whole.together[None] * 0
    size = parts.abs().sum(dim=0) + whole.together.abs() + whole.constant.abs()
    tolerance = tolerance_for(whole.before.dtype)
    return bool(((parts.sum(dim=0) - whole.together).abs() <= tolerance * size).all())


def _joined(units: list[UnitParts], block: BlockAdjoint) -> UnitParts:
    names = " with ".join(dict.fromkeys(unit.name for unit in units))
    return UnitParts(
        name=names,
        mixes=any(unit.mixes for unit in units),
        total=block.total.together,
        direct=block.direct.together,
        tokens=None,
        site=None,
        neurons=None,
        experts=None,
        why="the block's output is not linear in what each of its units gives",
    )


def token_parts(gradient: Tensor, x: Tensor) -> Tensor:
    """The parts ⟨λ[t], x[t]⟩ of tokens, (targets, N), from gradients (targets, 1, N, M) and hidden states (1, N, M)."""
    return (gradient.double() * x.double()).sum(dim=-1).flatten(1)


def _heads(run: BlockRun, gradients: Gradients) -> Tensor:
    """Parts of the heads of all attention calls in turn, (targets, heads)."""
    found = [
        (gradient.double() * call.output.double()).sum(dim=(1, 2, 4))
        for call, gradient in zip(run.attention, gradients.heads, strict=True)
    ]
    return torch.cat(found, dim=1) if found else gradients.constant.new_empty(len(gradients.constant), 0)


def _unit_parts(block: BlockAdjoint, place: int, unit: UnitCall, call: int, known: KnownExperts) -> UnitParts:
    run, total, direct = block.run, block.total.units[place], block.direct.units[place]
    term = unit.output - block.static[place]
    product = total.double() * term.double()
    held, routed = _of_call(block.held, unit, call, "neuron"), _of_call(block.held, unit, call, "expert")
    both = torch.cat([total, direct])  # gradients of both readings, to handle them in one go
    neurons = None if held is None else _neurons(held, unit, both)
    experts, inside = (None, None) if routed is None else expert_parts(routed, unit, both, known)
    site, in_expert = None if held is None else held.site, None
    if neurons is None and inside is not None:
        neurons, site, in_expert = inside.flatten(1), needed(routed).site, inside.shape[2]
    return UnitParts(
        name=type(unit.module).__name__,
        mixes=unit.module in run.parts.mixing,
        total=product.flatten(1).sum(dim=1),
        direct=products(direct, term),
        tokens=_by_token(product, run.input.shape[1]),
        site=site if neurons is not None else None,
        neurons=None if neurons is None else Inner(*neurons.chunk(2)),
        experts=None if experts is None else Inner(*experts.chunk(2)),
        in_expert=in_expert,
        why=None if neurons is not None else _why(routed, known),
    )


def _why(routed: SiteCall | None, known: KnownExperts) -> str:
    if routed is None:
        return "what it gives is not made by one linear layer of its neurons"
    return known.faults.get(routed.site.module, "parts of the neurons in its experts do not add up to their expert's")


def _by_token(product: Tensor, tokens: int) -> Tensor | None:
    """(targets, …) summed to (targets, N); None where the axis of tokens is not known."""
    axes = [axis for axis in range(1, product.ndim) if product.shape[axis] == tokens]
    if product.ndim < 3 or not axes:
        return None
    axis = product.ndim - 2 if product.ndim - 2 in axes else axes[-1]
    return product.movedim(axis, 1).flatten(2).sum(dim=2)


def _neurons(found: SiteCall, unit: UnitCall, gradient: Tensor) -> Tensor | None:
    """Parts Σ_t ⟨gradient, a_n w_n⟩ of the neurons, (targets, neurons); the unit is linear in them but for its bias."""
    if found.site.module not in set(unit.module.modules()):  # the layer is behind the unit, whose output are neurons
        if unit.output.shape[-1] != found.site.count:
            return None
        return (gradient.double() * unit.output.double()).flatten(1, -2).sum(dim=1)
    value = found.value.detach().clone().requires_grad_()
    with torch.enable_grad():
        output = found.site.module(value)
    (back,) = pulled(output, [value], gradient.reshape(len(gradient), *output.shape))
    return (back.double() * found.value.double()).flatten(1, -2).sum(dim=1)


def _of_call(held: list[SiteCall], unit: UnitCall, call: int, kind: str) -> SiteCall | None:
    """Value held by the unit's site of a kind in the unit's call of that number; None without such a site."""
    inside = set(unit.module.modules())
    mine = [h for h in held if h.site.kind == kind and (h.site.unit is unit.module or h.site.module in inside)]
    return mine[call] if call < len(mine) else None
