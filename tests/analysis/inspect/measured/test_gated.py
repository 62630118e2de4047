"""Every number about a gated W', and of its null, against the dense W' of the model itself."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import (
    GATED,
    DenseBlock,
    InDouble,
    assert_described,
    correlation_of,
    coupling_of,
    dense_blocks,
    double_model,
    effective_number,
    far,
    kronecker_singular_values,
    naive_coupling_numbers,
    single_model,
    sweep,
    token_ids,
)

from duat_cli.analysis.geometry import geometry
from duat_cli.analysis.inspect.measured import entries as entries_module
from duat_cli.analysis.inspect.measured.gated import MANY
from duat_cli.analysis.inspect.measured.numbers import NullNumbers, OperatorNumbers
from duat_cli.analysis.inspect.operator import measure
from duat_cli.analysis.inspect.uniform import UniformNulls
from duat_cli.cache.tensors import TensorCache
from duat_cli.models import budgets
from duat_cli.models.instrument.attention import StoredRows
from duat_cli.models.value_path.factors import operator_of
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.operators import gated as gated_module

THRESHOLD = 0.3


@dataclass(frozen=True)
class Block:
    operator: AttentionOperator
    numbers: OperatorNumbers
    null: NullNumbers


def blocks(model: Any, *, spectrum: bool = False) -> list[Block]:
    nulls, found = UniformNulls(THRESHOLD), []

    def listen(run: Any, step: Any, block: Any) -> None:
        operator = operator_of(run, block.factors, step)
        known = geometry(block.factors, block.parts.name, TensorCache("unused", enabled=False))
        numbers = measure(operator, known, threshold=THRESHOLD, spectrum=spectrum, matrix=True)
        nulls.add(run.index, operator, known, numbers)
        found.append((operator, numbers))

    sweep(model, token_ids(model), listen, None)
    by_block = nulls.numbers()
    return [Block(operator, numbers, by_block[k]) for k, (operator, numbers) in enumerate(found)]


@functools.cache
def reference(model_type: str) -> tuple[DenseBlock, ...]:
    model = double_model(model_type)
    return tuple(dense_blocks(model, token_ids(model), GATED[model_type]))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 2e-5)])
@pytest.mark.parametrize("model_type", list(GATED))
def test_every_number_is_that_of_the_dense_operator(model_type: str, dtype: str, tolerance: float) -> None:
    dense = reference(model_type)
    if dtype == "float64":
        model = double_model(model_type)
        with InDouble():
            found = blocks(model, spectrum=True)
    else:
        found = blocks(single_model(model_type))
    assert len(found) == len(dense) == 3
    for got, truth in zip(found, dense, strict=True):
        assert far(got.numbers.frobenius_norm, float(truth.W.norm())) <= tolerance
        assert far(got.numbers.matrix, coupling_of(truth.W, len(truth.x))) <= tolerance
        assert far(got.operator.matrix().dense(), truth.W) <= tolerance
        assert far(got.operator.by_channel().matrix().dense(), truth.W) <= tolerance
        assert_described(got.numbers, truth.W, truth.x, tolerance, THRESHOLD)
        singular = kronecker_singular_values(truth.W, len(truth.x))
        rank = int((singular > 1e-9 * singular.max()).sum())  # a causal mask leaves early tokens fewer than products
        assert rank <= got.operator.products
        assert got.operator.gate is None or rank > got.operator.factors.heads
        if got.numbers.spectral_norm is not None:
            assert far(got.numbers.spectral_norm, float(torch.linalg.matrix_norm(truth.W, ord=2))) <= 1e-3


@pytest.mark.parametrize("model_type", list(GATED))
def test_the_null_is_the_dense_operator_with_uniform_attention(model_type: str) -> None:
    model = double_model(model_type)
    with InDouble():
        found = blocks(model)
    for got, dense in zip(found, reference(model_type), strict=True):
        H = torch.cat([rows for _, rows in got.operator.rows.chunks()], dim=1)
        seen = (H != 0).any(dim=0).double()
        level = (seen / seen.sum(dim=1, keepdim=True)).expand_as(H)
        gate = got.operator.head_gate  # of heads as a whole: part of H, and of no softmax
        level = level.clone() if gate is None else level * gate[..., None]
        null = replace(got.operator, rows=StoredRows(level))
        assert_described(got.null, null.by_channel().matrix().dense(), dense.x, 1e-10, THRESHOLD)


@pytest.mark.parametrize("model_type", ["jamba", "mamba2"])
def test_the_gate_of_a_mixer_stays_in_the_null(model_type: str) -> None:
    """By hand: B_ij = O diag(g_i) / (i + 1), one gate a channel; whether its heads have one channel each or several."""
    model, caught = double_model(model_type), dict[str, torch.Tensor]()
    layer = (model.model if model_type == "jamba" else model.backbone).layers[0]
    mixer = layer.mamba if model_type == "jamba" else layer.mixer

    def keep(name: str) -> Any:
        return lambda _module, args, *_output: caught.update({name: args[0].detach().reshape(7, -1)})

    with InDouble():
        null = blocks(model)[0].null
        at = {"read": mixer.in_proj, "mixed": mixer.out_proj}
        handles = [module.register_forward_hook(keep(name)) for name, module in at.items()]
        if model_type == "mamba2":
            handles.append(mixer.norm.register_forward_pre_hook(keep("kernel")))
        with torch.no_grad():
            model(input_ids=token_ids(model))
            gate = torch.nn.functional.silu(mixer.in_proj(caught["read"]).chunk(2, dim=-1)[1])
        for handle in handles:
            handle.remove()
    gate = caught["mixed"] / caught["kernel"] if model_type == "mamba2" else gate
    tokens, output = len(gate), mixer.out_proj.weight.detach()
    level = torch.ones(tokens, tokens, dtype=torch.float64).tril() / torch.arange(1, tokens + 1)[:, None]
    W = torch.einsum("ij,ic,mc->imjc", level, gate, output).flatten(2).flatten(0, 1)
    assert null.effective_heads is not None
    assert null.effective_heads > 1.5
    assert far(null.effective_heads, effective_number(kronecker_singular_values(W, tokens))) <= 1e-9
    assert far(null.block_correlation, correlation_of(W, tokens)) <= 1e-9
    for name, expected in naive_coupling_numbers(coupling_of(W, tokens)).items():
        assert getattr(null.coupling, name) == pytest.approx(expected, rel=1e-9, abs=1e-9), name


def test_rows_in_pieces_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = blocks(single_model("muse_glimmer_text"))
    monkeypatch.setattr(budgets, "MEASURED_ELEMENTS", 4 * 13)
    for got, expected in zip(blocks(single_model("muse_glimmer_text")), whole, strict=True):
        for field in dataclasses.fields(OperatorNumbers):
            one, two = getattr(got.numbers, field.name), getattr(expected.numbers, field.name)
            if isinstance(one, float):
                assert one == pytest.approx(two, rel=1e-5), field.name
        assert dataclasses.asdict(got.numbers.weighted) == pytest.approx(dataclasses.asdict(expected.numbers.weighted))


def test_the_sampled_density_holds_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed is fixed; at three blocks a chance of 1 in 7 to miss one."""
    exact = blocks(single_model("afmoe"))
    monkeypatch.setattr(entries_module, "EXACT_ENTRIES", 0)
    inside = 0
    for got, expected in zip(blocks(single_model("afmoe")), exact, strict=True):
        sampled, counted = got.numbers.numerical, expected.numbers.numerical
        assert sampled is not None
        assert counted is not None
        assert sampled.low < sampled.share < sampled.high
        inside += sampled.low <= counted.share <= sampled.high
    assert inside >= 2


def test_where_the_gram_matrix_is_too_large_two_numbers_are_missing_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gated_module, "SPECTRUM_SIDE", 3)
    monkeypatch.setattr("duat_cli.analysis.inspect.measured.gated.SPECTRUM_SIDE", 3)
    for got in blocks(single_model("muse_glimmer_text")):
        assert got.numbers.effective_heads is None
        assert got.numbers.block_correlation is None
        assert got.numbers.frobenius_norm > 0
        assert got.numbers.reasons == dict.fromkeys(("effective_heads", "block_correlation"), MANY)
