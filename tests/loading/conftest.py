"""No test of loading reaches the network; a sound checkpoint to damage."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import pytest


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a network attempt")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    bad.llama(tmp_path / "m")
    return tmp_path / "m"
