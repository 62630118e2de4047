"""Checkpoints of tiny models, loaded whole and block by block."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import bad_checkpoints
import torch
from helpers import two_deep
from sharing import SHARING, model_of
from transformers import LlamaConfig, LlamaForCausalLM

from duat_cli.analysis.plan import run
from duat_cli.analysis.plan.run import Plan
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import Source
from duat_cli.loading.model import load
from duat_cli.loading.model.load import LoadedModel, load_files
from duat_cli.loading.paged.layout import layout
from duat_cli.loading.paged.pager import Pager
from duat_cli.results.plan import Way
from duat_cli.zoo import tiny


def saved(model_type: str, folder: Path) -> Path:
    model_of(model_type).save_pretrained(folder)
    return folder


WHOLE = {*SHARING, "zamba", "gemma3n_text"}  # blocks that need others by their numbers


def two_saved(model_type: str, folder: Path) -> Path:
    """Of two blocks, or whole."""
    model = model_of(model_type)
    (model if model_type in WHOLE else two_deep(model)).save_pretrained(folder)
    return folder


def llama_with_tokenizer(folder: Path, **shape: int) -> Path:
    """Random, with grouped heads, attention biases, a byte tokenizer, and nothing at a value that hides a mistake."""
    config = LlamaConfig(
        vocab_size=264, max_position_embeddings=64, attention_bias=True, bos_token_id=256, eos_token_id=257,
        pad_token_id=259, **shape,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    tiny.randomise(model, 3)
    model.save_pretrained(folder)
    bad_checkpoints.tokenizer(folder)
    return folder


def whole(folder: Path, dtype: str = "float32") -> LoadedModel:
    return load_files(Source(folder, "tiny", None), inspect_folder(folder), dtype=dtype)


@contextmanager
def in_parts(folder: Path, dtype: str = "float32", kept: int = 0) -> Iterator[LoadedModel]:
    """kept: bytes of a layer outside of blocks that stay; 0 reads even tiny embeddings by rows."""
    with mock.patch.object(load, "layout", functools.partial(layout, kept=kept)):
        loaded = load_files(Source(folder, "tiny", None), inspect_folder(folder), dtype=dtype, paged=True)
    try:
        yield loaded
    finally:
        pager_of(loaded).close()


@contextmanager
def streaming() -> Iterator[None]:
    """Commands read their weights block by block, however much memory there is."""

    def streamed(made: Plan) -> Way:
        return next(way for way in made.ways if way.weights == "streamed")

    with mock.patch.object(run, "way_of", streamed):
        yield


def pager_of(loaded: LoadedModel) -> Pager:
    assert loaded.paged is not None
    return loaded.paged.pager


def ids_of(loaded: LoadedModel, tokens: int = 9) -> torch.Tensor:
    rows = loaded.model.config.get_text_config().vocab_size
    return torch.randint(40, rows, (1, tokens), generator=torch.Generator().manual_seed(1))


def outputs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids)[0]
    return found


def differing(mine: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two reports differ; nulls of all blocks at once sum in another order than one by one."""
    if isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys():
        return [found for key in mine for found in differing(mine[key], theirs[key], f"{path}.{key}")]
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        pairs = enumerate(zip(mine, theirs, strict=True))
        return [found for k, (a, b) in pairs for found in differing(a, b, f"{path}[{k}]")]
    if ".null." in path and isinstance(mine, float) and isinstance(theirs, float):
        return [] if math.isclose(mine, theirs, rel_tol=1e-13) else [f"{path}: {mine} {theirs}"]
    return [] if mine == theirs else [f"{path}: {mine} {theirs}"]
