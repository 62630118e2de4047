"""Router weights of experts that take them as arguments: recorded, or held at given values.

An experts module has fused parameters, (experts, ...). It is called with the chosen experts, (N, k) integers, and their
weights, (N, k).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.models.block.slots import Key, put, slots_of, taken
from duat_cli.models.instrument.hooks import hooked


@dataclass(frozen=True)
class Routing:
    """The arguments in which an experts module takes its routing, by position or name."""

    index: Key  # argument of the chosen experts
    weights: Key  # argument of their weights


@dataclass(frozen=True)
class Routed:
    """The output of a router for one call: experts (N, k), integers, and weights (N, k)."""

    experts: Tensor
    weights: Tensor
    count: int  # number of all experts

    def dense(self) -> Tensor:
        """The weight of every expert, (N, count); zero where it was not chosen."""
        whole = self.weights.new_zeros(len(self.weights), self.count)
        return whole.scatter_add_(1, self.experts.long(), self.weights)


@dataclass
class Routers:
    """The latest call of every experts module."""

    latest: dict[nn.Module, Routed] = field(default_factory=dict)

    @contextlib.contextmanager
    def seen(self, model: nn.Module) -> Iterator[None]:
        """While active, the latest call of each experts module is recorded."""

        def see(module: nn.Module, args: Any, kwargs: Any) -> None:
            slots = routing_slots(args, kwargs)
            if slots is not None:
                experts, weights = (taken(args, kwargs, slot) for slot in (slots.index, slots.weights))
                self.latest[module] = Routed(experts.detach().clone(), weights.detach().clone(), experts_of(module))

        with hooked(experts_modules(model), see):
            yield

    def inside(self, block: nn.Module) -> dict[nn.Module, Routed]:
        """The latest calls of the experts modules of one block, if it has any."""
        return {module: self.latest[module] for module in block.modules() if module in self.latest}


def experts_of(module: nn.Module) -> int:
    """How many experts a module's own parameters hold; 0: none."""
    return next((p.shape[0] for p in module.parameters(recurse=False) if p.ndim >= 3), 0)


def experts_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if experts_of(module)]


def mean_routed(calls: list[Routed]) -> Routed:
    """The mean weight of every expert over some calls, with all experts chosen."""
    dense = torch.stack([call.dense() for call in calls]).mean(dim=0)
    every = torch.arange(calls[0].count, device=dense.device).expand_as(dense)
    return Routed(every.to(calls[0].experts.dtype).contiguous(), dense, calls[0].count)


def with_routing(args: Sequence[Any], kwargs: dict[str, Any], held: Routed) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of an experts module with the router's output replaced by `held`."""
    slots = routing_slots(args, kwargs)
    if slots is None:
        return args, kwargs
    return put(args, kwargs, {slots.index: held.experts, slots.weights: held.weights})


def routing_slots(args: Sequence[Any], kwargs: dict[str, Any]) -> Routing | None:
    """The arguments of a call that are integers (N, k) and floating-point numbers (N, k); None without such a pair."""
    tensors = [(key, value) for key, value in slots_of(args, kwargs) if value.ndim == 2]
    for index_key, index in tensors:
        if index.is_floating_point() or index.dtype == torch.bool:
            continue
        for key, value in tensors:
            if value.is_floating_point() and value.shape == index.shape:
                return Routing(index_key, key)
    return None


def routing_weights(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The weights of the chosen experts, (N, k), among the arguments of a call; None where there are none."""
    slots = routing_slots(args, kwargs)
    return None if slots is None else taken(args, kwargs, slots.weights)
