"""Metadata of report fields: there for every number of every report, and read by the JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, get_args

import pytest
from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from duat_cli.checks.paths import Place, places
from duat_cli.report.schema import REPORTS, schema_of
from duat_cli.results.base import Finite, Result
from duat_cli.results.inspect import InspectReport, Spread
from duat_cli.results.meaning import UNSAID, Meaning, meaning_of
from duat_cli.results.operator import Coupling, OperatorStats

COUNTS = ("index", "prompt", "block", "tokens", "parameters", "blocks", "hidden_size", "streams", "heads", "kv_heads")


class Sample(Result):
    plain: Finite = Field(description="no metadata")
    said: Annotated[Finite | None, Meaning("bits", "estimate", formula="log2 k", needs="spectrum")] = Field(
        description="with metadata"
    )
    group: Annotated[Coupling, Meaning(drift="group")]


def test_the_metadata_of_a_field() -> None:
    assert meaning_of(Sample, "said") == Meaning("bits", "estimate", formula="log2 k", needs="spectrum")
    assert meaning_of(Sample, "plain") is UNSAID
    assert UNSAID.drift is None
    assert Sample.model_fields["said"].description == "with metadata"


def test_the_schema_shows_unit_and_exactness() -> None:
    shown: dict[str, Any] = Sample.model_json_schema()["properties"]
    assert (shown["said"]["unit"], shown["said"]["exactness"]) == ("bits", "estimate")
    assert shown["said"]["description"] == "with metadata"
    assert shown["said"]["formula"] == "log2 k"
    assert not {"unit", "exactness", "formula"} & set(shown["plain"])
    assert shown["group"] == {"$ref": "#/$defs/Coupling"}
    inspect = schema_of("inspect")["$defs"]
    assert inspect["Coupling"]["properties"]["entropy_bits"]["unit"] == "bits"
    assert inspect["OperatorStats"]["properties"]["spectral_norm"]["exactness"] == "estimate"
    assert inspect["Density"]["properties"]["threshold"]["exactness"] == "given"


def numbers() -> list[Place]:
    return [place for place in places(InspectReport).values() if place.is_number]


def test_every_number_of_the_inspect_report_has_a_unit_and_says_how_exact_it_is() -> None:
    measured = [place for place in numbers() if place.path.rsplit(".", 1)[-1] not in COUNTS]
    assert len(measured) > 100
    assert [place.path for place in measured if not place.meaning.unit] == []
    exact = [place for place in measured if ".spreads." not in place.path]  # a spread is as exact as its field
    assert [place.path for place in exact if not place.meaning.exactness] == []


@pytest.mark.parametrize("report", REPORTS)
def test_every_number_but_a_count_has_a_unit_and_says_how_exact_it_is(report: str) -> None:
    for path, owner, info in _fields(REPORTS[report], ""):
        if float in _kinds(info.annotation):
            meaning = meaning_of(owner, path.rpartition(".")[2])
            assert meaning.unit, path
            assert meaning.exactness or owner is Spread, path  # a spread is as exact as its field


def _fields(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel], FieldInfo]]:
    for name, info in model.model_fields.items():
        yield f"{path}.{name}", model, info
        for kind in _kinds(info.annotation):
            if issubclass(kind, BaseModel):
                yield from _fields(kind, f"{path}.{name}")


def _kinds(hint: object) -> Iterator[type]:
    """Every class inside a type hint."""
    inner = get_args(hint)
    if isinstance(hint, type) and not inner:
        yield hint
    for kind in inner:
        yield from _kinds(kind)


def test_groups_and_numbers_are_told_apart() -> None:
    for place in places(InspectReport).values():
        kinds = {None, "number", "norm"} if place.is_number else {None, "group"}
        assert place.meaning.drift in kinds, place.path


def test_what_the_metadata_says_of_known_fields() -> None:
    assert meaning_of(OperatorStats, "frobenius_norm").drift == "norm"
    assert meaning_of(OperatorStats, "certificate_error").over_prompts == "largest"
    assert places()["blocks.#.prompts.#.operator.stable_rank"].needs == {"per_prompt", "spectrum"}
    assert places()["blocks.#.terms.own.share"].meaning.signed
    assert not any(path.startswith(("run.", "environment.")) for path in places())


def test_every_report_has_a_schema_with_its_metadata() -> None:
    for command in REPORTS:
        schema = schema_of(command)
        named = schema.get("discriminator", {}).get("mapping", {}).values()
        named = [*named, *(branch["$ref"] for branch in schema.get("anyOf", []))]
        branches = [schema["$defs"][name.rpartition("/")[2]] for name in named]
        assert all(branch["properties"] for branch in branches or [schema])
