"""What stands behind the last block, as an affine map, against the model's own output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import far, first_two, single_model, token_ids
from torch import Tensor

from duat_cli.errors import NoSignalError, UnsupportedModelError
from duat_cli.models.discovery.structure import discover, run_stack
from duat_cli.models.sweep.ending import Ending, EndingForm, find_ending
from duat_cli.models.sweep.passes import Behind, record
from duat_cli.zoo import tiny


def found(model: Any, tokens: int = 8) -> tuple[Behind, EndingForm]:
    structure, ids = discover(model), token_ids(model, tokens=tokens)

    def forward() -> Tensor:
        return run_stack(model, ids).logits

    behind = Behind(structure, forward, record(structure, forward))
    return behind, find_ending(model, behind)


@pytest.mark.parametrize(
    ("model_type", "norms", "held", "capped"),
    [
        ("llama", 1, False, False),
        ("gpt2", 1, False, False),
        ("cohere", 1, False, False),  # logits scaled
        ("gemma2", 1, False, True),
        ("bert", 1, True, False),  # dense, GELU, LayerNorm, decoder
        ("roberta", 1, True, False),  # its GELU is no module of the model
        ("esm", 2, True, False),  # its GELU is written out
        ("modernbert", 2, True, False),
    ],
)
def test_what_is_held_and_that_it_is_the_models_own(model_type: str, norms: int, held: bool, capped: bool) -> None:
    model = single_model(model_type) if model_type != "esm" else tiny.tiny_model("esm")
    behind, form = found(model)
    assert (len(form.norms), form.held, form.layer is not None) == (norms, held, capped)
    ending = Ending(behind, form)
    x = behind.hidden
    assert far(ending(x), ending.output) < 1e-5
    if capped:
        cap = model.config.final_logit_softcapping
        assert far(torch.tanh(ending.output / cap) * cap, behind.recorded.output) < 1e-6
    else:
        assert torch.equal(ending.output, behind.recorded.output)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    at_0, at_x, at_noise, at_both = (ending(z) for z in (0 * x, x, noise, x + noise))
    assert far(at_x + at_noise - at_0, at_both) < 1e-5
    assert torch.equal(ending(x), ending(x))  # the held activations begin anew


def test_its_gradient_is_that_of_the_held_map() -> None:
    behind, form = found(single_model("bert").double())
    ending = Ending(behind, form)
    x = torch.zeros_like(behind.hidden).requires_grad_()
    with torch.enable_grad():
        output = ending(x, gradient=True)
    (gradient,) = torch.autograd.grad(output[0, 4, 60], x)
    value = (gradient * behind.hidden).sum() + output.detach()[0, 4, 60]
    assert far(value, behind.recorded.output[0, 4, 60]) < 1e-12


def test_an_end_that_is_not_affine_is_refused() -> None:
    model = single_model("llama")
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: plain(x.exp())
    with pytest.raises(UnsupportedModelError, match="between its last block and its output is not affine"):
        found(model)


def test_an_output_of_zero_is_said_to_be() -> None:
    model = single_model("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    with pytest.raises(NoSignalError, match="its output is zero"):
        found(model)


def test_a_range_that_is_too_small_to_try_the_end_out_is_said_to_be() -> None:
    model = single_model("llama").half()
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight.mul_(1e4)
    with pytest.raises(UnsupportedModelError, match="leave the range of float16; use --dtype float32"):
        found(model)
    assert found(model.float())[1].norms


def test_a_stream_in_float32_between_weights_in_half_precision_rounds_as_these_do() -> None:
    behind, form = found(first_two(single_model("zaya").bfloat16()))
    assert (behind.hidden.dtype, behind.recorded.output.dtype) == (torch.float32, torch.bfloat16)
    assert not form.held
