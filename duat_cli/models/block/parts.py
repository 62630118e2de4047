"""What a block consists of, as discovery found it: the modules that replay freezes, and where V and O stand."""

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
    """Where V or O of a block's heads can be read: the linear layer that makes the values, or takes what heads give."""

    linear: nn.Module
    norm: nn.Module | None  # V: between the block's input and the layer; O: on the branch, behind the layer (sandwich)
    columns: Tensor | None = None  # V: which of the layer's output features are the values, (kv_heads, d)


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
    inline: tuple[nn.Module, ...] = ()  # of attention in the block's own forward: what ran in front of H V, no norms
    unit_biases: dict[nn.Module, Tensor] = field(
        default_factory=dict
    )  # the last linear's bias, part of the unit's output
    first_linears: dict[nn.Module, nn.Module] = field(default_factory=dict)  # unit -> its first linear layer
    value_projection: Projection | None = None
    output_projection: Projection | None = None
    mixer: MixerForm | None = None  # the one attention module, where it is a token mixer without softmax
    handed: Literal["", "values", "latent"] = ""
    """What a block in front hands on to attention: its values, or what they are made of. They are one of the units."""
    from_latent: Projection | None = None  # where V would be read if it were a latent
    beside: tuple[HiddenSlot, ...] = ()  # where the block takes other tensors of the stream's shape
    anew: bool = False  # whether the sum begins anew where the block takes another stream than that of the one in front
    cross: CrossAttention | None = None  # of a decoder: what it gives is held as a unit's output is
    second: SecondMixer | None = None  # one of the units, with the operator of its own
    gated: bool = False  # whether squashing functions inside attention are dynamic parameters too
    clamped: bool = False  # whether attention clips what it computes: which entries, is a dynamic parameter too
    homogeneous: bool = False  # no biases anywhere: the replayed block maps zero to zero, and c = 0
    direct: bool = False  # whether attention is O(H V(x)) of the two projections alone, so that replay may skip Q and K
    batched: bool = False  # whether several items may share one replay
    arrives: bool = False  # whether what the units give is in the block's output as it is, and nowhere else

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
        """Linear layers of the block that stand neither in a unit nor in attention: a replay runs them."""
        inner = {m for unit in self.units for m in unit.modules()}
        inner |= {m for attention in self.attending for m in self.modules_of(attention)}
        return tuple(m for m in self.module.modules() if type(m) is nn.Linear and m not in inner)

    def modules_of(self, attention: nn.Module) -> tuple[nn.Module, ...]:
        """What an attention module consists of."""
        return self.inline if attention is self.module else tuple(attention.modules())

    def is_cross(self, module: nn.Module) -> bool:
        """Whether a unit call of this module is one of cross-attention."""
        return self.cross is not None and self.cross.module is module
