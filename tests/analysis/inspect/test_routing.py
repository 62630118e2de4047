"""W_QK, its R² and H rebuilt from scores, against dense M x M matrices of the models' own weights in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import UNLIKE, WIRINGS, InDouble, as_loaded, double_model, far, prompt_of, sweep, token_ids, two_single
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.routing import _distances, routing
from duat_cli.analysis.inspect.run import inspect
from duat_cli.models.instrument.functions.scores import ScoreLayer, score_layers
from duat_cli.models.instrument.hooks import hooked
from duat_cli.operators.bilinear import bilinear_numbers, thin
from duat_cli.results.operator import Routing
from duat_cli.zoo import tiny

OPTIONS = InspectOptions(cache=False, routing=True)
ROTARY = ("llama", "gemma2", "mixtral")
READS = {"gpt2": "attn.c_attn", "bert": "attention.self.query"}


def routing_of(model: Any, *ids: Tensor) -> list[Routing]:
    report = inspect(as_loaded(model), [prompt_of(one) for one in ids], OPTIONS, lambda *_: None)
    found = [block.routing for block in report.blocks]
    assert None not in found
    return [one for one in found if one is not None]


@functools.cache
def in_double(model_type: str) -> list[Routing]:
    """Of the tokens of `token_ids`."""
    model = double_model(model_type)
    with InDouble():
        return routing_of(model, token_ids(model))


def weights_of(model_type: str, block: nn.Module, config: Any) -> tuple[Tensor, Tensor]:
    """W_Q and W_K of every head, (heads, M, d), from the names that these models give them."""
    heads = config.num_attention_heads
    if model_type == "gpt2":
        joint = block.attn.c_attn.weight  # type: ignore[union-attr]
        query, key, _ = joint.split(joint.shape[1] // 3, dim=1)
    elif model_type == "bert":
        own = block.attention.self  # type: ignore[union-attr]
        query, key = own.query.weight.T, own.key.weight.T
    else:
        query, key = block.self_attn.q_proj.weight.T, block.self_attn.k_proj.weight.T  # type: ignore[union-attr]
    width = query.shape[1] // heads
    query, key = (w.detach().unflatten(1, (-1, width)).permute(1, 0, 2) for w in (query, key))
    return query, key.repeat_interleave(heads // key.shape[0], 0)


def rotation(width: int, position: int, base: float) -> Tensor:
    """R with k R the rotated key, from the definition: channels c and c + d/2 turn by position * base^(-2c/d)."""
    R = torch.zeros(width, width, dtype=torch.float64)
    for c in range(width // 2):
        angle, other = position * base ** (-2 * c / width), c + width // 2
        R[c, c] = R[other, other] = math.cos(angle)
        R[c, other], R[other, c] = math.sin(angle), -math.sin(angle)
    return R


def numbers_of(W: Tensor) -> tuple[float, float]:
    """Stable rank and symmetric share of one dense form."""
    values = torch.linalg.svdvals(W)
    return float(values.square().sum() / values[0] ** 2), float(((W + W.T) / 2).norm() / W.norm())


def correlation(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1]) ** 2


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "bert", "mixtral"])
def test_w_qk_is_that_of_the_dense_weights(model_type: str) -> None:
    model, found = double_model(model_type), in_double(model_type)
    config = model.config
    for block, one in zip(model.get_submodule(WIRINGS[model_type].blocks), found, strict=True):
        query, key = weights_of(model_type, block, config)
        assert one.heads is not None
        for head, A, B in zip(one.heads, query, key, strict=True):
            W = A @ B.T
            rank, share = numbers_of(W)
            values = torch.linalg.svdvals(W)[: len(head.singular_values)]
            assert far(values.new_tensor(head.singular_values), values) < 1e-9
            assert head.frobenius_norm == pytest.approx(float(W.norm()), rel=1e-9)
            assert head.spectral_norm == head.singular_values[0]
            assert (head.stable_rank, head.symmetric_share) == pytest.approx((rank, share), rel=1e-9)
        assert one.stable_rank == pytest.approx(sum(h.stable_rank or 0 for h in one.heads) / len(one.heads))
        assert one.distances is not None
        assert [row.distance for row in one.distances] == ([0, 1, 2, 4] if model_type in ROTARY else [0])
        for row in one.distances:
            base = config.rope_parameters["rope_theta"] if model_type in ROTARY else 1.0
            turned = rotation(query.shape[-1], row.distance, base) if model_type in ROTARY else None
            dense = [A @ B.T if turned is None else A @ turned @ B.T for A, B in zip(query, key, strict=True)]
            ranks, shares = zip(*map(numbers_of, dense), strict=True)
            assert row.stable_rank == pytest.approx(sum(ranks) / len(ranks), rel=1e-6)
            assert row.symmetric_share == pytest.approx(sum(shares) / len(shares), rel=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "bert", "mixtral"])
def test_what_scores_are_explained_by(model_type: str) -> None:
    model = double_model(model_type)
    ids = token_ids(model)
    blocks = list(model.get_submodule(WIRINGS[model_type].blocks))
    read: list[Tensor] = []

    def see(module: nn.Module, args: Any, kwargs: Any) -> None:
        read.append(args[0][0])

    layers = [block.get_submodule(READS.get(model_type, "self_attn.q_proj")) for block in blocks]
    with InDouble():
        with hooked(layers, see), torch.no_grad():
            model(input_ids=ids)
        weights: dict[int, Any] = {}
        sweep(model, ids, lambda run, _step, _block: weights.setdefault(run.index, run.attention[0]))
    for block, x, one in zip(range(len(blocks)), read, in_double(model_type), strict=True):
        query, key = weights_of(model_type, blocks[block], model.config)
        given = weights[block].scored
        groups = given.query.shape[1] // given.key.shape[1]
        pairs = torch.cat([H for _, H in weights[block].rows.chunks()], dim=1)[0] > 0
        centred = x - x.mean(0)
        assert one.heads is not None
        for head, A, B in zip(one.heads, query, key, strict=True):
            scores = (given.query[0, head.index] @ given.key[0, head.index // groups].T)[pairs]
            assert head.r2_plain == pytest.approx(correlation(scores, (x @ x.T)[pairs]), rel=1e-8)
            assert head.r2_centred == pytest.approx(correlation(scores, (centred @ centred.T)[pairs]), rel=1e-8)
            assert head.r2_bilinear == pytest.approx(correlation(scores, (x @ A @ B.T @ x.T)[pairs]), rel=1e-8)


@pytest.mark.parametrize("budget", [None, 1])
@pytest.mark.parametrize("model_type", ["gemma2", "bert", "gpt_oss", "qwen3"])
def test_h_is_rebuilt_from_queries_and_keys(model_type: str, budget: int | None) -> None:
    model = two_single(model_type)
    found: list[Routing] = []
    sweep(model, token_ids(model), lambda run, _step, _block: found.append(routing(run)), budget)
    assert found
    assert all(one.rebuilt_error is not None and one.rebuilt_error < 1e-5 for one in found)
    assert any(one.rebuilt_error for one in found)  # another way, so not to the last bit


@pytest.mark.parametrize("model_type", sorted(set(UNLIKE) - {"gemma2", "bert", "gpt_oss"}))
def test_every_type_has_h_rebuilt_or_a_reason(model_type: str) -> None:
    """Of a type whose attention goes through the interface it is rebuilt, whatever its layers and positions are."""
    model = two_single(model_type)
    found: list[Routing] = []
    structure = sweep(model, token_ids(model), lambda run, _step, _block: found.append(routing(run)))
    assert found
    for one in found:
        if structure.path == "attention interface":
            assert one.rebuilt_error is not None
            assert one.rebuilt_error < 1e-5
        else:
            assert one.rebuilt_error is one.heads is None
            assert "intercepted" in one.reasons["rebuilt_error"]


def alibi_falcon() -> Any:
    config = tiny.tiny_config("falcon")
    config.alibi = True
    model = tiny.model_class(config)(config).eval()  # type: ignore[arg-type]
    tiny.randomise(model, 0)
    return model


@pytest.mark.parametrize("model", [lambda: two_single("mpt"), alibi_falcon], ids=["mpt", "falcon"])
def test_scores_with_alibi_are_not_seen_and_the_reason_stands(model: Callable[[], Any]) -> None:
    """ALiBi adds a slope times the distance to the scores; the types that have it (bloom too) pass by the interface."""
    made = model()
    for one in routing_of(made, token_ids(made)):
        absent = [name for name in Routing.model_fields if name != "reasons"]
        assert all(getattr(one, name) is None for name in absent)
        assert set(one.reasons) == set(absent)
        assert all("queries and keys are not seen" in why for why in one.reasons.values())


def test_queries_and_keys_are_made_again_from_their_layers() -> None:
    model = two_single("qwen3")  # norms on queries and keys, grouped heads

    def listen(run: Any, _step: Any, _block: Any) -> None:
        query, key = score_layers(run)
        scored = run.attention[0].scored
        for token in range(run.input.shape[1]):
            for layer, own in ((query, scored.query), (key, scored.key)):
                assert far(layer.read[token] @ layer.at(token), own[0, :, token]) < 1e-5

    sweep(model, token_ids(model), listen)


def test_where_there_is_nothing_to_see_the_reason_stands() -> None:
    model = two_single("bloom")
    for one in routing_of(model, token_ids(model)):
        assert one.rebuilt_error is one.heads is one.stable_rank is None
        assert "intercepted" in one.reasons["rebuilt_error"]
    model = two_single("deepseek_v3")
    latent = routing_of(model, token_ids(model))[0]
    assert latent.rebuilt_error is not None
    assert latent.heads is None
    assert "2 linear layers" in latent.reasons["heads"]
    biased = two_single("t5")
    one = routing_of(biased, token_ids(biased))[0]
    assert one.rebuilt_error is None
    assert "position_bias" in one.reasons["rebuilt_error"]


def test_it_is_a_mean_over_prompts_and_asked_for() -> None:
    model = two_single("llama")
    ids = token_ids(model), token_ids(model, 3, 2)
    both, *alone = (routing_of(model, *some)[0] for some in (ids, ids[:1], ids[1:]))
    assert both.r2_plain == pytest.approx(sum(one.r2_plain or 0.0 for one in alone) / 2, rel=1e-12)
    assert both.rebuilt_error == max(one.rebuilt_error or 0.0 for one in alone)
    assert both.heads is not None
    assert both.distances is not None
    assert [head.index for head in both.heads] == list(range(model.config.num_attention_heads))
    assert [row.distance for row in both.distances] == [0, 1, 2]  # those that both prompts have
    report = inspect(as_loaded(model), [prompt_of(ids[0])], InspectOptions(cache=False), lambda *_: None)
    assert report.blocks[0].routing is None


def test_thin_factors_of_forms_that_are_no_ordinary_matrix() -> None:
    zero = torch.zeros(5, 2)
    assert bilinear_numbers(thin(zero), thin(zero)).stable_rank is None
    assert bilinear_numbers(thin(torch.randn(5, 2)), thin(torch.randn(4, 2))).symmetric_share is None
    A = torch.randn(6, 3)
    assert bilinear_numbers(thin(A), thin(A)).symmetric_share == pytest.approx(1.0)
    turned = A @ torch.tensor([[0.0, 1, 0], [-1, 0, 0], [0, 0, 0]])
    assert bilinear_numbers(thin(A), thin(turned)).symmetric_share == pytest.approx(0.0, abs=1e-7)


def test_maps_of_all_tokens_are_compared_without_copies() -> None:
    """They take d x d numbers for every token and head, so a difference of them would be as large again."""
    turned = torch.zeros(2, 64, 16, 16)
    turned[:, 5] = 1.0
    layer = ScoreLayer(torch.zeros(64, 8), torch.zeros(2, 8, 16), turned)
    largest = [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if isinstance(found, Tensor) and found.untyped_storage().data_ptr() != turned.untyped_storage().data_ptr():
                largest[0] = max(largest[0], found.numel())
            return found

    near = [bilinear_numbers(thin(torch.eye(8, 4)), thin(torch.eye(8, 4)))]
    with Sizes():
        found = _distances((layer, layer), near, lambda _: near)
    assert [row.distance for row in found] == [0, 1, 2, 4, 8, 16, 32]
    assert largest[0] < turned.numel() / 2
