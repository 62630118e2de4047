"""tokenizers: known to work with 0.22 and 0.23."""

from __future__ import annotations


def is_panic(error: BaseException) -> bool:
    """Whether Rust code panicked. The class is pyo3's, no Exception, and in no module to import it from. Without it, a
    broken tokenizer ends duat with an unexpected error instead of a line that names the checkpoint."""
    return type(error).__name__ == "PanicException"
