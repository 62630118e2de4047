"""Quantised checkpoints through the commands: the reports of the numbers that they hold, with the format's name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import pytest
import torch
from quantising import WAYS, gpt_oss, mxfp4, quantise
from safetensors.torch import load_file

from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.loading.model.load import load
from duat_cli.loading.model.tokenizer import load_tokenizer

PROMPT = ("--prompt", "hello world")

Duat = Callable[..., dict[str, Any]]


@pytest.fixture
def duat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Duat:
    monkeypatch.setattr(libraries, "calm", lambda talk: None)  # it would silence the tests that come after

    def read(*arguments: object) -> dict[str, Any]:
        capsys.readouterr()
        assert run([*map(str, arguments), "--json", "-q"]) in (0, 1)
        report: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        return report

    return read


def three(folder: Path, way: str) -> tuple[Path, Path, Path]:
    """(in full precision, quantised, the quantised numbers in full precision)"""
    base, quantised, plain = (folder / name for name in ("base", "quantised", "plain"))
    if way == "mxfp4":
        gpt_oss(base)
    else:
        bad.llama(base, dtype="bfloat16", hidden_size=64, intermediate_size=96)
    shutil.copytree(base, quantised)
    if way == "mxfp4":
        mxfp4(quantised, plain)
    else:
        quantise(quantised, way, plain)
    return base, quantised, plain


def shared(report: dict[str, Any]) -> dict[str, Any]:
    """Without what names a run, a folder or how it is stored."""
    kept = {k: v for k, v in report.items() if k not in ("run", "warnings", "model")}
    return kept | {"parameters": report["model"]["parameters"], "weights": report["model"]["fingerprint"]}


@pytest.mark.parametrize("way", [w for w in [*WAYS, "mxfp4"] if w != "llm_int8"])
def test_the_certificate_is_that_of_the_numbers(way: str, tmp_path: Path, duat: Duat) -> None:
    """Of 8 bits of bitsandbytes two products of float32 stand against one of float64; all others are one product."""
    _, quantised, plain = three(tmp_path, way)
    one, two = (duat("verify", folder, *PROMPT) for folder in (quantised, plain))
    assert one["certificate"]["exact"]
    if way == "nf4":  # a sum and two products
        assert one["certificate"]["relative_error"] == pytest.approx(two["certificate"]["relative_error"], rel=0.5)
    else:
        assert shared(one) == shared(two)
    method = "mxfp4" if way == "mxfp4" else WAYS[way][1]["quant_method"]
    assert one["model"]["quantised"].startswith(method)
    assert two["model"]["quantised"] is None


def test_inspect_says_the_format_and_the_same_numbers(
    tmp_path: Path, duat: Duat, capsys: pytest.CaptureFixture[str]
) -> None:
    _, quantised, plain = three(tmp_path, "fp8")
    one, two = (duat("inspect", folder, *PROMPT, "--no-cache") for folder in (quantised, plain))
    kinds = [{block.pop("range")["stored_dtype"] for block in report["blocks"]} for report in (one, two)]
    assert kinds == [{"bfloat16"}, {"float32"}]  # the dtype before quantisation, and the stored one
    assert one["blocks"] == two["blocks"]
    assert one["certificate"] == two["certificate"]
    run(["verify", str(quantised), *PROMPT, "-q"])
    assert "quantised: fp8 (e4m3, blocks of 16 x 16), read as numbers" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("way", ["fp8", "mxfp4"])
def test_attribute_reads_the_numbers(way: str, tmp_path: Path, duat: Duat) -> None:
    """The whole report, ablations and all, is that of the checkpoint of those numbers; the parts add up."""
    _, quantised, plain = three(tmp_path, way)
    one, two = (duat("attribute", folder, *PROMPT, "--measure", "2") for folder in (quantised, plain))
    assert shared(one) == shared(two)
    assert one["certificate"]["exact"]
    assert len(one["attribution"][0]["measured"]["heads"]) == 2


@pytest.mark.parametrize("way", ["int4", "mxfp4"])
def test_lora_diff_says_what_quantisation_changed(way: str, tmp_path: Path, duat: Duat) -> None:
    """Block by block; the change of each matrix against the files' own difference in float64."""
    base, quantised, plain = three(tmp_path, way)
    report = duat("lora-diff", base, quantised, *PROMPT)
    old, new = (load_file(folder / bad.W) for folder in (base, plain))
    changed = {n for n in old if not torch.equal(old[n].float(), new[n].float())}
    assert {f"{m['name']}.{m['parameter']}" for m in report["modules"]} == changed
    for module in report["modules"]:
        name = f"{module['name']}.{module['parameter']}"
        expected = float((new[name].double() - old[name].double()).norm())
        assert module["frobenius_norm"] == pytest.approx(expected, rel=1e-6)
    assert report["tuned_quantised"].startswith("mxfp4" if way == "mxfp4" else "compressed-tensors")
    assert report["base_quantised"] is None
    assert len(report["blocks"]) == 2
    assert all((block["operator"]["weights"] > 0) is (way == "int4") for block in report["blocks"])
    assert all(block["terms"]["ffn"] > 0 for block in report["blocks"])
    ids = torch.tensor([load_tokenizer(base)("hello world")["input_ids"]])
    logits = [load(str(folder)).model(input_ids=ids).logits.double().log_softmax(-1) for folder in (base, plain)]
    kl = float((logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean())
    assert report["summary"]["kl"] == pytest.approx(kl, rel=1e-2)
    assert kl > 0


def test_what_is_planned_of_the_bytes(tmp_path: Path, duat: Duat) -> None:
    """What is read are the files' bytes, what is held are the numbers'."""
    _, quantised, plain = three(tmp_path, "fp8")
    one, two = (duat("plan", folder, "--tokens", "1x16") for folder in (quantised, plain))
    for name, same in (("bytes", True), ("stored_bytes", False), ("frame_bytes", True)):
        assert (one["weights"][name] == two["weights"][name]) is same
    held = sum(t.numel() * t.element_size() for t in load_file(quantised / bad.W).values())
    assert one["weights"]["stored_bytes"] == held
    terms = [{t["what"]: t["bytes"] for t in r["ways"][1]["terms"]} for r in (one, two)]
    assert terms[0]["one block"] == terms[1]["one block"]
    block = one["weights"]["largest_block"]
    norms = 2 * 64 * 2  # in bfloat16
    assert terms[0]["the next block, as stored"] == block["bytes"] - norms > block["stored_bytes"]


def test_streamed_as_in_memory(tmp_path: Path, duat: Duat) -> None:
    _, quantised, _ = three(tmp_path, "gptq")
    one = duat("verify", quantised, *PROMPT)
    two = duat("plan", quantised, *PROMPT, "--for", "verify")
    limit = two["ways"][1]["peak_memory_bytes"]
    assert shared(duat("verify", quantised, *PROMPT, "--memory", str(limit)))["weights"] == shared(one)["weights"]
