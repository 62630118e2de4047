"""A set that no checkpoint could be written without is refused before the run."""

from __future__ import annotations

import pytest
from helpers import as_loaded, single_model

from duat_cli.analysis.prune.writable import require_writable
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.structure import discover


def test_blocks_that_are_one_module_are_refused() -> None:
    albert = as_loaded(single_model("albert"))
    blocks = len(discover(albert.model).calls)
    for count in (None, 1):
        with pytest.raises(UnsupportedModelError, match="blocks are one module"):
            require_writable(albert, ["block"], count, means=False)
    require_writable(albert, ["block"], blocks, means=False)
    require_writable(albert, ["head"], 1, means=False)  # the same head of every block may go
    require_writable(as_loaded(single_model("bert")), ["block"], 1, means=False)


def test_means_need_a_bias() -> None:
    with pytest.raises(UnsupportedModelError, match="has no bias that could hold the means"):
        require_writable(as_loaded(single_model("llama")), ["head"], None, means=True)
    require_writable(as_loaded(single_model("gpt2")), ["head", "neuron"], None, means=True)
