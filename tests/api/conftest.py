"""The bundled demo as a model in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from duat_cli.cli.terminal import libraries
from duat_cli.loading.checkpoint.source import demo_path


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logs and warnings of this process as they are, for the tests that come after."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)
    for name in ("CI", "PRE_COMMIT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def demo() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_path())
