"""A forward that stands on a module itself runs the copy, or is refused."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.model.given import given
from duat_cli.zoo import tiny

IDS = torch.tensor([[11, 12, 13, 14, 15, 12]])
BELOW: dict[str, Any] = {}  # what a function names, and does not hold


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def dropping() -> Any:
    """A model in training, of which no two passes are alike."""
    model = tiny.tiny_model("gpt2")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    return model.train()


def inner(model: Any) -> Any:
    return model.transformer.h[1].mlp


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "compiled": functools.partial(torch.compile, backend="eager"),
    "to float32": convert_outputs_to_fp32,
    "both": lambda forward: torch.compile(convert_outputs_to_fp32(forward), backend="eager"),
    "without gradients": torch.no_grad(),
}


@pytest.mark.parametrize("of", [lambda model: model, inner], ids=["model", "ffn"])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_classes_own_method_is_taken_out_of_a_wrapper(of: Callable[[Any], Any], wrap: Callable[[Any], Any]) -> None:
    model = dropping()
    module = of(model)
    module.forward = wrapped = wrap(module.forward)
    held = given(model).model
    assert "forward" not in vars(of(held))
    assert module.forward is wrapped
    del module.forward
    assert torch.equal(logits(held), logits(model.eval()))


def doubled(self: Any, x: Tensor) -> Tensor:
    return 2 * type(self).forward(self, x)


def named(*args: Any) -> Any:
    return BELOW["forward"](*args)


@pytest.mark.parametrize(
    "own",
    [
        lambda mlp: types.MethodType(doubled, mlp),
        lambda mlp: torch.compile(types.MethodType(doubled, mlp), backend="eager"),
        lambda mlp: functools.partial(doubled, mlp),
    ],
    ids=["bound", "compiled", "partial"],
)
def test_what_is_bound_to_its_module_is_bound_to_the_copy(own: Callable[[Any], Any]) -> None:
    model = dropping()
    mlp = inner(model)
    mlp.forward = own(mlp)
    held = given(model).model
    if isinstance(own(mlp), types.MethodType):
        assert inner(held).forward.__self__ is inner(held)
    del mlp.forward
    mlp.register_forward_hook(lambda _module, _args, output: 2 * output)
    assert torch.equal(logits(held), logits(model.eval()))


def test_a_function_of_its_input_alone_is_kept() -> None:
    model = tiny.tiny_model("gpt2")
    inner(model).forward = lambda x: 0 * x
    assert torch.equal(logits(given(model).model), logits(model))


def test_accelerates_hooks_are_kept() -> None:
    class Doubling(ModelHook):
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return 2 * output

    model = tiny.tiny_model("gpt2")
    add_hook_to_module(inner(model), Doubling())
    assert torch.equal(logits(given(model).model), logits(model))


CLOSURES: dict[str, Callable[[Any], Any]] = {
    "closure": lambda forward: lambda x: 1 * forward(x),
    "closure of a closure": lambda forward: lambda x: functools.reduce(lambda y, _: forward(y), [x], x),
    "default": lambda forward: lambda x, own=forward: own(x),
    "partial": lambda forward: functools.partial(lambda own, x: own(x), lambda x: 1 * forward(x)),
    "named": lambda forward: BELOW.update(forward=forward) or named,
    "weak": lambda forward: functools.partial(lambda own, x: own()(x), weakref.ref(forward.__self__)),
    "bound closure": lambda forward: types.MethodType(lambda _self, x: forward(x), forward.__self__),
    "compiled closure": lambda forward: torch.compile(lambda x: 1 * forward(x), backend="eager"),
    "wrapped by a caller": lambda forward: functools.wraps(forward)(lambda x: 2 * forward(x)),
}


@pytest.mark.parametrize("closure", CLOSURES.values(), ids=CLOSURES)
def test_what_runs_the_model_itself_is_refused_in_one_line(closure: Callable[[Any], Any]) -> None:
    model = tiny.tiny_model("gpt2")
    inner(model).forward = closure(inner(model).forward)
    with pytest.raises(UnsupportedModelError, match=r"^transformer\.h\.1\.mlp: its forward was replaced by") as caught:
        given(model)
    assert "\n" not in str(caught.value)
    BELOW.clear()


def test_the_model_itself_goes_by_its_class() -> None:
    model = tiny.tiny_model("gpt2")
    own = model.forward
    model.forward = lambda **kwargs: own(**{**kwargs, "use_cache": False})
    with pytest.raises(UnsupportedModelError, match=r"^GPT2LMHeadModel: its forward was replaced"):
        given(model)


def test_a_method_of_a_module_outside_is_refused() -> None:
    model, other = tiny.tiny_model("gpt2"), tiny.tiny_model("gpt2")
    inner(model).forward = inner(other).forward
    with pytest.raises(UnsupportedModelError, match="mlp: its forward was replaced"):
        given(model)
