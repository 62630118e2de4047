"""What transformers computes for itself is there without any weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paging import in_parts, saved, whole


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "bert", "gpt2", "gpt_neox", "modernbert"])
def test_buffers_are_those_of_a_whole_load(model_type: str, tmp_path: Path) -> None:
    expected = dict(whole(saved(model_type, tmp_path)).model.named_buffers())
    with in_parts(tmp_path) as loaded:
        found = dict(loaded.model.named_buffers())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert not found[name].is_meta, name
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
