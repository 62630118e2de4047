"""Activations against the dtype of the files: measured by hooks of the plain model, and what that dtype really does."""

from __future__ import annotations

from pathlib import Path

import bad_checkpoints as bad
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.inspect.total import block_range, range_warnings
from duat_cli.loading.checkpoint.dtypes import most_stored_name
from duat_cli.loading.model.load import load
from duat_cli.loading.prompts import Prompt
from duat_cli.results.inspect import InspectReport, Range

LARGEST = 65504  # of float16
TEXTS = ((5, 80, 7, 30, 2), (9, 9, 40))


def gpt2(folder: Path, dtype: str = "float32") -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=bad.VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    GPT2LMHeadModel(config).to(getattr(torch, dtype)).save_pretrained(folder)
    bad.tokenizer(folder)


def report(folder: Path, dtype: str = "float32") -> InspectReport:
    prompts = [Prompt("", "0" * 64, torch.tensor([ids]), None) for ids in TEXTS]
    return inspect(load(str(folder), dtype=dtype), prompts, InspectOptions(cache=False), lambda *_: None)


def by_hooks(folder: Path, parts: tuple[str, ...], blocks: str) -> list[float]:
    """Largest absolute output of these modules of a block, from the model as transformers runs it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = [0.0] * 2

    def hook(block: int):
        def see(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            tensor = output if isinstance(output, Tensor) else output[0]
            found[block] = max(found[block], float(tensor.abs().max()))

        return see

    for block in range(2):
        for part in parts:
            model.get_submodule(f"{blocks}.{block}{part}").register_forward_hook(hook(block))
    with torch.no_grad():
        for ids in TEXTS:
            model(torch.tensor([ids]))
    return found


LLAMA = ("", ".self_attn", ".mlp", ".input_layernorm", ".post_attention_layernorm"), "model.layers"
GPT2 = ("", ".attn", ".mlp", ".ln_1", ".ln_2"), "transformer.h"


@pytest.mark.parametrize(("make", "where"), [(bad.llama, LLAMA), (gpt2, GPT2)])
def test_it_is_the_largest_output_of_the_plain_model(make, where, tmp_path: Path) -> None:
    make(tmp_path / "m", dtype="float16")
    blocks = report(tmp_path / "m").blocks
    assert [b.range.largest_activation for b in blocks] == pytest.approx(by_hooks(tmp_path / "m", *where), rel=1e-4)
    assert [b.range.share for b in blocks] == [b.range.largest_activation / LARGEST for b in blocks]  # type: ignore[operator]
    assert {b.range.stored_dtype for b in blocks} == {"float16"}


def reaching(folder: Path, share: float) -> None:
    """A float16 llama whose attention of block 1 puts out that share of the largest float16."""
    bad.llama(folder, dtype="float16")
    name = "model.layers.1.self_attn.{}.weight"

    def larger(state: dict[str, Tensor], part: str, factor: float) -> None:
        state[name.format(part)] = (state[name.format(part)].float() * factor).half()

    bad.wedit(folder, lambda state: larger(state, "v_proj", 500.0))
    now = by_hooks(folder, (".self_attn",), "model.layers")[1]
    bad.wedit(folder, lambda state: larger(state, "o_proj", share * LARGEST / now))


@pytest.mark.parametrize(("share", "word"), [(0.4, None), (0.7, "is close to overflowing"), (1.5, "overflows")])
def test_what_overflows_in_its_own_dtype_is_said(share: float, word: str | None, tmp_path: Path) -> None:
    reaching(tmp_path / "m", share)
    found = report(tmp_path / "m")
    assert found.certificate.exact
    assert found.blocks[1].range.share == pytest.approx(share, rel=0.01)
    assert found.blocks[0].range.share < 0.01  # type: ignore[operator]
    said = [w for w in found.warnings if "float16" in w]
    assert [w for w in said if word and w.endswith(word) and "in block 1" in w] == said
    assert len(said) == (word is not None)
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float16)
    with torch.no_grad():
        outputs = [narrow(torch.tensor([ids])).logits for ids in TEXTS]
    assert all(bool(o.isfinite().all()) for o in outputs) == (share < 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_wide_dtype_has_no_share(dtype: str, tmp_path: Path) -> None:
    bad.llama(tmp_path / "m", dtype=dtype)
    found = report(tmp_path / "m")
    for block in found.blocks:
        assert block.range.share is None
        assert block.range.reasons == {"share": "no activation comes near the largest number of the checkpoint's dtype"}
        assert block.range.stored_dtype == block.range.dtype == dtype
        assert block.range.largest_activation is not None
    assert not any("activations" in w for w in found.warnings)


def ranged(dtype: str, *sizes: float) -> Range:
    entry = type("Entry", (), {"dtype": dtype, "elements": 4, "bytes": 4})
    stored = most_stored_name(type("Files", (), {"tensors": {"w": entry}, "quantised": None}))  # type: ignore[arg-type]
    return block_range(stored, stored, "float32", max((size, "ffn") for size in sizes))


@pytest.mark.parametrize(("stated", "fits"), [("float32", True), ("bfloat16", True), ("float16", False)])
@pytest.mark.parametrize("stored", ["float16", "float32"])
def test_what_counts_is_the_dtype_in_which_transformers_loads_them(
    stored: str, stated: str, fits: bool, tmp_path: Path
) -> None:
    reaching(tmp_path / "m", 1.5)
    bad.wedit(tmp_path / "m", lambda state: state.update({k: v.to(getattr(torch, stored)) for k, v in state.items()}))
    bad.jedit(tmp_path / "m" / bad.CFG, dtype=stated)
    found, own = report(tmp_path / "m"), AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert f"torch.{found.blocks[1].range.dtype}" == str(own.dtype) == f"torch.{stated}"
    assert found.blocks[1].range.stored_dtype == stored
    with torch.no_grad():
        outputs = [own(torch.tensor([ids])).logits for ids in TEXTS]
    assert all(bool(o.isfinite().all()) for o in outputs) == fits
    assert (found.blocks[1].range.share is None) == (not any("overflows" in w for w in found.warnings)) == fits


@pytest.mark.parametrize(("dtype", "largest"), [("F16", LARGEST), ("F8_E4M3", 448), ("F8_E5M2", 57344)])
def test_the_largest_number_is_the_dtypes(dtype: str, largest: int) -> None:
    assert ranged(dtype, 1.0, 100.0).share == 100 / largest


def test_what_is_not_finite_has_a_reason() -> None:
    found = ranged("F16", 1.0, float("inf"))
    assert found.largest_activation is found.share is None
    assert set(found.reasons) == {"largest_activation", "share"}
    assert ranged("I64", 1.0).reasons.keys() == {"share", "stored_dtype"}
    assert range_warnings({}) == range_warnings({0: found}) == []
