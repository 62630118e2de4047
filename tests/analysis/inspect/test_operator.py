"""Every number about W' that a report prints, against the dense W' of the model itself, on every wiring."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from helpers import (
    UNLIKE,
    WIRINGS,
    DenseBlock,
    InDouble,
    correlation_of,
    coupling_of,
    dense_blocks,
    effective_number,
    far,
    kronecker_singular_values,
    naive_coupling_numbers,
    single_model,
    sweep,
    token_ids,
    two_double,
    two_single,
    weighted_coupling_of,
)
from torch import Tensor

from duat_cli.analysis.geometry import Geometry, geometry
from duat_cli.analysis.inspect import uniform as uniform_module
from duat_cli.analysis.inspect.measured import entries as entries_module
from duat_cli.analysis.inspect.measured.numbers import OperatorNumbers
from duat_cli.analysis.inspect.operator import measure
from duat_cli.analysis.inspect.uniform import UniformNulls
from duat_cli.cache.tensors import TensorCache
from duat_cli.models import budgets
from duat_cli.models.discovery.structure import discover
from duat_cli.models.value_path.factors import operator_of
from duat_cli.operators.coupling import CouplingNumbers

THRESHOLD = 0.3
Measured = list[tuple[OperatorNumbers, Geometry]]


def measured(model: Any, ids: Tensor, *, spectrum: bool = True, row_budget: int | None = None) -> Measured:
    found: Measured = []

    def listen(run: Any, step: Any, block: Any) -> None:
        operator = operator_of(run, block.factors, step)
        known = geometry(block.factors, block.parts.name, TensorCache("unused", enabled=False))
        found.append((measure(operator, known, threshold=THRESHOLD, spectrum=spectrum, matrix=True), known))

    sweep(model, ids, listen, row_budget)
    return found


@functools.cache
def reference(model_type: str) -> tuple[DenseBlock, ...]:
    model = two_double(model_type)
    return tuple(dense_blocks(model, token_ids(model), WIRINGS[model_type]))


@functools.cache
def in_double(model_type: str) -> Measured:
    model = two_double(model_type)
    with InDouble():
        return measured(model, token_ids(model))


@functools.cache
def in_single(model_type: str) -> Measured:
    model = two_single(model_type)
    return measured(model, token_ids(model))


def assert_coupling(got: CouplingNumbers, C: Tensor, tolerance: float) -> None:
    for name, expected in naive_coupling_numbers(C).items():
        assert far(dataclasses.asdict(got)[name], expected) <= tolerance, name


@pytest.mark.parametrize("model_type", UNLIKE)
def test_every_number_is_that_of_the_dense_operator(model_type: str) -> None:
    """In both dtypes."""
    found = zip(in_double(model_type), in_single(model_type), reference(model_type), strict=True)
    for (double, _), (single, _), dense in found:
        W, x, tokens = dense.W, dense.x, len(dense.x)
        heads, correlation = effective_number(kronecker_singular_values(W, tokens)), correlation_of(W, tokens)
        C, weighted = coupling_of(W, tokens), weighted_coupling_of(W, x)
        largest = float(torch.linalg.matrix_norm(W, ord=2))
        for got, tolerance in ((double, 1e-10), (single, 1e-5)):
            assert far(got.frobenius_norm, float(W.norm())) <= tolerance
            assert far(got.effective_heads, heads) <= tolerance
            assert far(got.block_correlation, correlation) <= tolerance
            assert far(got.matrix, C) <= tolerance
            assert far(got.spectral_norm, largest) <= 1e-3
            assert_coupling(got.coupling, C, tolerance)
            assert_coupling(got.weighted, weighted, tolerance)
            assert far(got.structural, float((W != 0).double().mean())) <= 1e-12


@pytest.mark.parametrize("model_type", UNLIKE)
def test_the_numerical_density_is_the_count(model_type: str) -> None:
    """Exactly, up to entries that rounding moves across the cutoff."""
    for (got, _), dense in zip(in_double(model_type), reference(model_type), strict=True):
        size = dense.W.abs()
        cutoff = THRESHOLD * float(dense.W.square().mean().sqrt())
        on_the_line = int(((size / cutoff - 1).abs() < 1e-9).sum())
        assert got.numerical is not None
        assert abs(got.numerical.share * size.numel() - int((size > cutoff).sum())) <= on_the_line + 1e-6
        assert got.numerical.low == got.numerical.share == got.numerical.high
        assert 0.05 < got.numerical.share < 0.95


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "gemma2", "falcon"])
def test_the_sampled_density_holds_the_exact_one(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block's 95 % interval; at three blocks a chance of 1 in 7 to miss one, and the seed is fixed."""
    exact = in_single(model_type)
    monkeypatch.setattr(entries_module, "EXACT_ENTRIES", 0)
    model = two_single(model_type)
    sampled = measured(model, token_ids(model), spectrum=False)
    inside = 0
    for (got, _), (expected, _) in zip(sampled, exact, strict=True):
        assert got.numerical is not None
        assert expected.numerical is not None
        assert got.numerical.low < got.numerical.share < got.numerical.high
        assert got.numerical.high - got.numerical.low < 0.06
        inside += got.numerical.low <= expected.numerical.share <= got.numerical.high
    assert inside >= 2


def test_structural_density_of_a_causal_mask_and_a_window() -> None:
    """(N + 1) / 2N for llama; gemma2 alternates a window of 4 with full attention; bert is full."""
    n = 7
    window = sum(min(i + 1, 4) for i in range(n)) / n**2
    for model_type, expected in (
        ("llama", [(n + 1) / (2 * n)] * 2),
        ("gemma2", [window, (n + 1) / (2 * n)]),
        ("bert", [1.0] * 2),
    ):
        shares = [got.structural for got, _ in in_single(model_type)]
        assert shares == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("model_type", "rows_at_once"), [("llama", 1), ("gemma2", 4)])
def test_rows_in_pieces_give_the_same_numbers(
    model_type: str, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = two_double(model_type)
    ids = token_ids(model, 13)
    with InDouble():
        whole = measured(model, ids, spectrum=False)
        monkeypatch.setattr(budgets, "MEASURED_ELEMENTS", 4 * 13 * rows_at_once)
        pieces = measured(model, ids, spectrum=False)
        chunks = measured(model, ids, spectrum=False, row_budget=4 * 4 * 13 * 8)
    for (one, _), (two, _), (three, _) in zip(whole, pieces, chunks, strict=True):
        for other in (two, three):
            assert far(other.frobenius_norm, one.frobenius_norm) <= 1e-12
            assert far(other.effective_heads, one.effective_heads) <= 1e-12
            assert far(other.block_correlation, one.block_correlation) <= 1e-12
            assert far(other.matrix, one.matrix) <= 1e-12
            for kind in ("coupling", "weighted"):
                a, b = (dataclasses.asdict(getattr(o, kind)) for o in (other, one))
                assert a == pytest.approx(b, rel=1e-12)
            assert other.numerical == one.numerical


def test_the_sampled_density_does_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries_module, "EXACT_ENTRIES", 0)
    model = two_double("llama")
    ids = token_ids(model, 13)
    with InDouble():
        whole = measured(model, ids, spectrum=False)
        monkeypatch.setattr(budgets, "MEASURED_ELEMENTS", 4 * 13)
        pieces = measured(model, ids, spectrum=False)
    assert [n.numerical for n, _ in whole] == [n.numerical for n, _ in pieces]


def test_one_token() -> None:
    model = two_double("llama")
    ids = token_ids(model, 1)
    dense = dense_blocks(model, ids, WIRINGS["llama"])
    with InDouble():
        got = measured(model, ids)
    for (numbers, _), block in zip(got, dense, strict=True):
        assert far(numbers.frobenius_norm, float(block.W.norm())) <= 1e-10
        assert far(numbers.spectral_norm, float(torch.linalg.matrix_norm(block.W, ord=2))) <= 1e-3
        assert numbers.block_correlation == pytest.approx(1.0, rel=1e-12)
        assert numbers.coupling.entropy_bits == pytest.approx(0.0, abs=1e-12)
        assert numbers.coupling.first_token_share is None
        assert numbers.coupling.off_diagonal_share == 0.0


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "mpt", "deberta-v2", "gpt_neo"])
def test_one_token_where_attention_is_found_by_its_softmax(model_type: str) -> None:
    model = two_single(model_type)
    found = measured(model, token_ids(model, 1))
    assert len(found) == len(discover(model).blocks)
    for numbers, _ in found:
        assert numbers.frobenius_norm > 0
        assert numbers.effective_heads == pytest.approx(1.0, rel=1e-4)  # a product is as many, whatever the heads
        assert numbers.coupling.effective_context == pytest.approx(1.0)


def test_an_attention_that_writes_nothing_has_no_numbers() -> None:
    """W' = 0 in one block: null, not NaN; the other blocks keep theirs."""
    model = single_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
    seen: list[tuple[float, Any]] = []

    def listen(run: Any, step: Any, block: Any) -> None:
        if block.factors is None:
            seen.append((-1.0, block.factors_reason))
            return
        operator = operator_of(run, block.factors, step)
        known = geometry(block.factors, block.parts.name, TensorCache("unused", enabled=False))
        numbers = measure(operator, known, threshold=0.01, spectrum=True, matrix=False)
        seen.append((numbers.frobenius_norm, numbers))

    sweep(model, token_ids(model), listen)
    assert seen[0][0] > 0
    assert seen[2][0] > 0
    norm, middle = seen[1]
    if norm == 0.0:
        assert middle.effective_heads is middle.block_correlation is middle.numerical is middle.spectral_norm is None
        assert set(dataclasses.asdict(middle.coupling).values()) == {None}
    else:
        assert isinstance(middle, str)
        assert middle


@pytest.mark.parametrize(("model_type", "index"), [("jamba", 0), ("lfm2_moe", 0), ("rwkv", 1), ("longformer", 1)])
def test_of_mixers_and_their_uniform_nulls_it_is_that_of_the_dense_operator(
    model_type: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the mixers most have heads of one channel each, of which there are more than tokens: kept together, or not."""
    model, seen = two_double(model_type), []

    def listen(run: Any, step: Any, block: Any) -> None:
        if run.index != index:
            return
        operator = operator_of(run, block.factors, step)
        known = geometry(block.factors, block.parts.name, TensorCache("unused", enabled=False))
        numbers, found = measure(operator, known, threshold=THRESHOLD, spectrum=False, matrix=True), []
        for kept in (512, 0):
            monkeypatch.setattr(uniform_module, "KEPT_HEADS", kept)
            nulls = UniformNulls(THRESHOLD)
            nulls.add(0, operator, known, numbers)
            found.append(nulls.numbers()[0])
        tokens, x = operator.values.shape[1], operator.values.transpose(0, 1).flatten(1)
        for each, of in (([numbers], operator), (found, operator.uniform(numbers.seen))):
            W = of.matrix().dense()
            heads, correlation = effective_number(kronecker_singular_values(W, tokens)), correlation_of(W, tokens)
            C = coupling_of(W, tokens)
            for got in each:
                assert far(got.effective_heads, heads) <= 1e-9
                assert far(got.block_correlation, correlation) <= 1e-9
                assert_coupling(got.coupling, C, 1e-9)
                if operator.own:  # then W' reads the values themselves
                    assert_coupling(got.weighted, weighted_coupling_of(W, x), 1e-9)
                assert far(got.structural, float((W != 0).double().mean())) <= 1e-12
        seen.append(run.index)

    with InDouble():
        sweep(model, token_ids(model), listen, None)
    assert seen == [index]


def test_a_wrong_operator_would_show() -> None:
    """The comparison can fail: another block's W' is far from this one's, in every number."""
    (got, _), other = in_double("llama")[0], reference("llama")[1]
    tokens = len(other.x)
    assert far(got.frobenius_norm, float(other.W.norm())) > 1e-3
    assert far(got.effective_heads, effective_number(kronecker_singular_values(other.W, tokens))) > 1e-3
    assert far(got.block_correlation, correlation_of(other.W, tokens)) > 1e-3
    assert far(got.matrix, coupling_of(other.W, tokens)) > 1e-2
