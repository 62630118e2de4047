"""A checkpoint's tokenizer, with the chat template of another folder where it has none; and the text of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.files import open_file, read_json
from duat_cli.loading.checkpoint.source import TOKENIZER_FILES, has_tokenizer
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import said
from duat_cli.loading.quiet import calling_tokenizer
from duat_cli.loading.texts import numbered
from duat_cli.text import clean

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
_OR_IDS = '; or give token ids, lines such as {"input_ids": [5, 6]} of a .jsonl file, to --prompts'


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint folder. It is loaded apart from the model, because a command about weights needs
    none."""
    if not has_tokenizer(path):
        raise CheckpointError(f"{clean(str(path))}: no tokenizer to read texts with, expected tokenizer.json{_OR_IDS}")
    for file in sorted(path.iterdir()):
        if file.name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
            read_json(file)  # transformers does not say which file is broken
        elif file.name == "merges.txt" or any(file.match(pattern) for pattern in TOKENIZER_FILES):
            open_file(file).close()  # nor does it notice a pipe, on which it would wait
    with calling_tokenizer(f"{clean(str(path))}: tokenizer cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=trust_remote_code)
        tokenizer.truncation_side = "right"  # --max-tokens keeps the beginning, whatever the files prefer
        return tokenizer


def tokenizer_if_any(path: Path, *, trust_remote_code: bool) -> Any:
    """The tokenizer of a checkpoint folder; None where it has none, so that only token ids can be read."""
    return load_tokenizer(path, trust_remote_code=trust_remote_code) if has_tokenizer(path) else None


def templated_tokenizer(
    path: Path, template: Path | None, *, needed: bool = True, trust_remote_code: bool = False
) -> Any:
    """The tokenizer of a folder. template: another folder, whose chat template stands in for one that is missing.
    needed: whether texts are to be read; if only token ids are, the result is None for a folder without a tokenizer."""
    load = load_tokenizer if needed else tokenizer_if_any
    tokenizer = load(path, trust_remote_code=trust_remote_code)
    if tokenizer is not None and template is not None and not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = template_of(template)
    return tokenizer


def token_texts(loaded: LoadedModel, trust_remote_code: bool) -> Callable[[int], str]:
    """A function that returns the text of a token, which may be part of a character; or, for a model that reads no
    tokens, the number of a position."""
    if not loaded.reads_tokens:
        return lambda position: numbered([position])
    tokenizer = tokenizer_if_any(loaded.files.path, trust_remote_code=trust_remote_code)
    return lambda token: said(tokenizer, [token], "--prompt: ")


def template_of(folder: Path) -> str | dict[str, str] | None:
    """The chat template of a folder, or several by name, of which one is the default; None if there is none. An
    adapter's folder often has a template and no tokenizer."""
    if (path := folder / TEMPLATE).is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{clean(str(path))}: cannot be read as UTF-8; save it again") from error
    found = read_json(folder / CONFIG).get("chat_template") if (folder / CONFIG).is_file() else None
    if isinstance(found, list):
        return {str(one.get("name")): str(one.get("template")) for one in found if isinstance(one, dict)}
    return found if isinstance(found, str) else None
