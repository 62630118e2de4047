"""The place of an adapter or a tuned checkpoint: a local folder, the bundled adapter, or a hub id.

A hub id may name its branch, tag or commit behind an @, as in org/name@v2, because --revision is the base's.
"""

from __future__ import annotations

import os
from dataclasses import replace

from duat_cli.errors import CheckpointError, InputError
from duat_cli.loading.adapter.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_adapter
from duat_cli.loading.checkpoint.source import Source, checkpoint, demo_adapter_path, is_local, snapshot
from duat_cli.text import clean, expanded, shown


def find_adapter(name: str, *, token: str | None = None, cache_dir: str | None = None) -> Source:
    """The folder of an adapter. Only its config and its safetensors are fetched from the hub, never pickle.

    A local folder is not opened. CheckpointError, one line, says why it cannot be had.
    """
    return _local(name) or _of_hub(name, token, cache_dir, or_checkpoint=False)


def find_tuned(name: str | None, *, token: str | None = None, cache_dir: str | None = None) -> Source:
    """The folder of an adapter, or of a checkpoint if the hub's repository is no adapter. None: the bundled adapter."""
    if name is None:
        return Source(demo_adapter_path(), "demo adapter", None)
    return _local(name) or _of_hub(name, token, cache_dir, or_checkpoint=True)


def _local(name: str) -> Source | None:
    """The place of a name that can only be a path, else None. A revision behind the @ may contain slashes."""
    if not name.strip() or "\0" in name:
        raise InputError(f"{shown(name)}: expected an adapter or a tuned checkpoint, a folder or a hub id")
    path = expanded(name)
    if os.path.lexists(path):
        return Source(path, name, None)
    if is_local(name.partition("@")[0]):
        raise CheckpointError(f"{clean(name)}: no such folder")
    return None


def _of_hub(name: str, token: str | None, cache_dir: str | None, *, or_checkpoint: bool) -> Source:
    """The place of an adapter or checkpoint on the hub. The adapter's config is fetched first, if there is one, because
    it decides what else to fetch."""
    repo, _, revision = name.partition("@")
    path = snapshot(repo, revision or None, token, cache_dir, [ADAPTER_CONFIG])
    commit = path.name
    if not is_adapter(path):
        if or_checkpoint:
            return replace(checkpoint(repo, commit, token, cache_dir), name=name)
        raise CheckpointError(
            f"{shown(name)}: neither the hub nor the cache has its {ADAPTER_CONFIG}; expected an adapter as PEFT "
            "pushes it"
        )
    path = snapshot(repo, commit, token, cache_dir, [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
    if not (path / ADAPTER_WEIGHTS).exists():
        raise CheckpointError(
            f"{shown(name)}: neither the hub nor the cache has its {ADAPTER_WEIGHTS}; pickle is never read: "
            "save the adapter as safetensors, or name a revision that holds it, as in org/name@main"
        )
    return Source(path, name, commit)
