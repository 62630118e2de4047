"""What is said of the checkpoint before anything is opened."""

from __future__ import annotations

from pathlib import Path

from duat_cli.cli.terminal import libraries
from duat_cli.cli.terminal.talk import Talk
from duat_cli.compat.libc import return_freed_memory
from duat_cli.errors import CheckpointError


def announce(model: str | None, talk: Talk) -> None:
    """What is known before torch is imported: a typing error should not cost these seconds."""
    if model is None:
        talk.note("no MODEL given: using the bundled demo model")
    elif model.startswith((".", "/", "~")) and not _exists(model):
        raise CheckpointError(f"{model}: no such folder")
    libraries.calm(talk)
    return_freed_memory()  # a setting of the process, which is a command's own


def _exists(name: str) -> bool:
    """False as well for a name that no file can have."""
    try:
        return Path(name).expanduser().exists()
    except PermissionError:
        return True  # reading it will say why
    except (OSError, RuntimeError, ValueError):
        return False
