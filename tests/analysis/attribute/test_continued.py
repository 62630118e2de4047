"""Greedy and given tokens, one by one and together, against the model asked token by token."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from attributing import WORDS, report_of
from helpers import token_ids, two_single
from paging import in_parts, two_saved
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM

from duat_cli.analysis.attribute import targets as targets_module
from duat_cli.analysis.attribute.run import AttributeOptions, attribute
from duat_cli.analysis.attribute.targets import Asked, why_by_length
from duat_cli.errors import InputError
from duat_cli.loading.model.load import LoadedModel
from duat_cli.results.attribute import AttributeReport
from duat_cli.zoo.randomise import randomise


def ran(loaded: LoadedModel, ids: Tensor, **options: Any) -> AttributeReport:
    wished = AttributeOptions(Asked(), 5, **options)
    return attribute(loaded, [helpers.prompt_of(ids)], WORDS, wished, lambda *_: None)


@torch.no_grad()
def greedy(model: Any, ids: Tensor, steps: int) -> tuple[Tensor, list[float]]:
    """The longer prompt and the logit of every token, one pass a token."""
    logits = []
    for _ in range(steps):
        row = model(ids).logits[0, -1]
        logits.append(float(row.max()))
        ids = torch.cat([ids, row.argmax()[None, None]], dim=1)
    return ids, logits


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_greedy_tokens_are_those_of_one_pass_each(model_type: str) -> None:
    model = two_single(model_type).double()
    ids = token_ids(model, tokens=5)
    longer, logits = greedy(model, ids, 4)
    report = ran(helpers.as_loaded(model), ids, steps=4)
    assert [one.logit for one in report.attribution] == pytest.approx(logits)
    (together,) = report.continuations
    assert [token.id for token in together.tokens] == longer[0, 5:].tolist()
    assert together.logits == pytest.approx(math.fsum(logits))
    assert together.log_probability is None
    assert report.prompts[0].tokens == 5
    assert [source.position for source in together.sources] == list(range(8))
    expected = [0.0] * 8
    for step, one in enumerate(report.attribution):  # each is what it is alone, in front of the tokens that follow
        token = int(longer[0, 5 + step])
        (alone,) = report_of(model, longer[:, : 5 + step], target=f"t{token}").attribution
        for place, part in enumerate(alone.parts.tokens):
            expected[place] += part.value + sum((unit.tokens or [])[place] for unit in alone.parts.units)
            assert one.parts.tokens[place].value == pytest.approx(part.value, abs=1e-9)
    assert [source.value for source in together.sources] == pytest.approx(expected, abs=1e-9)


def test_a_given_continuation_is_by_its_log_probability() -> None:
    model = two_single("llama").double()
    ids = token_ids(model, tokens=5)
    report = ran(helpers.as_loaded(model), ids, continuation="t50 t60 t70")
    given = torch.cat([ids, torch.tensor([[50, 60, 70]])], dim=1)
    with torch.no_grad():
        logits = model(given).logits[0, 4:7]
    logs = logits.log_softmax(-1)
    (together,) = report.continuations
    assert together.log_probability == pytest.approx(float(logs[[0, 1, 2], [50, 60, 70]].sum()))
    entropy = -(logs.exp() * logs).sum(-1)
    for one, row, log, token in zip(report.attribution, logits, logs, (50, 60, 70), strict=True):
        assert one.target.kind == "log-probability"
        assert one.logit == pytest.approx(float(row[token] - (log.exp() * row).sum()))
    # true gain over equal logits, less the linearised one
    gains = logs[[0, 1, 2], [50, 60, 70]] + math.log(logits.shape[1])
    linear = sum(one.logit for one in report.attribution)
    assert together.first_order_error == pytest.approx(float(gains.sum()) - linear)
    assert together.first_order_error == pytest.approx(float((math.log(logits.shape[1]) - entropy).sum()))
    # the parts are the slope of the log-probability: a small change of the logits moves it by their share
    assert report.certificate.exact


def test_what_has_no_next_token_is_refused() -> None:
    model = two_single("bert")
    with pytest.raises(InputError, match="--steps: BertForMaskedLM is no next-token model"):
        ran(helpers.as_loaded(model), token_ids(model), steps=2)


def test_capped_logits_have_greedy_tokens_alone() -> None:
    model = two_single("gemma2")
    ids = token_ids(model, tokens=5)
    assert ran(helpers.as_loaded(model), ids, steps=2).certificate.exact
    with pytest.raises(InputError, match="--continuation: this model caps its logits"):
        ran(helpers.as_loaded(model), ids, continuation="t50")


def test_a_prompt_that_would_be_too_long_is_refused() -> None:
    model = two_single("gpt2")
    room = model.config.max_position_embeddings
    ids = token_ids(model, tokens=room - 1)
    with pytest.raises(InputError, match=f"--steps: prompt 1 would have {room + 2} tokens, the model has {room}"):
        ran(helpers.as_loaded(model), ids, steps=3)


def longrope() -> Any:
    """Takes other frequencies for all tokens of a text of more than 10."""
    ropes = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
    config = Phi3Config(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, original_max_position_embeddings=10, pad_token_id=0,
        rope_parameters={**ropes, "rope_theta": 10000.0, "original_max_position_embeddings": 10},
        attn_implementation="eager",
    )  # fmt: skip
    model = Phi3ForCausalLM(config).eval()
    randomise(model, 1)
    return model


@pytest.mark.parametrize("tokens", [7, 12])
def test_on_one_side_of_where_longrope_changes_greedy_tokens_are_those_of_one_pass_each(tokens: int) -> None:
    model = longrope()
    ids = torch.arange(40, 40 + tokens)[None]
    report = ran(helpers.as_loaded(model), ids, steps=3)
    assert [one.logit for one in report.attribution] == pytest.approx(greedy(model, ids, 3)[1], rel=1e-5)
    assert ran(helpers.as_loaded(model), ids, continuation="t50 t60 t70").certificate.exact


@pytest.mark.parametrize("options", [{"steps": 4}, {"continuation": "t50 t60 t70 t80"}])
def test_a_text_whose_length_changes_its_first_tokens_is_refused(options: dict[str, Any]) -> None:
    """One pass over 11 tokens has other logits at all of them than passes over 7 to 10."""
    model, ids = longrope(), torch.arange(40, 47)[None]
    longer = torch.cat([ids, torch.tensor([[50, 60, 70, 80]])], dim=1)
    with torch.no_grad():
        assert helpers.far(model(longer).logits[0, 6], model(ids).logits[0, 6]) > 1e-2
    with pytest.raises(InputError, match="one pass over all 11 tokens the logits at position 6 are not those of") as at:
        ran(helpers.as_loaded(model), ids, **options)
    assert "chooses its rotary frequencies by how long the text is (rope_type longrope); attribute each" in str(
        at.value
    )


def test_what_differs_between_lengths_is_named_by_the_config_and_the_dtype() -> None:
    """A router flips by rounding in a narrow dtype alone; longrope goes before it."""
    narrow, mixtral, llama = torch.bfloat16, two_single("mixtral").config, two_single("llama").config
    assert "a router that rounds sends tokens to other experts; use --dtype float32" in why_by_length(mixtral, narrow)
    assert why_by_length(llama, narrow) == "passes of other lengths round otherwise in bfloat16; use --dtype float32"
    for config in (mixtral, llama):
        assert why_by_length(config, torch.float32) == "the model computes otherwise by how long the text is"
    assert "longrope" in why_by_length(longrope().config, narrow)


def test_a_refusal_over_a_narrow_router_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no tolerance, what rounding leaves is refused."""
    model = two_single("mixtral").to(torch.bfloat16)
    monkeypatch.setattr(targets_module, "tolerance_for", lambda dtype: -1.0)
    loaded = dataclasses.replace(helpers.as_loaded(model), dtype="bfloat16")
    with pytest.raises(InputError, match="a router that rounds sends tokens to other experts"):
        ran(loaded, token_ids(model), steps=2)


def test_an_empty_continuation_is_refused() -> None:
    model = two_single("llama")
    with pytest.raises(InputError, match="--continuation: the tokenizer makes no tokens of it"):
        ran(helpers.as_loaded(model), token_ids(model), continuation="")


def test_weights_read_block_by_block(tmp_path: Path) -> None:
    folder = two_saved("llama", tmp_path)
    model = two_single("llama")
    ids = token_ids(model, tokens=5)
    _, logits = greedy(model, ids, 3)
    with in_parts(folder) as loaded:
        report = ran(loaded, ids, steps=3)
    assert [one.logit for one in report.attribution] == pytest.approx(logits, abs=1e-5)
