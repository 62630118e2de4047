"""Positions of tensors in the arguments and the output of a call of a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from duat_cli.errors import UnsupportedModelError

Key = int | str  # the position or the name of an argument
Arguments = tuple[list[Any], dict[str, Any]]


def slots_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Key, Tensor]]:
    """The tensors among the arguments, each with its position or name."""
    return [(key, value) for key, value in by_slot(args, kwargs) if isinstance(value, Tensor)]


def by_slot(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Key, Any]]:
    """Every argument, with its position or name."""
    return [*enumerate(args), *kwargs.items()]


def taken(args: Sequence[Any], kwargs: Mapping[str, Any], key: Key) -> Tensor:
    """The argument, a tensor, at this position or of this name."""
    found: Tensor = args[key] if isinstance(key, int) else kwargs[key]
    return found


def put(args: Sequence[Any], kwargs: Mapping[str, Any], values: Mapping[Key, Tensor]) -> Arguments:
    """The arguments with these tensors at these positions and names."""
    new_args, new_kwargs = list(args), dict(kwargs)
    for key, value in values.items():
        if isinstance(key, int):
            new_args[key] = value
        else:
            new_kwargs[key] = value
    return new_args, new_kwargs


def parted(output: Any) -> tuple[Tensor, tuple[Any, ...] | None]:
    """The tensor of a module's output, or the first of a tuple, and the rest of that tuple; None if it is no tuple."""
    return (output, None) if isinstance(output, Tensor) else (output[0], tuple(output[1:]))


def joined(tensor: Tensor, rest: tuple[Any, ...] | None) -> Any:
    """The inverse of `parted`."""
    return tensor if rest is None else (tensor, *rest)


@dataclass(frozen=True)
class HiddenSlot:
    """The argument of a module that is hidden states: a positional index or a keyword.

    They are read as (batch, N, M), however the module lays them out. A module may hold several streams a token
    (hyper-connections), which are read as one, of M = streams * width.
    """

    key: Key
    flat: bool = False  # whether it takes them without a batch, (N, M): one item per call
    again: tuple[Key, ...] = ()  # further arguments that are the same tensor (queries, keys and values by name)
    streams: int = 1  # on an axis of their own, (batch, N, streams, width)
    first: bool = False  # whether that is the first axis, (streams, batch, N, width)
    turned: bool = False  # whether it takes tokens in front of the batch, (N, batch, M)
    grid: tuple[int, int] | None = None  # height and width of a map of tokens, (batch, height, width, M)

    def get(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        return self.together(taken(args, kwargs, self.key))

    def put(self, args: Sequence[Any], kwargs: Mapping[str, Any], value: Tensor) -> Arguments:
        """The arguments with other hidden states. Raises ValueError for several items where the module takes one."""
        if self.flat:
            [value] = value
        return put(args, kwargs, dict.fromkeys((self.key, *self.again), self.apart(value)))

    def together(self, value: Tensor) -> Tensor:
        """Hidden states in the module's own layout, as (batch, N, M)."""
        if self.streams > 1:
            value = (value.movedim(0, 2) if self.first else value).flatten(2)
        if self.turned:
            value = value.transpose(0, 1)
        if self.grid is not None:
            value = value.flatten(1, 2)
        return value[None] if self.flat else value

    def apart(self, value: Tensor) -> Tensor:
        """Hidden states (batch, N, M) in the module's own layout, but for a missing batch."""
        if self.turned:
            return value.transpose(0, 1)
        if self.grid is not None:
            return value.unflatten(1, self.grid)
        if self.streams == 1:
            return value
        parted = value.unflatten(2, (self.streams, -1))
        return parted.movedim(2, 0) if self.first else parted

    def found(self, output: Any, like: Tensor) -> Tensor:
        """The hidden states, (batch, N, M), in a block's output: the first tensor of the input's shape, or an output
        that is one tensor, whose number of tokens and width may differ (a block may merge tokens).

        like: the block's input, (batch, N, M). Raises UnsupportedModelError where there are none.
        """
        own, usual = self.apart(like), self.streams == 1 and not self.turned and self.grid is None
        if usual and isinstance(output, Tensor) and (output.ndim, len(output)) == (3, len(like)):
            return output
        several = output.values() if isinstance(output, dict) else output
        candidates = [output] if isinstance(output, Tensor) else several
        for candidate in candidates if isinstance(candidates, Iterable) else ():
            if isinstance(candidate, Tensor) and candidate.shape == own.shape:
                return candidate if usual else self.together(candidate)
            if isinstance(candidate, Tensor) and len(like) == 1 and candidate.shape == like.shape[1:]:
                return candidate[None]  # the block takes no batch
        raise UnsupportedModelError("a block returns no hidden states of its input's shape")

    def exchanged(self, output: Any, like: Tensor, hidden: Tensor) -> Any:
        """A block's output with other hidden states, (batch, N, M). like: as in `found`."""
        shape, hidden = self.apart(like).shape, self.apart(hidden)
        if isinstance(output, Tensor):
            return hidden
        if isinstance(output, dict):
            key = next(k for k, v in output.items() if isinstance(v, Tensor) and v.shape == shape)
            return type(output)(**{**output, key: hidden})
        place = next(k for k, v in enumerate(output) if isinstance(v, Tensor) and v.shape == shape)
        return type(output)([*output[:place], hidden, *output[place + 1 :]])
