"""Output of `duat --version`, made without importing the libraries."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from duat_cli import __version__

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "accelerate", "peft")
"""Libraries that can change a number, or which checkpoints can be read."""


def versions() -> str:
    """The versions, one in each line, duat's own first; a missing library is listed as not installed."""
    lines = [f"duat {__version__}", f"python {platform.python_version()} on {platform.system()} {platform.machine()}"]
    return "\n".join([*lines, *(f"{name} {_version(name)}" for name in LIBRARIES)]) + "\n"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
