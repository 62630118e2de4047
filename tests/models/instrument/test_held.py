"""A model whose dynamic parameters are held, against the same model whose softmax and norms are made to return them."""

from __future__ import annotations

import pytest
import torch
from function_modes import SOFTMAX, Kept
from helpers import single_model, token_ids
from torch import Tensor

from duat_cli.models.arrays import relative_error
from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.instrument.attention import StoredRows
from duat_cli.models.instrument.held import Held, HeldRig
from duat_cli.models.instrument.rig import BlockRun

RSQRT = (torch.rsqrt, Tensor.rsqrt)


def captured(structure: ModelStructure, ids: Tensor, *, norms: bool = True) -> list[Held]:
    found: list[Held] = []

    def listen(run: BlockRun) -> None:
        rows = [torch.cat([H for _, H in call.rows.chunks()], dim=1) for call in run.attention]
        found.append(Held([StoredRows(H) for H in rows], dict(run.recording.norms) if norms else {}))

    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, ids), listen)
    return found


def output(structure: ModelStructure, ids: Tensor, held: list[Held]) -> Tensor:
    interface = structure.path == "attention interface"
    parts = [block.parts for block in structure.blocks]
    with torch.no_grad(), HeldRig(structure.stack, parts, interface=interface, held=held.__getitem__).active():
        found: Tensor = run_stack(structure.stack, ids)[0]
    return found


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "gemma2", "mixtral", "bloom", "qwen3", "albert"])
def test_own_values_give_the_models_own_output(model_type: str, norms: bool) -> None:
    model = single_model(model_type)
    structure, ids = discover(model), token_ids(model)
    with torch.no_grad():
        own = run_stack(structure.stack, ids)[0]
    assert relative_error(output(structure, ids, captured(structure, ids, norms=norms)), own) < 2e-6
    with torch.no_grad():
        assert torch.equal(run_stack(structure.stack, ids)[0], own)


@pytest.mark.parametrize(("model_type", "norms"), [("llama", True), ("llama", False), ("gemma2", False)])
def test_another_prompts_values_are_used_where_the_models_own_would_be(model_type: str, norms: bool) -> None:
    """gemma2's norms do not call rsqrt."""
    model = single_model(model_type)
    structure, ids, other = discover(model), token_ids(model), token_ids(model, seed=5)
    found = output(structure, ids, captured(structure, other, norms=norms))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        with Kept(SOFTMAX) as weights, Kept(RSQRT) as scales:
            run_stack(structure.stack, other)
        held = scales.values[:-1] if norms else []  # the last norm is in no block
        with Kept(SOFTMAX, weights.values), Kept(RSQRT, held):
            expected = run_stack(structure.stack, ids)[0]
        live = run_stack(structure.stack, ids)[0]
    assert relative_error(found, expected) < 1e-5
    assert relative_error(found, live) > 1e-2
