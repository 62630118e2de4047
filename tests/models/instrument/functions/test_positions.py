"""Where attention may read is the same however sharp its scores are, whether its mask is seen or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import as_loaded, prompt_of, single_model, sweep, token_ids
from torch import Tensor

from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.models.instrument.functions.positions import positions

TOKENS = 7
SHARP = 1e5
MAKING_QUERIES = ("query.weight", "q_proj.weight", "query_key_value.weight")


def sharpened(model: Any, by: float = SHARP) -> Any:
    """With scores so far apart that, by default, each head of each row reads one token, but for some ties."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(MAKING_QUERIES):
                parameter.mul_(by)
    return model


def read(model: Any, row_budget: int | None = None) -> list[tuple[Tensor | None, Tensor]]:
    """Of each block what the mask is found to leave, and where some head's H is not zero."""
    found = []

    def listen(run: Any, step: Any, block: Any) -> None:
        weights = torch.cat([weights for _, weights in run.attention[0].rows.chunks()], dim=1)
        found.append((positions(run), (weights != 0).any(dim=0)))

    sweep(model, token_ids(model), listen, row_budget)
    return found


@pytest.mark.parametrize("model_type", ["bert", "bloom", "gpt_neo"])
@pytest.mark.parametrize("row_budget", [None, 4 * 4 * TOKENS * 8])
def test_zeros_by_underflow_are_none_of_a_mask(model_type: str, row_budget: int | None) -> None:
    """An encoder whose function is given no mask, a causal one and one with a window whose softmax is intercepted."""
    plain, sharp = read(single_model(model_type), row_budget), read(sharpened(single_model(model_type)), row_budget)
    for (nothing, reached), (left, few) in zip(plain, sharp, strict=True):
        assert nothing is None  # H itself shows it
        assert left is not None
        assert torch.equal(left, reached)
        assert int(few.sum()) < int(reached.sum())


def test_the_density_and_the_null_are_those_of_what_the_mask_leaves() -> None:
    """Of one prompt, and of several that run as one batch."""
    model = sharpened(single_model("bert"))
    options = InspectOptions(cache=False, heads=True)
    one, other = token_ids(model), token_ids(model).flip(1)
    for prompts in ([one], [one, other, one.roll(1, 1), other.roll(2, 1)]):
        report = inspect(as_loaded(model), [prompt_of(ids) for ids in prompts], options, lambda *_: None)
        for block in report.blocks:
            assert block.density.structural == pytest.approx(1.0)
            assert block.null.uniform.density.structural == pytest.approx(1.0)
            assert block.null.uniform.coupling.effective_context == pytest.approx(TOKENS)
            assert block.heads.uniform.effective_context == pytest.approx(TOKENS)
            assert block.coupling.effective_context < 4


def test_float16_gives_zero_much_earlier() -> None:
    model = sharpened(single_model("bert"), by=20)
    wide, narrow = read(model), read(model.half())
    assert all(reached.all() for _, reached in wide)
    assert not any(reached.all() for _, reached in narrow)
    assert all(left is not None and left.all() for left, _ in narrow)
