"""What hooks see and replace, and that the very modules hooked are left as they were."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from duat_cli.models.instrument.hooks import ExchangedError, hooked, patched, unexchanged

X = torch.tensor([1.0, -2.0])


class Scale(nn.Module):
    def forward(self, x: Tensor, by: float = 2.0) -> Tensor:
        return x * by


def traces(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks, *module._forward_pre_hooks, *(n for n in vars(module) if n == "forward")]


def test_hooks_see_every_call_and_leave_it() -> None:
    modules, seen = [Scale(), Scale()], list[Any]()

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append((module, args, kwargs))

    def after(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        seen.append((module, args, kwargs, output))

    with hooked(modules, before, after):
        outputs = [module(X, by=3.0) for module in modules]
    assert all(torch.equal(output, 3 * X) for output in outputs)
    want = [(m, (X,), {"by": 3.0}, *rest) for m, y in zip(modules, outputs, strict=True) for rest in ((), (y,))]
    assert len(seen) == 4
    assert all(all(a is b or a == b for a, b in zip(*pair, strict=True)) for pair in zip(seen, want, strict=True))
    assert [traces(module) for module in modules] == [[], []]


def test_first_goes_in_front_of_other_hooks() -> None:
    module, order = Scale(), list[str]()
    with (
        hooked([module], lambda *_: order.append("second")),
        hooked([module], lambda *_: order.append("1"), first=True),
    ):
        module(X)
    assert order == ["1", "second"]


def test_modules_that_a_pass_puts_in_the_place_of_others_are_seen() -> None:
    model = nn.Sequential(Scale(), nn.Sequential(Scale()))
    with unexchanged(model):
        model[0].more = Scale()  # takes no other's place
    with pytest.raises(ExchangedError, match=r"in the place of 1\.0 \(Scale\)"), unexchanged(model):
        model[1][0] = Scale()


def test_what_hooks_return_replaces_arguments_and_output() -> None:
    module = Scale()
    with hooked([module], before=lambda module, args, kwargs: ((X + 1,), {"by": 10.0})):
        assert torch.equal(module(X, by=3.0), 10 * (X + 1))
    with hooked([module], after=lambda module, args, kwargs, output: output + 1):
        assert torch.equal(module(X), 2 * X + 1)
    assert torch.equal(module(X), 2 * X)


def test_a_copy_of_a_hooked_module_leaves_the_hook_and_what_it_belongs_to_behind() -> None:
    class Owner:
        seen = 0

        def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            self.seen += 1
            return (args[0] + 1,), kwargs

        def after(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            self.seen += 1
            return output + 1

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied with the module")

    module, owner = Scale(), Owner()
    with hooked([module], owner.before, owner.after):
        assert torch.equal(copy.deepcopy(module)(X), 2 * X)
        assert owner.seen == 0
        assert torch.equal(module(X), 2 * (X + 1) + 1)
    assert owner.seen == 2


def add_one(module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return original(*args, **kwargs) + 1


def test_a_patch_stands_in_for_forward_and_yields_it() -> None:
    module = Scale()
    with patched(module, add_one) as original:
        assert torch.equal(module(X), 2 * X + 1)
        assert torch.equal(original(X), 2 * X)
    assert traces(module) == []
    assert torch.equal(module(X), 2 * X)


def test_a_copy_of_a_patched_module_runs_its_own_weights() -> None:
    """A float32 copy, made while a pass goes through the model, would otherwise call the half precision one."""
    block = nn.Sequential(nn.Linear(2, 2, bias=False).bfloat16())
    with patched(block[0], add_one), patched(block[0], add_one), torch.no_grad():
        twin = copy.deepcopy(block).float()
        twin[0].weight.copy_(torch.eye(2))
        assert torch.equal(twin(X), X)
    assert traces(twin[0]) == ["forward"]  # a bound method of its own
    with torch.no_grad():
        assert torch.equal(twin(X), X)


def test_patches_nest_and_keep_a_forward_of_the_modules_own() -> None:
    module = Scale()
    module.forward = own = lambda x: x * 5  # type: ignore[method-assign,assignment]
    with patched(module, add_one), patched(module, add_one):
        assert torch.equal(module(X), 5 * X + 2)
    assert vars(module)["forward"] is own


@pytest.mark.parametrize(
    "change",
    [lambda module: hooked([module], lambda *call: None, lambda *call: None), lambda module: patched(module, add_one)],
    ids=["hooked", "patched"],
)
def test_an_error_leaves_no_trace(change: Callable[[nn.Module], contextlib.AbstractContextManager[Any]]) -> None:
    module = Scale()

    def fail() -> None:
        assert traces(module)
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"), change(module):
        fail()
    assert traces(module) == []
