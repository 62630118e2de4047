"""The request for inputs: the files that a model of images or sound is to read, and the stack that is meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from duat_cli.errors import InputError
from duat_cli.text import clean

StackName = Literal["vision", "audio", "text", "encoder", "decoder"]
EVERY: Literal["all"] = "all"
"""The value of --stack that names all stacks."""

READS: dict[StackName, tuple[str, ...]] = {
    "vision": ("pixel_values", "grid_thw"),
    "audio": ("input_features", "input_values"),
    "text": ("input_ids",),
}
"""Stack -> names that its forward pass may have for its input."""


_OPTIONS: dict[StackName, str] = {"vision": "--image", "audio": "--audio", "text": "--prompt"}


def by_part(parts: Sequence[StackName]) -> str:
    """The inputs, and their options, of a model that takes no pictures or sound within its text. parts: the model's
    own."""
    ways = {part: f"{_OPTIONS[part]} beside --stack {part}" for part in parts}
    if "text" in parts and len(parts) > 1:
        return f"each kind of input by a part of its own; give {', '.join(ways.values())}, or all beside --stack all"
    return "token ids here; give " + ", or ".join(["--prompt", *(ways[part] for part in parts if part != "text")])


def label(option: str, given: Any, number: int) -> str:
    """The name of an input in messages: its file, or its place if it is no file."""
    return f"{option} {clean(given) if isinstance(given, str) else f'{number} ({type(given).__name__})'}"


@dataclass(frozen=True)
class InputFiles:
    """The files of --image, --audio and --inputs, the stack of --stack, and the prompt of its decoder.

    From Python, an image may also be a PIL picture, and prepared tensors a mapping from name to tensor.
    """

    images: tuple[Any, ...] = ()
    sounds: tuple[str, ...] = ()
    tensors: tuple[Any, ...] = ()
    stack: str | None = None
    """A `StackName`, 'all', or the name of one of several chains of blocks."""
    decoder_prompt: str | None = None
    pair: bool = False
    """Whether the inputs are compared: each picture stands in a text alone, and without a file two are made up."""

    def asked(self) -> InputFiles:
        """The request itself, checked as a user's; InputError where it contradicts itself."""
        if self.decoder_prompt is not None and self.stack not in ("decoder", EVERY):
            raise InputError("--decoder-prompt: only a decoder reads it; give --stack decoder")
        return self

    @property
    def names_blocks(self) -> bool:
        """Whether --stack names a stack of an encoder-decoder, or one of several chains of blocks."""
        return self.stack in ("encoder", "decoder") or self.chain is not None

    @property
    def without_blocks(self) -> InputFiles:
        """The request with which the model is opened: without a stack that is chosen only once the model is there."""
        return replace(self, stack=None) if self.names_blocks else self

    @property
    def part(self) -> StackName | None:
        """The stack that --stack names, if it is one of `StackName`."""
        return next((name for name in get_args(StackName) if name == self.stack), None)

    @property
    def chain(self) -> str | None:
        """The value of --stack that may name one of several chains of blocks."""
        return None if self.stack in (None, EVERY, *get_args(StackName)) else self.stack

    @property
    def by_option(self) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        """The files of each option."""
        return ("--image", self.images), ("--audio", self.sounds), ("--inputs", self.tensors)

    @property
    def option(self) -> str | None:
        """The first of the options that was given; None without files."""
        return next((option for option, files in self.by_option if files), None)
