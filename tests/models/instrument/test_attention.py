"""Capture: H is the model's own, by both paths, and the model is not disturbed by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import far, row_budget_of, single_model, token_ids
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from two_blocks import single

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.structure import run_stack
from duat_cli.models.instrument import attention
from duat_cli.models.instrument.attention import (
    INTERFACE_NAME,
    AttentionCall,
    Interface,
    RecomputedRows,
    StoredRows,
    Watch,
    apply_rows,
    watched,
)

INTERFACE = [
    "llama",
    "qwen3",
    "mixtral",
    "gemma2",
    "gpt2",
    "phi",
    "opt",
    "gpt_oss",
    "deepseek_v3",
    "bert",
    "distilbert",
]
SOFTMAX = ["bloom", "falcon", "mpt"]
CAUSAL = ["llama", "gemma2", "gpt_oss", "gpt2", "falcon", "bloom"]


class Listener:
    """Keeps every call; replaces nothing."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def captured(self, call: AttentionCall) -> None:
        self.calls.append(call)

    def replacement(self, module: torch.nn.Module, value: Tensor) -> None:
        return None


def whole(call: AttentionCall) -> Tensor:
    return torch.cat([rows for _, rows in call.rows.chunks()], dim=1)


def captured(model_type: str, ids: Tensor, row_budget: int | None = None) -> list[tuple[AttentionCall, Tensor]]:
    """Every attention call of one run with its H, taken while the block is alive."""
    found, (_, structure) = [], single(model_type)
    with row_budget_of(row_budget), structure.rig().active() as rig:
        rig.run(
            lambda: run_stack(structure.stack, ids),
            lambda run: found.extend((call, whole(call).clone()) for call in run.attention),
        )
    return found


def own_attentions(model: Any, ids: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [H[0] for H in model(input_ids=ids, output_attentions=True).attentions]


@pytest.mark.parametrize("model_type", [*INTERFACE, *SOFTMAX])
def test_captured_attention_is_the_models_own(model_type: str) -> None:
    model, _ = single(model_type)
    ids = token_ids(model)
    expected, calls = own_attentions(model, ids), captured(model_type, ids)
    assert len(calls) == len(expected) == 2
    assert len({call.module for call, _ in calls}) == len(calls)
    path = "attention interface" if model_type in INTERFACE else "softmax interception"
    assert {call.path for call, _ in calls} == {path}
    for (_, H), own in zip(calls, expected, strict=True):
        assert far(H, own) <= 1e-6
    assert far(expected[0], expected[1]) > 1e-2  # blocks do differ, so the comparison can fail


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "deepseek_v3", "falcon"])
def test_the_recorded_output_is_h_times_v(model_type: str) -> None:
    for call, H in captured(model_type, token_ids(single(model_type)[0])):
        groups = H.shape[0] // call.value.shape[1]
        product = torch.stack([H[h] @ call.value[0, h // groups] for h in range(len(H))], dim=1)
        assert far(call.output[0], product) <= 1e-6


def test_rows_with_sinks_do_not_sum_to_one_and_are_kept_so() -> None:
    sums = torch.stack([H.sum(-1) for _, H in captured("gpt_oss", token_ids(single("gpt_oss")[0]))])
    assert float(sums.min()) < 0.9
    assert float(sums.max()) < 1.0


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "bert"])
@pytest.mark.parametrize("step", [1, 3])
def test_rows_in_chunks_are_the_whole(model_type: str, step: int) -> None:
    ids = token_ids(single(model_type)[0], 18)
    expected = captured(model_type, ids)
    budget = 4 * step * expected[0][1].shape[0] * 18 * 4  # four times the bytes of `step` rows
    assert budget < expected[0][1].numel() * 4
    chunks = captured(model_type, ids, budget)
    for (call, H), (before, own) in zip(chunks, expected, strict=True):
        assert isinstance(call.rows, RecomputedRows)
        assert isinstance(before.rows, StoredRows)
        assert [len(range(*rows.indices(18))) for rows, _ in call.rows.chunks()] == [step] * (18 // step)
        assert far(H, own) <= 1e-6
        assert far(call.output, before.output) <= 1e-6


def test_apply_rows_is_the_product_head_by_head() -> None:
    torch.manual_seed(0)
    H, V = torch.randn(6, 5, 5, dtype=torch.float64), torch.randn(2, 3, 5, 4, dtype=torch.float64)
    got = apply_rows(StoredRows(H), V)
    parts = apply_rows(RecomputedRows(lambda rows: H[:, rows], 6, 5, 2), V)
    for item in range(2):
        for head in range(6):
            assert far(got[item, :, head], H[head] @ V[item, head // 2]) <= 1e-12
    assert far(parts, got) <= 1e-14


# -- the model is not disturbed ------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 7])
def test_its_gradient_is_that_of_the_product_head_by_head(step: int) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.rand(6, 7, 7, generator=generator, dtype=torch.float64)
    value = torch.randn(2, 3, 7, 4, generator=generator, dtype=torch.float64).requires_grad_()
    rows = StoredRows(matrix) if step == 7 else RecomputedRows(lambda part: matrix[:, part], 6, 7, step)
    dense = torch.stack([matrix[h] @ value[:, h // 2] for h in range(6)], dim=2)  # (batch, N, heads, d)
    mixed = apply_rows(rows, value)
    assert far(mixed, dense) < 1e-12
    probes = torch.randn(3, *mixed.shape, generator=generator, dtype=torch.float64)
    (expected,) = torch.autograd.grad(dense, value, probes, is_grads_batched=True)

    def pull(probe: Tensor) -> Tensor:
        return torch.autograd.grad(mixed, value, probe, retain_graph=True)[0]

    assert far(torch.func.vmap(pull)(probes), expected) < 1e-12
    assert far(torch.stack([pull(probe) for probe in probes]), expected) < 1e-12


def hidden(model: Any, ids: Tensor) -> Tensor:
    return run_stack(model.base_model, ids)[0][0]


def hidden_while_captured(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad(), Interface(model.base_model).installed(), watched(model.modules(), Watch(Listener())):
        return hidden(model, ids)


@pytest.mark.parametrize("model_type", CAUSAL)
def test_a_change_of_the_last_token_moves_no_earlier_one(model_type: str) -> None:
    model, _ = single(model_type)
    ids = token_ids(model)
    other = ids.clone()
    other[0, -1] = ids[0, -1] + 1
    one, two = hidden_while_captured(model, ids), hidden_while_captured(model, other)
    assert far(one[:-1], two[:-1]) <= 1e-6  # not bit by bit: experts batch other tokens together
    assert far(one[-1], two[-1]) > 1e-2


def test_without_the_mask_registry_causality_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: this is what registering in one registry alone does."""
    model, _ = single("llama")
    ids = token_ids(model)
    other = ids.clone()
    other[0, -1] = ids[0, -1] + 1

    def half(name: str, function: Any) -> None:
        AttentionInterface.register(name, function)
        AttentionMaskInterface._global_mapping.pop(name, None)

    monkeypatch.setattr(attention, "register_attention", half)
    one, two = hidden_while_captured(model, ids), hidden_while_captured(model, other)
    assert far(one[:-1], two[:-1]) > 1e-2
    monkeypatch.undo()
    assert far(hidden_while_captured(model, ids)[:-1], hidden_while_captured(model, other)[:-1]) <= 1e-6


def test_bidirectional_models_stay_so() -> None:
    model, _ = single("bert")
    ids = token_ids(model)
    other = ids.clone()
    other[0, -1] = ids[0, -1] + 1
    assert far(hidden_while_captured(model, ids)[:-1], hidden_while_captured(model, other)[:-1]) > 1e-3


@pytest.mark.parametrize("model_type", [*INTERFACE, *SOFTMAX])
def test_capturing_changes_no_output(model_type: str) -> None:
    model, _ = single(model_type)
    ids = token_ids(model)
    with torch.no_grad():
        before = hidden(model, ids)
    during = hidden_while_captured(model, ids)
    with torch.no_grad():
        after = hidden(model, ids)
    assert torch.equal(before, during)
    assert torch.equal(before, after)


def fail_while_captured(model: Any) -> None:
    with Interface(model).installed() as accepted:
        assert accepted
        assert model.config._attn_implementation == INTERFACE_NAME
        raise ZeroDivisionError


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_attention_implementation_is_put_back(implementation: str) -> None:
    model = single_model("llama")
    model.set_attn_implementation(implementation)
    with pytest.raises(ZeroDivisionError):
        fail_while_captured(model)
    assert model.config._attn_implementation == implementation


def test_models_outside_the_interface_say_so() -> None:
    """falcon takes the name and then never asks the interface for it: no call arrives."""
    (model, _), listener = single("falcon"), Listener()
    with torch.no_grad(), Interface(model.base_model).installed(), watched(model.modules(), Watch(listener)):
        hidden(model, token_ids(model))
    assert listener.calls == []


def test_a_probe_does_not_outlive_its_context() -> None:
    (model, _), listener = single("llama"), Listener()
    with torch.no_grad(), Interface(model).installed(), watched(model.modules(), Watch(listener)):
        hidden(model, token_ids(model))
        seen = len(listener.calls)
    with torch.no_grad(), Interface(model).installed():
        hidden(model, token_ids(model))
    assert len(listener.calls) == seen == 2


def test_a_module_without_an_eager_function_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no eager attention function"):
        attention._eager(torch.nn.Linear(2, 2))
