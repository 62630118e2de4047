"""The text that criteria are computed on, and other text that they are judged on: both come with Python.

The demo reads source files of the standard library that its training held out, MiniLM the language reference. A file,
or a topic, is on one side alone. The text is cut into windows of equal length.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WINDOW = 128
CALIBRATION, HELD_OUT = 32, 64


@dataclass(frozen=True)
class Texts:
    """Windows of token ids, (windows, WINDOW) each."""

    calibration: Tensor
    held_out: Tensor


def library() -> list[str]:
    """The source files of the standard library that the demo was never trained on, sorted by name."""
    from train_demo import HELD_OUT_ONE_IN, is_wanted, one_in

    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    held = [name for name in names if is_wanted(Path(name)) and one_in(name, HELD_OUT_ONE_IN)]
    return [text for name in held if (text := (root / name).read_text(encoding="utf-8", errors="replace").strip())]


def reference() -> list[str]:
    """The topics of the language reference, sorted by name."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def texts_of(tokenizer: Any, documents: Sequence[str]) -> Texts:
    """Windows of the documents' tokens: of every other document for calibration, of the rest held out.

    Windows are taken in turn from the documents of a side, so that no long one fills it. A tokenizer's own opening and
    closing tokens stand around every window.
    """
    opening, closing = _around(tokenizer)
    inside = WINDOW - len(opening) - len(closing)
    sides: list[list[list[Tensor]]] = [[], []]
    for number, text in enumerate(documents):
        ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        windows = list(ids[: len(ids) // inside * inside].split(inside)) if len(ids) >= inside else []
        sides[number % 2].append([torch.cat([opening, window, closing]) for window in windows])
    return Texts(_in_turn(sides[0], CALIBRATION), _in_turn(sides[1], HELD_OUT))


def _around(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Special tokens in front of a text and behind it."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    place = next(k for k in range(len(whole)) if whole[k : k + len(bare)] == bare)
    return torch.tensor(whole[:place], dtype=torch.long), torch.tensor(whole[place + len(bare) :], dtype=torch.long)


def _in_turn(documents: Sequence[Sequence[Tensor]], count: int) -> Tensor:
    """The first window of every document, the second of every one that has it, and so on."""
    longest = max(map(len, documents))
    found = [windows[k] for k in range(longest) for windows in documents if k < len(windows)]
    if len(found) < count:
        raise ValueError(f"{len(found)} windows of {WINDOW} tokens, expected {count}: the text is too short")
    return torch.stack(found[:count])
