"""C of the first prompts against the dense W' of autograd, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers import Wiring, coupling_of, dense_blocks, quiet

from duat_cli.analysis.inspect.maps import MOST_TOKENS, Maps
from duat_cli.analysis.inspect.options import Filled, InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.results.inspect import CouplingMap

Encoded = Callable[..., list[Prompt]]
LLAMA = Wiring("model.layers", "self_attn.o_proj")


def mapped(loaded: LoadedModel, prompts: list[Prompt], count: int, **options: object) -> list[CouplingMap] | None:
    maps = Maps(prompts[:count], lambda token: f"t{token}")
    return inspect(loaded, prompts, InspectOptions(**options), quiet, Filled(maps=maps)).maps  # type: ignore[arg-type]


def test_maps_are_c_of_the_dense_operator(loaded: LoadedModel, prompts: Encoded) -> None:
    texts = prompts(loaded, "Nui zi created", "def f(x):", "one two")
    found = mapped(loaded, texts, 2)
    assert found is not None
    assert [one.prompt for one in found] == [0, 1]
    double = copy.deepcopy(loaded.model).double()
    for one, prompt in zip(found, texts, strict=False):
        ids = prompt.input_ids[0].tolist()
        assert one.tokens == [f"t{token}" for token in ids]
        assert one.total_tokens == len(ids)
        for block, dense in zip(one.blocks, dense_blocks(double, prompt.input_ids, LLAMA), strict=True):
            rows = [row + [0.0] * (len(ids) - len(row)) for row in block.coupling]
            expected = coupling_of(dense.W, len(ids))
            assert [len(row) for row in block.coupling] == list(range(1, len(ids) + 1))  # causal: no zeros are kept
            assert torch.tensor(rows).double().sub(expected).abs().max() <= 6e-4 * expected.max()


def test_without_maps_there_are_none(loaded: LoadedModel, prompts: Encoded) -> None:
    report = inspect(loaded, prompts(loaded, "def f(x):"), InspectOptions(), quiet)
    assert report.maps is None


def test_only_chosen_blocks_are_mapped(loaded: LoadedModel, prompts: Encoded) -> None:
    found = mapped(loaded, prompts(loaded, "def f(x):"), 1, layers=frozenset({1}))
    assert found is not None
    assert [block.index for block in found[0].blocks] == [1]


def test_a_long_prompt_is_cut_and_its_first_tokens_are_what_they_were() -> None:
    C = torch.rand(MOST_TOKENS + 9, MOST_TOKENS + 9).tril()
    ids = torch.arange(MOST_TOKENS + 9)[None]
    maps = Maps([Prompt(text="", sha256="", input_ids=ids, line=1)], str)
    maps.add(0, 4, C)
    (found,) = maps.maps()
    assert found.total_tokens == MOST_TOKENS + 9
    assert found.tokens == [str(i) for i in range(MOST_TOKENS)]
    assert found.blocks[0].coupling[MOST_TOKENS - 1] == pytest.approx(
        C[MOST_TOKENS - 1, :MOST_TOKENS].tolist(), rel=6e-4
    )


def test_vectors_that_are_no_tokens_have_numbers_for_names() -> None:
    """Where a model puts vectors of its own beside the tokens."""
    maps = Maps([Prompt(text="", sha256="", input_ids=torch.tensor([[5, 6]]), line=1)], str)
    maps.add(0, 0, torch.ones(3, 3))
    assert maps.maps()[0].tokens == ["vector 0", "vector 1", "vector 2"]
