"""Checkpoints without chosen terms: read back by transformers itself and compared with hooks on the untouched model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers import single_model
from pruning import Case, applied, neurons
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    T5ForConditionalGeneration,
)

from duat_cli.analysis.prune.sets import apply as apply_module
from duat_cli.analysis.prune.sets.apply import check_directory
from duat_cli.errors import DuatError, InputError, UnsupportedModelError
from duat_cli.loading.model.load import load
from duat_cli.models.discovery.structure import discover
from duat_cli.models.terms.sites import TermId


def close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).norm() / b.norm()) < 1e-5


def state_of(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# -- each kind, against an edit by hand ----------------------------------------------------------------------


def test_a_head_by_hand(tmp_path: Path) -> None:
    """Query head 1 of llama shares its kv head with head 0: O's columns are zeroed, V stays."""
    case = Case(tmp_path, "llama")
    before = state_of(case.model)
    done = case.apply(TermId("head", 1, 1))
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert (done.removed_blocks, done.removed_neurons, done.zeroed, done.notes) == ((), 0, 1, ())
    assert done.error <= 1e-5
    written = AutoModelForCausalLM.from_pretrained(case.out).state_dict()
    changed = [name for name, value in written.items() if not torch.equal(value, before[name])]
    assert changed == ["model.layers.1.self_attn.o_proj.weight"]
    width = case.model.config.head_dim
    with torch.no_grad():
        case.model.model.layers[1].self_attn.o_proj.weight[:, width : 2 * width] = 0
    assert torch.equal(written[changed[0]], case.model.state_dict()[changed[0]])
    assert close(case.logits(), case.own())


@pytest.mark.parametrize("model_type", ["gpt2", "phi3", "opt"])
def test_neurons_that_all_blocks_lose_are_removed(model_type: str, tmp_path: Path) -> None:
    case = Case(tmp_path, model_type)
    whole = case.sites[case.structure.calls[0]].count("neuron")
    done = case.apply(*neurons(3, 0, 7, whole - 1), TermId("neuron", 2, 5))
    assert (done.removed_neurons, done.zeroed) == (3, 1)
    assert "1 a block, are zeroed" in done.notes[0]
    assert len(done.notes) == 1
    written = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(case.out).parameters())
    assert written < sum(p.numel() for p in case.model.parameters())
    for term in (*neurons(3, 0, 7, whole - 1), TermId("neuron", 2, 5)):
        site, number = case.sites[case.structure.calls[term.block]].find(term)
        weight = site.module.weight
        with torch.no_grad():
            (weight if type(site.module).__name__ == "Conv1D" else weight.T)[number] = 0  # type: ignore[operator, union-attr, index]
    assert close(case.logits(), case.own())


def test_neurons_that_only_some_blocks_lose_are_zeroed(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama")
    done = case.apply(TermId("neuron", 0, 3), TermId("neuron", 2, 4))
    assert (done.removed_neurons, done.zeroed) == (0, 2)
    assert "one width" in done.notes[0]
    with torch.no_grad():
        case.model.model.layers[0].mlp.down_proj.weight[:, 3] = 0
        case.model.model.layers[2].mlp.down_proj.weight[:, 4] = 0
    assert close(case.logits(), case.own())


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "bloom"])
def test_a_block_is_removed(model_type: str, tmp_path: Path) -> None:
    case = Case(tmp_path, model_type)
    done = case.apply(TermId("block", 1))
    assert (done.removed_blocks, done.zeroed, done.notes) == ((1,), 0, ())
    config = AutoConfig.from_pretrained(case.out)
    assert config.num_hidden_layers == 2
    if getattr(config, "layer_types", None) is not None:
        assert config.layer_types == [case.model.config.layer_types[k] for k in (0, 2)]
    assert len(case.structure.calls) == case.model.config.num_hidden_layers == 3
    block = case.structure.calls[1]
    block.forward = lambda hidden_states, *args, **kwargs: (  # type: ignore[method-assign]
        (hidden_states, None) if model_type == "bloom" else hidden_states
    )
    assert close(case.logits(), case.own())


def test_what_is_declared_of_single_blocks_goes_with_them(tmp_path: Path) -> None:
    """Gemma 4 declares wider heads of its global attention by the numbers of these blocks."""
    shape = single_model("gemma4_text").config.to_dict() | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
    }
    shape.pop("per_layer_config")
    Gemma4ForCausalLM(Gemma4TextConfig(**shape)).save_pretrained(tmp_path / "source")
    loaded = load(str(tmp_path / "source"))
    structure = discover(loaded.model)
    terms = [TermId("block", 1)]
    done = applied(loaded, structure, terms, tmp_path / "out")
    assert done.removed_blocks == (1,)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["per_layer_config"] == {
        "1": {"head_dim": 32},
        "4": {"head_dim": 32},
    }
    assert len(loaded.model.config.per_layer_config) == 6


def test_a_hybrid_is_not_written_as_one_that_only_runs_without_a_cache(tmp_path: Path) -> None:
    """Without any attention transformers does not know how long the cache is."""
    case = Case(tmp_path, "qwen3_next")
    attention = [k for k, kind in enumerate(case.model.config.layer_types) if kind == "full_attention"]
    done = case.apply(*(TermId("block", block) for block in attention))
    assert (done.removed_blocks, done.zeroed) == ((), len(attention))
    assert "not removed but zeroed: it then runs with use_cache=False alone (ValueError" in done.notes[-1]
    written = AutoModelForCausalLM.from_pretrained(case.out)
    assert written.generate(torch.arange(40, 45)[None], max_new_tokens=2, do_sample=False).shape[1] > 5


def test_blocks_neurons_and_heads_at_once(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama")
    terms = [TermId("block", 0), TermId("head", 1, 3), TermId("attention", 2, 0), TermId("neuron", 0, 9)]
    done = case.apply(*terms, TermId("neuron", 1, 1), TermId("neuron", 2, 2))
    assert (done.removed_blocks, done.removed_neurons, done.zeroed, done.notes) == ((0,), 1, 2, ())
    model = case.model.model
    with torch.no_grad():
        model.layers[1].self_attn.o_proj.weight[:, 48:] = 0
        model.layers[2].self_attn.o_proj.weight.zero_()
        model.layers[1].mlp.down_proj.weight[:, 1] = 0
        model.layers[2].mlp.down_proj.weight[:, 2] = 0
    model.layers[0].forward = lambda hidden_states, *args, **kwargs: hidden_states
    assert close(case.logits(), case.own())


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_oss", "bert", "gemma2"])
def test_branches_are_zeroed(model_type: str, tmp_path: Path) -> None:
    case = Case(tmp_path, model_type)
    done = case.apply(TermId("ffn", 1, 0), TermId("attention", 2, 0))
    assert (done.zeroed, done.notes) == (2, ())
    assert done.error <= 1e-5


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen2_moe"])
def test_an_expert_is_zeroed(model_type: str, tmp_path: Path) -> None:
    case = Case(tmp_path, model_type)
    done = case.apply(TermId("expert", 1, 2), TermId("expert", 1, 0))
    assert (done.zeroed, done.notes) == (2, ())
    assert done.error <= 1e-5


# -- what cannot be removed, or not written --------------------------------------------------------------------


def test_a_block_that_depends_on_its_number_is_zeroed_and_said_so(tmp_path: Path) -> None:
    """gpt2 can scale attention by 1 / (number of the block + 1): behind a cut the later blocks would change."""
    model = single_model("gpt2")
    model.config.scale_attn_by_inverse_layer_idx = True
    model.save_pretrained(tmp_path / "source")
    loaded = load(str(tmp_path / "source"))
    structure = discover(loaded.model)
    done = applied(loaded, structure, [TermId("block", 1)], tmp_path / "out")
    assert (done.removed_blocks, done.zeroed) == ((), 1)
    assert "another output" in done.notes[0]
    assert done.error <= 1e-5


def test_a_set_that_weights_cannot_hold_is_refused(tmp_path: Path) -> None:
    """albert's blocks are one module; bert's blocks end in a norm, and its config can lose a block."""
    case = Case(tmp_path, "albert")
    with pytest.raises(UnsupportedModelError, match="one module"):
        case.apply(TermId("head", 1, 0))
    assert not case.out.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]
    everywhere = [TermId("head", block, 0) for block in range(len(case.structure.calls))]
    assert case.apply(*everywhere).error <= 1e-5


def test_bert_loses_a_block(tmp_path: Path) -> None:
    assert Case(tmp_path, "bert").apply(TermId("block", 2)).removed_blocks == (2,)


def test_the_encoder_of_t5(tmp_path: Path) -> None:
    case = Case(tmp_path, "t5")
    done = case.apply(TermId("head", 0, 1), TermId("block", 1))
    assert done.error <= 1e-5
    assert done.removed_blocks in ((1,), ())


def test_a_decoder_that_would_not_write_any_more_keeps_its_encoder_s_blocks(tmp_path: Path) -> None:
    """T5's cache has as many layers as the encoder has blocks: with fewer than the decoder it cannot generate."""
    case = Case(tmp_path, "t5")
    ids = torch.tensor([[40, 41, 42, 43]])
    case.model.generate(input_ids=ids, decoder_start_token_id=0, max_new_tokens=3)
    assert case.model.config.num_decoder_layers == 2
    done = case.apply(TermId("block", 1), TermId("block", 2))
    assert (done.removed_blocks, done.zeroed) == ((), 2)
    assert done.notes[0].startswith("2 blocks not removed but zeroed: it then runs with use_cache=False alone")
    again = T5ForConditionalGeneration.from_pretrained(case.out)
    assert again.generate(input_ids=ids, decoder_start_token_id=0, max_new_tokens=3).shape[1] > 1


def test_each_tensor_keeps_the_dtype_that_it_is_stored_in(tmp_path: Path) -> None:
    """Norms in float32 beside matrices in bfloat16; and what the model has no place for is named, and no saving."""
    case = Case(tmp_path, "llama", torch.bfloat16)
    source = tmp_path / "source" / "model.safetensors"
    tensors = tensors_of(tmp_path / "source")
    norms = {name for name in tensors if "norm" in name}
    mixed = {name: value.float() * 1.001 if name in norms else value for name, value in tensors.items()}
    save_file(mixed | {"model.mtp.0.weight": torch.ones(64, 64)}, source, {"format": "pt"})
    loaded = load(str(tmp_path / "source"), dtype="float32")
    structure = discover(loaded.model)
    terms = [TermId("head", 0, 2)]
    done = applied(loaded, structure, terms, case.out)
    after = tensors_of(case.out)
    assert {name for name, value in after.items() if value.dtype == torch.float32} == norms
    assert (done.dtype, done.bytes_before) == ("bfloat16", done.bytes_after)
    assert done.bytes_after == sum(value.nbytes for value in mixed.values())
    assert done.notes[0] == "1 tensor not carried over, unused by LlamaForCausalLM: 'model.mtp.0.weight'"


def test_the_stored_dtype_stays(tmp_path: Path) -> None:
    """A bfloat16 checkpoint, worked on in float32, is written in bfloat16: zeros lose nothing."""
    case = Case(tmp_path, "llama", torch.bfloat16)
    assert case.model.dtype == torch.float32
    done = case.apply(TermId("head", 0, 2), TermId("block", 1))
    assert (done.dtype, done.removed_blocks) == ("bfloat16", (1,))
    assert json.loads((case.out / "config.json").read_text())["dtype"] == "bfloat16"
    again = AutoModelForCausalLM.from_pretrained(case.out, dtype="auto")
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    case.model.float()
    with torch.no_grad():
        case.model.lm_head.weight[0, 0] += 1e-5  # no longer a bfloat16 number
    case.out = case.folder / "second"
    assert case.apply(TermId("head", 0, 2)).dtype == "float32"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tied_weights_are_written_once(dtype: torch.dtype, tmp_path: Path) -> None:
    """gpt2's LM head is its embedding, and stays so in a checkpoint that is worked on in another dtype."""
    case = Case(tmp_path, "gpt2", dtype)
    assert case.model.lm_head.weight is case.model.transformer.wte.weight
    before = tensors_of(tmp_path / "source")
    assert "lm_head.weight" not in before
    case.apply(TermId("head", 0, 1))
    assert tensors_of(case.out).keys() == before.keys()
    assert sum(t.nbytes for t in tensors_of(case.out).values()) == sum(t.nbytes for t in before.values())
    case.out = tmp_path / "shorter"
    done = case.apply(TermId("block", 2))
    assert done.removed_blocks == (2,)
    after = tensors_of(case.out)
    assert done.bytes_before == sum(t.nbytes for t in before.values())
    assert done.bytes_after == sum(t.nbytes for t in after.values()) < done.bytes_before
    assert after.keys() == {name for name in before if ".h.2." not in name}
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert {value.dtype for value in after.values()} == {dtype}


def test_views_of_one_storage_are_told_apart(tmp_path: Path) -> None:
    """Same address, other strides or another shape: another tensor. Only what is the same is converted once."""
    case = Case(tmp_path, "llama", torch.bfloat16)
    whole = torch.arange(9.0).reshape(3, 3)
    values = {"a": whole, "same": whole, "transposed": whole.T, "row": whole[0], "empty": whole[:0]}
    fake: Any = SimpleNamespace(dtype=torch.float32, state_dict=lambda: values)
    state, dtype = apply_module._state(fake, case.loaded.files)
    assert state is not None
    assert dtype == torch.bfloat16
    assert state["a"] is state["same"]
    assert len({id(value) for value in state.values()}) == 4
    assert all(torch.equal(state[name].float(), value) for name, value in values.items())


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama")
    (case.folder / "source" / "chat_template.jinja").write_text("{{ messages }}")
    stated = json.dumps({"eos_token_id": [1, 2], "do_sample": True, "temperature": 0.7})
    (case.folder / "source" / "generation_config.json").write_text(stated)
    case.apply(TermId("head", 0, 0))
    assert (case.out / "generation_config.json").read_text() == stated  # transformers would write its own
    assert (case.out / "tokenizer.json").read_text() == "{}"
    assert (case.out / "chat_template.jinja").exists()
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert case.out.stat().st_mode == (tmp_path / "folder").stat().st_mode
    assert {p.stat().st_mode for p in case.out.iterdir()} == {(tmp_path / "file").stat().st_mode}


def test_all_files_but_weights_come_along(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama")
    source = case.folder / "source"
    (source / "modules.json").write_text(json.dumps([{"type": "T", "path": ""}, {"type": "D", "path": "2_Dense"}]))
    behind = {"2_Dense/config.json", "2_Dense/model.safetensors"}
    foreign = {"onnx/model.onnx", "onnx/config.json", ".git/HEAD"}
    for name in (*behind, *foreign, "1_Pooling/config.json", "LICENSE", "README.md"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f"of {name}")
    (source / "optimizer.pt").write_bytes(b"x")
    case.apply(TermId("head", 0, 0))
    here = {path.relative_to(case.out).as_posix() for path in case.out.rglob("*") if path.is_file()}
    assert {"1_Pooling/config.json", "LICENSE", "README.md", *behind} <= here
    assert not {*foreign, "optimizer.pt"} & here
    assert (case.out / "README.md").read_text() == "of README.md"  # the card is written with the report at hand
    assert (source / "README.md").read_text() == "of README.md"


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").touch()
    for name, reason in (("full", "not empty"), ("file", "is a file"), ("none/out", "no folder")):
        with pytest.raises(InputError, match=reason):
            check_directory(tmp_path / name)
    (tmp_path / "empty").mkdir()
    check_directory(tmp_path / "empty")
    assert [*(tmp_path / "empty").iterdir(), *tmp_path.glob(".duat-*")] == []
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.mkdtemp", Mock(side_effect=PermissionError(13, "Permission denied")))
        with pytest.raises(InputError, match="new': cannot write: Permission denied"):
            check_directory(tmp_path / "new")
    case = Case(tmp_path, "llama")
    with pytest.raises(InputError, match="empty"):
        case.apply()


def test_a_disk_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, "llama")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(case.model, "save_pretrained", full)
    with pytest.raises(InputError, match="No space left"):
        case.apply(TermId("head", 0, 0))
    monkeypatch.setattr(apply_module.tempfile, "mkdtemp", full)
    with pytest.raises(InputError, match="No space left"):
        case.apply(TermId("head", 0, 0))
    assert os.listdir(tmp_path) == ["source"]


def test_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, "llama")
    before = state_of(case.model)

    def interrupted(*args: Any) -> tuple[float, int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(apply_module, "_read_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        case.apply(*neurons(3, 1), TermId("block", 1))
    assert os.listdir(tmp_path) == ["source"]
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert (len(case.model.model.layers), case.model.config.num_hidden_layers) == (3, 3)
    assert case.model.config.intermediate_size == 48


def test_a_checkpoint_that_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: the wrong head zeroed."""
    case = Case(tmp_path, "llama")
    original = apply_module.zeroed

    def wrong(model: Any, structure: Any, sites: Any, terms: Any) -> Any:
        return original(model, structure, sites, [TermId("head", 1, 2)] if terms else [])

    monkeypatch.setattr(apply_module, "zeroed", wrong)
    with pytest.raises(DuatError, match="another output"):
        case.apply(TermId("head", 1, 1))
    assert os.listdir(tmp_path) == ["source"]


# -- whole key and value heads -------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_key_and_value_heads_leave_the_file_with_the_heads_that_use_them(model_type: str, tmp_path: Path) -> None:
    """A different one of every block; plain transformers reads it, with the output of the ablation by hooks."""
    case = Case(tmp_path, model_type)
    gone = [TermId("head", block, 2 * (block % 2) + k) for block in range(3) for k in range(2)]
    ablated = apply_module._ablated(case.model, case.structure, case.sites, gone)
    before = state_of(case.model)
    done = case.apply(*gone, TermId("head", 0, 2))
    assert (done.removed_groups, done.zeroed) == (1, 1)
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert done.error <= 1e-5
    config = AutoConfig.from_pretrained(case.out)
    assert (config.num_attention_heads, config.num_key_value_heads) == (2, 1)
    written = {name: tuple(t.shape) for f in case.out.glob("*.safetensors") for name, t in load_file(f).items()}
    assert written["model.layers.1.self_attn.k_proj.weight"][0] == case.model.config.head_dim
    assert ablated.shape[-1] == case.own().shape[-1]
    rows = torch.cat([before["model.layers.1.self_attn.q_proj.weight"][: 2 * config.head_dim]])
    kept = load_file(next(case.out.glob("*.safetensors")))["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(kept, rows)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox"])
def test_heads_are_zeroed_where_no_config_states_their_number(model_type: str, tmp_path: Path) -> None:
    """Their width follows from the number of heads, or their layers are one."""
    case = Case(tmp_path, model_type)
    done = case.apply(*(TermId("head", block, 1) for block in range(3)))
    assert (done.removed_groups, done.zeroed) == (0, 3)
    assert done.error <= 1e-5
    assert any("zeroed" in note for note in done.notes)


def test_blocks_neurons_and_key_and_value_heads_leave_together(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama")
    heads = [TermId("head", block, k) for block in (0, 2) for k in (2, 3)]
    done = case.apply(TermId("block", 1), *heads, TermId("neuron", 0, 4), TermId("neuron", 2, 7))
    assert (done.removed_blocks, done.removed_groups, done.removed_neurons, done.zeroed) == ((1,), 1, 1, 0)
    assert done.error <= 1e-5
    assert AutoConfig.from_pretrained(case.out).num_attention_heads == 2
