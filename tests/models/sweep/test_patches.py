"""Passes with parts of another prompt's."""

from __future__ import annotations

import pytest
import torch
from helpers import single_model, token_ids
from torch import Tensor

from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.instrument.attention import StoredRows
from duat_cli.models.instrument.held import Held
from duat_cli.models.sweep.passes import Recorded, record, run_alone
from duat_cli.models.sweep.patches import Patch, PatchedPass

TOKENS = 6
ALL = slice(None)


@pytest.fixture(scope="module", params=["llama", "albert"])
def structure(request: pytest.FixtureRequest) -> ModelStructure:
    """Of a module a block, and of one that is called again and again."""
    return discover(single_model(request.param))


def recorded(structure: ModelStructure, seed: int) -> Recorded:
    return record(structure, lambda: forward(structure, seed))


def forward(structure: ModelStructure, seed: int) -> Tensor:
    found: Tensor = run_stack(structure.stack, token_ids(structure.stack, TOKENS, seed))[0]
    return found


def output(structure: ModelStructure, calls: Recorded, patch: Patch) -> Tensor:
    return run_alone(PatchedPass(structure, lambda: forward(structure, 0), calls.calls, patch))


def test_the_stream_of_all_tokens_makes_it_the_other_pass(structure: ModelStructure) -> None:
    own, other = (recorded(structure, seed) for seed in (0, 1))
    for block in range(len(structure.calls)):
        patch = Patch(stream={block: (ALL, other.calls[block].before)})
        assert patch.start == block
        torch.testing.assert_close(output(structure, own, patch), other.output)
        same = Patch(stream={block: (ALL, own.calls[block].before)})
        torch.testing.assert_close(output(structure, own, same), own.output)


def test_a_block_call_is_patched_alone(structure: ModelStructure) -> None:
    """H that hands nothing on, in one call of a module that may be called at others: the stream in front of it is as it
    was, what the call gives lacks its attention."""
    own, shown = recorded(structure, 0), list[Tensor]()
    block, heads = 1, structure.block(1).parts.attention
    none = StoredRows(torch.zeros(4, TOKENS, TOKENS))
    patch = Patch({block: lambda: Held([none for _ in heads])})
    last = PatchedPass(structure, lambda: forward(structure, 0), own.calls, patch)
    module = structure.calls[block]
    with module.register_forward_hook(lambda module, args, output: shown.append(torch.as_tensor(output[0]))):
        moved = run_alone(last)
    assert not torch.allclose(moved, own.output)
    assert len(shown) == (len(structure.calls) if structure.calls[0] is module else 1)
