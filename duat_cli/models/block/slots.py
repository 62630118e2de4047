"""Where a call of a module takes its tensors, and where its output holds the one that counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Key = int | str  # of an argument: its position or its name
Arguments = tuple[list[Any], dict[str, Any]]


def slots_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Key, Tensor]]:
    """The tensors among the arguments, each with its position or name."""
    return [(key, value) for key, value in by_slot(args, kwargs) if isinstance(value, Tensor)]


def by_slot(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Key, Any]]:
    """Every argument, with its position or name."""
    return [*enumerate(args), *kwargs.items()]


def taken(args: Sequence[Any], kwargs: Mapping[str, Any], key: Key) -> Tensor:
    """The tensor at a position, or of a name, among the arguments."""
    found: Tensor = args[key] if isinstance(key, int) else kwargs[key]
    return found


def put(args: Sequence[Any], kwargs: Mapping[str, Any], values: Mapping[Key, Tensor]) -> Arguments:
    """The arguments with other tensors in these places."""
    new_args, new_kwargs = list(args), dict(kwargs)
    for key, value in values.items():
        if isinstance(key, int):
            new_args[key] = value
        else:
            new_kwargs[key] = value
    return new_args, new_kwargs


def parted(output: Any) -> tuple[Tensor, tuple[Any, ...] | None]:
    """The tensor that a module gives, or the first of a tuple with what stands behind it; None: it is no tuple."""
    return (output, None) if isinstance(output, Tensor) else (output[0], tuple(output[1:]))


def joined(tensor: Tensor, rest: tuple[Any, ...] | None) -> Any:
    """The inverse of `parted`."""
    return tensor if rest is None else (tensor, *rest)


@dataclass(frozen=True)
class HiddenSlot:
    """Where a module takes hidden states, (batch, N, M): a positional index or a keyword."""

    key: Key
    flat: bool = False  # it takes them without a batch, (N, M): one item a call
    again: tuple[Key, ...] = ()  # where it takes the same tensor once more (queries, keys and values by name)

    def get(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        value = taken(args, kwargs, self.key)
        return value[None] if self.flat else value

    def put(self, args: Sequence[Any], kwargs: dict[str, Any], value: Tensor) -> Arguments:
        """ValueError where several items are given to a module that takes one."""
        if self.flat:
            [value] = value
        return put(args, kwargs, dict.fromkeys((self.key, *self.again), value))
