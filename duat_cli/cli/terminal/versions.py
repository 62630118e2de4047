"""What `duat --version` prints; no library is imported for it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from duat_cli import __version__

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "accelerate", "peft")
"""Those that can change a number, or what can be read."""


def versions() -> str:
    """One a line, duat's own first; a library that is not there says so."""
    lines = [f"duat {__version__}", f"python {platform.python_version()} on {platform.system()} {platform.machine()}"]
    return "\n".join([*lines, *(f"{name} {_version(name)}" for name in LIBRARIES)]) + "\n"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
