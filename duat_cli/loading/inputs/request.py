"""Which files a model of images or sound is to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StackName = Literal["vision", "audio", "text"]

READS: dict[StackName, tuple[str, ...]] = {
    "vision": ("pixel_values",),
    "audio": ("input_features", "input_values"),
    "text": ("input_ids",),
}
"""Stack -> the names that its forward pass may have for what it reads."""


@dataclass(frozen=True)
class InputFiles:
    """The files of --image, --audio and --inputs, and the stack of --stack."""

    images: tuple[str, ...] = ()
    sounds: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    stack: StackName | None = None

    @property
    def option(self) -> str | None:
        """The first of the options that was given; None without files."""
        named = (("--image", self.images), ("--audio", self.sounds), ("--inputs", self.tensors))
        return next((option for option, files in named if files), None)
