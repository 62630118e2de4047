"""A panic of Rust code is known by its class; tests/loading/model/test_load.py has a real one."""

from __future__ import annotations

from duat_cli.compat.tokenizers import byte_alphabet, is_panic


def test_panics() -> None:
    assert is_panic(type("PanicException", (BaseException,), {})("index out of bounds"))
    assert not is_panic(KeyboardInterrupt())
    assert not is_panic(ValueError("PanicException"))


def test_the_alphabet_of_bytes() -> None:
    assert len(set(byte_alphabet())) == 256
    assert {"a", "\u0120"} <= set(byte_alphabet())
