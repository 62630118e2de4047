"""W' from the package against W' by automatic differentiation, and by hand from the weights, on every wiring."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import (
    WIRINGS,
    DenseBlock,
    InDouble,
    blocks_of,
    dense_blocks,
    double_model,
    far,
    first_two,
    single_model,
    sweep,
    token_ids,
)
from image_models import build, picture
from torch import Tensor, nn
from two_blocks import double, single

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.instrument.rig import zero_given
from duat_cli.models.value_path import factors as factors_module
from duat_cli.models.value_path.factors import Base, checked, find_factors, operator_of
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.models.value_path.probed import accept
from duat_cli.operators.kronecker import HeadFactors


def operators(
    model: Any, ids: Tensor, structure: Any = None, row_budget: int | None = None
) -> list[tuple[Tensor, AttentionOperator]]:
    """Every block's W', written out, and its factors."""
    found: list[tuple[Tensor, AttentionOperator]] = []

    def listen(run: Any, step: Any, block: Any) -> None:
        assert block.factors is not None, block.factors_reason
        operator = operator_of(run, block.factors, step)
        found.append((operator.matrix().dense(), operator))

    sweep(model, ids, listen, row_budget, structure=structure)
    return found


@dataclass(frozen=True)
class Known:
    """Two blocks of a type in float64, what discovery finds of them, and W' by it and by automatic differentiation."""

    model: Any
    structure: ModelStructure
    ids: Tensor
    operators: list[tuple[Tensor, AttentionOperator]]
    dense: list[DenseBlock]


@functools.cache
def known_of(model_type: str) -> Known:
    model, structure = double(model_type)
    ids = token_ids(model)
    with InDouble():
        found, dense = operators(model, ids, structure), dense_blocks(model, ids, WIRINGS[model_type])
    return Known(model, structure, ids, found, dense)


PROBED = {"falcon", "deepseek_v3"}  # values copied out of a fused layer; values behind a latent


@pytest.mark.parametrize("model_type", list(WIRINGS))
def test_the_factors_are_the_jacobian_of_the_frozen_model_in_float64(model_type: str) -> None:
    """And read where memory shows the place: else probing takes over, right but slow and without a cache."""
    known = known_of(model_type)
    assert len(known.operators) == len(known.dense) == 2
    for (W, operator), block in zip(known.operators, known.dense, strict=True):
        assert far(W, block.W) <= 1e-10
        assert operator.error <= 1e-10
    origins = {block.factors.origin for block in known.structure.blocks}
    assert origins == {"probed" if model_type in PROBED else "read"}


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3", "mixtral", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_homogeneous_block_reads_no_values_from_zeros(model_type: str, dtype: torch.dtype) -> None:
    seen: list[bool] = []

    def listen(run: Any, step: Any, block: Any) -> None:
        [mixed] = run.replay(torch.zeros_like(run.input), zero_given(run, 1)).mixed
        assert mixed.dtype == run.attention[0].output.dtype
        assert torch.equal(mixed, torch.zeros_like(run.attention[0].output))
        seen.append(run.parts.homogeneous)

    model = first_two(single_model(model_type)).to(dtype)
    sweep(model, token_ids(model), listen)
    assert seen == [True] * 2


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral", "phi", "gpt2"])
def test_a_token_whose_embedding_is_zero_has_its_columns_of_w(model_type: str) -> None:
    """As that of a padding token that a prompt begins with: its norm's scale is 1 / sqrt(eps)."""
    model, ids = first_two(double_model(model_type)), torch.tensor([[3, 11, 5, 7, 3, 13]])
    model.get_input_embeddings().weight.data[3] = 0.0
    if model_type == "gpt2":
        model.transformer.wpe.weight.data[0] = 0.0
    expected = dense_blocks(model, ids, WIRINGS[model_type])
    assert not expected[0].x[0].any()
    assert expected[0].W.unflatten(1, (6, -1))[:, 0].any()
    with InDouble():
        got = operators(model, ids)
    for (W, operator), block in zip(got, expected, strict=True):
        assert far(W, block.W) <= 1e-7
        assert operator.error <= 1e-10


@pytest.mark.parametrize(
    "model_type",
    [
        "mobilebert",  # attention inside a bottleneck
        "dbrx",  # queries, keys and values are clipped
        "muse_spark_text",  # a gate in front of O, constant factors of channels behind it
        "ibert",  # norms and layers that give a tuple
    ],
)
def test_w_is_what_attention_adds_for_each_unit_vector(model_type: str) -> None:
    """In float64: what the model's own code adds, attention alone, without factors."""
    seen = []

    def listen(run: Any, step: Any, block: Any) -> None:
        operator = operator_of(run, block.factors, step)
        zero, nothing = torch.zeros_like(run.input), zero_given(run, 1)

        def added(z: Tensor) -> Tensor:
            mixed = run.replay(z, nothing).mixed[0]
            return block.factors.tap.read(run.replay(zero, nothing, attention=mixed))[0]

        W, constant = operator.matrix().dense(), added(zero)
        columns = range(0, zero.numel(), 13)
        units = [torch.zeros_like(zero).flatten().index_fill(0, torch.tensor(c), 1.0) for c in columns]
        images = torch.stack([(added(unit.view_as(zero)) - constant).flatten() for unit in units], dim=1)
        assert far(images, W[:, list(columns)]) <= 1e-10
        assert checked(operator, run, block.factors.tap).error <= 1e-10
        assert step.terms.error <= 1e-10
        seen.append(run.index)

    model = first_two(double_model(model_type))
    with InDouble():
        sweep(model, token_ids(model), listen)
    assert seen == [0, 1]


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "bert", "falcon", "deepseek_v3"])
def test_and_in_float32(model_type: str) -> None:
    known, (model, structure) = known_of(model_type), single(model_type)
    for (W, _), block in zip(operators(model, known.ids, structure), known.dense, strict=True):
        assert far(W, block.W) <= 1e-5


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "bert"])
def test_the_values_are_those_at_the_blocks_input(model_type: str) -> None:
    """B_ij x_j = t_i Σ_h H_h[i, j] v_jh O_h."""
    known = known_of(model_type)
    with InDouble():
        for (_, operator), block in zip(known.operators, known.dense, strict=True):
            weights = torch.cat([rows for _, rows in operator.attention_chunks()], dim=1)
            B = blocks_of(block.W, len(block.x))
            for i, j in ((0, 0), (5, 2), (6, 6)):
                product = sum(
                    weights[h, i, j] * operator.values[h, j] @ out for h, out in enumerate(operator.factors.output)
                )
                assert far(product, B[i, j] @ block.x[j]) <= 1e-10


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "bert"])
def test_probed_factors_are_the_read_ones(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit vectors through the frozen block find the same W' as the weights."""
    known = known_of(model_type)

    def unreadable(run: Any) -> Tensor:
        raise UnsupportedModelError("not to be read")

    monkeypatch.setattr(factors_module, "read_value", unreadable)
    with InDouble():
        structure = discover(known.model)
        probed = operators(known.model, known.ids, structure)
    assert {block.factors.origin for block in structure.blocks} == {"probed"}
    for (W, _), (expected, _) in zip(probed, known.operators, strict=True):
        assert far(W, expected) <= 1e-10


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_row_chunks_make_the_same_operator(model_type: str) -> None:
    known = known_of(model_type)
    ids = token_ids(known.model, 13)
    with InDouble():
        whole, parts = (operators(known.model, ids, known.structure, size) for size in (None, 4 * 4 * 13 * 2))
    for (W, one), (V, many) in zip(whole, parts, strict=True):
        assert len(list(one.chunks())) == 1
        assert len(list(many.chunks())) >= 4
        assert far(V, W) <= 1e-12


# -- a wrong factor cannot fit -------------------------------------------------------------------------------


def corrupted(name: str) -> Callable[..., Tensor]:
    original = getattr(factors_module, name)

    def wrong(*args: Any) -> Tensor:
        matrix = original(*args).clone()
        matrix[0, 0] *= 1.01  # one row of one head
        return matrix

    return wrong


@pytest.mark.parametrize("name", ["read_value", "_read_output"])
def test_a_wrong_reading_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of one head off by a hundredth: the fit's residual shows it, and probing takes over."""
    model, structure = single("llama")
    ids = token_ids(model)
    right = operators(model, ids, structure)
    monkeypatch.setattr(factors_module, name, corrupted(name))
    structure = discover(model)
    assert {block.factors.origin for block in structure.blocks} == {"probed"}
    for (W, _), (expected, _) in zip(operators(model, ids, structure), right, strict=True):
        assert far(W, expected) <= 1e-5


@pytest.mark.parametrize("names", [("read_value", "probe_value"), ("_read_output", "_probe_output")])
def test_where_probing_is_wrong_too_there_is_no_operator(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = single("llama")
    for name in names:
        monkeypatch.setattr(factors_module, name, corrupted(name))
    reasons = [block.factors_reason for block in discover(model).blocks]
    assert all(reason and "no sum of Kronecker products" in reason for reason in reasons)


def test_factors_of_another_block_are_refused_for_this_input() -> None:
    """The fit is made anew for every input: factors that are not this block's leave a residual."""
    model, structure = single("llama")
    known: list[Any] = []
    caught: list[str] = []

    def listen(run: Any, step: Any, block: Any) -> None:
        known.append(block.factors)
        if len(known) == 2:
            stranger = replace(known[1], heads=known[0].heads)
            with pytest.raises(UnsupportedModelError, match="residual") as error:
                operator_of(run, stranger, step)
            caught.append(str(error.value))

    sweep(model, token_ids(model), listen, structure=structure)
    assert len(caught) == 1


def test_a_scale_by_token_is_made_anew_for_each_input() -> None:
    """gemma2's norm behind attention: t depends on the prompt; llama's block has one t = 1."""
    for model_type, fixed in (("llama", True), ("gemma2", False), ("granite", True)):
        model, structure = single(model_type)
        scales = [[o.token_scale for _, o in operators(model, token_ids(model, seed=s), structure)] for s in (0, 1)]
        assert all((t.numel() == 1) == fixed for row in scales for t in row)
        assert all(torch.equal(a, b) == fixed for a, b in zip(*scales, strict=True))
        if fixed:
            assert far(scales[0][0], torch.tensor([WIRINGS[model_type].factor])) <= 1e-5


@pytest.mark.parametrize(
    ("left_over", "reason"),
    [
        (0.0, "W' is zero but for rounding: its heads cancel each other"),
        (1e-6, "all but cancel each other.*--dtype float64 tells"),
        (1.0, None),
    ],
)
def test_what_rounding_leaves_of_heads_that_cancel_is_no_operator(left_over: float, reason: str | None) -> None:
    model = single_model("llama")
    attention = model.model.layers[1].self_attn
    width, heads, output = attention.head_dim, attention.config.num_attention_heads, attention.o_proj.weight
    rest = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    signs = torch.tensor([1.0, -1.0]).repeat(heads // 2).repeat_interleave(width)
    with torch.no_grad():
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
            layer.weight.copy_(layer.weight[:width].repeat(len(layer.weight) // width, 1))
        output.copy_(output[:, :width].repeat(1, heads) * signs + left_over * rest)
    reasons: list[str | None] = []

    def listen(run: Any, step: Any, block: Any) -> None:
        operator = operator_of(run, block.factors, step)
        try:
            checked(operator, run, block.factors.tap)
            reasons.append(None)
        except UnsupportedModelError as error:
            reasons.append(str(error))
        wrong = replace(operator, factors=HeadFactors(operator.factors.value, 1.01 * operator.factors.output))
        with pytest.raises(UnsupportedModelError, match="cancel" if reasons[-1] else "no sum of Kronecker products"):
            checked(wrong, run, block.factors.tap)

    sweep(model, token_ids(model), listen)
    assert reasons[0] is None
    assert reasons[2] is None
    assert reasons[1] is None if reason is None else re.search(reason, str(reasons[1]))


def test_what_attention_adds_may_be_too_small_to_be_told_where_it_arrives() -> None:
    model = single_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight *= 1e-12
    before, small, behind = (block.factors_reason for block in discover(model).blocks)
    assert before is behind is None
    assert "so small that rounding hides" in str(small)


def test_find_factors_says_why_there_are_none() -> None:
    """longcat_flash calls attention twice a block."""
    reasons = [block.factors_reason for block in single("longcat_flash")[1].blocks]
    assert all(reason and "2 times" in reason for reason in reasons)

    def without_attention(run: Any, step: Any, block: Any) -> None:
        run.recording.attention.clear()
        with pytest.raises(UnsupportedModelError, match="no token mixer"):
            find_factors(run, replace(step, given=zero_given(run, 1)))

    model, structure = single("llama")
    sweep(model, token_ids(model), without_attention, structure=structure)


# -- by hand, from the weights -------------------------------------------------------------------------------
#
# W' as a product of explicit matrices on the row-major vector: norm, values, mixing of tokens, output, norm.


def by_token(matrix: Tensor, tokens: int) -> Tensor:
    """The (out, in) matrix on every token: I_N ⊗ matrix."""
    return torch.block_diag(*[matrix] * tokens)


def scales(s: Tensor, width: int) -> Tensor:
    return torch.diag(s.repeat_interleave(width))


def mixing(H: Tensor, kv_heads: int, width: int) -> Tensor:
    """(N heads d, N kv_heads d): token i's head h gets Σ_j H[h, i, j] of token j's head h // groups."""
    heads, tokens, _ = H.shape
    groups = heads // kv_heads
    out = torch.zeros(tokens, heads, width, tokens, kv_heads, width, dtype=H.dtype)
    for h in range(heads):
        for i in range(tokens):
            for j in range(tokens):
                out[i, h, :, j, h // groups] = H[h, i, j] * torch.eye(width, dtype=H.dtype)
    return out.reshape(tokens * heads * width, tokens * kv_heads * width)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    return 1 / (x.square().mean(-1) + eps).sqrt()


def centring(width: int) -> Tensor:
    return torch.eye(width, dtype=torch.float64) - torch.full((width, width), 1 / width, dtype=torch.float64)


def layer_norm_matrix(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """vec(x) to vec of the frozen LayerNorm less its bias."""
    P = centring(x.shape[-1])
    s = inverse_rms(x @ P, norm.eps)
    return scales(s, x.shape[-1]) @ by_token(torch.diag(norm.weight) @ P, len(x))


def rms_norm_matrix(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return scales(inverse_rms(x, eps), x.shape[-1]) @ by_token(torch.diag(gain), len(x))


def _llama(block: Any, x: Tensor, H: Tensor, config: Any) -> Tensor:
    n, d, kv = len(x), config.head_dim, config.num_key_value_heads
    norm, attention = block.input_layernorm, block.self_attn
    front = rms_norm_matrix(x, norm.weight, norm.variance_epsilon)
    return by_token(attention.o_proj.weight, n) @ mixing(H, kv, d) @ by_token(attention.v_proj.weight, n) @ front


def _gpt2(block: Any, x: Tensor, H: Tensor, config: Any) -> Tensor:
    n, M, heads = len(x), config.n_embd, config.n_head
    V = block.attn.c_attn.weight[:, 2 * M :].T  # Conv1D stores (in, out); q, k, v side by side
    front = layer_norm_matrix(x, block.ln_1)
    return by_token(block.attn.c_proj.weight.T, n) @ mixing(H, heads, M // heads) @ by_token(V, n) @ front


def _bert(block: Any, x: Tensor, H: Tensor, config: Any) -> Tensor:
    n, heads = len(x), config.num_attention_heads
    V, out = block.attention.self.value.weight, block.attention.output.dense.weight
    return by_token(out, n) @ mixing(H, heads, V.shape[0] // heads) @ by_token(V, n)


def _olmo2(block: Any, x: Tensor, H: Tensor, config: Any) -> Tensor:
    attention, norm = block.self_attn, block.post_attention_layernorm
    n, d, kv = len(x), attention.head_dim, config.num_key_value_heads
    branch = by_token(attention.o_proj.weight, n) @ mixing(H, kv, d) @ by_token(attention.v_proj.weight, n)
    out = (branch @ x.reshape(-1)).reshape(n, -1)  # olmo2's projections have no bias
    return rms_norm_matrix(out, norm.weight, norm.variance_epsilon) @ branch


def _gemma2(block: Any, x: Tensor, H: Tensor, config: Any) -> Tensor:
    n, d, kv = len(x), config.head_dim, config.num_key_value_heads
    attention, front, behind = block.self_attn, block.input_layernorm, block.post_attention_layernorm
    branch = (
        by_token(attention.o_proj.weight, n)
        @ mixing(H, kv, d)
        @ by_token(attention.v_proj.weight, n)
        @ rms_norm_matrix(x, 1 + front.weight, front.eps)
    )
    out = (branch @ x.reshape(-1)).reshape(n, -1)
    return rms_norm_matrix(out, 1 + behind.weight, behind.eps) @ branch


def _deepseek_v3(block: Any, x: Tensor, H: Tensor, config: Any) -> Tensor:
    n, attention, latent = len(x), block.self_attn, config.kv_lora_rank
    nope, d, heads = config.qk_nope_head_dim, config.v_head_dim, config.num_attention_heads
    norm, inner = block.input_layernorm, attention.kv_a_layernorm
    down = by_token(attention.kv_a_proj_with_mqa.weight[:latent], n)
    front = down @ rms_norm_matrix(x, norm.weight, norm.variance_epsilon)
    c = (front @ x.reshape(-1)).reshape(n, latent)
    up = attention.kv_b_proj.weight.reshape(heads, nope + d, latent)[:, nope:].reshape(heads * d, latent)
    middle = rms_norm_matrix(c, inner.weight, inner.variance_epsilon)
    return by_token(attention.o_proj.weight, n) @ mixing(H, heads, d) @ by_token(up, n) @ middle @ front


BY_HAND = {
    "llama": _llama, "gpt2": _gpt2, "bert": _bert, "olmo2": _olmo2, "gemma2": _gemma2, "deepseek_v3": _deepseek_v3,
}  # fmt: skip


@pytest.mark.parametrize("model_type", list(BY_HAND))
def test_the_factors_are_the_matrix_built_by_hand(model_type: str) -> None:
    known = known_of(model_type)
    with torch.no_grad(), InDouble():
        whole = known.model(input_ids=known.ids, output_attentions=True, output_hidden_states=True)
        blocks = known.model.get_submodule(WIRINGS[model_type].blocks)
        for k, ((W, _), block) in enumerate(zip(known.operators, blocks, strict=True)):
            expected = BY_HAND[model_type](block, whole.hidden_states[k][0], whole.attentions[k][0], known.model.config)
            assert far(W, expected) <= 1e-10


@pytest.mark.parametrize(
    ("factor", "reason"), [(0.0, None), (1e-25, factors_module.SMALL), (1.0, None)], ids=["none", "small", "whole"]
)
def test_a_layer_scale_of_zero_leaves_a_w_of_zero(factor: float, reason: str | None) -> None:
    """One that is small has a W' that rounding hides behind the biases."""
    model, like = build("beit"), picture()
    for name, parameter in model.named_parameters():
        if name.endswith("lambda_1"):
            parameter.data.fill_(factor)
    structure = discover(model, like)
    assert {block.factors_reason for block in structure.blocks} == {reason}
    sizes = list[float]()
    with structure.rig().active() as rig:

        def listen(run: Any) -> None:
            zero = torch.zeros_like(run.input)
            given = zero_given(run, 1)
            block = structure.block(run.index)
            assert block.factors is not None
            operator = operator_of(run, block.factors, Base(zero, given, run.replay(zero, given)))
            sizes.append(float(operator.image().norm()))

        if reason is None:
            rig.run(lambda: run_stack(structure.stack, like), listen)
    assert [size > 0 for size in sizes] == ([] if reason else [factor > 0] * 2)


def test_values_that_nothing_moves_are_said_so_in_windows_as_well() -> None:
    """Which token stands where in a window then shows nowhere."""
    model = build("swin")
    for name, parameter in model.named_parameters():
        if "v_proj.weight" in name or "value.weight" in name:
            parameter.data.zero_()
    reasons = {block.factors_reason for block in discover(model, picture()).blocks if block.parts.attention}
    assert reasons == {"its values do not depend on the stream while dynamic parameters are frozen"}


def test_two_calls_that_are_one_but_for_rounding_are_told_to_try_a_wider_dtype() -> None:
    """Of differential attention, whose difference of two softmax calls is proved in float32."""
    model = first_two(single_model("diffllama"))
    assert all(block.factors is not None for block in discover(model).blocks)
    reason = discover(model.bfloat16()).blocks[0].factors_reason
    assert reason is not None
    assert reason.startswith("it calls attention 2 times; W' is defined for one call")
    assert reason.endswith("in bfloat16 rounding may hide it, try --dtype float32")


def test_values_of_several_tokens_that_rounding_hides_say_what_tells() -> None:
    """RWKV mixes each token with the one in front; of a norm that all but closes, float32 leaves too little to fit."""
    model = first_two(single_model("rwkv"))
    assert discover(model).blocks[1].factors is not None
    with torch.no_grad():
        model.rwkv.blocks[1].ln1.weight.mul_(1e-3)
    reason = discover(model).blocks[1].factors_reason
    assert reason is not None
    assert reason.startswith("its values are made of several tokens")
    assert reason.endswith("--dtype float64 tells whether it is rounding")
    with InDouble():
        assert discover(model.double()).blocks[1].factors is not None


@pytest.mark.parametrize(
    ("dtype", "wider"), [(torch.float16, "float32"), (torch.bfloat16, "float32"), (torch.float32, "")]
)
def test_factors_that_overflow_in_half_precision_are_referred_to_a_wider_dtype(dtype: torch.dtype, wider: str) -> None:
    with pytest.raises(UnsupportedModelError, match="do not fit it") as raised:
        accept(float("inf"), dtype)
    assert (f"--dtype {wider} tells" in str(raised.value)) == bool(wider)
