"""Router weights seen and held, against the model whose router is made to give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import single_model, token_ids
from torch import Tensor, nn

from duat_cli.models.arrays import relative_error
from duat_cli.models.discovery.structure import discover, run_stack
from duat_cli.models.instrument.held import Held, HeldRig
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.routers import Routed, Routers, mean_routed, routing_slots


def test_another_prompts_router_weights_are_used_where_the_own_would_be() -> None:
    model = single_model("mixtral")
    structure, ids, other = discover(model), token_ids(model), token_ids(model, seed=5)
    gates = [block.mlp.gate for block in model.model.layers]

    def outputs(tokens: Tensor, given: list[Any] | None) -> tuple[Tensor, list[Any]]:
        kept: list[Any] = []

        def act(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            kept.append(output)
            return None if given is None else given[len(kept) - 1]

        with torch.no_grad(), hooked(gates, after=act):
            return run_stack(structure.stack, tokens)[0], kept

    routers, held = Routers(), []

    def listen(run: BlockRun) -> None:
        held.append(routers.inside(run.parts.module))

    with structure.rig().active() as rig, routers.seen(model):
        rig.run(lambda: run_stack(structure.stack, other), listen)
    expected, _ = outputs(ids, outputs(other, None)[1])
    live, _ = outputs(ids, None)

    class Capturing(HeldRig):
        """Attention stays live: H of a pass in which routers are held is not known before it."""

        def replacement(self, module: nn.Module, value: Tensor) -> None:
            return None

    parts = [block.parts for block in structure.blocks]
    with Capturing(structure.stack, parts, interface=True, held=lambda k: Held([], {}, held[k])).active():
        found = run_stack(structure.stack, ids)[0]
    assert relative_error(found, expected) < 1e-6
    assert relative_error(found, live) > 1e-3


def test_the_mean_chooses_every_expert() -> None:
    some = [
        Routed(torch.tensor([[0, 2]]), torch.tensor([[0.25, 0.75]]), 3),
        Routed(torch.tensor([[2, 1]]), torch.tensor([[0.5, 0.5]]), 3),
    ]
    mean = mean_routed(some)
    assert mean.experts.tolist() == [[0, 1, 2]]
    assert mean.weights.tolist() == [[0.125, 0.25, 0.625]]


@pytest.mark.parametrize("args", [(torch.zeros(3, 4),), (torch.zeros(3, 2), torch.zeros(3, 2)), ()])
def test_a_call_without_routing(args: tuple[Tensor, ...]) -> None:
    assert routing_slots(args, {}) is None
