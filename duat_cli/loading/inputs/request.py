"""Which files a model of images or sound is to read, and which of its stacks is meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from duat_cli.errors import InputError
from duat_cli.text import clean

StackName = Literal["vision", "audio", "text", "encoder", "decoder"]
EVERY: Literal["all"] = "all"
"""What --stack names them all by."""

READS: dict[StackName, tuple[str, ...]] = {
    "vision": ("pixel_values", "grid_thw"),
    "audio": ("input_features", "input_values"),
    "text": ("input_ids",),
}
"""Stack -> the names that its forward pass may have for what it reads."""


_OPTIONS: dict[StackName, str] = {"vision": "--image", "audio": "--audio", "text": "--prompt"}


def by_part(parts: Sequence[StackName]) -> str:
    """What a model reads that takes no pictures or sound within its text, and by which options. parts: of its own."""
    ways = {part: f"{_OPTIONS[part]} beside --stack {part}" for part in parts}
    if "text" in parts and len(parts) > 1:
        return f"each kind of input by a part of its own; give {', '.join(ways.values())}, or all beside --stack all"
    return "token ids here; give " + ", or ".join(["--prompt", *(ways[part] for part in parts if part != "text")])


def label(option: str, given: Any, number: int) -> str:
    """What an input is called: by its file, or by its place where it is no file."""
    return f"{option} {clean(given) if isinstance(given, str) else f'{number} ({type(given).__name__})'}"


@dataclass(frozen=True)
class InputFiles:
    """The files of --image, --audio and --inputs, the stack of --stack, and what its decoder reads.

    From Python an image may be a PIL picture as well, and prepared tensors a mapping from name to tensor.
    """

    images: tuple[Any, ...] = ()
    sounds: tuple[str, ...] = ()
    tensors: tuple[Any, ...] = ()
    stack: str | None = None
    """A `StackName`, 'all', or the name of one of several chains of blocks."""
    decoder_prompt: str | None = None
    pair: bool = False
    """Whether two inputs are made up where no file is given."""

    def asked(self) -> InputFiles:
        """The same, as a user asks for it; InputError where it contradicts itself."""
        if self.decoder_prompt is not None and self.stack not in ("decoder", EVERY):
            raise InputError("--decoder-prompt: only a decoder reads it; give --stack decoder")
        return self

    @property
    def names_blocks(self) -> bool:
        """Whether it names a stack of an encoder-decoder, or one of several chains of blocks."""
        return self.stack in ("encoder", "decoder") or self.chain is not None

    @property
    def without_blocks(self) -> InputFiles:
        """What the model is opened with: the same, but for a stack that is chosen once it is there."""
        return replace(self, stack=None) if self.names_blocks else self

    @property
    def part(self) -> StackName | None:
        """The kind of input by which one stack is named."""
        return next((name for name in get_args(StackName) if name == self.stack), None)

    @property
    def chain(self) -> str | None:
        """What may name one of several chains of blocks."""
        return None if self.stack in (None, EVERY, *get_args(StackName)) else self.stack

    @property
    def by_option(self) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        """The files of each option."""
        return ("--image", self.images), ("--audio", self.sounds), ("--inputs", self.tensors)

    @property
    def option(self) -> str | None:
        """The first of the options that was given; None without files."""
        return next((option for option, files in self.by_option if files), None)
