"""The names of torch that duat relies on mean what duat takes them for."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from duat_cli.compat import torch as compat


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_own_parameters_are_listed_and_exchanged() -> None:
    layer = nn.Linear(2, 3, bias=False)
    assert list(compat.parameters_of(layer)) == ["weight", "bias"]
    assert compat.parameters_of(layer)["bias"] is None
    new = nn.Parameter(torch.ones(1, 2))
    compat.parameters_of(layer)["weight"] = new
    assert layer.weight is new
    assert compat.parameters_of(nn.Sequential(layer)) == {}


def test_a_tensor_stands_in_for_another_which_is_not_written_to() -> None:
    layer = nn.BatchNorm1d(2)
    for name in ("weight", "running_mean"):
        own, version = getattr(layer, name), getattr(layer, name)._version
        with compat.standing_in(layer, name, torch.full((2,), 7.0)):
            assert getattr(layer, name).tolist() == [7.0, 7.0]
        assert getattr(layer, name) is own
        assert own._version == version


def test_hooks_of_the_caller_are_told_from_those_of_libraries() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    assert compat.hooked_modules(model) == []

    def left_behind(*_: Any) -> None:
        """As transformers leaves them once outputs were asked for."""

    left_behind.__module__ = "transformers.utils.output_capturing"
    model[0].register_forward_hook(left_behind)
    assert compat.hooked_modules(model) == []
    model[1][0].register_forward_pre_hook(lambda *_: None)
    model.register_forward_hook(lambda *_: None)
    assert compat.hooked_modules(model) == ["Sequential", "1.0"]


def test_hooks_of_the_caller_are_put_around_those_of_another_module() -> None:
    calls: list[Any] = []
    source, target = nn.Identity(), nn.Identity()
    source.register_forward_pre_hook(lambda *_: calls.append("source before"))
    target.register_forward_pre_hook(lambda *_: calls.append("target before"))
    target.register_forward_hook(lambda *_: calls.append("target behind"))
    source.register_forward_hook(lambda m, a, kwargs, o: calls.append(kwargs), with_kwargs=True)
    source.register_forward_hook(lambda *_: calls.append("always"), always_call=True)

    def left_behind(*_: Any) -> None:
        calls.append("of a library")

    left_behind.__module__ = "transformers.utils.output_capturing"
    source.register_forward_hook(left_behind)
    assert compat.is_hooked(source)
    assert not compat.is_hooked(nn.Identity())
    compat.add_hooks(source, target)
    target(torch.ones(1))
    assert calls == ["source before", "target before", "target behind", {}, "always"]


def test_backward_hooks_are_taken_off() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].register_full_backward_hook(lambda _module, grads, _outputs: (5 * grads[0],))
    model[1].register_full_backward_pre_hook(lambda _module, grads: (5 * grads[0],))
    x = torch.ones(1, 1, requires_grad=True)
    before = torch.autograd.grad(model(x), x)[0]
    assert compat.without_backward_hooks(model) == ["0", "1"]
    assert torch.allclose(25 * torch.autograd.grad(model(x), x)[0], before)
    assert compat.without_backward_hooks(model) == []


def test_what_torch_wraps_is_found() -> None:
    layer = nn.Linear(1, 1)
    assert compat.unwrapped(torch.compile(torch.no_grad()(layer.forward))) == layer.forward

    @functools.wraps(layer.forward)
    def of_a_caller(x: torch.Tensor) -> torch.Tensor:
        return 2 * layer(x)

    assert compat.unwrapped(of_a_caller) is of_a_caller
    assert compat.unwrapped(torch.compile(of_a_caller)) is of_a_caller


def test_buffers_and_which_of_them_are_saved() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("made", torch.ones(1), persistent=False)
    assert set(compat.buffers_of(module)) == {"kept", "made"}
    assert compat.unsaved_buffers(module) == {"made"} == {"kept", "made"} - set(module.state_dict())


def test_children_are_exchanged_in_order() -> None:
    one, two = nn.Identity(), nn.Identity()
    blocks = nn.ModuleList([one, two])
    compat.children_of(blocks).clear()
    compat.children_of(blocks).update({"0": two})
    assert list(blocks) == [two]


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d])
def test_convolutions(kind: type[nn.Module]) -> None:
    assert compat.is_convolution(kind(2, 2, 1))
    assert not compat.is_convolution(nn.Linear(2, 2))


def test_no_function_is_watched_inside() -> None:
    x = torch.ones(1)
    with Counting() as mode:
        with compat.functions_unwatched():
            torch.sigmoid(x)
        assert mode.calls == 0
        torch.sigmoid(x)
    assert mode.calls == 1


def test_a_mode_is_left_where_it_is_the_innermost() -> None:
    with Counting() as outer, Counting() as inner:
        for mode in (inner, outer):
            with compat.left(mode):
                torch.sigmoid(torch.ones(()))
            assert (outer.calls > 0, inner.calls > 0) == (True, mode is outer)
        seen = inner.calls
        torch.sigmoid(torch.ones(()))
        assert inner.calls > seen


def test_what_a_context_of_operations_holds_goes_with_it() -> None:
    """Without a search for cycles: it may be the weights of a block that is read for its pass alone."""

    class Held:
        pass

    def context() -> weakref.ref[Held]:
        held = Held()

        def through(operation: Any, args: Any, kwargs: Any) -> Any:
            assert held
            return operation(*args, **kwargs)

        with compat.operations_through(through):
            torch.ones(2).add_(1)
        return weakref.ref(held)

    gc.disable()
    try:
        assert context()() is None
    finally:
        gc.enable()


def test_every_operation_goes_through_a_function() -> None:
    names = []

    def through(operation: Any, args: Any, kwargs: Any) -> Any:
        names.append(operation.overloadpacket.__name__)
        return operation(*args, **kwargs)

    x = torch.zeros(3)
    with compat.operations_through(through):
        x.fill_(2.0)
        assert torch.equal(x + x, torch.full((3,), 4.0))
    assert {"fill_", "add", "full"} <= set(names)
    names.clear()
    x.fill_(1.0)
    assert names == []


def test_the_mode_of_operations_is_left_where_it_is_the_innermost() -> None:
    seen: list[str] = []

    def of(name: str) -> Any:
        def through(operation: Any, args: Any, kwargs: Any) -> Any:
            seen.append(name)
            return operation(*args, **kwargs)

        return compat.operations_through(through)

    with of("outer") as outer, of("inner") as inner:
        with compat.operations_left(inner):
            torch.ones(2) + 1
        assert set(seen) == {"outer"}
        seen.clear()
        with compat.operations_left(outer), compat.operations_left(None):
            torch.ones(2) + 1
        assert set(seen) == {"outer", "inner"}
    seen.clear()
    with compat.operations_left(None):
        torch.ones(2) + 1
    assert not seen


def test_what_an_operation_writes_to() -> None:
    x, y = torch.ones(2), torch.ones(2)
    found: list[list[Any]] = []

    def through(operation: Any, args: Any, kwargs: Any) -> Any:
        found.append(compat.written(operation, args, kwargs))
        return operation(*args, **kwargs)

    with compat.operations_through(through):
        torch.add(x, y)
        x.add_(y)
        torch.add(x, y, out=y)
        torch._foreach_add_([x, y], 1)
    assert [[id(one) for one in each] for each in found] == [[], [id(x)], [id(y)], [id(x), id(y)]]


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_checkpointed_runs_once(reentrant: bool) -> None:
    ran = []

    def squared(x: torch.Tensor) -> torch.Tensor:
        ran.append(torch.is_grad_enabled())
        return x.square()

    x = torch.tensor(3.0, requires_grad=True)
    with compat.uncheckpointed():
        y = checkpoint(squared, x, use_reentrant=reentrant)
    y.backward()
    assert ran == [True]
    assert x.grad == 6
    checkpoint(squared, x, use_reentrant=reentrant).backward()
    assert len(ran) == 3


def test_the_inside_of_a_function_of_torch_is_open_to_modes() -> None:
    layer, x = nn.MultiheadAttention(8, 2), torch.ones(3, 1, 8)
    function = nn.functional.multi_head_attention_forward
    calls = list[str]()

    class Listening(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func.__name__)
            inside = compat.open_to_modes(function) if func is function else None
            with self if inside is not None else contextlib.nullcontext():
                return (inside or func)(*args, **(kwargs or {}))

    expected = layer(x, x, x)
    with Listening():
        torch.testing.assert_close(layer(x, x, x), expected)
    assert "softmax" in calls[calls.index("multi_head_attention_forward") :]
    assert compat.open_to_modes(nn.functional.softmax) is None


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (nn.ModuleList(), True),
        (nn.Sequential(nn.TransformerEncoderLayer(4, 2, 4), nn.TransformerEncoderLayer(4, 2, 4)), True),
        (nn.Sequential(nn.TransformerEncoderLayer(4, 2, 4), nn.LayerNorm(4)), False),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), False),  # of which neither can be a block
        (nn.Sequential(nn.Sequential(nn.Conv1d(4, 4, 1)), nn.Sequential(nn.Conv1d(4, 4, 1))), False),
        (nn.Sequential(), False),
    ],
)
def test_lists_of_modules(module: nn.Module, found: bool) -> None:
    assert compat.is_list(module) == found
