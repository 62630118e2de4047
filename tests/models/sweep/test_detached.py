"""What detaches is found by what moves; what is zero is not taken for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import token_ids
from removal import forward_of
from sharing import gemma4
from torch import Tensor, nn

from duat_cli.api.models import attribute, prune_bound
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.structure import discover
from duat_cli.models.sweep.gradients import Backward
from duat_cli.models.sweep.lockstep import one_by_one
from duat_cli.models.sweep.passes import record
from duat_cli.models.terms.sites import find_sites
from duat_cli.zoo import tiny


def detached(_module: nn.Module, _args: Any, output: Any) -> Any:
    return output.detach() if isinstance(output, Tensor) else (output[0].detach(), *output[1:])


class Detaching(nn.Module):
    """Of which no gradient reaches the input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.detach())


def walk(model: Any) -> None:
    """The gradients of three probes through all blocks; parameters have none, as of a model that duat loads."""
    model.requires_grad_(False)
    structure = discover(model)
    recorded = record(structure, forward := forward_of(structure, token_ids(model)))
    probes = torch.randn(3, *recorded.output.shape, generator=torch.Generator().manual_seed(3))
    backward = Backward(structure, find_sites(structure), forward, recorded, lambda: [probes])
    one_by_one([backward])
    for number in reversed(range(len(recorded.calls))):
        list(backward.through(number))


def block(model: Any, number: int = 1) -> Any:
    return model.model.layers[number]


HOOKED: dict[str, Callable[[Any], nn.Module]] = {
    "attention": lambda model: block(model).self_attn,
    "ffn": lambda model: block(model).mlp,
    "norm": lambda model: block(model).input_layernorm,
    "block": block,
}


@pytest.mark.parametrize("of", HOOKED.values(), ids=HOOKED)
def test_a_hook_that_detaches_is_found(of: Callable[[Any], nn.Module]) -> None:
    model = tiny.tiny_model("llama")
    of(model).register_forward_hook(detached)
    with pytest.raises(UnsupportedModelError, match=r"^block 1 \(layers\.1\): gives no gradient") as caught:
        walk(model)
    assert "\n" not in str(caught.value)


def test_a_unit_that_detaches_is_found() -> None:
    model = tiny.tiny_model("llama")
    block(model).mlp = Detaching(block(model).mlp)
    with pytest.raises(UnsupportedModelError, match="block 1"):
        walk(model)


def test_a_block_whose_input_is_detached_is_found() -> None:
    model = tiny.tiny_model("llama")
    block(model).register_forward_pre_hook(lambda _module, args: (args[0].detach(), *args[1:]))
    with pytest.raises(UnsupportedModelError, match="block 1"):
        walk(model)


def test_what_blocks_in_front_hand_on_and_is_detached_is_found() -> None:
    def detach(_module: nn.Module, _args: Any, kwargs: Any) -> None:
        shared = kwargs["shared_kv_states"]
        shared.update({key: tuple(t.detach() for t in pair) for key, pair in shared.items()})

    model = gemma4()
    walk(model)
    block(model, 2).register_forward_pre_hook(detach, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match=r"^block 2 \(layers\.2\): gives no gradient"):
        walk(model)


@pytest.mark.parametrize("name", ["mlp.down_proj", "mlp.up_proj", "self_attn.o_proj", "self_attn.v_proj"])
def test_weights_that_are_zero_are_no_fault(name: str) -> None:
    model = tiny.tiny_model("llama")
    with torch.no_grad():
        block(model).get_submodule(name).weight.zero_()
    walk(model)


@pytest.mark.parametrize("ask", [attribute, prune_bound], ids=["attribute", "prune_bound"])
@pytest.mark.parametrize("of", ["model.norm", "lm_head", "model.layers.2", "model.layers.1.mlp"])
def test_commands_say_it_in_one_line(ask: Callable[..., Any], of: str) -> None:
    model = tiny.tiny_model("llama")
    of = of.replace("layers.2", f"layers.{len(model.model.layers) - 1}")
    model.get_submodule(of).register_forward_hook(detached)
    with pytest.raises(UnsupportedModelError, match="gives no gradient of some of what it computes") as caught:
        ask(model, prompts=[token_ids(model)[0].tolist()])
    assert "\n" not in str(caught.value)


def test_a_layer_behind_neurons_that_detaches_is_said() -> None:
    model = tiny.tiny_model("llama")
    block(model, 0).mlp.down_proj.register_forward_hook(detached)
    with pytest.raises(UnsupportedModelError, match="gives no gradient"):
        attribute(model, prompts=[token_ids(model)[0].tolist()])
