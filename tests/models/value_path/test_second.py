"""W'_c against dense arithmetic: with the model's own weights and attention weights, or by the mixer's definition."""

from __future__ import annotations

from typing import Any

import decoders
import pytest
import torch
from decoders import attentions, given_to, through
from helpers import InDouble, double_model, far, single_model, sweep, token_ids
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from duat_cli.analysis.decomposition import crossing
from duat_cli.analysis.geometry import bare
from duat_cli.analysis.inspect.measured.cross import cross_of, measure_cross
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import relative_error
from duat_cli.models.discovery.modality import STATES
from duat_cli.models.discovery.proof import ProvedBlock
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.models.value_path.second import second_operator


def operators(model: Any) -> list[AttentionOperator]:
    found = []

    def listen(run: BlockRun, block: ProvedBlock) -> None:
        assert block.cross is not None, block.cross_reason
        found.append(second_operator(run, block.cross))

    through(model, listen)
    return found


def dense_cross(weights: Tensor, value: Tensor, output: Tensor) -> Tensor:
    """W'_c written out, (N M, K width): weights (heads, N, K), value and output as nn.Linear holds them."""
    heads = len(weights)
    v = value.T.unflatten(1, (heads, -1)).permute(1, 0, 2)  # (heads, width, d)
    o = output.T.unflatten(0, (heads, -1))  # (heads, d, M)
    blocks = torch.einsum("hnk,hwd,hdm->nmkw", weights, v, o)
    return blocks.flatten(2).flatten(0, 1)


LAYERS = {
    "t5": lambda model: [
        (block.layer[1].EncDecAttention.v, block.layer[1].EncDecAttention.o) for block in model.decoder.block
    ],
    "bart": lambda model: [
        (layer.encoder_attn.v_proj, layer.encoder_attn.out_proj) for layer in model.model.decoder.layers
    ],
}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("model_type", LAYERS)
def test_that_of_cross_attention_is_the_dense_matrix(
    model_type: str, zero: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zero: one of the encoder's states is the zero vector, and has its columns all the same."""
    model = single_model(model_type).double()
    given = given_to(model)
    if zero:
        given[STATES][:, 1] = 0.0
        monkeypatch.setattr(decoders, "given_to", lambda model: given)
    states, out = given[STATES][0], attentions(model)
    for operator, weights, (v, o) in zip(
        operators(model), out.cross_attentions, LAYERS[model_type](model), strict=True
    ):
        truth = dense_cross(weights[0], v.weight.detach(), o.weight.detach())
        mine = torch.einsum("hnk,hwm->nmkw", operator.matrix().left, operator.factors.maps())
        assert relative_error(mine.flatten(2).flatten(0, 1), truth) < 1e-10
        image = operator.matrix().apply(states)
        assert relative_error(image.flatten(), truth @ states.flatten()) < 1e-10
        assert operator.error < 1e-10


def test_a_norm_behind_cross_attention_is_in_its_scale() -> None:
    """T5Gemma has one on the branch: t differs from token to token."""
    for operator in operators(single_model("t5gemma")):
        assert operator.token_scale.numel() > 1
        assert operator.error < 1e-5


def test_values_that_are_no_layers_output_have_no_factors() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2.0

    model, seen = single_model("bart"), []
    for layer in model.model.decoder.layers:
        own = layer.encoder_attn.v_proj
        layer.encoder_attn.v_proj = Doubled(own.in_features, own.out_features)
        layer.encoder_attn.v_proj.load_state_dict(own.state_dict())
    through(model, lambda run, block: seen.append(block.cross_reason))
    assert all(reason is not None and "is not the matrix that it applies" in reason for reason in seen)


def test_another_output_layer_of_cross_attention_is_refused() -> None:
    """The proof can fail: factors of other weights do not give what the block's own cross-attention adds."""
    model = single_model("bart")

    def listen(run: BlockRun, block: ProvedBlock) -> None:
        assert block.cross is not None
        with torch.no_grad():
            block.parts.cross.module.out_proj.weight.mul_(1.5)  # type: ignore[union-attr, operator]
        with pytest.raises(UnsupportedModelError, match="factors leave a relative residual"):
            second_operator(run, block.cross)

    through(model, listen)


def dense(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """W'_c as blocks B_ij (N, N, M, channels) and the values u (N, channels), of a Mamba-2 mixer that reads x (N, M):
    h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_tᵀ, y_t = C_t h_t + D u_t, then y silu(z)."""
    mixer, tokens = layer.mamba, len(x)
    heads, d, groups = mixer.num_heads, mixer.head_dim, mixer.n_groups
    mixed = mixer.in_proj(x * mixer.ssm_in_multiplier) * mixer.mup_vector[0]
    z, inner, dt = mixed.split([heads * d, mixer.conv_dim, heads], dim=-1)
    u, B, C = silu(mixer.conv1d(inner.T[None])[0, :, :tokens]).T.split(
        [heads * d, groups * mixer.ssm_state_size, groups * mixer.ssm_state_size], dim=-1
    )
    B, C = (each.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 1) for each in (B, C))
    dt, A = softplus(dt + mixer.dt_bias).clamp(*mixer.time_step_limit), -mixer.A_log.exp()
    H = torch.zeros(heads, tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        for j in range(i + 1):
            decay = (dt[j + 1 : i + 1].sum(0) * A).exp()
            H[:, i, j] = (C[i] * B[j]).sum(-1) * dt[j] * decay + mixer.D * (i == j)
    gate = silu(z).unflatten(-1, (heads, d))
    O = (mixer.out_proj.weight * layer.ssm_out_multiplier).unflatten(1, (heads, d))  # noqa: E741
    return torch.einsum("hij,ihc,mhc->ijmhc", H, gate, O).flatten(3), u


def test_it_is_the_recurrence_that_the_model_defines() -> None:
    """Its blocks and values, what the model's own mixer adds, and the numbers that are measured of it."""
    model, seen = double_model("falcon_h1"), []

    def listen(run: Any, _step: Any, known: Any) -> None:
        operator = crossing(run, known)
        assert operator is not None
        assert operator.error < 1e-10
        layer = run.parts.module
        with torch.no_grad():
            blocks, u = dense(layer, layer.input_layernorm(run.input)[0])
        assert far(operator.values.transpose(0, 1).flatten(1), u) < 1e-10
        mine = operator.matrix().dense().unflatten(0, blocks.shape[0::2]).unflatten(-1, (len(u), -1))
        assert far(mine, blocks.transpose(1, 2)) < 1e-10
        own = next(unit.output for unit in run.units if unit.module is layer.mamba)[0] * layer.ssm_out_multiplier
        assert far(torch.einsum("ijmc,jc->im", blocks, u), own) < 1e-10
        told = measure_cross(operator, lambda: bare(operator.factors))
        assert (told.rows, told.columns) == (own.numel(), u.numel())
        assert told.frobenius_norm == pytest.approx(float(blocks.norm()), rel=1e-9)
        squares = blocks.square().sum(dim=(2, 3))
        p = squares / squares.sum(dim=1, keepdim=True)
        entropy = -torch.special.xlogy(p, p).sum(dim=1).mean() / torch.log(torch.tensor(2.0))
        assert told.stats is not None
        assert told.stats.entropy_bits == pytest.approx(float(entropy), rel=1e-6)
        seen.append(run.index)

    with InDouble():
        sweep(model, token_ids(model), listen)
    assert seen == [0, 1, 2]


def test_another_output_layer_is_refused() -> None:
    """The proof can fail: O of other weights does not give what the block's own mixer adds."""
    model = double_model("falcon_h1")

    def listen(run: Any, _step: Any, known: Any) -> None:
        with torch.no_grad():
            run.parts.second.form.output.weight.mul_(1.5)
        with pytest.raises(UnsupportedModelError, match="factors leave a relative residual"):
            second_operator(run, known.cross)

    with InDouble():
        sweep(model, token_ids(model), listen)


def test_a_call_that_runs_other_code_than_it_was_proved_in_has_no_operator() -> None:
    """That is said of the block; the others are measured all the same."""
    model, told = double_model("falcon_h1"), []

    def listen(run: Any, _step: Any, known: Any) -> None:
        if run.index == 1:
            run.recording.second = other_code
        told.append(cross_of(run, known, lambda: bare(known.cross.heads)))

    def other_code() -> Any:
        raise UnsupportedModelError("runs other operations than when it was proved")

    with InDouble():
        sweep(model, token_ids(model), listen)
    first, second, third = told
    assert second.frobenius_norm is None
    assert "other operations" in second.reasons["frobenius_norm"]
    assert second.columns == 0
    assert first.stats is not None
    assert third.stats is not None
