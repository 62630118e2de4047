"""A model drawn page by page against the same one built whole, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.paged import drawn
from duat_cli.loading.paged.drawn import untrained_model
from duat_cli.loading.paged.layout import layout
from duat_cli.loading.paged.pager import Pager
from duat_cli.models.edits.reinitialised import reinitialised, seeded
from duat_cli.zoo import tiny


@pytest.fixture(autouse=True)
def every_layer_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "layout", lambda model, targets: layout(model, targets, kept=0))


def built(model: Any, seed: int | None = None) -> tuple[Any, Pager]:
    with seeded():
        if seed is not None:
            torch.manual_seed(seed)
        return untrained_model(type(model), copy.deepcopy(model.config), model.dtype, "cpu")


def held(fresh: nn.Module, pager: Pager) -> Iterator[tuple[str, Tensor]]:
    """Everything that each page holds, once a page."""
    for page in pager._order:
        if page.doors:
            pager.hold(page)
        for name, parameter in fresh.named_parameters(remove_duplicate=False):
            if not (parameter.is_meta or parameter.isnan().all()):  # NaN stands in for an embedding
                yield name, parameter


# gpt2 scales some layers behind the others' draw; bert pads a tied bias; siglip cuts normal draws off; qwen3_next takes
# logarithms of draws; blt is several models in one.
@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "bert", "mixtral", "t5", "siglip_text_model", "qwen3_next", "blt"]
)
def test_every_parameter_and_buffer_is_that_of_the_whole_model(model_type: str) -> None:
    model = tiny.tiny_model(model_type)
    whole = reinitialised(model)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    fresh, pager = built(model)
    seen = set()
    for name, value in held(fresh, pager):
        assert torch.equal(value, expected[name]), name
        seen.add(name)
    assert seen == set(expected)
    buffers = dict(fresh.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in whole.named_buffers())
    pager.close()


def test_another_state_of_the_generator_draws_another_model() -> None:
    model = tiny.tiny_model("llama")
    one, two = ({n: v.clone() for n, v in held(*built(model, seed))} for seed in (1, 2))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(one[name], two[name])
    assert torch.equal(one["model.norm.weight"], two["model.norm.weight"])


def test_no_block_is_drawn_before_it_is_asked_for() -> None:
    _, pager = built(tiny.tiny_model("llama"))
    pager.hold(next(page for page in pager.pages if page.block))
    assert pager._ahead is None
    pager.close()


def test_drawing_a_page_moves_no_generator() -> None:
    fresh, pager = built(tiny.tiny_model("llama"))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert len(list(held(fresh, pager))) > 9
    assert torch.equal(torch.rand(3), expected)


def test_rows_are_those_of_the_matrix() -> None:
    recorded = drawn.Recorder()
    with seeded(), recorded.recording(), torch.device("meta"):
        layer = nn.Linear(5, 7, bias=False)
    found = drawn.Drawn(layer, recorded)
    whole = found.tensors(["weight"])["weight"]
    assert whole.shape == (7, 5)
    assert torch.equal(found.rows("weight", [6, 2]), whole[[6, 2]])


def test_what_is_computed_from_other_values_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match=r"mixer\.A_log.* computed, not drawn"):
        built(tiny.tiny_model("mamba"))
