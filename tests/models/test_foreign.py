"""A model's own errors are refused with their cause; duat's own pass as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import single_model
from torch import nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery import structure
from duat_cli.models.discovery.structure import discover
from duat_cli.models.foreign import model_code


def raising(error: Exception) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        raise error

    return forward


@pytest.mark.parametrize("kind", [AttributeError, TypeError, KeyError, RuntimeError])
def test_an_error_of_the_models_own_code_is_refused_with_its_cause(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = single_model("llama")
    monkeypatch.setattr(model.model.layers[1].mlp, "forward", raising(kind("planted")))
    with pytest.raises(UnsupportedModelError, match=f"LlamaForCausalLM: .*replayed: {kind.__name__}") as seen:
        discover(model)
    assert isinstance(seen.value.__cause__, kind)


@pytest.mark.parametrize("kind", [AttributeError, TypeError, KeyError, RuntimeError])
def test_an_error_of_duat_passes(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    space: dict[str, Any] = {"__name__": "duat_cli.planted", "kind": kind}
    exec("def broken(*args):\n    raise kind('planted')\n", space)
    monkeypatch.setattr(structure, "outermost_lists", space["broken"])
    with pytest.raises(kind, match="planted"):
        discover(single_model("llama"))


def test_torch_called_by_duat_is_duats_error() -> None:
    source = "def wrong():\n    nn.Linear(2, 2)(torch.zeros(1, 3))\n"
    ours: dict[str, Any] = {"__name__": "duat_cli.planted", "nn": nn, "torch": torch}
    theirs = ours | {"__name__": "modeling_planted"}
    exec(source, ours)
    exec(source, theirs)
    with pytest.raises(RuntimeError, match="shapes"), model_code("Planted"):
        ours["wrong"]()
    with pytest.raises(UnsupportedModelError, match="Planted: its own code"), model_code("Planted"):
        theirs["wrong"]()


def test_memory_that_runs_out_is_no_fault_of_the_model() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), model_code("Planted"):
        raise RuntimeError("CUDA out of memory")
