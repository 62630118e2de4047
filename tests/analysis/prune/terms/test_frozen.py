"""One frozen block: affine, exact with everything in place, and its neurons alone, together and all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import far, token_ids, two_single

from duat_cli.analysis.prune.terms.frozen import FrozenBlock
from duat_cli.models.discovery.structure import discover, run_stack
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.passes import Removal, removals
from duat_cli.models.terms.sites import TermId, find_sites


def blocks(model_type: str, look: Any) -> None:
    """look(block, run, its sites, what makes a removal of terms) behind every block."""
    structure = discover(two_single(model_type))
    sites = find_sites(structure)

    def removal(*terms: TermId) -> Removal:
        return removals(structure, sites, terms)[terms[0].block]

    def listen(run: BlockRun) -> None:
        look(FrozenBlock(run, sites[run.parts.module]), run, sites[run.parts.module], removal)

    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, token_ids(structure.stack)), listen)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "gemma2", "mixtral", "falcon"])
def test_it_is_affine_with_and_without_terms(model_type: str) -> None:
    def look(block: FrozenBlock, run: BlockRun, _: Any, removal: Any) -> None:
        assert far(block.whole(run.input), run.output) < 1e-6
        step = torch.randn(3, *run.input.shape[1:], generator=torch.Generator().manual_seed(run.index))
        for gone in (None, removal(TermId("head", run.index, 1)), removal(TermId("block", run.index))):
            moved = block.whole(run.input + step, gone) - block.whole(run.input, gone)
            first, others = step[:1].clone(), step[1:].clone()
            block.move([first, others], gone)
            assert far(torch.cat([first, others]), moved) < 1e-5

    blocks(model_type, look)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "gemma2", "phi3", "falcon"])
def test_neurons_add_up_to_the_layer(model_type: str) -> None:
    """Each by its own activation and row, against the layer without them; all of them leave its bias alone."""

    def look(block: FrozenBlock, run: BlockRun, sites: Any, removal: Any) -> None:
        [site] = sites.of("neuron")
        some, every = [1, 4, 5], list(range(site.count))
        for places in (some, every):
            gone = removal(*(TermId("neuron", run.index, k) for k in places))
            layer, index = block.neurons(site, gone), torch.tensor(places)
            missing = block.whole(run.input) - block.whole(run.input, gone)
            assert far(layer.each(index).sum(dim=0, keepdim=True), missing) < 1e-5
            assert far(layer.together(index), missing) < 1e-5
        assert far(layer.sizes, layer.values.norm(dim=0) * layer.weight.norm(dim=1)) < 1e-6

    blocks(model_type, look)
