"""Which files a model of images or sound is to read, and which of its stacks is meant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StackName = Literal["vision", "audio", "text", "encoder", "decoder"]
EVERY: Literal["all"] = "all"
"""What --stack names them all by."""

READS: dict[StackName, tuple[str, ...]] = {
    "vision": ("pixel_values",),
    "audio": ("input_features", "input_values"),
    "text": ("input_ids",),
}
"""Stack -> the names that its forward pass may have for what it reads."""


@dataclass(frozen=True)
class InputFiles:
    """The files of --image, --audio and --inputs, the stack of --stack, and what its decoder reads."""

    images: tuple[str, ...] = ()
    sounds: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    stack: StackName | Literal["all"] | None = None
    decoder_prompt: str | None = None

    @property
    def of_pair(self) -> bool:
        """Whether it names a stack of an encoder-decoder."""
        return self.stack in ("encoder", "decoder")

    @property
    def part(self) -> StackName | None:
        """The one stack that is named."""
        return None if self.stack == EVERY else self.stack

    @property
    def option(self) -> str | None:
        """The first of the options that was given; None without files."""
        named = (("--image", self.images), ("--audio", self.sounds), ("--inputs", self.tensors))
        return next((option for option, files in named if files), None)
