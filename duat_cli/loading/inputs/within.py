"""Pictures within a text, by the checkpoint's own processor: one set of tensors for each text. Errors are one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoProcessor

from duat_cli.errors import InputError
from duat_cli.loading.chat import written
from duat_cli.loading.inputs.files import Home, load_processor, open_picture
from duat_cli.loading.inputs.request import label
from duat_cli.loading.quiet import foreign_errors, hushed
from duat_cli.loading.texts import PromptText, asked
from duat_cli.text import clean, plural

DEFAULT = "the default question"  # its place, for messages
QUESTION = "What is in the picture?"


@dataclass(frozen=True)
class Within:
    """A text with its pictures in place."""

    text: PromptText
    tensors: Mapping[str, Tensor]
    """Tensors by the forward pass's argument names."""


def pieces_of(config: Any) -> dict[int, str]:
    """The token ids that a config reserves for pieces of pictures, videos and sounds in the text, each with its kind:
    'image', 'video' or 'audio'."""
    names = ((kind, f"{kind}_token_{end}") for kind in ("audio", "video", "image") for end in ("id", "index"))
    return {token: kind for kind, name in names if isinstance(token := getattr(config, name, None), int)}


def with_pictures(
    texts: Sequence[PromptText],
    images: Sequence[Any],
    home: Home,
    trust_remote_code: bool,
    config: Any,
    *,
    apart: bool = False,
) -> list[Within]:
    """Every text with all the pictures, in their order; apart: with each of them alone. Without texts, a default
    question is asked in the form of the checkpoint's template. config: of the model."""
    pieces = [token for token, kind in pieces_of(config).items() if kind == "image"]
    pictures = [open_picture(one, label("--image", one, number)) for number, one in enumerate(images, 1)]
    processor = load_processor(AutoProcessor, "--image", home, trust_remote_code)
    if not callable(getattr(processor, "image_processor", None)) or getattr(processor, "tokenizer", None) is None:
        raise InputError(
            f"--image: {type(processor).__name__} reads no text with its pictures; give a processor that does, or "
            "prepared tensors with --inputs"
        )
    together = [[one] for one in pictures] if apart else [pictures]
    questions = texts or [_question(processor, len(together[0]))]
    return [_one(text, some, processor, pieces) for some in together for text in questions]


def _one(text: PromptText, pictures: Sequence[Any], processor: Any, pieces: Sequence[int]) -> Within:
    count, mark = plural(len(pictures), "picture"), clean(_mark(processor))
    where = f"{text.where}: the checkpoint's processor cannot put {count} into it, one in the place of each {mark}"
    said = written(processor, text, len(pictures))
    begins = getattr(processor.tokenizer, "bos_token", None)
    # as in transformers: some templates write the bos token; for others the tokenizer adds it
    bare = {"add_special_tokens": False} if text.conversation and begins and said.startswith(begins) else {}
    with hushed(), foreign_errors(where, InputError):
        made = processor(images=list(pictures), text=said, return_tensors="pt", **bare)
    tensors = {name: value for name, value in made.items() if isinstance(value, Tensor)}
    if not bool(torch.isin(tensors["input_ids"], torch.tensor(pieces)).any()):
        raise InputError(f"{text.where}: says nowhere where the picture goes; put {mark} there for each --image")
    return Within(replace(text, text=said), tensors)


def _question(processor: Any, count: int) -> PromptText:
    """The question for pictures where the user asks nothing."""
    if getattr(processor, "chat_template", None):
        return asked(PromptText(QUESTION, DEFAULT, 1))
    return PromptText(f"{_mark(processor) * count}\n{QUESTION}", DEFAULT, 1)


def _mark(processor: Any) -> str:
    """The mark that stands for a picture in a text."""
    names = ("boi_token", "image_token", "fake_image_token")
    found = (getattr(processor, name, None) for name in names)
    return next((str(mark) for mark in found if mark), "<image>")
