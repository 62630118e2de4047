"""The base model's tensors by parameter name, one at a time, straight from the safetensors files.

A tensor's name in a file is not always its parameter's name: a file may lack the head's prefix, and transformers
renames and fuses some at load (experts). What no file name answers to is looked up in the loaded model, which is
then loaded once, in the stored dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from duat_cli.loading.checkpoint import CheckpointFiles
from duat_cli.loading.source import Source
from duat_cli.loading.stored import STORED, readers


@dataclass(frozen=True)
class Place:
    """Where one base parameter is."""

    parameter: str
    """Its name in the base model, as far as the files and the adapter tell."""
    tensor: str
    """Its name where it is read from."""
    shape: tuple[int, ...]
    dtype: str
    """As stored, such as 'bfloat16'."""
    loaded: bool
    """Whether it is read from the loaded model."""


class BaseWeights:
    """Looks parameters up and reads them; to be used inside `with`."""

    def __init__(self, source: Source, files: CheckpointFiles) -> None:
        self.source, self.files = source, files
        self._stack = contextlib.ExitStack()
        self._opened: dict[str, Any] = {}
        self._state: dict[str, Tensor] | None = None
        self._tails: dict[str, list[str]] = {}
        self._votes: dict[str | None, set[bool]] = {}
        for name in files.tensors:
            self._tails.setdefault(name.partition(".")[2], []).append(name)

    def __enter__(self) -> BaseWeights:
        self._opened = self._stack.enter_context(readers(self.files))
        return self

    def __exit__(self, *exit_: object) -> None:
        self._stack.close()
        self._state = None

    def find(self, parameter: str, *, load: bool = True) -> Place | None:
        """The place of a parameter; None where the base has none of that name.

        load: whether to load the model where the file names alone do not answer.
        """
        tensor = self._in_files(parameter)
        if tensor is not None:
            entry = self.files.tensors[tensor]
            dtype = str(STORED[entry.dtype]).removeprefix("torch.")
            longer = tensor if tensor.endswith("." + parameter) else parameter
            return Place(longer, tensor, entry.shape, dtype, False)
        if not load:
            return None
        state = self._loaded()
        name = next((n for n in (parameter, *_tail(parameter)) if n in state), None)
        if name is None:
            return None
        held = state[name]
        return Place(parameter, name, tuple(held.shape), str(held.dtype).removeprefix("torch."), True)

    def read(self, place: Place) -> Tensor:
        """The tensor as it is stored, in memory of its own or of the loaded model: not to be written to."""
        if place.loaded:
            return self._loaded()[place.tensor]
        tensor: Tensor = self._opened[self.files.tensors[place.tensor].shard].get_tensor(place.tensor)
        return tensor

    def _in_files(self, parameter: str) -> str | None:
        held = self.files.tensors
        if parameter in held:
            return parameter
        longer = self._tails.get(parameter, [])
        if len(longer) == 1:  # the adapter's keys lack a prefix
            return longer[0]
        return next((n for n in _tail(parameter) if n in held), None)  # the file's do

    def _loaded(self) -> dict[str, Tensor]:
        """Every parameter of the model by its module's name, tied ones under each of their names."""
        if self._state is None:
            from duat_cli.loading.load import load_files  # transformers, only where it is needed

            model = load_files(self.source, self.files, dtype="auto").model
            self._state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        return self._state

    def parameters(self) -> list[str]:
        """Names of all parameters, in the order in which the model's classes declare them."""
        return list(self._loaded())

    def is_transposed(self, parameter: str) -> bool | None:
        """Whether a square weight is stored as (in, out), by its neighbours: layers whose bias tells which side is
        out. None where no neighbour tells."""
        if not self._votes:
            self._vote()
        votes = self._votes.get(_block_of(parameter), set())
        return next(iter(votes)) if len(votes) == 1 else None

    def _vote(self) -> None:
        self._votes = {None: set()}
        for name, entry in self.files.tensors.items():
            bias = self.files.tensors.get(name.removesuffix("weight") + "bias") if name.endswith(".weight") else None
            if bias is not None and len(entry.shape) == 2 and entry.shape[0] != entry.shape[1]:
                self._votes.setdefault(_block_of(name), set()).add(bias.shape[0] == entry.shape[1])


def _tail(parameter: str) -> Iterator[str]:
    """The name without its first component, which is the base model's prefix in a model with a head."""
    rest = parameter.partition(".")[2]
    if "." in rest:
        yield rest


def _block_of(name: str) -> str | None:
    """The part of a name up to its first number: blocks are compared with each other, whatever the prefix is."""
    parts = name.split(".")
    at = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    return None if not at else parts[at - 1]
