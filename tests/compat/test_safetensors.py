"""Files of tensors are read by the way that the installed safetensors has."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from duat_cli.compat.safetensors import open_read, system_error


@pytest.mark.parametrize("old", [False, True])
def test_a_file_is_read_whether_or_not_the_way_can_be_chosen(
    old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = safetensors.safe_open, list[dict[str, Any]]()

    def opening(path: str, **options: Any) -> Any:
        asked.append(options)
        if old and "backend" in options:
            raise TypeError("safe_open() got an unexpected keyword argument 'backend'")
        return real(path, **options)

    save_file({"x": torch.arange(3.0)}, tmp_path / "x.safetensors")
    monkeypatch.setattr(safetensors, "safe_open", opening)
    with open_read(tmp_path / "x.safetensors") as opened:
        assert opened.get_tensor("x").tolist() == [0.0, 1.0, 2.0]
    assert asked[0]["backend"] == "pread"
    assert not old or "backend" not in asked[1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO])
def test_what_the_system_says_is_known_by_its_number(number: int) -> None:
    said = f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})"  # as safetensors 0.8 has it
    found = system_error(safetensors.SafetensorError(said))
    assert found is not None
    assert (found.errno, found.strerror) == (number, os.strerror(number))
    assert system_error(ValueError("tensors share memory")) is None
