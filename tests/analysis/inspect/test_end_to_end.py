"""The end-to-end operator against automatic differentiation of the whole model, float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    WIRINGS,
    Detached,
    InDouble,
    as_loaded,
    double_model,
    far,
    naive_coupling_numbers,
    prompt_of,
    token_ids,
    two_single,
)
from torch import Tensor, nn

from duat_cli.analysis import decomposition as subject
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.models.instrument.hooks import hooked
from duat_cli.results.inspect import EndToEnd

FFN = {"llama": "mlp", "gpt2": "mlp", "gemma2": "mlp", "bert": "intermediate", "mixtral": "mlp", "phi": "mlp"}
OPTIONS = InspectOptions(cache=False, end_to_end=True)


def end_to_end_of(model: Any, *ids: Tensor) -> EndToEnd:
    report = inspect(as_loaded(model), [prompt_of(one) for one in ids], OPTIONS, lambda *_: None)
    assert report.end_to_end is not None
    return report.end_to_end


def couplings(model_type: str, ids: Tensor, frozen: Callable[[], Detached] = Detached) -> Tensor:
    """c_ij with softmax weights, scales of norms and FFN outputs constant to autograd, (N, N)."""
    model = double_model(model_type)
    blocks = list(model.get_submodule(WIRINGS[model_type].blocks))
    caught: dict[str, Tensor] = {}

    def leaf(module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = None if args else "hidden_states"
        caught["x"] = x = (args[0] if key is None else kwargs[key]).detach().clone().requires_grad_()
        return ((x * 1.0, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: x * 1.0})

    def constant(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return output.detach()

    def last(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        caught["out"] = output if isinstance(output, Tensor) else output[0]

    ffns = [block.get_submodule(FFN[model_type]) for block in blocks]
    with (
        InDouble(), frozen(), torch.enable_grad(), hooked([blocks[0]], leaf), hooked(ffns, after=constant),
        hooked([blocks[-1]], after=last),
    ):  # fmt: skip
        model(input_ids=ids)
    x, out = caught["x"], caught["out"]
    seeds = torch.eye(out.numel(), dtype=out.dtype).reshape(-1, *out.shape)
    (rows,) = torch.autograd.grad(out, x, seeds, is_grads_batched=True)
    N, M = x.shape[1:]
    T = rows.reshape(N, M, N, M)
    return torch.einsum("iajb,jb->ija", T, x[0].detach()).norm(dim=-1).detach()


@pytest.mark.parametrize("elements", [1, 1 << 22])
@pytest.mark.parametrize("model_type", FFN)
def test_the_coupling_is_that_of_the_whole_models_jacobian(
    model_type: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "SOURCE_ELEMENTS", elements)
    model = double_model(model_type)
    ids = token_ids(model)
    with InDouble():
        found = end_to_end_of(model, ids)
    for name, expected in naive_coupling_numbers(couplings(model_type, ids)).items():
        assert far(getattr(found.coupling, name), expected) <= 1e-9, name
    assert found.certificate_error < 1e-12


class Uniform(Detached):
    """As `Detached`, with every softmax uniform over the entries that are not zero, and scales of norms as recorded."""

    def __init__(self, recorded: list[Tensor] | None = None) -> None:
        """recorded: scales in the order of their calls; None: record them, with attention as it is."""
        super().__init__()
        self.given = None if recorded is None else list(recorded)
        self.recorded: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        if func in (torch.softmax, nn.functional.softmax, torch.Tensor.softmax):
            seen = (out > 0).to(out)
            return out if self.given is None or out.ndim < 4 else seen / seen.sum(-1, keepdim=True)
        if func in (torch.rsqrt, torch.Tensor.rsqrt) or (func in POWERS and args[1] == -0.5):
            self.recorded.append(out)
            return out if self.given is None else self.given.pop(0)
        return out


POWERS = (torch.pow, torch.Tensor.pow, torch.Tensor.__pow__)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral"])
def test_the_null_is_that_of_the_whole_model_with_uniform_attention(model_type: str) -> None:
    model = double_model(model_type)
    ids = token_ids(model)
    with InDouble(), torch.no_grad(), Uniform() as first:
        model(input_ids=ids)
    assert len(first.recorded) > 2 * model.config.num_hidden_layers
    expected = naive_coupling_numbers(couplings(model_type, ids, lambda: Uniform(first.recorded)))
    with InDouble():
        found = end_to_end_of(model, ids)
    assert found.null.uniform is not None
    for name, value in expected.items():
        assert far(getattr(found.null.uniform, name), value) <= 1e-9, name
    assert far(found.null.uniform.effective_context, found.coupling.effective_context) > 0.01
    assert found.null.reinitialised is None
    assert "one by one" in found.null.reasons["reinitialised"]


def test_uniform_attention_is_its_own_null() -> None:
    """Queries of zero: every H is uniform already. A block without attention has no other H."""
    model = two_single("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    found = end_to_end_of(model, token_ids(model))
    assert found.null.uniform is not None
    for name in ("effective_context", "entropy_bits", "off_diagonal_share"):
        assert far(getattr(found.null.uniform, name), getattr(found.coupling, name)) < 1e-6
    assert end_to_end_of(two_single("jamba"), token_ids(two_single("jamba"))).null.uniform is not None


def test_it_is_a_mean_over_prompts_and_asked_for() -> None:
    model = two_single("llama")
    ids = token_ids(model), token_ids(model, 5, 2)
    both, *alone = (end_to_end_of(model, *some) for some in (ids, ids[:1], ids[1:]))
    values = [one.coupling.effective_context or 0.0 for one in alone]
    assert both.coupling.effective_context == pytest.approx(sum(values) / 2, rel=1e-12)
    assert both.certificate_error == max(one.certificate_error for one in alone)
    report = inspect(as_loaded(model), [prompt_of(ids[0])], InspectOptions(cache=False), lambda *_: None)
    assert report.end_to_end is None
