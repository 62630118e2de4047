"""A checkpoint's tokenizer, with the chat template of another folder where it has none."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from duat_cli.errors import CheckpointError
from duat_cli.loading.model.load import load_tokenizer


def templated_tokenizer(path: Path, template: Path | None, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder. template: another, whose chat template stands in for one that the folder lacks."""
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    if template is not None and not getattr(tokenizer, "chat_template", None):
        with contextlib.suppress(CheckpointError):  # such as an adapter's folder, which often has no tokenizer
            tokenizer.chat_template = load_tokenizer(template).chat_template
    return tokenizer
