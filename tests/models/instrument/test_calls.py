"""Names of parameters, of functions and methods, as long as they live; what calls hand on in mappings."""

from __future__ import annotations

import functools
import gc
from typing import Any, NamedTuple

import torch
from torch import Tensor

from duat_cli.models.instrument import calls
from duat_cli.models.instrument.calls import apart, beside_handed, hand_on, handed, taken_by, with_handed


class Pair(NamedTuple):
    key: Tensor
    value: Tensor


class Layer:
    def forward(self, ids: int, *rest: int, mask: int = 0) -> None: ...


def test_what_is_handed_on_is_copied_to_its_depth() -> None:
    """What a later call puts into a mapping within a mapping is not in what was kept, nor in what it came from."""
    key, mask = torch.ones(1, 2), torch.ones(1, dtype=torch.long)
    args, kwargs = apart((1,), {"shared": {"kv": {"a": (key, None)}, "mask": mask}, "x": key})
    kept = kwargs["shared"]["kv"]
    live: dict[str, Any] = {"shared": {}}
    hand_on((), live, (args, kwargs))
    live["shared"]["kv"]["b"] = key
    assert kept == {"a": (key, None)}
    assert list(handed(args, kwargs)) == [("shared", "kv", "a", 0)]
    assert beside_handed(args, kwargs) == [key]
    _, changed = with_handed(args, kwargs, lambda _path, tensor: tensor + 1)
    assert changed["shared"]["kv"]["a"][0].tolist() == [[2.0, 2.0]]
    assert changed["shared"]["mask"] is mask
    _, changed = with_handed((), {"shared": {0: Pair(key, key)}}, lambda path, tensor: tensor * path[-1])
    assert isinstance(changed["shared"][0], Pair)
    assert [tensor.tolist() for tensor in changed["shared"][0]] == [[[0.0, 0.0]], [[1.0, 1.0]]]


def test_names_of_a_method_and_of_what_wraps_it() -> None:
    layer = Layer()
    assert taken_by(layer.forward) == taken_by(Layer.forward) == {"self", "ids", "rest", "mask"}

    @functools.wraps(Layer.forward)
    def wrapped(*args: int, **kwargs: int) -> None: ...

    assert taken_by(wrapped) == {"self", "ids", "rest", "mask"}


def test_a_function_that_is_put_in_its_place_is_asked_anew_and_not_kept() -> None:
    layer = Layer()

    def other(output: int) -> None: ...

    layer.forward = other  # type: ignore[method-assign, assignment]
    assert taken_by(layer.forward) == {"output"}
    before = len(calls._known)
    del layer, other
    gc.collect()
    assert len(calls._known) == before - 1
