"""The place of a checkpoint: a local folder, the bundled demo, or the hub's cache, filled online where needed.

Neither torch nor transformers is imported here, so that a wrong name is answered at once.
"""

from __future__ import annotations

import importlib.resources
import os
from dataclasses import dataclass
from pathlib import Path

from duat_cli.compat.huggingface_hub import cache_folder
from duat_cli.errors import CheckpointError, InputError
from duat_cli.loading.checkpoint.files import near_folder
from duat_cli.loading.checkpoint.index import ADAPTER_CONFIG, INDEX, WEIGHTS
from duat_cli.loading.quiet import described
from duat_cli.text import clean, expanded, shown

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "*.tiktoken",
)  # fmt: skip
_BESIDE_TOKENIZER = (
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
_HUB_FILES = (
    "config.json", WEIGHTS, INDEX, "model-?????-of-?????.safetensors", *TOKENIZER_FILES,
    "modules.json", "*sentence*.json", "[1-9]*_*/config.json", "[1-9]*_*/model.safetensors",
    *_BESIDE_TOKENIZER, ADAPTER_CONFIG, "generation_config.json", "*processor_config.json",
)  # fmt: skip
READ_FILES = (*_HUB_FILES, "*.safetensors", "*.py")
"""Patterns of the files that may be read from a folder of a checkpoint or an adapter."""


@dataclass(frozen=True)
class Source:
    """The place of a checkpoint."""

    path: Path
    """A local folder; for a hub checkpoint its folder in the cache."""
    name: str
    """The name as the user wrote it; 'demo' for the bundled model."""
    revision: str | None
    """Commit of a hub checkpoint; None for a local folder."""


def resolve(
    source: str | None,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
) -> Source:
    """The local folder of what the user named; only a hub id is looked up in the cache, then online."""
    if source is None:
        if revision is not None:
            raise InputError(f"--revision {shown(revision)}: the bundled demo has none; give MODEL")
        return Source(demo_path(), "demo", None)
    if not source.strip() or "\0" in source:
        raise InputError(f"MODEL {shown(source)}: expected a folder or a hub id such as org/name")
    if not is_local(source):
        return checkpoint(source, revision, token, cache_dir, trust_remote_code)
    if revision is not None:
        raise InputError(f"--revision {shown(revision)}: {shown(source)} is a local folder, which has none")
    return Source(expanded(source), source, None)


def is_local(source: str) -> bool:
    """Whether the source can only be a path: it exists, or no hub id looks like it."""
    return os.path.lexists(source) or source.startswith((".", "/", "~")) or source.count("/") > 1


def demo_path() -> Path:
    """The bundled demo checkpoint."""
    return Path(str(importlib.resources.files("duat_cli.demo") / "model"))


def demo_adapter_path() -> Path:
    """The bundled adapter of the demo checkpoint."""
    return demo_path().parent / "adapter"


def checkpoint(
    repo: str, revision: str | None, token: str | None, cache_dir: str | None, trust_remote_code: bool = False
) -> Source:
    """A checkpoint of the hub, in the local cache: config, tokenizer, safetensors; never pickle."""
    patterns = [*_HUB_FILES, *(["*.py"] if trust_remote_code else [])]
    path = snapshot(repo, revision, token, cache_dir, patterns)
    if not any((path / name).exists() for name in (WEIGHTS, INDEX)):
        raise CheckpointError(
            f"{shown(repo)}: neither the hub nor the cache has its {WEIGHTS}; pickle is never read: "
            "convert it to safetensors, or use a --revision that holds safetensors"
        )
    return Source(path, repo, path.name)


def snapshot(repo: str, revision: str | None, token: str | None, cache_dir: str | None, patterns: list[str]) -> Path:
    """The folder of a commit in the hub's cache, with the files of these patterns; the folder's name is the commit.

    CheckpointError says why neither hub nor cache has it; its text holds no token.
    """
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, token=token, cache_dir=cache_dir, allow_patterns=patterns
        )
    except Exception as error:
        text = _hub_reason(error, revision, cache_dir or cache_folder())
        text = text.replace(token, "***") if token else text
        near = near_folder(Path(repo))
        text = f"no such folder{near}; as a hub id: {text.removeprefix('no such folder, ')}" if near else text
        raise CheckpointError(f"{shown(repo)}: {text}") from error
    return Path(folder)


def _hub_reason(error: Exception, revision: str | None, cache: str) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return "no such folder, and not a hub id, which looks like org/name"
    if isinstance(error, errors.GatedRepoError):
        return "is gated: accept its terms on its hub page, then give --token"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision {shown(revision)} on the hub"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such folder, and no such repository on the hub; a private one needs --token"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError)):
        return (
            f"no such folder, not in the cache {clean(str(cache))}, and the hub is off or out of reach; "
            "go online once, or give a local folder"
        )
    return f"cannot be fetched from the hub: {described(error)}"


def has_tokenizer(path: Path) -> bool:
    """Whether a checkpoint folder has a file that a tokenizer is made from."""
    return any(any(path.glob(pattern)) for pattern in TOKENIZER_FILES)


def tokenizer_files(path: Path) -> list[Path]:
    """The files that the tokenizer of a checkpoint folder is made from."""
    return sorted({file for pattern in (*TOKENIZER_FILES, *_BESIDE_TOKENIZER) for file in path.glob(pattern)})
