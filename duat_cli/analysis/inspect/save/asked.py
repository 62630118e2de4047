"""Options --save and --save-to, checked before a model's libraries are loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from duat_cli.errors import InputError
from duat_cli.text import clean

KINDS = ("H", "S", "bias")
Saved = tuple[frozenset[str], Path]  # the kinds to save of each prompt, and the folder
_PATTERN = "prompt-*.safetensors"


def saved_of(what: str | Iterable[str] | None, folder: str | os.PathLike[str] | None) -> Saved | None:
    """The kinds to save and the folder; None for nothing. Raises InputError where that cannot be done."""
    if what is None or folder is None:
        if what is not folder:
            raise InputError("--save and --save-to go together: what to write, and the folder for it")
        return None
    saved = kinds_of(what), Path(folder)
    require_folder(saved[1])
    return saved


def kinds_of(asked: str | Iterable[str]) -> frozenset[str]:
    """The kinds of --save: H, S, bias, separated by commas."""
    given = [part.strip() for part in asked.split(",")] if isinstance(asked, str) else list(asked)
    unknown = [kind for kind in given if kind not in KINDS]
    if unknown or not given:
        raise InputError(f"--save '{clean(','.join(given))}': expected some of H, S and bias, separated by commas")
    return frozenset(given)


def require_folder(folder: Path) -> None:
    """Raises InputError, before anything is computed, where the files cannot be put into `folder`."""
    what = f"--save-to '{clean(str(folder))}'"
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{what}: is a file, expected a folder")
    if not folder.resolve().parent.is_dir():
        raise InputError(f"{what}: there is no folder '{clean(str(folder.resolve().parent))}'; create it first")
    if folder.is_dir() and any(folder.glob(_PATTERN)):
        raise InputError(f"{what}: holds prompts of another run; give an empty or a new folder")
