"""The uniform null against the dense W' with uniform H in float64: by definition, and by the model's own code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import (
    GATED,
    UNLIKE,
    WIRINGS,
    Detached,
    InDouble,
    as_loaded,
    assert_described,
    correlation_of,
    coupling_of,
    dense_blocks,
    far,
    kron_sum,
    naive_coupling_numbers,
    prompt_of,
    sweep,
    token_ids,
    two_double,
    two_single,
)
from torch import Tensor, nn

from duat_cli.analysis.geometry import geometry
from duat_cli.analysis.inspect import uniform as uniform_module
from duat_cli.analysis.inspect.measured import entries as entries_module
from duat_cli.analysis.inspect.measured.numbers import NullNumbers
from duat_cli.analysis.inspect.operator import measure
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.inspect.uniform import UniformNulls
from duat_cli.cache.tensors import TensorCache
from duat_cli.models import budgets
from duat_cli.models.instrument.attention import StoredRows
from duat_cli.models.value_path.factors import operator_of
from duat_cli.models.value_path.operator import AttentionOperator

THRESHOLD = 0.3


@dataclass(frozen=True)
class Case:
    """One block: its null as the package has it, and what its dense reference is made of."""

    null: NullNumbers
    left: Tensor  # Ĥ of the null, (heads, N, N), position by position
    maps: Tensor  # A_h, (heads, M, M)
    x: Tensor  # (N, M)

    def dense(self) -> Tensor:
        return kron_sum(self.left, self.maps)


def uniform_left(operator: AttentionOperator) -> Tensor:
    """t_i s_hj / n_i on the n_i positions that some head of row i reaches, one by one."""
    H = torch.cat([weights for _, weights in operator.rows.chunks()], dim=1)
    heads, tokens, _ = H.shape
    t, s = operator.token_scale.expand(tokens), operator.source_scale
    left = torch.zeros(heads, tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        allowed = [j for j in range(tokens) if any(float(H[h, i, j]) != 0 for h in range(heads))]
        for j in allowed:
            for h in range(heads):
                left[h, i, j] = float(t[i]) * float(s[h, j]) / len(allowed)
    return left


Edit = Callable[[AttentionOperator], AttentionOperator]


def cases(model: Any, ids: Tensor, row_budget: int | None = None, edit: Edit = lambda operator: operator) -> list[Case]:
    nulls, found = UniformNulls(THRESHOLD), []

    def listen(run: Any, step: Any, block: Any) -> None:
        operator = edit(operator_of(run, block.factors, step))
        known = geometry(block.factors, block.parts.name, TensorCache("unused", enabled=False))
        numbers = measure(operator, known, threshold=THRESHOLD, spectrum=False, matrix=False)
        nulls.add(run.index, operator, known, numbers)
        found.append((uniform_left(operator), operator.factors.maps().double(), run.input[0].double()))

    sweep(model, ids, listen, row_budget)
    numbers = nulls.numbers()
    return [Case(numbers[k], *parts) for k, parts in enumerate(found)]


IN_SINGLE = ["llama", "gpt2", "bert", "gemma2", "falcon", "deepseek_v3"]


@pytest.mark.parametrize(
    ("model_type", "tolerance"), [*((one, 1e-10) for one in UNLIKE), *((one, 2e-5) for one in IN_SINGLE)]
)
def test_every_number_is_that_of_the_dense_operator_with_uniform_attention(model_type: str, tolerance: float) -> None:
    """In float64, and of some types in float32."""
    if tolerance == 1e-10:
        model = two_double(model_type)
        with InDouble():
            found = cases(model, token_ids(model))
    else:
        model = two_single(model_type)
        found = cases(model, token_ids(model))
    assert len(found) == 2
    for case in found:
        W = case.dense()
        assert W.shape[0] <= 4096
        assert_described(case.null, W, case.x, tolerance, THRESHOLD)


class Uniform(Detached):
    """The model's own code with every softmax that mixes tokens replaced by the uniform one over its own positions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        if func not in (torch.softmax, nn.functional.softmax, torch.Tensor.softmax) or out.shape[-2:] != (7, 7):
            return out
        seen = (out != 0).any(dim=-3, keepdim=True).expand_as(out).to(out)
        return seen / seen.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "opt", "phi3", "deepseek_v3", "laguna"])
def test_in_the_first_block_it_is_what_the_models_own_code_gives(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There no scale of a norm and no gate depends on attention, so that a model with uniform attention has the null's
    W'."""
    import helpers

    model, wiring = two_double(model_type), (WIRINGS | GATED)[model_type]
    ids = token_ids(model)
    with InDouble():
        null = cases(model, ids)[0].null
    own = dense_blocks(model, ids, wiring)[0]
    monkeypatch.setattr(helpers, "Detached", Uniform)
    dense = dense_blocks(model, ids, wiring)[0]
    assert far(dense.x, own.x) == 0
    assert far(dense.W, own.W) > 1e-2
    assert_described(null, dense.W, dense.x, 1e-10, THRESHOLD)


def test_windows_and_masks_are_those_of_the_rows() -> None:
    """gemma2 alternates a window of 4 with all that came before; bert sees everything."""
    for model_type, windows in (("gemma2", [4, 7]), ("llama", [7, 7])):
        model = two_double(model_type)
        with InDouble():
            found = cases(model, token_ids(model))
        for case, window in zip(found, windows, strict=True):
            rows = [min(i + 1, window) for i in range(7)]
            assert (case.left[0] != 0).sum(dim=1).tolist() == rows
            assert case.null.structural == pytest.approx(sum(rows) / 49, abs=1e-12)
    model = two_double("bert")
    with InDouble():
        assert all(case.null.structural == pytest.approx(1.0) for case in cases(model, token_ids(model)))


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_rows_in_pieces_give_the_same_numbers(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_double(model_type)
    ids = token_ids(model, 13)
    with InDouble():
        whole = cases(model, ids)
        chunks = cases(model, ids, row_budget=4 * 4 * 13 * 8)
        monkeypatch.setattr(budgets, "MEASURED_ELEMENTS", 4 * 13)
        monkeypatch.setattr(uniform_module, "PATTERN_BYTES", 0)  # every pattern of tokens alone
        monkeypatch.setattr("duat_cli.operators.uniform.PATTERN_ELEMENTS", 2 * 13)
        pieces = cases(model, ids)
    for one, two, three in zip(whole, pieces, chunks, strict=True):
        for other in (two, three):
            a, b = (dataclasses.asdict(replace(c.null, reasons={})) for c in (other, one))
            assert (a.pop("reasons"), b.pop("reasons")) == ({}, {})
            for kind in ("coupling", "weighted", "numerical"):
                assert a.pop(kind) == pytest.approx(b.pop(kind), rel=1e-12)
            assert a == pytest.approx(b, rel=1e-12)


def test_heads_that_miss_positions_and_tokens_that_are_scaled_away() -> None:
    """A position counts if some head reaches it; a row that no head uses has no block, and is in no mean."""
    model = two_double("llama")
    ids = token_ids(model)

    def edit(operator: AttentionOperator) -> AttentionOperator:
        H = torch.cat([weights for _, weights in operator.rows.chunks()], dim=1).clone()
        H[0, :, 0] = 0  # one head does not reach the first token,
        H[:, 5, 2] = 0  # and none of them the third from the sixth
        scale = torch.ones(7, dtype=torch.float64)
        scale[3] = 0.0
        scale[4] = -2.0
        source = operator.source_scale.clone()
        source[:, 1] = 0  # a token without a value is read and gives nothing
        # no mask is seen, so that positions are counted by the heads that reach them
        return dataclasses.replace(operator, rows=StoredRows(H), token_scale=scale, source_scale=source, allowed=None)

    with InDouble():
        for case in cases(model, ids, edit=edit):
            W = case.dense()
            tokens = 7
            assert far(case.null.block_correlation, correlation_of(W, tokens)) <= 1e-10
            assert far(case.null.structural, float((W != 0).double().mean())) <= 1e-12
            for name, expected in naive_coupling_numbers(coupling_of(W, tokens)).items():
                assert far(dataclasses.asdict(case.null.coupling)[name], expected) <= 1e-10, name
            assert case.null.structural == pytest.approx((28 - 4 - 1 - 6 + 1) / 49)


@pytest.mark.parametrize("row_budget", [None, 4 * 4 * 7 * 8])
def test_a_softmax_that_underflows_leaves_the_positions_of_the_mask(row_budget: int | None) -> None:
    """The null follows the mask, not what a sharp head happens to leave above zero."""
    plain, sharp = two_single("llama"), two_single("llama")
    with torch.no_grad():
        for layer in sharp.model.layers:
            layer.self_attn.q_proj.weight *= 1e5
    ids = token_ids(sharp)
    found = cases(sharp, ids, row_budget)
    numbers = naive_coupling_numbers(coupling_of(cases(plain, ids)[0].dense(), 7))
    assert found[0].null.structural == pytest.approx(28 / 49)
    assert found[0].null.coupling.effective_context == pytest.approx(numbers["effective_context"], rel=1e-4)
    options = InspectOptions(cache=False)
    report = inspect(as_loaded(sharp), [prompt_of(ids)], options, lambda *_: None)
    assert [block.density.structural for block in report.blocks] == pytest.approx([28 / 49] * 2)
    assert min(block.coupling.effective_context or 9 for block in report.blocks) < 2.5  # each head reads one token


def test_the_sampled_density_holds_the_counted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_single("gpt2")
    counted = cases(model, token_ids(model))
    monkeypatch.setattr(entries_module, "EXACT_ENTRIES", 0)
    inside = 0
    for sampled, exact in zip(cases(model, token_ids(model)), counted, strict=True):
        estimate, share = sampled.null.numerical, exact.null.numerical
        assert estimate is not None
        assert share is not None
        assert estimate.low < estimate.share < estimate.high
        assert estimate.high - estimate.low < 0.06
        inside += estimate.low <= share.share <= estimate.high
    assert inside >= 2


def test_one_token() -> None:
    model = two_double("llama")
    with InDouble():
        for case in cases(model, token_ids(model, 1)):
            assert case.null.block_correlation == pytest.approx(1.0)
            assert case.null.coupling.first_token_share is None
            assert case.null.coupling.effective_context == pytest.approx(1.0)


def test_a_wrong_null_would_show() -> None:
    model = two_double("llama")
    with InDouble():
        first, second = cases(model, token_ids(model))
    with pytest.raises(AssertionError):
        assert_described(first.null, second.dense(), second.x, 1e-10, THRESHOLD)
