"""A checkpoint's tokenizer, with the chat template of another folder where it has none; and what its tokens say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.files import read_json
from duat_cli.loading.model.load import LoadedModel, load_tokenizer, tokenizer_if_any
from duat_cli.loading.prompts import said
from duat_cli.loading.texts import numbered
from duat_cli.text import clean

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"


def templated_tokenizer(path: Path, template: Path | None, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder. template: another, whose chat template stands in for one that the folder lacks."""
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    if template is not None and not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = template_of(template)
    return tokenizer


def token_texts(loaded: LoadedModel, trust_remote_code: bool) -> Callable[[int], str]:
    """What each token of a model that is loaded says, which may be part of a character; or where a position is."""
    if not loaded.reads_tokens:
        return lambda position: numbered([position])
    tokenizer = tokenizer_if_any(loaded.files.path, trust_remote_code=trust_remote_code)
    return lambda token: said(tokenizer, [token], "--prompt: ")


def template_of(folder: Path) -> str | dict[str, str] | None:
    """The chat template of a folder, or several by name, of which one is the default; such as an adapter's, which often
    has no tokenizer of its own. None without one."""
    if (path := folder / TEMPLATE).is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{clean(str(path))}: cannot be read as UTF-8; save it again") from error
    found = read_json(folder / CONFIG).get("chat_template") if (folder / CONFIG).is_file() else None
    if isinstance(found, list):
        return {str(one.get("name")): str(one.get("template")) for one in found if isinstance(one, dict)}
    return found if isinstance(found, str) else None
