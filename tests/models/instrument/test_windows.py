"""Attention over windows against the same attention over all tokens, written out pair by pair in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from helpers import as_loaded
from image_models import MAP, WINDOWS, build, picture
from torch import Tensor, nn

from duat_cli.analysis.decomposition import Decomposition
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.prepared import Prepared, as_prompts
from duat_cli.analysis.support import examine
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.structure import discover, run_stack
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.windows import Windows, asked_streams, tokens_at, window_rows
from duat_cli.zoo import tiny
from duat_cli.zoo.randomise import randomise


def scores_swin(layer: Any, y: Tensor) -> Tensor:
    """Scores and relative positions of all pairs of places, (heads, P, P); y: what attention reads, (P, M)."""
    heads, own = layer.attention.num_attention_heads, layer.attention
    q, k = ((f(y)).unflatten(-1, (heads, -1)).transpose(0, 1) for f in (own.q_proj, own.k_proj))
    return q @ k.mT / q.shape[-1] ** 0.5


def scores_swinv2(layer: Any, y: Tensor) -> Tensor:
    own = layer.attention.self
    q, k = ((f(y)).unflatten(-1, (own.num_attention_heads, -1)).transpose(0, 1) for f in (own.query, own.key))
    q, k = (nn.functional.normalize(t, dim=-1) for t in (q, k))
    return q @ k.mT * own.logit_scale.clamp(max=torch.log(torch.tensor(100.0))).exp()


def bias_swin(layer: Any, down: Tensor, right: Tensor) -> Tensor:
    """By how far one place is below the other and to its right, (P, P) each: (heads, P, P)."""
    w = layer.window_size
    table = layer.attention.relative_position_bias.relative_position_bias_table
    return table[(down + w - 1) * (2 * w - 1) + right + w - 1].permute(2, 0, 1)


def bias_swinv2(layer: Any, down: Tensor, right: Tensor) -> Tensor:
    own, w = layer.attention.self, layer.window_size
    far = torch.stack([down, right], dim=-1) / (w - 1) * 8
    far = far.sign() * torch.log2(far.abs() + 1.0) / torch.log2(torch.tensor(8.0))
    return 16 * own.continuous_position_bias_mlp(far.to(own.logit_scale.dtype)).sigmoid().permute(2, 0, 1)


def dense(layer: Any, x: Tensor, scores: Any, bias: Any, norm: Any) -> Tensor:
    """H over the tokens of a square map, (heads, N, N): a softmax over all places, padding included."""
    side = int(len(x) ** 0.5)
    w, s = layer.window_size or side, getattr(layer, "shift_size", 0)
    padded = -(-side // w) * w
    row, column = (t.flatten() for t in torch.meshgrid(torch.arange(padded), torch.arange(padded), indexing="ij"))
    real = (row < side) & (column < side)
    y = x.new_zeros(padded**2, x.shape[1])
    y[real] = x if norm is None else norm(x)
    r, c = (row - s) % padded, (column - s) % padded  # where the shift puts it
    region = [(t >= padded - w).long() + (t >= padded - s).long() if s else 0 * t for t in (r, c)]
    window, area = (r // w) * padded + c // w, 3 * region[0] + region[1]
    found = scores(layer, y)
    same = window[:, None] == window
    local = [(t[:, None] % w - t % w) * same for t in (r, c)]
    found = found + bias(layer, *local) - 100.0 * (area[:, None] != area)
    return found.masked_fill(~same, -torch.inf).softmax(-1)[:, real][:, :, real]


CASES = {"swin": (scores_swin, bias_swin), "swinv2": (scores_swinv2, bias_swinv2)}


def reference(name: str, layer: Any, x: Tensor) -> Tensor:
    """W' of the block over its tokens, (N, M, N, M), by its weights."""
    new = name == "swin"  # a norm stands in front; in the second version behind
    own, last = layer.attention, layer.attention.o_proj if new else layer.attention.output.dense
    value, norm = own.v_proj if new else own.self.value, layer.layernorm_before
    H = dense(layer, x, *CASES[name], norm if new else None)
    V = value.weight.T.unflatten(-1, (len(H), -1)).transpose(0, 1)  # (heads, M, d)
    out = last.weight.T.unflatten(0, (len(H), -1))  # (heads, d, M)
    centring = torch.eye(x.shape[1], dtype=x.dtype) - 1 / x.shape[1]
    normed = x if new else attended(layer, x)
    scale = (normed.var(-1, correction=0) + norm.eps).rsqrt()
    if new:
        return torch.einsum("hij,j,hab,hbc->icja", H, scale, centring @ norm.weight.diag() @ V, out)
    return torch.einsum("i,hij,hab,hbc->icja", scale, H, V, out @ centring @ norm.weight.diag())


@pytest.mark.parametrize("name", CASES)
def test_the_operator_is_that_of_all_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim, **_: x.softmax(dim))  # the models' own is of float32
    torch.manual_seed(4)
    model = build(name).double().eval().requires_grad_(False)
    like = {"pixel_values": picture()["pixel_values"].double()}
    structure = discover(model, like)
    decomposition, errors, found = Decomposition(one_by_one=True), list[float](), list[Any]()

    def look(run: BlockRun) -> None:
        step = decomposition.advance(run)
        errors.append(step.terms.error)
        operator = step.operator(run, structure.block(run.index)) if run.attention else None
        found.append((run.parts.module, run.input[0], operator))

    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, like), look)
    assert [tuple(x.shape) for _, x, _ in found] == [(64, 8), (64, 8), (64, 8), (16, 16), (16, 16)]
    assert max(errors) < 1e-10
    carried = decomposition.carried
    assert carried is not None
    assert torch.allclose(torch.stack(carried.terms).sum(0), carried.dynamic, atol=1e-12)
    for layer, x, operator in found:
        if operator is not None:
            expected, own = reference(name, layer, x), operator.matrix()
            again = torch.einsum("hij,hab,hbc->icja", own.left, own.factors.value, own.factors.output)
            assert float((again - expected).norm() / expected.norm()) < 1e-10
            assert torch.equal(operator.allowed, expected.abs().amax((1, 3)) > 1e-25)  # also where a shift meets itself


def scores_sam(layer: Any, y: Tensor) -> Tensor:
    """As `scores_swin`, with positions: products of queries and two tables, by how far places of a window are apart."""
    own, side = layer.attn, int(len(y) ** 0.5)
    w = layer.window_size or side
    q, k, _ = own.qkv(y).unflatten(-1, (3, own.num_attention_heads, -1)).permute(1, 2, 0, 3)
    places = torch.meshgrid(torch.arange(side) % w, torch.arange(side) % w, indexing="ij")
    apart = [t.flatten()[:, None] - t.flatten() + w - 1 for t in places]
    down, right = (
        torch.einsum("hic,ijc->hij", q, table[far])
        for table, far in zip((own.rel_pos_h, own.rel_pos_w), apart, strict=True)
    )
    return own.scale * q @ k.mT + down + right


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_the_operator_of_a_map_in_windows_is_that_of_all_tokens(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SAM's blocks take a map of tokens, the first one here in windows; its own code has windows and heads on one axis,
    torch's kernel on two."""
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim, **_: x.softmax(dim))  # the model's own is of float32
    config = transformers.SamVisionConfig(**MAP, attn_implementation=kernel)
    model = transformers.SamVisionModel(config).double().eval()
    randomise(model, 3)
    like, seen = {"pixel_values": picture()["pixel_values"].double()}, []
    structure, decomposition = discover(model, like), Decomposition()

    def look(run: BlockRun) -> None:
        own, norm, x = run.parts.module.attn, run.parts.module.layer_norm1, run.input[0]
        step = decomposition.advance(run)
        assert step.terms.error < 1e-12
        H = dense(run.parts.module, x, scores_sam, lambda _, down, __: torch.zeros_like(down, dtype=x.dtype), norm)
        V = own.qkv.weight[-32:].T.unflatten(-1, (4, -1)).transpose(0, 1)
        out = own.proj.weight.T.unflatten(0, (4, -1))
        centring = torch.eye(32, dtype=x.dtype) - 1 / 32
        scale = (x.var(-1, correction=0) + norm.eps).rsqrt()
        expected = torch.einsum("hij,j,hab,hbc->icja", H, scale, centring @ norm.weight.diag() @ V, out)
        found = step.operator(run, structure.block(run.index)).matrix().dense()
        assert torch.allclose(found, expected.reshape(found.shape), rtol=1e-10, atol=1e-13)
        seen.append(run.parts.hidden.grid)

    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, like), look)
    assert seen == [(4, 4)] * 2


def test_windows_with_a_call_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks without a batch, which attend within each window in a call of its own: W' by their weights."""
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim, **_: x.softmax(dim))
    model = tiny.tiny_model("qwen2_5_vl_vision").double()
    width = model.patch_embed.proj.weight[0].numel()
    grid = torch.tensor([[1, 6, 4], [1, 2, 2]])  # two pictures; windows of 2 x 2
    like = {"hidden_states": torch.randn(28, width).double(), "grid_thw": grid}
    structure, decomposition = discover(model, like), Decomposition()
    given, sizes = list[dict[str, Any]](), list[Any]()
    handles = [b.register_forward_pre_hook(lambda _m, _a, k: given.append(k), with_kwargs=True) for b in model.blocks]

    def look(run: BlockRun) -> None:
        step, layer = decomposition.advance(run), run.parts.module
        assert step.terms.error < 1e-6  # its norms and positions are of float32, whatever the weights are
        own = step.operator(run, structure.block(run.index)).matrix()
        sizes.append(run.attention[0].windows and run.attention[0].windows.sizes)
        found = torch.einsum("hij,hab,hbc->icja", own.left, own.factors.value, own.factors.output)
        expected = packed(
            layer, run.input[0], **{k: given[run.index][k] for k in ("cu_seqlens", "position_embeddings")}
        )
        assert float((found - expected).norm() / expected.norm()) < 1e-6

    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, like), look)
    for handle in handles:
        handle.remove()
    assert sizes == [(4,) * 7, (24, 4), (4,) * 7]


def packed(layer: Any, x: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
    """W' of a block over tokens that follow one another in windows, (N, M, N, M), by its weights."""
    own, gain = layer.attn, layer.norm1.weight
    scale = (x.square().mean(-1) + layer.norm1.variance_epsilon).rsqrt()
    q, k, _ = own.qkv(x * scale[:, None] * gain).unflatten(-1, (3, own.num_heads, -1)).unbind(1)
    cos, sin = (t[:, None] for t in position_embeddings)
    q, k = (t * cos + torch.cat([-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]], -1) * sin for t in (q, k))
    window = torch.bucketize(torch.arange(len(x)), cu_seqlens, right=True)
    scores = torch.einsum("ihd,jhd->hij", q, k) * own.scaling
    H = scores.masked_fill(window[:, None] != window, -torch.inf).softmax(-1)
    V = (gain[:, None] * own.qkv.weight.T).unflatten(-1, (3, own.num_heads, -1))[:, 2].transpose(0, 1)
    out = own.proj.weight.T.unflatten(0, (own.num_heads, -1))
    return torch.einsum("hij,j,hab,hbc->icja", H, scale, V, out)


def attended(layer: Any, x: Tensor) -> Tensor:
    """What a norm behind attention reads: attention's output of the block's own tokens, by the block's own code."""
    seen: list[Tensor] = []
    side = int(len(x) ** 0.5)
    handle = layer.layernorm_before.register_forward_pre_hook(lambda _module, given: seen.append(given[0][0]))
    layer(x[None], (side, side))
    handle.remove()
    return seen[0]


def test_a_window_larger_than_the_map_is_padded() -> None:
    torch.manual_seed(2)
    config = transformers.MaskFormerSwinConfig(**WINDOWS | {"window_size": 6})
    entry = examine(transformers.MaskFormerSwinModel(config).eval(), like=picture())
    assert (entry.status, entry.parts) == ("exact", [])
    assert entry.relative_error is not None
    assert entry.relative_error < 1e-5


def test_tokens_that_are_merged_are_related_to_none() -> None:
    loaded = replace(as_loaded(build("swin")), like=picture())
    options = InspectOptions(cache=False, end_to_end=True)
    prompts = as_prompts(loaded, [Prepared("one", picture(), None)])
    with pytest.raises(UnsupportedModelError, match="block 2 makes 16 tokens of 64; --end-to-end relates"):
        inspect(loaded, prompts, options, lambda *_: None)


def test_windows_lay_out_what_they_take() -> None:
    at = torch.tensor([[3, -1, 0], [2, 1, -1]])
    values = torch.arange(24.0).reshape(4, 1, 3, 2)  # two items
    by_token = Windows(2, at).inward(values)
    assert by_token[1, 0].tolist() == [values[2, 0, 2].tolist(), *(values[3, 0, k].tolist() for k in (1, 0)),
                                       values[2, 0, 0].tolist()]  # fmt: skip
    laid = Windows(2, at).outward(by_token.transpose(1, 2)).transpose(1, 2)
    padding = (at < 0)[None, :, None, :, None].expand(2, 2, 1, 3, 2).reshape(values.shape)
    assert torch.equal(laid, values.masked_fill(padding, 0.0))
    unknown = Windows(2)
    assert torch.equal(unknown.outward(unknown.inward(values).transpose(1, 2)).transpose(1, 2), values)


def test_rows_of_windows_are_a_matrix() -> None:
    torch.manual_seed(1)
    at = torch.tensor([[3, -1, 0], [2, 1, -1]])
    rows = window_rows(torch.randn(2, 4, 3, 3).softmax(-1), at)
    values = torch.randn(2, 2, 3, 5).masked_fill((at < 0)[:, None, :, None], 0.0)  # two of four heads have their own
    [(_, H)] = rows.chunks()
    by_token = rows.windows.inward(values).repeat_interleave(2, 1)[0]
    assert torch.allclose((H @ by_token).transpose(0, 1)[None], rows.mix(values), atol=1e-6)
    assert (H[:, 3, 1:3] == 0).all()
    assert (H[:, 0, 3] > 0).all()


def answers_of(stream: Tensor, mix: Tensor) -> Tensor:
    """Values (items, W, 1, n, M) whose places hold these sums of tokens, mix (W, n, N), and a bias."""
    return (torch.einsum("wnj,bjm->bwnm", mix, stream) + 0.5)[:, :, None]


FOUND = {
    "a permutation": ([0, 3, 1, 2, 4], None, [0, 3, 1, 2, 4]),
    "padding": ([0, 3, None, 1, 2, 4], None, [0, 3, -1, 1, 2, 4]),
    "a token twice": ([0, 3, 1, 2, 4, 4], None, None),
    "a token nowhere": ([0, 3, 1, 2], None, None),
    "two tokens in one place": ([0, 3, 1, 2, 4], (1, 4), None),
}


@pytest.mark.parametrize("case", FOUND)
def test_which_token_stands_where(case: str) -> None:
    places, more, expected = FOUND[case]
    mix = torch.zeros(1, len(places), 5)
    for place, token in enumerate(places):
        if token is not None:
            mix[0, place, token] = 2.0
    if more is not None:
        mix[0, more[0], more[1]] = 1.0
    at = tokens_at(answers_of(asked_streams(torch.randn(1, 5, 3)), mix), 5)
    assert (None if at is None else at.tolist()) == (None if expected is None else [expected])
