"""The operator of a mixer beside attention, against its definition written out with the model's own weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import InDouble, double_model, far, sweep, token_ids
from torch import Tensor
from torch.nn.functional import silu, softplus

from duat_cli.analysis.decomposition import crossing
from duat_cli.analysis.geometry import bare
from duat_cli.analysis.inspect.measured.cross import cross_of, measure_cross
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.value_path.second import second_operator


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
