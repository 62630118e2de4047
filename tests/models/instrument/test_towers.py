"""Encoders in front of the blocks run once for passes with one input, and give what they would give again."""

from __future__ import annotations

import itertools
from typing import Any

import picture_texts
import pytest
import torch
from torch import Tensor, nn

from duat_cli.models.instrument.towers import Towers


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0, given: Any = None) -> dict[str, Any]:
        self.calls += 1
        found = self.layers[0](x) * scale
        return {"last": found, "all": (x, found)}


class Model(nn.Module):
    """A tower, blocks in a list, and a head with no list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.text = nn.Module()
        self.text.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)]))])
        self.head = nn.Sequential(nn.Linear(4, 4))


def made() -> tuple[Model, Towers]:
    model = Model().requires_grad_(False)
    assert isinstance(model.text.blocks, nn.ModuleList)
    return model, Towers(model, [*model.text.blocks])


def test_an_equal_input_is_not_encoded_again() -> None:
    model, towers = made()
    x = torch.randn(2, 4)
    plain = model.tower(x)
    for _ in range(3):
        with towers.active(itertools.count()):
            found = model.tower(x.clone())
        assert torch.equal(found["last"], plain["last"])
        assert found["all"][1] is found["last"], "what shared memory still does"
        found["last"].add_(1)  # code behind it may write to its output
    assert model.tower.calls == 2
    model.tower(x)
    assert model.tower.calls == 3, "outside of a pass nothing is kept"


def test_another_input_is_encoded() -> None:
    model, towers = made()
    x = torch.randn(2, 4)
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {}),
        ((x + 1,), {}),
        ((x.double().float() * 2,), {"scale": 2.0}),
        ((x.repeat(2, 1)[:3],), {}),
        ((x[:1],), {}),
        ((x[:0],), {}),
        ((x[0],), {}),
        ((x,), {"scale": 2.0}),
    ]
    for args, kwargs in given:
        with towers.active(itertools.count()):
            found = model.tower(*args, **kwargs)
        assert torch.equal(found["last"], model.tower.layers[0](args[0]) * kwargs.get("scale", 1.0))
    assert model.tower.calls == len(given)


def test_rows_of_one_input_are_encoded_as_one() -> None:
    model, towers = made()
    x = torch.randn(2, 4)
    for given in (x, x.repeat(3, 1), x, torch.cat([x, x + 1])):
        with towers.active(itertools.count()):
            found = model.tower(given)
        assert torch.allclose(found["last"], model.tower.layers[0](given), atol=1e-6)
        assert torch.equal(found["all"][0], given)
        assert found["all"][1] is found["last"]
    assert model.tower.calls == 2


def test_two_calls_of_one_pass_are_told_apart() -> None:
    model, towers = made()
    first, second = torch.randn(2, 4), torch.randn(3, 4)
    for _ in range(3):
        with towers.active(itertools.count()):
            for x in (first, second):
                assert torch.equal(model.tower(x)["last"], model.tower.layers[0](x))
    assert model.tower.calls == 2


def test_what_cannot_be_compared_is_encoded_each_time() -> None:
    model, towers = made()
    x = torch.randn(2, 4)
    for given in (object(), {"kept": x}):  # something may be put into a mapping
        for _ in range(2):
            with towers.active(itertools.count()):
                model.tower(x, given=given)
    assert model.tower.calls == 4


def test_an_output_with_a_gradient_is_not_kept() -> None:
    model, towers = made()
    x = torch.randn(2, 4)
    model.tower.requires_grad_(True)
    for _ in range(2):
        with towers.active(itertools.count()):
            assert model.tower(x)["last"].requires_grad
    assert model.tower.calls == 2


def patched(model: nn.Module, towers: Towers) -> list[str]:
    with towers.active(itertools.count()):
        return [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_towers_stand_beside_the_list_of_blocks() -> None:
    """What stands in that list is no tower, and neither is a head without a list."""
    assert patched(*made()) == ["tower"]


@pytest.mark.parametrize("name", picture_texts.RUNNING)
def test_the_encoder_of_pictures_or_sound_is_a_tower(name: str) -> None:
    model = picture_texts.build(name)
    found = patched(model.model, Towers(model.model, picture_texts.blocks_of(model)))
    assert found in (["visual"], ["vision_tower"], ["vision_model"], ["audio_tower"])


def test_a_module_with_a_list_behind_the_blocks_gives_gradients() -> None:
    """It is given the values of the last pass again, now with a gradient to take through it."""
    model, towers = made()
    x = torch.randn(2, 4)
    with towers.active(itertools.count()):
        model.tower(x)
    again = x.clone().requires_grad_()
    with towers.active(itertools.count()):
        found = model.tower(again)["last"]
    [gradient] = torch.autograd.grad(found.sum(), [again])
    torch.testing.assert_close(gradient, model.tower.layers[0].weight.sum(0).expand(2, 4))
