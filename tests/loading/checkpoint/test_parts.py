"""Parts told by names alone are the pages that the model's modules give."""

from __future__ import annotations

from pathlib import Path

import pytest
from paging import in_parts, pager_of, saved

from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.parts import FRAME_BYTES, parts_of
from duat_cli.loading.checkpoint.preflight import CheckpointFiles, inspect_folder
from duat_cli.loading.paged.layout import Page


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "gemma2", "mixtral", "falcon", "bloom", "jamba"])
def test_blocks_are_the_pages_of_the_model(model_type: str, tmp_path: Path) -> None:
    files = inspect_folder(saved(model_type, tmp_path))
    with in_parts(tmp_path, kept=1 << 30) as loaded:
        pages: list[Page] = list(pager_of(loaded)._order)
    assert not pages[0].block
    expected = sorted(sum(files.tensors[name].bytes for name in page.tensors) for page in pages[1:])
    parts = parts_of(files, 4)
    assert sorted(block.stored for block in parts.blocks) == expected
    assert parts.frame.stored == sum(files.tensors[name].bytes for name in pages[0].tensors)
    assert parts.layers == ()


def test_a_large_matrix_outside_of_blocks_is_a_part_of_its_own() -> None:
    rows = FRAME_BYTES // 8 + 1

    def entry(*shape: int) -> TensorEntry:
        return TensorEntry(shape, "BF16", "model.safetensors", 2 * shape[0] * shape[-1], 0)

    tensors = {"embed.weight": entry(rows, 2), "norm.weight": entry(4), "layers.0.1.w": entry(3, 3)}
    files = CheckpointFiles(Path(), {}, (), tensors, (), 0, {})
    assert [layer.name for layer in parts_of(files, 4).layers] == ["embed.weight"]
    assert parts_of(files, 2).layers == ()  # half of it in memory
    assert [block.name for block in parts_of(files, 4).blocks] == ["layers.0"]
