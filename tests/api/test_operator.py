"""W' as tensors: rebuilt densely and held against what the model's own attention adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import kron_sum

import duat_cli as duat
from duat_cli.api.operator import Operator

TEXTS = ["Nui zi", "The cat sat on the mat."]


@pytest.fixture(scope="module")
def stored() -> Any:
    """The report of the demo's folder; each operator asked of it is made anew."""
    return duat.verify(prompts=TEXTS)


def dense(operator: Operator) -> torch.Tensor:
    """W' by its definition, (N M, N M)."""
    groups = len(operator.O) // len(operator.V)
    maps = torch.stack([operator.V[h // groups] @ operator.O[h] for h in range(len(operator.O))])
    return kron_sum(operator.t[None, :, None] * operator.H * operator.s[:, None, :], maps)


def test_it_is_shown_by_its_shapes(stored: Any) -> None:
    operator = stored.operator()
    shown = repr(operator)
    assert len(shown) < 250
    for name in ("H", "V", "O", "s", "t", "x", "contribution", "input_ids"):
        assert f" {name} {tuple(getattr(operator, name).shape)}" in shown


@pytest.mark.parametrize("place", [{"prompt": "0"}, {"block": 1.0}, {"block": True}])
def test_a_place_is_a_whole_number(place: Any, stored: Any) -> None:
    [(name, value)] = place.items()
    with pytest.raises(duat.InputError, match=f"{name} {value!r}: expected a whole number"):
        stored.operator(**place)


def attention_of(model: Any, block: int, ids: torch.Tensor) -> torch.Tensor:
    """What the model's own attention puts out there, seen by a hook; the demo has no biases."""
    seen: list[torch.Tensor] = []
    hook = model.model.layers[block].self_attn.register_forward_hook(lambda m, a, out: seen.append(out[0]))
    with torch.no_grad(), hook:
        model(input_ids=ids[None])
    return seen[0][0]


def test_it_applied_to_the_blocks_input_is_what_attention_adds(demo: Any, tokenizer: Any) -> None:
    report = duat.verify(demo, tokenizer, prompts=TEXTS)
    for prompt, text in enumerate(TEXTS):
        operator = report.operator(prompt=prompt, block=3)
        assert operator.input_ids.tolist() == tokenizer(text)["input_ids"]
        assert operator.tokens == [tokenizer.decode([token]) for token in operator.input_ids.tolist()]
        added = (dense(operator) @ operator.x.flatten()).reshape(operator.x.shape)
        own = attention_of(demo, 3, operator.input_ids)
        assert torch.allclose(added, own, atol=1e-5 * float(own.abs().max()))
        assert torch.allclose(operator.contribution, own, atol=1e-5 * float(own.abs().max()))
        assert operator.certificate_error < 1e-5


def test_a_folder_gives_what_a_model_in_memory_gives(demo: Any, tokenizer: Any, stored: Any) -> None:
    ours = duat.inspect(demo, tokenizer, prompts=TEXTS, null="uniform").operator(1, 2)
    theirs = stored.operator(1, 2)
    for name in ("H", "V", "O", "s", "t", "x", "contribution"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_its_tensors_are_not_the_models(demo: Any, tokenizer: Any) -> None:
    before = {name: value.clone() for name, value in demo.state_dict().items()}
    operator = duat.verify(demo, tokenizer, prompts=TEXTS).operator()
    for name in ("H", "V", "O", "s", "t", "x", "contribution"):
        getattr(operator, name).fill_(7.0)
    assert all(torch.equal(value, before[name]) for name, value in demo.state_dict().items())


def test_a_model_that_changed_since_is_refused(demo: Any, tokenizer: Any) -> None:
    report = duat.verify(demo, tokenizer, prompts=TEXTS)
    with torch.no_grad():
        demo.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(duat.CheckpointError, match="its weights changed since the report was made"):
        report.operator()


@pytest.mark.parametrize(("place", "said"), [((2, 0), "prompt 2: no such prompt"), ((0, 6), "block 6: no such block")])
def test_a_place_that_is_not_there_is_refused(place: tuple[int, int], said: str, stored: Any) -> None:
    with pytest.raises(duat.InputError, match=said):
        stored.operator(*place)
