"""A block that reads more than hidden states is found; an exception leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import single_model, token_ids
from removal import forward_of, prepared, untouched
from torch import Tensor

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.structure import discover
from duat_cli.models.sweep.chain import Chain
from duat_cli.models.sweep.lockstep import one_by_one


def require_chained(structure: Any, forward: Any) -> None:
    chain = Chain(structure, forward)
    one_by_one(chain.passes)
    chain.require()


def test_a_block_that_reads_more_than_the_hidden_states_is_refused() -> None:
    """A side channel from the first block to the last: a gradient from block to block would miss it."""
    model = single_model("llama")
    structure = discover(model)
    ids = token_ids(model)
    require_chained(structure, forward_of(structure, ids))
    layers = model.model.layers
    layers[0].register_forward_hook(lambda m, a, out: kept.append(out))
    layers[2].register_forward_pre_hook(lambda m, a, k: (a, {**k, "shared": {"keys": kept[-1]}}), with_kwargs=True)
    kept: list[Tensor] = []
    with pytest.raises(UnsupportedModelError, match=r"layers\.2 reads more"):
        require_chained(structure, forward_of(structure, ids))


def test_an_exception_leaves_nothing_behind() -> None:
    model, structure, _ = prepared("llama")

    def stop() -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        require_chained(structure, stop)
    assert untouched(model)
