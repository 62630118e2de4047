"""Checkpoints with blocks removed, repeated or narrowed: which block is which, and what the model then answers."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from duat_cli.analysis.lora.report import checkpoint_pair
from duat_cli.analysis.lora.weights.checkpoint_diff import checkpoint_report
from duat_cli.analysis.lora.weights.weight_change import Directions
from duat_cli.errors import CheckpointError
from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.origins import renumbered_stacks
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import Source
from duat_cli.loading.model.load import load_files
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import random_like
from duat_cli.results.base import Run
from duat_cli.results.lora import LoraReport
from duat_cli.zoo import tiny

RUN = Run(started="now", seconds=0.0, peak_memory_bytes=None)
BLOCKS, TOKENS = 5, 61


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=40, num_hidden_layers=BLOCKS, num_attention_heads=4, vocab_size=TOKENS
    )
    return transformers.LlamaForCausalLM(config).eval()


def with_blocks(model: Any, blocks: Sequence[nn.Module]) -> Any:
    """A copy of a llama with these blocks in the place of its own."""
    made = copy.deepcopy(model)
    made.model.layers = nn.ModuleList(copy.deepcopy(block) for block in blocks)
    for number, block in enumerate(made.model.layers):
        block.self_attn.layer_idx = number
    made.config.num_hidden_layers = len(blocks)
    return made


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def origins(base: Path, tuned: Path) -> list[tuple[str, str | None]]:
    before, after = (BaseWeights(Source(f, f.name, None), inspect_folder(f)) for f in (base, tuned))
    with before, after:
        found = [one for stack in renumbered_stacks(before, after) for one in stack.blocks]
    return [(one.block.name, one.base and one.base.name) for one in found]


def compared(base: Path, tuned: Path, prompts: Sequence[list[int]] = (), *, paged: bool = False) -> LoraReport:
    """prompts: as token ids. paged: weights are read block by block."""
    weights = [BaseWeights(Source(f, f.name, None), inspect_folder(f)) for f in (base, tuned)]
    report = checkpoint_report(weights[0], weights[1], Directions(), quiet, lambda **_: RUN)
    if not prompts:
        return report
    before, after = (load_files(one.source, one.files, paged=paged) for one in weights)
    made = [Prompt(str(ids), "0" * 64, torch.tensor([ids]), k) for k, ids in enumerate(prompts)]
    with checkpoint_pair(report, before, after, quiet) as pair:
        return pair.report(made, str, lambda **_: RUN)


def stream(model: Any, ids: Tensor) -> Tensor:
    """What the last block gives, in front of the model's last norm."""
    seen = list[Tensor]()
    with model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach())):
        model(ids)
    return seen[0]


def quiet(*_: Any) -> None:
    return None


@pytest.mark.parametrize("order", [[0, 2, 4], [1], [0, 1, 2, 3, 1, 2, 3, 4], [3, 2, 1, 0], [0, 4, 0, 4, 1, 2]])
def test_every_block_is_known_by_its_weights_tuned_as_it_may_be(order: list[int], tmp_path: Path) -> None:
    model = llama()
    tuned = with_blocks(model, [model.model.layers[k] for k in order])
    with torch.no_grad():
        for weight in tuned.parameters():
            weight.add_(random_like(weight) * weight.std(correction=0), alpha=0.3)
    found = origins(saved(model, tmp_path / "base"), saved(tuned, tmp_path / "tuned"))
    assert found == [(f"model.layers.{n}", f"model.layers.{k}") for n, k in enumerate(order)]


def test_a_new_block_is_like_none_and_as_many_blocks_keep_their_numbers(tmp_path: Path) -> None:
    model, other = llama(), llama(1)
    layers = model.model.layers
    base = saved(model, tmp_path / "base")
    longer = with_blocks(model, [*layers[:2], other.model.layers[0], *layers[2:]])
    found = dict(origins(base, saved(longer, tmp_path / "longer")))
    assert found == {
        f"model.layers.{n}": b and f"model.layers.{b}" for n, b in enumerate(["0", "1", None, "2", "3", "4"])
    }
    turned = with_blocks(model, layers[::-1])
    assert origins(base, saved(turned, tmp_path / "turned")) == []


def test_blocks_that_repeat_each_other_are_taken_in_order_and_a_head_may_be_missing(tmp_path: Path) -> None:
    model = llama()
    layers = model.model.layers
    base = with_blocks(model, [layers[0], layers[1], layers[1], layers[2]])
    shorter = with_blocks(base, [base.model.layers[k] for k in (1, 2, 3)])
    found = origins(saved(base, tmp_path / "base"), saved(shorter.model, tmp_path / "headless"))
    assert found == [(f"layers.{n}", f"model.layers.{n + 1}") for n in range(3)]


def test_blocks_come_in_order_whatever_the_shards_are(tmp_path: Path) -> None:
    model = with_blocks(llama(), [llama().model.layers[0]] * 12)
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in tuned.model.layers.parameters():
            parameter.add_(0.1)
    model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 5
    found = compared(tmp_path / "base", saved(tuned, tmp_path / "tuned"))
    each = len(list(model.model.layers[0].parameters()))
    assert [entry.name.split(".")[2] for entry in found.modules] == [str(k) for k in range(12) for _ in range(each)]
    assert found.unchanged == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


def test_stacks_are_told_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=16, d_kv=4, d_ff=24, num_layers=4, num_heads=4, vocab_size=TOKENS)
    model = transformers.T5ForConditionalGeneration(config)
    tuned = copy.deepcopy(model)
    del tuned.decoder.block[2]
    tuned.config.num_decoder_layers = 3
    found = origins(saved(model, tmp_path / "base"), saved(tuned, tmp_path / "tuned"))
    assert found == [(f"decoder.block.{n}", f"decoder.block.{k}") for n, k in enumerate([0, 1, 3])]


def test_of_a_checkpoint_without_a_block_only_what_was_tuned_has_changed(tmp_path: Path) -> None:
    model = llama()
    tuned = with_blocks(model, [model.model.layers[k] for k in (0, 1, 3, 4)])
    with torch.no_grad():
        tuned.model.layers[2].mlp.up_proj.weight[1] += 0.25
    report = compared(saved(model, tmp_path / "base"), saved(tuned, tmp_path / "tuned"))
    [changed] = report.modules
    assert changed.whole_name == "model.layers.2.mlp.up_proj.weight"
    assert changed.frobenius_norm == pytest.approx(0.25 * 32**0.5)
    whole = model.model.layers[3].mlp.up_proj.weight.detach()
    assert changed.relative_frobenius == pytest.approx(0.25 * 32**0.5 / float(whole.norm()))
    assert report.removed == sorted(f"model.layers.2.{name}" for name, _ in model.model.layers[2].named_parameters())
    assert not report.added
    assert len(report.unchanged) == len(list(tuned.parameters())) - 1
    assert report.matched is not None
    assert [one.base for one in report.matched] == [f"model.layers.{k}" for k in (0, 1, 3, 4)]
    assert report.summary.notable[0] == (
        "model.layers, by the weights: blocks 2-3 were the base's blocks 3-4; the base's block 2: not in it"
    )


@pytest.mark.parametrize(("order", "paged"), [([0, 1, 3], True), ([0, 1, 2, 2, 3, 4], False)])
def test_the_answers_of_another_depth_are_compared(order: list[int], paged: bool, tmp_path: Path) -> None:
    model = llama()
    tuned = with_blocks(model, [model.model.layers[k] for k in order])
    ids = [[5, 9, 2, 33, 41, 7], [8, 1, 1, 60]]
    report = compared(saved(model, tmp_path / "base"), saved(tuned, tmp_path / "tuned"), ids, paged=paged)
    assert report.certificate is not None
    assert report.tuned_certificate is not None
    assert report.certificate.exact
    assert report.tuned_certificate.exact
    assert (report.blocks, report.eq18) == ([], None)
    assert [(one.what, one.why) for one in report.skipped] == [
        ("blocks", f"{BLOCKS} in the base, {len(order)} in the tuned checkpoint: not compared")
    ]
    for one in report.by_prompt or []:
        prompt = torch.tensor([ids[one.prompt]])
        p, q = (helpers.logits_of(m, prompt).double().log_softmax(-1) for m in (model, tuned))
        assert one.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
        losses = [-float(x[:-1].gather(1, prompt[0, 1:, None]).mean()) for x in (p, q)]
        assert [one.loss_base, one.loss_tuned] == pytest.approx(losses, rel=1e-5)
        before, after = (stream(m, prompt).double() for m in (model, tuned))
        assert one.output == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-5)
    assert len(report.by_prompt or []) == 2


def test_narrowed_ffns_are_said_and_their_models_answers_compared(tmp_path: Path) -> None:
    model = llama()
    tuned = copy.deepcopy(model)
    for block in tuned.model.layers:
        for layer in (block.mlp.gate_proj, block.mlp.up_proj):
            layer.weight = nn.Parameter(layer.weight[:30].clone())
        block.mlp.down_proj.weight = nn.Parameter(block.mlp.down_proj.weight[:, :30].clone())
    tuned.config.intermediate_size = 30
    report = compared(saved(model, tmp_path / "base"), saved(tuned, tmp_path / "tuned"), [[5, 9, 2, 33]])
    assert len(report.reshaped) == 3 * BLOCKS
    assert {one.why for one in report.skipped} == {
        "[30, 32] where the base has [40, 32]: not compared",
        "[32, 30] where the base has [32, 40]: not compared",
    }
    [one] = report.by_prompt or []
    p, q = (helpers.logits_of(m, torch.tensor([[5, 9, 2, 33]])).double().log_softmax(-1) for m in (model, tuned))
    assert one.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    assert len(report.blocks or []) == BLOCKS


def test_a_model_of_another_width_is_no_fine_tune(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, vocab_size=TOKENS
    )
    narrow = transformers.LlamaForCausalLM(config)
    with pytest.raises(CheckpointError, match="not its base model"):
        compared(saved(llama(), tmp_path / "base"), saved(narrow, tmp_path / "tuned"))


@pytest.mark.parametrize("rows", [TOKENS - 4, TOKENS + 4])
def test_a_resized_vocabulary_is_said_and_counts_for_nothing_else(rows: int, tmp_path: Path) -> None:
    model = llama()
    tuned = copy.deepcopy(model)
    tuned.resize_token_embeddings(rows)
    with torch.no_grad():
        weight = tuned.model.layers[1].mlp.up_proj.weight
        weight.mul_(1.5)
    report = compared(saved(model, tmp_path / "base"), saved(tuned, tmp_path / "tuned"))
    resized = {one.whole_name: one.added_rows for one in report.modules if one.added_rows}
    assert resized == {"model.embed_tokens.weight": rows - TOKENS, "lm_head.weight": rows - TOKENS}
    assert report.summary.relative_frobenius == pytest.approx(0.5)
    assert any(note.startswith("resized: ") for note in report.warnings)
    assert f"config.json differs: vocab_size {TOKENS} → {rows}" in report.warnings


@pytest.mark.parametrize("shift", [0.0, 0.25])
@pytest.mark.parametrize("turned", [False, True])
def test_a_head_of_its_own_is_compared_with_the_embedding_that_it_was(
    shift: float, turned: bool, tmp_path: Path
) -> None:
    """turned: it is the base that has one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, vocab_size=TOKENS,
        tie_word_embeddings=True,
    )  # fmt: skip
    tied = transformers.LlamaForCausalLM(config).eval()
    untied = copy.deepcopy(tied)
    untied.config.tie_word_embeddings = False
    untied.lm_head.weight = nn.Parameter(tied.lm_head.weight.detach().clone())
    with torch.no_grad():
        untied.lm_head.weight[:8] += shift
    pair = [saved(tied, tmp_path / "tied"), saved(untied, tmp_path / "untied")]
    report = compared(*(reversed(pair) if turned else pair), prompts=[[5, 9, 2, 33]])
    assert (report.added, report.removed) == ([], [])
    norms = {one.whole_name: one.frobenius_norm for one in report.modules}
    assert norms == ({} if not shift else {"lm_head.weight": pytest.approx(shift * (8 * 32) ** 0.5, rel=1e-6)})
    states = "false → true" if turned else "true → false"
    assert f"config.json differs: tie_word_embeddings {states}" in report.warnings
    assert ((report.summary.kl or 0.0) > 1e-6) is bool(shift)


def test_a_config_that_differs_is_named_where_no_weight_does(tmp_path: Path) -> None:
    model = llama()
    base, tuned = saved(model, tmp_path / "base"), saved(model, tmp_path / "tuned")
    config = json.loads((tuned / "config.json").read_text())
    (tuned / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.01, "attention_dropout": 0.5}))
    report = compared(base, tuned)
    assert report.summary.changed == 0
    assert report.warnings == ["config.json differs: rms_norm_eps 1e-06 → 0.01"]


SIDES = {
    "t5": ("shared.weight", True),
    "gpt2": ("transformer.wpe.weight", True),
    "gpt_neox": ("embed_out.weight", False),
    "electra": ("electra.embeddings_project.weight", False),
    "bert": ("bert.embeddings.position_embeddings.weight", True),
}


@pytest.mark.parametrize("model_type", SIDES)
def test_a_table_has_its_tokens_on_the_input_side_and_a_layer_beside_it_has_not(
    model_type: str, tmp_path: Path
) -> None:
    """A column of ones is added to the values of one row alone: the side that the row is on aligns as a unit vector."""
    name, table = SIDES[model_type]
    base = saved(tiny.tiny_model(model_type), tmp_path / "base")
    shutil.copytree(base, tmp_path / "tuned")
    tensors = load_file(base / "model.safetensors")
    weight = tensors[name].clone()
    weight[5] += 1.0
    save_file({**tensors, name: weight}, tmp_path / "tuned" / "model.safetensors", {"format": "pt"})
    (found,) = compared(base, tmp_path / "tuned").modules
    assert found.whole_name == name
    u, _, vh = torch.linalg.svd(tensors[name].double(), full_matrices=False)
    of_row, of_ones = float(u[5, :10].square().sum()), float(vh[:10].sum(dim=1).square().sum()) / vh.shape[1]
    assert found.alignment is not None
    sides = (found.alignment.output, found.alignment.input)
    assert sides == pytest.approx((of_ones, of_row) if table else (of_row, of_ones), rel=1e-4)
