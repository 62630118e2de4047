"""tokenizers: known to work with 0.22 and 0.23."""

from __future__ import annotations


def is_panic(error: BaseException) -> bool:
    """Whether Rust code panicked. The class is pyo3's, is no Exception, and cannot be imported from any module. Without
    it, a broken tokenizer ends duat with an unexpected error instead of a line that names the checkpoint."""
    return type(error).__name__ == "PanicException"


def byte_alphabet() -> list[str]:
    """The 256 characters that byte-level tokenizers write bytes with. Without it, no round trip of a text is tried."""
    from tokenizers.pre_tokenizers import ByteLevel

    return list(ByteLevel.alphabet())
