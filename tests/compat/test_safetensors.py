"""What safetensors says of a file that cannot be written."""

from __future__ import annotations

import errno
import os

import pytest
import safetensors

from duat_cli.compat.safetensors import system_error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO])
def test_what_the_system_says_is_known_by_its_number(number: int) -> None:
    said = f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})"  # as safetensors 0.8 has it
    found = system_error(safetensors.SafetensorError(said))
    assert found is not None
    assert (found.errno, found.strerror) == (number, os.strerror(number))
    assert system_error(ValueError("tensors share memory")) is None
