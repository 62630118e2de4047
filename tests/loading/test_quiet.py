"""The libraries below: silent while they work, heard again afterwards, their panics errors."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

import bad_checkpoints as bad
import pytest

from duat_cli.errors import CheckpointError, DuatError
from duat_cli.loading.model.tokenizer import load_tokenizer
from duat_cli.loading.prompts import encode
from duat_cli.loading.quiet import calling_tokenizer, foreign_errors, hushed
from duat_cli.loading.texts import PromptText


def test_the_libraries_are_heard_again_afterwards(sound: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("transformers")
    before = (list(logger.handlers), logger.propagate)
    with hushed() as lines:
        logger.warning("to us")
        print("to nobody")
    assert lines == ["to us"]
    assert (list(logger.handlers), logger.propagate) == before
    assert capfd.readouterr() == ("", "")


def test_a_panic_is_an_error_and_a_stop_is_not() -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(CheckpointError, match="the tokenizer: PanicException: index"), \
            foreign_errors("the tokenizer"):  # fmt: skip
        raise panic("index\nout of bounds")
    with pytest.raises(KeyboardInterrupt), foreign_errors("the tokenizer"):
        raise KeyboardInterrupt
    with pytest.raises(CheckpointError, match="the model: SystemExit: 0"), foreign_errors("the model"):
        sys.exit(0)


@pytest.mark.parametrize("panics", [False, True])
def test_what_rust_prints_is_dropped_and_what_python_prints_is_not(
    panics: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(2, "w", closefd=False) as own:  # as in a process that no test captures
        monkeypatch.setattr(sys, "stderr", own)
        with contextlib.suppress(CheckpointError), calling_tokenizer("the tokenizer"):
            os.write(2, b"thread 'main' panicked")
            print("progress", file=sys.stderr)
            if panics:
                raise type("PanicException", (BaseException,), {})("index out of bounds")
        assert sys.stderr is own
        os.write(2, b"after")
    assert capfd.readouterr() == ("", "progress\nafter")


@pytest.mark.parametrize(("charsmap", "step"), [("", "cannot be loaded"), ("BAAAAP////8=", "fails")])
def test_a_real_panic_prints_nothing(
    charsmap: str, step: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A character table that cannot be parsed, or that points behind its own end; base64."""
    bad.tokenizer(tmp_path)
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    bad.jedit(tmp_path / "tokenizer.json", normalizer=normalizer)
    with pytest.raises(DuatError, match=rf"tokenizer {step}: PanicException: \w"):
        encode(load_tokenizer(tmp_path), [PromptText("abc", "--prompt 1", 1)], None, None, bad.VOCAB)
    assert capfd.readouterr() == ("", "")
