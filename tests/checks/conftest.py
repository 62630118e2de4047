"""The fixtures that run the command line with nothing faked, and a small model."""

from __future__ import annotations

from pathlib import Path

import bad_checkpoints as bad
import pytest
from running_checks import demo, duat

__all__ = ["demo", "duat", "small"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    bad.llama(tmp_path / "m")
    return tmp_path / "m"
