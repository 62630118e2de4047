"""What a set saves is what the written file lacks, and what is zero in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import single_model
from pruning import applied, parameters_of
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from duat_cli.analysis.prune.sets.size import set_size
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.model.given import given
from duat_cli.loading.model.load import LoadedModel, load
from duat_cli.models.discovery.structure import ModelStructure, discover
from duat_cli.models.edits.parameters import BlockParameters
from duat_cli.models.terms.sites import Sites, TermId, find_sites

NEURONS = 48  # of an FFN of the small llama


@dataclass(frozen=True)
class Source:
    """A tiny checkpoint, loaded and discovered."""

    folder: Path
    loaded: LoadedModel
    structure: ModelStructure
    sites: Sites
    parameters: dict[nn.Module, BlockParameters]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Source]:
    """Of a model type, made once: what is written leaves the loaded model as it is."""

    @functools.cache
    def made(model_type: str) -> Source:
        folder = tmp_path_factory.mktemp(model_type)
        single_model(model_type).to(torch.bfloat16).save_pretrained(folder)
        loaded = load(str(folder))
        structure = discover(loaded.model)
        sites = find_sites(structure)
        return Source(folder, loaded, structure, sites, parameters_of(structure, sites))

    return made


def counts(folder: Path) -> tuple[int, int, int]:
    """Values in the files, zeros among them, and bytes."""
    tensors = [t for file in folder.glob("*.safetensors") for t in load_file(file).values()]
    return (
        sum(t.numel() for t in tensors),
        sum(int((t == 0).sum()) for t in tensors),
        sum(t.numel() * t.element_size() for t in tensors),
    )


@pytest.mark.parametrize(
    ("model_type", "terms", "removed"),
    [
        ("llama", [("neuron", b, n) for b in range(3) for n in range(5)] + [("neuron", 1, 9), ("head", 2, 1)], 15),
        ("gpt2", [("neuron", b, n) for b in range(3) for n in (1, 7)], 6),
        ("phi3", [("neuron", b, n) for b in range(3) for n in (1, 7)], 6),
        ("qwen2", [("block", 1, None), ("neuron", 0, 3), ("neuron", 2, 4), ("neuron", 0, 5)], 3),
        ("llama", [("neuron", 0, 3), ("ffn", 1, 0), ("attention", 2, 0)], 0),
        ("llama", [("head", b, h) for b in range(3) for h in (0, 1)], 6),
        ("mixtral", [("expert", 1, 2), ("head", 0, 0)], 0),
        ("bloom", [("neuron", b, n) for b in range(3) for n in (1, 7)], 0),  # its config states no width of the FFNs
        ("llama", [("neuron", b, n) for b in range(3) for n in range(NEURONS)], 3 * (NEURONS - 1)),
        ("llama", [("block", b, None) for b in range(3)], 0),  # none would be left
        (
            "llama",
            [("block", 1, None)] + [(k, b, n) for b in (0, 2) for k, n in (("neuron", 4), ("head", 2), ("head", 3))],
            7,
        ),
        ("phi", [(k, b, n) for b in range(3) for k, n in (("neuron", 4), ("head", 2), ("head", 3))], 3),
        ("jamba", [("block", 0, None)], 0),  # which of its blocks has attention follows from their numbers
        ("albert", [("ffn", b, 0) for b in range(3)], 0),  # its blocks are one module, whose weights count once
        ("zamba2", [("block", 2, None)], 1),  # it shares most of its weights with a block that stays
    ],
)
def test_it_is_what_the_written_file_shows(
    model_type: str,
    terms: list[tuple[str, int, int | None]],
    removed: int,
    source: Callable[[str], Source],
    tmp_path: Path,
) -> None:
    here, gone = source(model_type), [TermId(kind, block, index) for kind, block, index in terms]  # type: ignore[arg-type]
    said = set_size(here.loaded, here.structure, here.sites, here.parameters, gone)
    applied(here.loaded, here.structure, gone, tmp_path / "out")
    before, after = counts(here.folder), counts(tmp_path / "out")
    assert said.terms_removed == removed
    assert said.parameters_removed == before[0] - after[0]
    assert said.bytes_removed == before[2] - after[2]
    assert before[1] == 0
    assert said.parameters_zeroed == after[1]


@pytest.mark.parametrize(
    ("model_type", "kind", "leaves"),
    [
        ("llama", "neuron", True),
        ("llama", "head", True),
        ("llama", "ffn", False),
        ("gpt2", "neuron", True),
        ("gpt2", "head", False),  # the width of its heads follows from their number
        ("bloom", "neuron", False),  # its config states no width of the FFNs
        ("dots1", "neuron", False),  # only its first block has neurons that can be told apart
        ("bitnet", "neuron", False),  # a norm stands behind its activation
    ],
)
def test_whether_uniform_takes_terms_out_of_the_file_is_what_a_written_file_shows(
    model_type: str, kind: str, leaves: bool, source: Callable[[str], Source], tmp_path: Path
) -> None:
    here = source(model_type)
    said = set_size(here.loaded, here.structure, here.sites, here.parameters, [TermId(kind, 0, 0)])  # type: ignore[arg-type]
    assert said.terms_removed == 0
    assert said.uniform_leaves == [kind] * leaves
    gone = [
        TermId(kind, k, i)  # type: ignore[arg-type]
        for k, block in enumerate(here.structure.blocks)
        for i in range(min(2, len(here.parameters[block.parts.module].each[kind])))  # type: ignore[index]
    ]
    applied(here.loaded, here.structure, gone, tmp_path / "out")
    assert (counts(tmp_path / "out")[0] < counts(here.folder)[0]) is leaves


def test_weights_that_serve_other_places_are_not_counted(source: Callable[[str], Source]) -> None:
    """Blocks that are one module: a term of one of them alone cannot be taken out."""
    here = source("albert")
    said = set_size(here.loaded, here.structure, here.sites, here.parameters, [TermId("head", 0, 1)])
    assert (said.parameters_removed, said.parameters_zeroed) == (0, None)
    assert "one module" in said.reasons["parameters_zeroed"]


def test_tied_weights_are_not_counted() -> None:
    """Blocks of several modules with one weight: zeroing a term of one would zero that of the other."""
    model = single_model("llama")
    model.model.layers[2].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight
    loaded = given(model)
    structure = discover(loaded.model)
    sites = find_sites(structure)
    said = set_size(loaded, structure, sites, parameters_of(structure, sites), [TermId("neuron", 0, 3)])
    assert (said.parameters_removed, said.parameters_zeroed) == (0, None)
    assert said.reasons["parameters_zeroed"] == "block 0: a weight to be zeroed is tied to another place of the model"


@pytest.mark.parametrize("place", ["mlp.up_proj", "self_attn.q_proj"])
def test_weights_that_are_made_of_others_leave_no_file(place: str) -> None:
    model = single_model("llama")
    terms = [TermId("neuron", b, n) for b in range(3) for n in range(5)]
    weight_norm(model.model.layers[0].get_submodule(place))
    loaded = given(model)
    structure = discover(loaded.model)
    sites = find_sites(structure)
    parameters = parameters_of(structure, sites)
    assert parameters[structure.calls[0]].each["neuron"][0] > 0
    with pytest.raises(UnsupportedModelError, match=f"{place}.weight is made of other parameters by a parametr"):
        set_size(loaded, structure, sites, parameters, terms)
