"""Damage against its definition, and the probes against the matrix whose square root they are."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from classifiers import classifier
from helpers import token_ids, two_single
from torch import Tensor
from transformers import PreTrainedConfig

from duat_cli.analysis.prune.terms.damage import Divergence, Hidden, Loss, hidden_states, metric_for
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.models.discovery.causality import head_of, head_output
from duat_cli.models.discovery.structure import discover
from duat_cli.statistics import divergence

GENERATOR_SEED = 5


def noise_of(seed: int = GENERATOR_SEED) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return lambda shape: torch.randn(shape, generator=generator)


def logits(tokens: int = 3, vocabulary: int = 7, seed: int = 0) -> Tensor:
    return 2 * torch.randn(1, tokens, vocabulary, generator=torch.Generator().manual_seed(seed))


def ids(tokens: int = 3, vocabulary: int = 7) -> Tensor:
    return torch.arange(tokens)[None] * 2 % vocabulary


def covariance(probes: Tensor) -> Tensor:
    flat = probes.double().flatten(1)
    return flat.T @ flat / len(flat)


def fisher(x: Tensor) -> Tensor:
    """diag(p) - ppᵀ for every token, block-diagonal over the tokens."""
    blocks = [torch.diag(p) - torch.outer(p, p) for p in x[0].double().softmax(dim=-1)]
    return torch.block_diag(*blocks)


# -- measured ------------------------------------------------------------------------------------------------


def test_hidden_is_a_ratio_of_lengths() -> None:
    metric = Hidden(None)  # type: ignore[arg-type]
    out = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]])
    assert metric.measured(out, out + torch.tensor([[[0.0, 1.0], [0.0, 0.0]]]), ids(2)) == pytest.approx(0.2)
    assert metric.measured(out, 0 * out, ids(2)) == pytest.approx(1.0)


def test_kl_is_the_mean_divergence_of_the_tokens() -> None:
    before, after = logits(seed=0), logits(seed=1)
    p, q = before[0].double().softmax(-1), after[0].double().softmax(-1)
    by_hand = sum(float(a * math.log(a / b)) for x, y in zip(p, q, strict=True) for a, b in zip(x, y, strict=True)) / 3
    assert Divergence(None).measured(before, after, ids()) == pytest.approx(by_hand, rel=1e-9)
    assert Divergence(None).measured(before, before + 3.0, ids()) == pytest.approx(0.0, abs=1e-12)


def test_tokens_that_the_model_rules_out_do_not_count() -> None:
    before, after = logits(seed=0), logits(seed=1)
    without = Divergence(None).measured(before[..., :-1], after[..., :-1], ids())
    before[..., -1] = after[..., -1] = -torch.inf
    assert Divergence(None).measured(before, after, ids()) == pytest.approx(without, rel=1e-9)


def test_nll_is_the_change_of_the_loss() -> None:
    before, after, tokens = logits(4, seed=0), logits(4, seed=1), ids(4)

    def loss(x: Tensor) -> float:
        return float(torch.nn.functional.cross_entropy(x[0, :-1].double(), tokens[0, 1:]))

    assert Loss(None).measured(before, after, tokens) == pytest.approx(loss(after) - loss(before), rel=1e-9)
    assert Loss(None).measured(after, before, tokens) == pytest.approx(loss(before) - loss(after), rel=1e-9)


@pytest.mark.parametrize("at_once", [1, 14, 21])  # one token, two, three
def test_damage_is_the_same_in_pieces_of_some_tokens(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, tokens = logits(5, seed=0), logits(5, seed=1), ids(5)
    whole = [metric(None).measured(before, after, tokens) for metric in (Divergence, Loss)]
    monkeypatch.setattr(divergence, "AT_ONCE", at_once)
    pieces = [metric(None).measured(before, after, tokens) for metric in (Divergence, Loss)]
    assert pieces == pytest.approx(whole, rel=1e-12)


# -- probes --------------------------------------------------------------------------------------------------


def test_probes_of_hidden_have_unit_covariance() -> None:
    out = logits(2, 4)
    probes = Hidden(None).probes(out, ids(2), noise_of(), 40_000)  # type: ignore[arg-type]
    assert torch.allclose(covariance(probes) * float(out.norm()) ** 2, torch.eye(8, dtype=torch.float64), atol=0.05)


@pytest.mark.parametrize("metric", [Divergence(None), Loss(None)])
def test_fisher_probes_have_the_fisher_matrix_as_covariance(metric: Any) -> None:
    """½ F / tokens: a change of the logits δ then has E⟨v, δ⟩² = ½ δᵀFδ / tokens."""
    out = logits()
    probes = metric.probes(out, ids(), noise_of(), 60_000)
    scored = 3
    if metric.name == "nll":
        probes, scored = probes[1:], 2
        assert not probes[:, :, -1].any()
    want = fisher(out) / (2 * scored)
    if metric.name == "nll":
        want[14:] = want[:, 14:] = 0
    assert torch.allclose(covariance(probes), want, atol=2e-3)
    assert float(want.abs().max()) > 0.02  # the tolerance says something


def test_fisher_probes_of_a_large_vocabulary_in_bfloat16() -> None:
    """A bfloat16 softmax over many tokens misses 1 by a percent; probes sum to zero for every token even so."""
    out = logits(2, 30_000).bfloat16()
    probes = Divergence(None).probes(out, ids(2), noise_of(), 4).float()
    assert float((probes.sum(-1).abs() / probes.abs().sum(-1)).max()) < 5e-3
    assert probes.dtype == torch.float32


@pytest.mark.parametrize("metric", [Divergence, Loss])
def test_pieces_of_pictures_are_no_words(metric: Any) -> None:
    """Neither what the model gives there, nor that they are what comes next."""
    model = SimpleNamespace(config=SimpleNamespace(image_token_id=5, video_token_id=6, audio_token_index=None))
    of, out, other = metric(model), logits(6, seed=3), logits(6, seed=4)
    given = {"input_ids": torch.tensor([[1, 5, 5, 2, 6, 3]]), "pixel_values": torch.ones(1)}
    log_p, log_q = (one[0].double().log_softmax(-1) for one in (out, other))
    if metric is Divergence:
        rows, scored = [0, 3, 5], 3
        want = float((log_p.exp() * (log_p - log_q)).sum(-1)[rows].mean())
    else:
        rows, scored = [2, 4], 2  # in front of 2 and of 3
        want = float((log_p - log_q)[rows, [2, 3]].mean())
    assert of.measured(out, other, given) == pytest.approx(want)
    assert of.measured_each(out, other, given) == pytest.approx([want])
    others = [row for row in range(6) if row not in rows]
    for found in (of.probes(out, given, noise_of(), 4), of.slope(out, other, given)[None]):
        assert not found[:, 0, others].any()
        assert found[:, 0, rows].any(dim=-1).all()
    # with all else left out, what a pass over the words alone would have
    alone = of.probes(out, given, noise_of(), 60_000)[:, :, rows]
    assert torch.allclose(covariance(alone), fisher(out[:, rows]) / (2 * scored), atol=3e-3)


def test_a_prompt_without_words_is_refused() -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(image_token_id=5))
    pictures = {"input_ids": torch.tensor([[5, 5]])}
    with pytest.raises(InputError, match="a prompt of pictures alone has no words; use --metric hidden"):
        Divergence(model).measured(logits(2), logits(2), pictures)
    with pytest.raises(InputError, match="a prompt of one token, pictures apart, has no next token"):
        Loss(model).forward({"input_ids": torch.tensor([[1, 5, 5]])})


@pytest.mark.parametrize("name", ["kl", "nll"])
def test_the_second_order_is_the_measured_damage_of_a_small_change(name: str) -> None:
    metric: Any = Divergence(None) if name == "kl" else Loss(None)
    out, tokens = logits(4, 9), ids(4, 9)
    delta = 1e-2 * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    delta_all = delta.double().flatten()
    measured = metric.measured(out.double(), out.double() + delta, tokens)
    # r = -⟨v, δ⟩: the response is the term's, and the output changes by minus the term
    first = metric.first_order(out, tokens)
    probes = metric.probes(out, tokens, noise_of(), 50_000)
    probes = probes if first is None else torch.cat([first[None], probes])
    responses = -(probes.double().flatten(1) @ delta_all)[None, :, None]
    estimate, low, high = (float(x) for x in metric.predicted(responses, 0.999))
    assert low <= 1.03 * measured
    assert high >= 0.97 * measured
    assert estimate == pytest.approx(measured, rel=0.03)
    assert float(metric.of_set(responses)[0, 0]) == pytest.approx(estimate, rel=1e-6)


def test_the_first_order_of_nll_is_exact_and_signed() -> None:
    metric, out, tokens = Loss(None), logits(4, 9), ids(4, 9)
    slope = metric.first_order(out, tokens)
    assert slope.shape == (1, 4, 9)
    leaf = out.clone().requires_grad_()
    with torch.enable_grad():
        (want,) = torch.autograd.grad(torch.nn.functional.cross_entropy(leaf[0, :-1], tokens[0, 1:]), leaf)
    assert torch.allclose(slope, want, atol=1e-7)


# -- which metric a model has --------------------------------------------------------------------------------


@functools.cache
def structure_of(model_type: str) -> tuple[Any, Any]:
    model = two_single(model_type)
    return model, discover(model)


@pytest.mark.parametrize(
    ("model_type", "default", "causal"),
    [("llama", "kl", True), ("gpt2", "kl", True), ("bert", "kl", False), ("t5", "hidden", False)],
)
def test_default_metric(model_type: str, default: str, causal: bool) -> None:
    model, structure = structure_of(model_type)
    metric = metric_for(None, model, structure)
    assert metric.name == default
    if default == "kl":
        assert head_of(model, structure.stack).causal == causal
        assert ("next-token" in metric.meaning) == causal  # a masked LM predicts the token itself


@pytest.mark.parametrize("kind", ["text", "token"])
def test_the_damage_of_a_classifier_is_of_its_classes(kind: str) -> None:
    model = classifier(kind)
    metric = metric_for(None, model, discover(model))
    assert (metric.name, metric.unit) == ("kl", "nats" if kind == "text" else "nats/token")
    assert "over its classes" in metric.meaning
    with pytest.raises(InputError, match=r"no next-token model: .*; use --metric kl"):
        metric_for("nll", model, discover(model))
    other = classifier(kind, problem_type="multi_label_classification")
    assert metric_for(None, other, discover(other)).name == "hidden"


def test_a_decoder_without_a_mask_is_not_causal() -> None:
    """bert with a causal head's name but bidirectional attention: its loss would see the answer."""
    from transformers import BertLMHeadModel

    model, _ = structure_of("bert")
    model = BertLMHeadModel._from_config(model.config, attn_implementation="eager").eval()
    structure = discover(model)
    assert not head_of(model, structure.stack).causal
    with pytest.raises(InputError, match="does not predict the next token"):
        metric_for("nll", model, structure)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decoder", [False, True])
def test_causality_of_an_untrained_model_in_every_dtype(decoder: bool, dtype: torch.dtype) -> None:
    """Its attention is nearly uniform and its weights are small: a later token moves earlier logits by 1e-3."""
    from transformers import ElectraConfig, ElectraForCausalLM

    config = ElectraConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                           intermediate_size=48, embedding_size=32, is_decoder=decoder)  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = ElectraForCausalLM._from_config(config, attn_implementation="eager").eval().to(dtype)
    assert head_of(model, discover(model).stack).causal == decoder


def test_a_head_whose_output_has_another_name_is_read() -> None:
    from transformers import BertForPreTraining

    model, _ = structure_of("bert")
    model = BertForPreTraining._from_config(model.config, attn_implementation="eager").eval()
    assert metric_for(None, model, discover(model)).name == "kl"
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(head_output(model, ids), model(ids).prediction_logits)
    assert "move with later tokens" in str(head_of(model, discover(model).stack).why_no_next_token())


@pytest.mark.parametrize("name", ["kl", "nll"])
@pytest.mark.parametrize("model_type", ["llama", "t5"])
def test_no_head_no_divergence(name: Any, model_type: str) -> None:
    model, structure = structure_of(model_type)
    model = model if model_type == "t5" else model.model
    why = "what is read here is its encoder" if model_type == "t5" else "no LM head"
    with pytest.raises(InputError, match=rf"^--metric {name}: .*{why}; use --metric hidden( or --stack decoder)?$"):
        metric_for(name, model, structure)


def test_one_token_has_no_next() -> None:
    model, _ = structure_of("llama")
    with pytest.raises(InputError, match="one token"):
        Loss(model).forward(torch.tensor([[5]]))
    assert Divergence(model).forward(torch.tensor([[5]]))().shape[1] == 1


def test_hidden_of_an_encoder_decoder_is_the_encoders() -> None:
    model, structure = structure_of("t5")
    tokens = token_ids(model.get_encoder())
    with torch.no_grad():
        own = model.get_encoder()(input_ids=tokens).last_hidden_state
        assert torch.equal(Hidden(structure).forward(tokens)(), own)


def test_hidden_states_are_those_of_tokens() -> None:
    """A model of two towers gives scores first: no change of these is one of hidden states."""
    states = torch.ones(1, 3, 4)
    assert hidden_states((states, None), None) is states
    for output in ((torch.tensor(2.0),), (torch.ones(1, 3),), (None,)):
        with pytest.raises(UnsupportedModelError, match="no hidden states of tokens"):
            hidden_states(output, None)


def test_a_map_is_read_place_by_place_whichever_axis_its_channels_are_on() -> None:
    """In front, as convolutions leave them, or behind, where the last axis is as wide as hidden states."""
    states, stack = torch.randn(1, 3, 5, 8), SimpleNamespace(config=PreTrainedConfig(hidden_size=8))
    for given in (states, states[..., :4].permute(0, 3, 1, 2)):
        made = hidden_states((given, None), stack)
        assert torch.equal(made, states[..., : made.shape[-1]].flatten(1, 2))
