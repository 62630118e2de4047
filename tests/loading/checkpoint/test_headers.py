"""The header of a weight file: a wrong form is refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import pytest
from refusals import refusal_of_files


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"shape": [True, 32]}, "shape"),
        ({"shape": [-1]}, "shape"),
        ({"shape": "32"}, "shape"),
        ({"data_offsets": [128, 0]}, "data_offsets"),
        ({"data_offsets": [0]}, "data_offsets"),
        ({"dtype": 7}, "dtype"),
        ({"dtype": None}, "dtype"),
    ],
)
def test_a_header_entry_of_a_wrong_form(change: dict[str, Any], part: str, sound: Path) -> None:
    header, data = bad.split(sound / bad.W)
    header["model.norm.weight"] |= change
    bad.join(sound / bad.W, header, data)
    message = refusal_of_files(sound)
    assert "'model.norm.weight'" in message
    assert part in message


@pytest.mark.parametrize(
    ("header", "part"),
    [
        (b"[]", "expected a JSON object"),
        (b'{"a": 3}', "'a': expected an object"),
        (b'{"a": {}, "a": {}}', "'a' stands twice"),
        (b'{"a": ' + b"[" * 100_000, "header is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "header is not JSON"),
    ],
)
def test_a_header_of_a_wrong_form(header: bytes, part: str, sound: Path) -> None:
    bad.join(sound / bad.W, header, b"")
    assert part in refusal_of_files(sound)


def test_an_error_page_instead_of_weights(sound: Path) -> None:
    (sound / bad.W).write_text("<!DOCTYPE html><html><body>Not Found</body></html>")
    assert "begins with b'<!DOCTYP'" in refusal_of_files(sound)


def test_a_pipe_is_not_waited_for(sound: Path) -> None:
    (sound / bad.W).unlink()
    os.mkfifo(sound / bad.W)
    assert "no regular file" in refusal_of_files(sound)


def test_a_link_to_itself(sound: Path) -> None:
    (sound / bad.W).unlink()
    (sound / bad.W).symlink_to(bad.W)
    assert bad.W in refusal_of_files(sound)
