"""A model whose weights are read block by block against the model itself, to the bit."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from paging import ids_of, in_parts, outputs, pager_of, saved, whole
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from duat_cli.errors import CheckpointError
from duat_cli.loading.model.fingerprint import fingerprint
from duat_cli.loading.paged import pager as module
from duat_cli.loading.paged.layout import Page
from duat_cli.loading.paged.pager import guard

TYPES = [
    "llama",
    "gpt2",
    "bert",
    "albert",
    "t5",
    "mixtral",
    "qwen2_moe",
    "gemma3_text",
    "falcon",
    "distilbert",
    "zamba2",
    "inkling_text",  # a norm within its embedding
]


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [*((name, "float32") for name in TYPES), *((name, "bfloat16") for name in ("t5", "mixtral", "inkling_text"))],
)
def test_the_output_and_the_fingerprint_are_the_models(model_type: str, dtype: str, tmp_path: Path) -> None:
    known = whole(saved(model_type, tmp_path), dtype)
    with in_parts(tmp_path, dtype) as loaded:
        ids = ids_of(known)
        model, stack = loaded.model, known.model
        if known.model.config.is_encoder_decoder:
            model, stack = model.get_encoder(), stack.get_encoder()
        assert torch.equal(outputs(model, ids), outputs(stack, ids))
        assert loaded.paged is not None
        assert loaded.paged.fingerprint(loaded.model) == fingerprint(known.model)
        part = known.model.base_model  # as with --stack
        assert loaded.paged.fingerprint(loaded.model.base_model) == fingerprint(part)
        assert loaded.paged.fingerprint(model) == fingerprint(stack)
        assert loaded.nonfinite_weights == {}


@pytest.mark.parametrize("kept", [0, 1 << 30])
def test_one_block_is_in_memory_at_a_time_and_read_once(kept: int, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with in_parts(tmp_path, kept=kept) as loaded:
        pager, seen = pager_of(loaded), []

        def look(module: torch.nn.Module, args: object, output: object) -> None:
            layers = loaded.model.model.layers
            seen.append([not any(p.is_meta for p in layer.parameters()) for layer in layers])

        for layer in loaded.model.model.layers:
            layer.register_forward_hook(look)
        outputs(loaded.model, ids_of(loaded))
        assert seen == [[True, False, False], [False, True, False], [False, False, True]]
        pager.complete()
        few = 9 * 32 * 4  # rows of the embedding, where it is read by rows
        assert pager.bytes_read <= loaded.files.total_bytes + few
        assert pager.held is None
        assert all(p.is_meta for layer in loaded.model.model.layers for p in layer.parameters())


def test_tied_weights_are_one_parameter_and_read_once(tmp_path: Path) -> None:
    known = whole(saved("gpt2", tmp_path))
    with in_parts(tmp_path) as loaded:
        count = sum(p.numel() for p in known.model.parameters())
        assert sum(p.numel() for p in loaded.model.parameters()) == count
        outputs(loaded.model, ids_of(loaded))
        pager_of(loaded).complete()
        assert sum(p.numel() for p in loaded.model.parameters()) == count
        assert loaded.paged is not None
        assert "lm_head.weight" not in loaded.paged.digests


def test_weights_that_are_no_numbers_are_counted_as_they_pass(tmp_path: Path) -> None:
    path = saved("llama", tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][0, :3] = torch.nan
    tensors["model.layers.2.self_attn.q_proj.weight"].zero_()
    save_file(tensors, path, metadata={"format": "pt"})
    with in_parts(tmp_path) as loaded:
        assert loaded.nonfinite_weights == {}
        pager_of(loaded).complete()
        assert loaded.nonfinite_weights == {"model.layers.1.mlp.up_proj.weight": 3}
        assert loaded.paged is not None
        assert [note.partition(":")[0] for note in loaded.value_notes()] == [
            "3 non-finite weights (NaN or Inf) in 1 tensor",
            f"1 of {loaded.paged.matrices} weight matrices are all zero",
        ]


def test_a_missing_pooler_is_zero(tmp_path: Path) -> None:
    path = saved("bert", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["BertModel"]
    (path / "config.json").write_text(json.dumps(config))
    known = whole(path)
    with in_parts(path) as loaded:
        assert loaded.spare
        for name in loaded.spare:
            assert not loaded.model.get_parameter(name).any()
        assert loaded.paged is not None
        assert loaded.paged.fingerprint(loaded.model) == fingerprint(known.model)
        assert (*loaded.warnings, *loaded.value_notes()) == known.warnings


def test_what_transformers_makes_at_the_load_of_a_whole_model_is_refused(tmp_path: Path) -> None:
    saved("marian", tmp_path)
    with pytest.raises(CheckpointError, match=r"embed_positions.*made by transformers"), in_parts(tmp_path):
        pass


def test_an_embedding_outside_of_its_call_is_no_number(tmp_path: Path) -> None:
    """Used past its module it must not pass for weights."""
    saved("llama", tmp_path)
    with in_parts(tmp_path) as loaded:
        weight = loaded.model.get_input_embeddings().weight
        assert weight.device.type == "cpu"
        assert bool(weight.isnan().all())
        assert weight.untyped_storage().nbytes() == 4


def test_pages_backwards_are_read_ahead_backwards(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with in_parts(tmp_path) as loaded:
        pager = pager_of(loaded)
        blocks = [page for page in pager.pages if page.block]
        for page in reversed(blocks):
            pager.hold(page)
            assert pager.held is page
        pager.release()
        before = pager.bytes_read
        pager.hold(blocks[1])
        assert pager.bytes_read >= before
        pager.release()


class Weights:
    def __init__(self, table: Tensor) -> None:
        self.table, self.held = table, None
        self.asked: list[Page] = []
        self.at_door = self.asked.append
        self.rows_read: list[int] = []

    def rows(self, page: Page, rows: Sequence[int]) -> Tensor:
        self.rows_read += rows
        return self.table[list(rows)]


def test_a_layer_asks_once_a_call_as_long_as_its_page_is_missing() -> None:
    layer, weights = nn.Linear(2, 2), Weights(torch.zeros(0))
    page = Page("layer", (layer,), ("t",), block=True, by_rows=False)
    guard(weights, page, layer)
    layer(torch.zeros(1, 2))
    layer(torch.zeros(1, 2))
    assert weights.asked == [page, page]
    weights.held = page
    layer(torch.zeros(1, 2))
    assert len(weights.asked) == 2


def test_an_embedding_reads_the_rows_it_needs_once_each() -> None:
    table = torch.randn(40, 6)
    layer = nn.Embedding(40, 6, padding_idx=39)
    placeholder = layer.weight
    weights = Weights(table)
    page = Page("embed", (layer,), ("t",), block=False, by_rows=True)
    guard(weights, page, layer)
    ids = torch.tensor([[7, 39, 7, 0]])
    assert torch.equal(layer(ids), table[ids])
    assert sorted(weights.rows_read) == [0, 7, 39]
    assert layer.weight is placeholder
    assert layer.padding_idx == 39
    assert weights.asked == []
    weights.held = page
    assert torch.equal(layer(ids), placeholder[ids])


@pytest.mark.parametrize("number", [-1, 40])
def test_what_lies_beside_the_table_is_no_row_of_it(number: int) -> None:
    layer, weights = nn.Embedding(40, 6), Weights(torch.zeros(41, 6))
    guard(weights, Page("embed", (layer,), ("t",), block=False, by_rows=True), layer)
    with pytest.raises(IndexError, match="out of range"):
        layer(torch.tensor([[7, number]]))
    assert weights.rows_read == []


class Shifted(nn.Embedding):
    """As learned positions are, and as Gemma scales its embeddings."""

    def forward(self, ids: Tensor) -> Tensor:
        return 3 * super().forward(ids + 2).to(self.weight.dtype)


def test_code_of_its_own_stands_around_the_table() -> None:
    table = torch.randn(40, 6)
    layer, weights = Shifted(40, 6), Weights(table)
    guard(weights, Page("embed", (layer,), ("t",), block=False, by_rows=True), layer)
    assert torch.equal(layer(torch.tensor([[7, 0, 7]])), 3 * table[torch.tensor([[9, 2, 9]])])
    assert sorted(weights.rows_read) == [2, 9]


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_what_no_pass_asks_for_is_looked_through_in_pieces(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(model_type, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    [name] = [name for name in tensors if "embed_tokens" in name]
    tensors[name][[3, 3, 50], [0, 1, 5]] = torch.tensor([torch.inf, torch.nan, -torch.inf])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    known = whole(tmp_path, "float32")
    monkeypatch.setattr(module, "ROWS_BYTES", 7 * tensors[name].shape[1] * 4)
    with in_parts(tmp_path, "float32") as loaded:
        pager, sizes = pager_of(loaded), []
        rows = pager.rows
        monkeypatch.setattr(pager, "rows", lambda page, which: sizes.append(len(which)) or rows(page, which))
        assert pager_of(loaded).held is None
        assert loaded.paged is not None
        assert loaded.paged.fingerprint(loaded.model) == fingerprint(known.model)
        assert loaded.nonfinite_weights == known.nonfinite_weights == {name: 3}
        assert max(sizes) == 7


def test_the_placeholder_is_back_after_an_error() -> None:
    layer = nn.Embedding(4, 2)
    placeholder = layer.weight
    weights = Weights(torch.zeros(4, 3))
    guard(weights, Page("embed", (layer,), ("t",), block=False, by_rows=True), layer)

    def fail(module: nn.Module, args: object, output: object) -> None:
        raise ValueError("planted")

    layer.register_forward_hook(fail)
    with contextlib.suppress(ValueError):
        layer(torch.tensor([[1]]))
    assert layer.weight is placeholder


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
