"""The head on what the stack gave, against the model's own pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from classifiers import KINDS, classifier
from helpers import single_model
from image_models import build, picture
from transformers import BlipForConditionalGeneration

from duat_cli.models.discovery import causality
from duat_cli.models.discovery.causality import head_logits, head_of
from duat_cli.models.discovery.modality import stack_of
from duat_cli.models.discovery.structure import run_stack
from duat_cli.zoo import tiny

BY_WEIGHTS = ["llama4", "llama4_text", "mllama", "mllama_text_model", "kosmos_2_text_model", "kosmos_2_5_text_model"]
"""Types whose class names no part that is their model without its head."""


@pytest.fixture(params=["llama", "gpt2", "bert", "gemma2", "opt", *BY_WEIGHTS])
def model(request: pytest.FixtureRequest) -> Any:
    return single_model(request.param).eval()


def ids_of(model: Any) -> torch.Tensor:
    rows = model.config.get_text_config().vocab_size
    return torch.randint(10, rows, (1, 9), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_a_classifier_of_pictures_has_a_distribution_over_its_classes() -> None:
    model, like = build("vit"), picture()
    head = head_of(model, stack_of(model), like)
    assert (head.exists, head.classes, head.predicts) == (False, "text", True)
    assert "it predicts the class of a picture or a sound" in str(head.why_no_next_token())
    model.config.problem_type = "multi_label_classification"
    assert not head_of(model, stack_of(model), like).predicts
    bare = model.vit
    assert not head_of(bare, stack_of(bare), like).passes


def test_it_gives_the_model_s_own_logits(model: Any) -> None:
    ids, stack = ids_of(model), stack_of(model)
    [(start, found)] = head_logits(model, stack, run_stack(stack, ids), ids)
    assert start == 0
    assert torch.equal(found, model(input_ids=ids).logits[0])
    assert "forward" not in vars(stack)  # as it was


@pytest.mark.parametrize("model", BY_WEIGHTS, indirect=True)
def test_the_stack_is_what_has_all_weights_but_the_head_s(model: Any) -> None:
    stack, head = stack_of(model), model.get_output_embeddings()
    assert stack is model.model
    assert set(stack.parameters()) | set(head.parameters()) == set(model.parameters())
    assert head_of(model, stack).causal
    model.__class__ = type("OwnForCausalLM", (type(model),), {"__module__": "own"})  # which may do more than run it
    assert stack_of(model) is model


@torch.no_grad()
@pytest.mark.parametrize("model", ["llama", "gpt2", "bert", "gemma2"], indirect=True)  # opt's head calls its decoder
def test_the_blocks_do_not_run_again(model: Any) -> None:
    ids, stack = ids_of(model), stack_of(model)
    output = run_stack(stack, ids)
    calls: list[Any] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda *_: calls.append(1))
    list(head_logits(model, stack, output, ids))
    hook.remove()
    assert calls == []


@torch.no_grad()
@pytest.mark.parametrize("model", ["llama", "gemma2"], indirect=True)
def test_large_logits_come_in_pieces(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, stack = ids_of(model), stack_of(model)
    output = run_stack(stack, ids)
    width = model.get_output_embeddings().weight.shape[0] * 4
    monkeypatch.setattr(causality, "LOGITS_BYTES", 4 * width)
    pieces = list(head_logits(model, stack, output, ids))
    assert [(start, len(found)) for start, found in pieces] == [(0, 4), (4, 4), (8, 1)]
    torch.testing.assert_close(torch.cat([found for _, found in pieces]), model(input_ids=ids).logits[0])


def test_logits_that_are_not_finite_are_no_sign_of_later_tokens() -> None:
    model = single_model("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    assert head_of(model, model.model).why_no_next_token() == "LlamaForCausalLM gives logits that are not finite"


@pytest.mark.parametrize("kind", KINDS)
def test_a_classifier_predicts_classes_and_no_next_token(kind: str) -> None:
    model = classifier(kind)
    head = head_of(model, stack_of(model))
    what = "token" if kind == "token" else "text"
    assert head.classes == what
    said = f"{type(model).__name__} is no next-token model: it predicts the class of a {what}"
    assert head.why_no_next_token() == said


@pytest.mark.parametrize("fields", [{"num_labels": 1}, {"problem_type": "multi_label_classification"}])
def test_what_gives_no_distribution_over_classes(fields: dict[str, Any]) -> None:
    model = classifier("text", **fields)
    head = head_of(model, stack_of(model))
    assert head.classes is None
    assert str(head.why_no_next_token()).endswith("is no next-token model: it gives no distribution over classes")
    other = single_model("llama")
    assert head_of(other, stack_of(other)).classes is None


def test_the_head_of_a_part_is_no_missing_head() -> None:
    """BLIP's decoder has one, and the whole model is run; BERT without a head has none."""
    model = BlipForConditionalGeneration(tiny.tiny_model("blip").config)
    like = {"pixel_values": torch.zeros(1, 3, 4, 4), "input_ids": torch.tensor([[5, 9]])}
    said = str(head_of(model, stack_of(model), like).why_no_next_token())
    assert said.endswith("is no next-token model: the LM head of a part of it is not read")
    bare = single_model("bert").base_model
    assert str(head_of(bare, stack_of(bare)).why_no_next_token()).endswith("it has no LM head")
