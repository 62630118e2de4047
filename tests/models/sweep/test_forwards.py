"""Plain passes one by one and side by side: the same results, and one read of the weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch

from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import Source
from duat_cli.loading.model.load import load_files
from duat_cli.models.sweep.forwards import forwards
from duat_cli.zoo import tiny


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_side_by_side_they_give_the_same_from_one_read(model_type: str, tmp_path: Path) -> None:
    tiny.tiny_model(model_type).save_pretrained(tmp_path)
    place, files = Source(tmp_path, "tiny", None), inspect_folder(tmp_path)
    whole, parts = (load_files(place, files, paged=paged) for paged in (False, True))
    ids = [helpers.token_ids(whole.model, tokens=4 + k, seed=k) for k in range(3)]

    def calls(model: Any) -> list[Any]:
        return [functools.partial(helpers.logits_of, model, one) for one in ids]

    assert parts.paged is not None
    expected, got = forwards(None, calls(whole.model)), forwards(parts.paged.pager, calls(parts.model))
    assert all(map(torch.equal, got, expected))
    assert not any(one.requires_grad for one in got)
    assert parts.paged.pager.bytes_read == files.total_bytes
