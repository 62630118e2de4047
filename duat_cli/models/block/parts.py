"""The parts of a block, as discovery found them: the modules that a replay freezes, and the layers of V and O."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from duat_cli.models.block.mixer import MixerForm
from duat_cli.models.block.norms import NormForm
from duat_cli.models.block.slots import HiddenSlot


@dataclass(frozen=True)
class Projection:
    """The linear layer from which V or O of a block's heads can be read: it makes the values, or takes H V."""

    linear: nn.Module
    norm: nn.Module | None  # V: between the block's input and the layer; O: on the branch, behind the layer (sandwich)
    columns: Tensor | None = None  # V: the layer's output features that are the values, (kv_heads, d)


@dataclass(frozen=True)
class CrossAttention:
    """The attention of a decoder block over the encoder's states."""

    module: nn.Module
    states: HiddenSlot  # where the module takes the encoder's states
    taken: HiddenSlot  # where the block takes them
    value_projection: Projection | None = None
    output_projection: Projection | None = None


@dataclass(frozen=True)
class SecondMixer:
    """A token mixer without softmax that runs beside a block's attention."""

    form: MixerForm
    output_projection: Projection


@dataclass(frozen=True)
class BlockParts:
    """The instrumented modules of one block; discovery fills this in."""

    name: str
    module: nn.Module
    hidden: HiddenSlot
    attention: tuple[nn.Module, ...]  # over the block's own tokens
    intercepted: frozenset[nn.Module]  # attention modules outside the interface
    norms: dict[nn.Module, NormForm]
    units: tuple[nn.Module, ...]  # nonlinear FFN modules, in call order
    mixing: frozenset[nn.Module] = frozenset()  # units that mix tokens: no FFNs
    inline: tuple[nn.Module, ...] = ()  # for attention in the block's own forward: modules in front of H V, no norms
    unit_biases: dict[nn.Module, Tensor] = field(
        default_factory=dict
    )  # the last linear's bias, part of the unit's output
    first_linears: dict[nn.Module, nn.Module] = field(default_factory=dict)  # unit -> its first linear layer
    value_projection: Projection | None = None
    output_projection: Projection | None = None
    mixer: MixerForm | None = None  # the one attention module, where it is a token mixer without softmax
    handed: Literal["", "values", "latent"] = ""
    """Whether an earlier block hands on attention's values or their latent; they are then held as a unit's output."""
    from_latent: Projection | None = None  # the projection for V if a latent is handed on
    beside: tuple[HiddenSlot, ...] = ()  # where the block takes other tensors of the stream's shape
    anew: bool = False  # whether the sum begins anew where the block takes another stream than that of the one in front
    cross: CrossAttention | None = None  # of a decoder block; its output is held as that of a unit
    second: SecondMixer | None = None  # one of the units, which has an operator of its own
    gated: bool = False  # whether squashing functions inside attention are dynamic parameters too
    streams: int = 1  # of a token; with several, squashing functions outside attention and units weigh them
    weighing: frozenset[nn.Module] = frozenset()  # modules that do: no units
    clamped: bool = False  # whether attention clips tensors; the choice of clipped entries is a dynamic parameter too
    homogeneous: bool = False  # no biases anywhere: the replayed block maps zero to zero, and c = 0
    direct: bool = False  # whether attention is O(H V(x)) of the two projections alone, so that replay may skip Q and K
    batched: bool = False  # whether several items may share one replay
    arrives: bool = False  # whether the units' outputs are added to the block's output unchanged, and go nowhere else

    @property
    def feedforward(self) -> tuple[nn.Module, ...]:
        """The units that mix no tokens."""
        return tuple(unit for unit in self.units if unit not in self.mixing)

    @property
    def attending(self) -> tuple[nn.Module, ...]:
        """Every attention module, cross-attention among them."""
        return self.attention if self.cross is None else (*self.attention, self.cross.module)

    @functools.cached_property
    def outer_linears(self) -> tuple[nn.Module, ...]:
        """Linear layers of the block outside units and attention; a replay runs them."""
        inner = {m for unit in self.units for m in unit.modules()}
        inner |= {m for attention in self.attending for m in self.modules_of(attention)}
        return tuple(m for m in self.module.modules() if type(m) is nn.Linear and m not in inner)

    def modules_of(self, attention: nn.Module) -> tuple[nn.Module, ...]:
        """The modules that an attention module consists of."""
        return self.inline if attention is self.module else tuple(attention.modules())

    def is_cross(self, module: nn.Module) -> bool:
        """Whether a unit call of this module is one of cross-attention."""
        return self.cross is not None and self.cross.module is module

    def in_cross(self, module: nn.Module) -> bool:
        """Whether the module is cross-attention or a layer of it, also one behind the module itself (BERT's)."""
        if self.cross is None:
            return False
        output = self.cross.output_projection
        return module in set(self.cross.module.modules()) or (output is not None and module is output.linear)
