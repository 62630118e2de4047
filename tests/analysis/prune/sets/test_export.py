"""The chosen set as JSON and as mergekit slices."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from helpers import single_model
from hypothesis import given
from hypothesis import strategies as st

from duat_cli.analysis.prune.sets.export import chosen_set, kinds_of_blocks, mergekit_slices
from duat_cli.errors import InputError
from duat_cli.models.discovery.structure import discover
from duat_cli.models.terms.sites import TermId, find_sites
from duat_cli.results.base import ModelFacts
from duat_cli.results.prune.chosen import ChosenSet, ChosenTerm


def chosen(model: Any, *terms: TermId) -> ChosenSet:
    structure = discover(model)
    facts = ModelFacts.model_construct(name="org/name", revision="abc", fingerprint="f" * 8)
    return chosen_set(model, structure, find_sites(structure), terms, facts)


def test_names_and_features() -> None:
    found = chosen(
        single_model("llama"), TermId("head", 2, 3), TermId("neuron", 0, 7), TermId("block", 1),
        TermId("ffn", 0, 0), TermId("attention", 0, 0), TermId("neuron", 0, 7),
    )  # fmt: skip
    assert (found.blocks, len(found.terms)) == (3, 5)
    assert found.terms[1] == ChosenTerm(
        kind="ffn", block=0, index=0, module="model.layers.0.mlp", place="output", features=None
    )
    assert found.terms[2] == ChosenTerm(
        kind="neuron", block=0, index=7, module="model.layers.0.mlp.down_proj", place="input", features=(7, 8)
    )
    assert found.terms[3].module == "model.layers.1"
    assert found.terms[4] == ChosenTerm(
        kind="head", block=2, index=3, module="model.layers.2.self_attn.o_proj", place="input", features=(48, 64)
    )
    assert ChosenSet.model_validate_json(found.model_dump_json()) == found


def test_conv_layers_and_experts() -> None:
    head = chosen(single_model("gpt2"), TermId("head", 1, 2)).terms[0]
    assert (head.module, head.features) == ("transformer.h.1.attn.c_proj", (16, 24))
    expert = chosen(single_model("mixtral"), TermId("expert", 0, 3)).terms[0]
    assert (expert.place, expert.features) == ("routing", (3, 4))
    assert expert.module.startswith("model.layers.0.")


def test_slices_text() -> None:
    text = mergekit_slices(8, [0, 3, 4], model="org/name", dtype="bfloat16")
    assert text == (
        "slices:\n"
        "- sources:\n"
        "  - model: org/name\n"
        "    layer_range: [1, 3]\n"
        "- sources:\n"
        "  - model: org/name\n"
        "    layer_range: [5, 8]\n"
        "merge_method: passthrough\n"
        "dtype: bfloat16\n"
    )


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=n - 1))),
       st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufeff")))  # fmt: skip
def test_slices_keep_what_is_not_removed(case: tuple[int, set[int]], model: str) -> None:
    blocks, removed = case
    read = yaml.safe_load(mergekit_slices(blocks, sorted(removed), model=model, dtype="float32"))
    kept = [k for piece in read["slices"] for source in piece["sources"] for k in range(*source["layer_range"])]
    assert kept == [k for k in range(blocks) if k not in removed]
    assert {source["model"] for piece in read["slices"] for source in piece["sources"]} == {model}
    assert (read["merge_method"], read["dtype"]) == ("passthrough", "float32")


@pytest.mark.parametrize(("model_type", "kinds"), [("llama", 1), ("gemma2", 2), ("zamba2", 2)])
def test_blocks_of_several_kinds_are_said_to_be(model_type: str, kinds: int) -> None:
    model = single_model(model_type)
    assert kinds_of_blocks(model, discover(model), [1]) == kinds
    text = mergekit_slices(3, [1], model="m", dtype="float32", kinds=kinds)
    assert text.startswith("# the config lists kinds of blocks" if kinds > 1 else "slices:")
    assert [slice["sources"][0]["layer_range"] for slice in yaml.safe_load(text)["slices"]] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("model_type", "why"), [("albert", "one module"), ("bart", "an encoder's blocks")])
def test_blocks_that_are_no_list_of_a_decoder(model_type: str, why: str) -> None:
    model = single_model(model_type)
    with pytest.raises(InputError, match=f"{why}.*give a .json file"):
        kinds_of_blocks(model, discover(model), [1])


def test_kinds_that_follow_from_numbers_are_no_slices() -> None:
    """Jamba's attention stands in every block of a period; the last block may go."""
    model = single_model("jamba")
    with pytest.raises(InputError, match=r"Jamba\w+ makes blocks of a kind by their number.* give a \.json file"):
        kinds_of_blocks(model, discover(model), [0])
    last = len(discover(model).calls) - 1
    assert kinds_of_blocks(model, discover(model), [last]) > 1


def test_slices_that_cannot_be() -> None:
    with pytest.raises(InputError, match="no block"):
        mergekit_slices(2, [0, 1], model="m", dtype="float32")
    with pytest.raises(InputError, match="blocks 0 to 1"):
        mergekit_slices(2, [2], model="m", dtype="float32")
