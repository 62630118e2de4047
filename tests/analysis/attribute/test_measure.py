"""Removals against the model with weights, masks and embeddings changed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from attributing import WORDS, double
from classifiers import classifier
from function_modes import SOFTMAX
from helpers import token_ids, two_single
from own_code import PROMPTS, OwnStack, own
from paging import in_parts, two_saved, whole
from removal import OWN, weights_zeroed
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import ModernBertForSequenceClassification

import duat_cli
from duat_cli.analysis.attribute.measure import ITSELF, MIXED, OWN_PLACE, POOLED, UNEMBEDDED, UNMASKED
from duat_cli.analysis.attribute.run import AttributeOptions, attribute
from duat_cli.analysis.attribute.targets import Asked
from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.model.load import LoadedModel
from duat_cli.models.terms.sites import TermId
from duat_cli.results.attribute import MeasuredParts
from duat_cli.zoo import tiny

TOKEN, PLACE = 77, 5


def measured(loaded: LoadedModel, ids: Tensor, count: int, **asked: Any) -> MeasuredParts:
    options = AttributeOptions(Asked(**({"target": f"t{TOKEN}", "position": PLACE} | asked)), 3, measure=count)
    report = attribute(loaded, [helpers.prompt_of(ids)], WORDS, options, lambda *_: None)
    found = report.attribution[0].measured
    assert found is not None
    return found


def expected(before: Tensor, after: Tensor) -> list[float]:
    """(what of the logit is lost, KL), of logits (vocabulary,)."""
    p, q = (row.double().softmax(-1) for row in (before, after))
    return [float(before[TOKEN] - after[TOKEN]), float((p * (p / q).log()).sum())]


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert"])
def test_what_is_lost_is_what_the_changed_model_loses(model_type: str) -> None:
    model = two_single(model_type).double()
    ids = token_ids(model, tokens=8)

    def logits(**inputs: Any) -> Tensor:
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | inputs
        return model(**{k: v for k, v in given.items() if v is not None}).logits[0, PLACE]

    before = logits()
    found = measured(helpers.as_loaded(model), ids, 5)
    assert len(found.heads) == len(found.neurons) == len(found.tokens) == 5
    for kind, parts in (("head", found.heads), ("neuron", found.neurons)):
        for one in parts:
            with weights_zeroed(model, OWN[model_type], [TermId(kind, one.block, one.index)]):  # type: ignore[arg-type]
                after = logits()
            assert [one.change, one.kl] == pytest.approx(expected(before, after), rel=1e-6, abs=1e-9)
    embedding = model.get_input_embeddings()
    for token in found.tokens:
        mask, rows = torch.ones_like(ids), embedding(ids).clone()
        mask[0, token.position] = 0
        rows[0, token.position] = embedding.weight.mean(0)
        cut, replaced = logits(attention_mask=mask), logits(input_ids=None, inputs_embeds=rows)
        if bool(cut.isnan().any()):  # no token is left to attend to, and the model's softmax says so
            assert (model_type, token.position, token.cut) == ("llama", 0, None)
            assert "not finite" in token.reasons["cut"]
        else:
            assert [token.cut, token.cut_kl] == pytest.approx(expected(before, cut), rel=1e-6, abs=1e-9)
        assert [token.replaced, token.replaced_kl] == pytest.approx(expected(before, replaced), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("model_type", ["ibert", "xlnet"])
@torch.no_grad()
def test_the_embedding_of_a_token_is_replaced_whatever_its_layout(model_type: str) -> None:
    """I-BERT's module gives its scale as well; XLNet's gives tokens in front of the batch."""
    model = two_single(model_type)
    ids = token_ids(model, tokens=6)
    weight = model.get_input_embeddings().weight

    def put(module: Any, args: Any, output: Any) -> Any:
        rows = (output[0] if isinstance(output, tuple) else output).clone()
        rows[(place, 0) if len(rows) > 1 else (0, place)] = weight.mean(0)
        return (rows, *output[1:]) if isinstance(output, tuple) else rows

    before = model(ids).logits[0, PLACE]
    found = measured(helpers.as_loaded(model), ids, 4).tokens
    assert len(found) == 4
    for token in found:
        place = token.position
        with model.get_input_embeddings().register_forward_hook(put):
            after = model(ids).logits[0, PLACE]
        assert [token.replaced, token.replaced_kl] == pytest.approx(expected(before, after), rel=1e-3, abs=1e-5)


@torch.no_grad()
def test_of_a_norm_the_length_itself_is_lost() -> None:
    model = two_single("bert").base_model.double()
    ids = token_ids(model, tokens=6)
    found = measured(helpers.as_loaded(model), ids, 3, target="norm", position=None)
    before = model(ids).last_hidden_state[0].mean(0)
    width = model.config.hidden_size // model.config.num_attention_heads
    for head in found.heads:

        def without(module: Any, args: Any, first: int = head.index * width) -> Any:
            kept = args[0].clone()
            kept[..., first : first + width] = 0
            return (kept,)

        with model.encoder.layer[head.block].attention.output.dense.register_forward_pre_hook(without):
            after = model(ids).last_hidden_state[0].mean(0)
        assert head.change == pytest.approx(float(before.norm() - after.norm()), rel=1e-6)
        assert head.change != pytest.approx(float((before - after) @ before / before.norm()), rel=1e-3)


def test_they_lead_and_agree_as_said() -> None:
    model = two_single("llama")
    found = measured(helpers.as_loaded(model), token_ids(model, tokens=8), 6)
    for parts in (found.heads, found.neurons, found.tokens):
        sizes = [abs(one.part) for one in parts]
        assert sizes == sorted(sizes, reverse=True)
    by_name = {one.what: one for one in found.agreement}
    pairs = [(one.part, one.change) for one in found.neurons]

    def order(values: list[float]) -> list[int]:
        return [sorted(values).index(value) for value in values]

    a, b = (order([pair[k] for pair in pairs]) for k in (0, 1))
    distance = sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
    assert by_name["neurons"].rank_correlation == pytest.approx(1 - 6 * distance / (6 * 35))


def test_few_have_no_rank_correlation() -> None:
    model = two_single("gpt2")
    found = measured(helpers.as_loaded(model), token_ids(model, tokens=8), 2)
    assert all(
        one.rank_correlation is None and "fewer than 4" in one.reasons["rank_correlation"] for one in found.agreement
    )


def test_in_front_of_a_cap() -> None:
    model = two_single("gemma2")
    ids, cap = token_ids(model, tokens=8), model.config.final_logit_softcapping
    token = measured(helpers.as_loaded(model), ids, 1).tokens[0]
    mask = torch.ones_like(ids)
    mask[0, token.position] = 0
    with torch.no_grad():
        rows = [model(ids, attention_mask=m).logits[0, PLACE, TOKEN] / cap for m in (torch.ones_like(ids), mask)]
    assert token.cut == pytest.approx(cap * (math.atanh(rows[0]) - math.atanh(rows[1])), rel=1e-3)


@pytest.mark.parametrize("model_type", ["mixtral", "gemma4 sharing"])
def test_weights_read_block_by_block_give_the_same(model_type: str, tmp_path: Path) -> None:
    folder = two_saved(model_type, tmp_path)
    plain = whole(folder)
    ids = token_ids(plain.model, tokens=8)
    numbers: Callable[[MeasuredParts], list[float]] = lambda found: [  # noqa: E731
        *(one.change for one in (*found.heads, *found.neurons)),
        *(value for token in found.tokens for value in (token.cut, token.replaced)),
    ]
    with in_parts(folder) as loaded:
        got = measured(loaded, ids, 3)
    assert numbers(got) == pytest.approx(numbers(measured(plain, ids, 3)), abs=1e-5)


@pytest.mark.parametrize("tokens", [1, 8])
def test_attention_to_all_that_a_place_has_cannot_be_cut(tokens: int) -> None:
    """The first token of a causal model attends to itself alone; what the model makes of nothing depends on kernels,
    and on tokens behind it. Those are no part of what is there, so none of them is taken out."""
    model = two_single("llama")
    found = measured(helpers.as_loaded(model), token_ids(model, tokens=tokens), 6, position=0)
    assert [(one.position, one.cut) for one in found.tokens] == [(0, None)]
    assert "all that its place attends to" in found.tokens[0].reasons["cut"]
    assert found.tokens[0].replaced
    cut = next(one for one in found.agreement if one.what == "tokens, attention cut")
    assert (cut.count, cut.rank_correlation) == (0, None)
    assert [one.what for one in found.skipped if "all that" in one.why] == ["attention to a token"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("model_type", "mixer", "blocks"),
    [("jamba", "layers.0.mamba", "block 0"), ("falcon_h1", "layers.0.mamba", "blocks 0-1")],
)
def test_a_mask_cuts_no_attention_where_tokens_are_mixed_without(model_type: str, mixer: str, blocks: str) -> None:
    """A mixer that obeys the mask gives the masked token's own place nothing: more than attention to it is gone."""
    model = two_single(model_type)
    ids = token_ids(model, tokens=8)
    given: list[Tensor] = []
    handle = model.get_submodule(f"model.{mixer}").register_forward_hook(lambda _m, _a, out: given.append(out[0, 3]))
    for place in (None, 3):
        mask = torch.ones_like(ids)
        mask[0, [] if place is None else place] = 0
        model(ids, attention_mask=mask)
    handle.remove()
    assert float(given[0].norm()) > 1e-3
    assert float(given[1].norm()) == 0.0
    found = measured(helpers.as_loaded(model), ids, 4)
    assert len(found.tokens) == 4
    for token in found.tokens:
        assert (token.cut, token.cut_kl) == (None, None)
        assert token.reasons["cut"] == MIXED.format(blocks)
        assert token.replaced
    assert ("attention to a token", MIXED.format(blocks)) in [(one.what, one.why) for one in found.skipped]


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_mask_that_the_pooling_reads_cuts_more_than_attention(pooling: str) -> None:
    """ModernBERT's mean is over the tokens of the mask, which a masked token would leave."""
    config = tiny.tiny_config("modernbert")
    config.classifier_pooling, config.num_labels = pooling, 3
    model = ModernBertForSequenceClassification._from_config(config, attn_implementation="eager").eval()
    tiny.randomise(model, 1)
    ids = token_ids(model, tokens=6)
    found = measured(helpers.as_loaded(model), ids, 4, target="LABEL_1", position=None)
    assert len(found.tokens) == 4
    for token in found.tokens:
        assert token.replaced
        if pooling == "mean":
            assert (token.cut, token.reasons["cut"]) == (None, POOLED)
            continue
        mask = torch.ones_like(ids)
        mask[0, token.position] = 0
        rows = [model(ids, attention_mask=one).logits[0, 1] for one in (torch.ones_like(ids), mask)]
        assert token.cut == pytest.approx(float(rows[0] - rows[1]), rel=1e-3, abs=1e-5)


class ColumnGone(TorchFunctionMode):
    """While active, no softmax over the tokens gives weight to one of them, and a row that reads no other stays."""

    def __init__(self, place: int, tokens: int) -> None:
        super().__init__()
        self._place, self._tokens = place, tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SOFTMAX and args[0].shape[-2:] == (self._tokens, self._tokens):
            scores = args[0].clone()
            scores[..., self._place] = -torch.inf
            args = (scores, *args[1:])
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        pytest.param("esm", "", id="the mask sets the token's vector to zero"),
        pytest.param("opt", "", id="the mask makes positions"),
        pytest.param("deberta-v2", OWN_PLACE, id="the mask takes the token's row as well"),
        pytest.param("xlnet", ITSELF, id="the mask leaves a token to itself"),
    ],
)
def test_a_cut_leaves_the_stream_of_the_token(model_type: str, why: str) -> None:
    """Of a masked LM it is the place of the target that leads."""
    model = two_single(model_type)
    ids = token_ids(model, tokens=PLACE + 1)
    before = model(ids, attention_mask=torch.ones_like(ids)).logits[0, PLACE]
    found = {one.position: one for one in measured(helpers.as_loaded(model), ids, PLACE + 1).tokens}
    for place in (2, PLACE):
        token = found[place]
        if place == PLACE and why:
            assert (token.cut, token.reasons["cut"]) == (None, why)
            continue
        with ColumnGone(place, PLACE + 1):
            after = model(ids, attention_mask=torch.ones_like(ids)).logits[0, PLACE]
        assert [token.cut, token.cut_kl] == pytest.approx(expected(before, after), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("fields", [{"num_labels": 1}, {"problem_type": "multi_label_classification"}])
def test_labels_that_may_hold_together_are_no_distribution(fields: dict[str, Any]) -> None:
    model = classifier("text", **fields)
    found = measured(helpers.as_loaded(model), token_ids(model, tokens=6), 2, target=None, position=None)
    assert {one.kl for one in found.heads} == {None}
    assert all(one.reasons["kl"].startswith("the output is no distribution") for one in found.heads)


def test_one_position_at_a_time() -> None:
    model = two_single("llama")
    with pytest.raises(InputError, match="--measure: one position at a time"):
        measured(helpers.as_loaded(model), token_ids(model), 2, position="all", target=None)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_a_neuron_inside_an_expert_is_taken_out_of_its_weights(model_type: str) -> None:
    model = double(model_type)
    ids = token_ids(model, tokens=8)
    before = model(ids).logits[0, PLACE]
    found = measured(helpers.as_loaded(model), ids, 8)
    inside = [neuron for neuron in found.neurons if neuron.expert is not None]
    assert inside
    assert found.skipped == []
    for one in inside:
        experts = model.model.layers[one.block].mlp.experts
        column = experts.down_proj[one.expert, :, one.index]
        kept = column.clone()
        column.zero_()
        after = model(ids).logits[0, PLACE]
        column.copy_(kept)
        assert [one.change, one.kl] == pytest.approx(expected(before, after), rel=1e-6, abs=1e-9)
    assert torch.equal(model(ids).logits[0, PLACE], before)


def test_what_is_not_taken_out_is_said() -> None:
    """gpt-oss cuts its activations off, so that the neurons of its experts are not told apart."""
    model = two_single("gpt_oss")
    found = measured(helpers.as_loaded(model), token_ids(model, tokens=8), 3)
    assert found.neurons == []
    (skipped,) = found.skipped
    assert skipped.what == "neurons of GptOssMLP of blocks 0-1"
    assert "is no known activation between two layers" in skipped.why


class Registers(OwnStack):
    """Two tokens of its own in front of those that it reads."""

    def through(self, x: Tensor) -> Tensor:
        registers = self.embed.weight[None, :2]
        return super().through(torch.cat([registers, x], dim=1))[:, 2:]


class Unsaid(OwnStack):
    """Does not say what embeds its tokens, and obeys no mask."""

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError


def test_tokens_are_not_taken_out_where_that_would_be_of_others_or_of_none() -> None:
    for stack in (Registers, Unsaid):
        model = own(stack=stack)
        model.get_input_embeddings = model.model.get_input_embeddings
        found = duat_cli.attribute(model, prompts=PROMPTS[:1], measure=3).attribution[0].measured
        assert found is not None
        assert len(found.heads) == 3
        if stack is Registers:
            assert found.tokens == []
            assert [s.why for s in found.skipped] == [
                "the blocks have 10 tokens for the 8 of the prompt: which of them stands for which is not known"
            ]
            continue
        assert [(s.what, s.why) for s in found.skipped] == [
            ("attention to a token", UNMASKED),
            ("the embedding of a token", UNEMBEDDED),
        ]
        assert len(found.tokens) == 3
        for token in found.tokens:
            assert (token.cut, token.replaced, token.cut_kl, token.replaced_kl) == (None, None, None, None)
            assert token.reasons == {
                **dict.fromkeys(("cut", "cut_kl"), UNMASKED),
                **dict.fromkeys(("replaced", "replaced_kl"), UNEMBEDDED),
            }


def test_a_mask_that_is_obeyed_cuts() -> None:
    report = duat_cli.attribute(demo_path(), prompts="The cat sat.", measure=2)
    assert all(token.cut for token in report.attribution[0].measured.tokens)
