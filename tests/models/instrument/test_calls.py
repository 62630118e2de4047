"""Names of parameters, of functions and methods, as long as they live."""

from __future__ import annotations

import functools
import gc

from duat_cli.models.instrument import calls
from duat_cli.models.instrument.calls import taken_by


class Layer:
    def forward(self, ids: int, *rest: int, mask: int = 0) -> None: ...


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
