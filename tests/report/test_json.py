"""JSON reports and their schema."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import sample_reports as sample

from duat_cli.report.json import to_json
from duat_cli.report.schema import REPORTS, schema_of, to_schema
from duat_cli.results.base import Result

SAMPLES: dict[str, Result] = {
    "attribute": sample.attribute_report(),
    "check": sample.check_report(),
    "compare": sample.compare_report(several=True),
    "explain": sample.explain_report(),
    "inspect": sample.inspect_report(spectrum=True, with_terms=True, per_prompt=True),
    "lora-diff": sample.lora_report(prompts_too=True, two=True),
    "matrix": sample.matrix_report(),
    "matrix --network": sample.network_report(),
    "plan": sample.plan_report(),
    "prune-bound": sample.prune_report(),
    "verify": sample.verify_report(),
    "support": sample.support_report(),
}


@pytest.mark.parametrize("command", SAMPLES)
def test_round_trip(command: str) -> None:
    text = to_json(SAMPLES[command])
    document = json.loads(text, parse_constant=pytest.fail)
    assert REPORTS[command].model_validate(document) == SAMPLES[command]
    assert text.isascii()
    assert text.endswith("}\n")


def test_controls_are_escaped() -> None:
    text = to_json(sample.inspect_report(name="\x1b[31m\u202e\x9b é"))
    assert "\x1b" not in text
    assert json.loads(text)["model"]["name"] == "\x1b[31m\u202e\x9b é"


def test_nan_is_refused() -> None:
    unchecked = sample.certificate().model_copy(update={"relative_error": math.nan})
    with pytest.raises(ValueError, match=r"not JSON compliant|Out of range"):
        to_json(unchecked)


@pytest.mark.parametrize("command", REPORTS)
def test_schema_describes_the_report(command: str) -> None:
    schema = schema_of(command)
    assert json.loads(to_schema(command)) == schema
    document = json.loads(to_json(SAMPLES[command]))
    assert conforms(document, schema, schema) == []


def test_the_schema_check_can_fail() -> None:
    schema = schema_of("compare")
    document = json.loads(to_json(SAMPLES["compare"]))
    wrong = {**document, "surplus": 1, "warnings": [1], "command": "inspect"}
    del wrong["certificate"]
    found = " ".join(conforms(wrong, schema, schema))
    for word in ("surplus", "warnings[0]", "command", "certificate"):
        assert word in found


def test_the_schema_of_check_tells_a_report_from_an_error_by_its_verdict() -> None:
    schema = schema_of("check")
    error = json.loads(to_json(sample.undecided_report()))
    assert conforms(error, schema, schema) == []
    assert conforms(error | {"verdict": "passed"}, schema, schema) != []
    assert conforms(error | {"verdict": "odd"}, schema, schema) != []
    report = json.loads(to_json(sample.check_report()))
    assert conforms(report | {"verdict": "undecided"}, schema, schema) != []
    del report["causes"]
    assert conforms(report, schema, schema) == [".causes: missing"]


def test_every_report_field_but_the_envelope_has_a_meaning_or_a_model() -> None:
    described = schema_of("inspect")["$defs"]["Coupling"]["properties"]
    for name in ("off_diagonal_share", "entropy_bits", "effective_context"):
        assert described[name]["description"]


TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "any": object,
}


def conforms(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "") -> list[str]:
    """Where a value breaks a schema: the keywords that pydantic writes, no more."""
    if "$ref" in schema:
        return conforms(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, at)
    if "anyOf" in schema or "oneOf" in schema:
        return _one_of(value, schema, root, at)
    if not isinstance(value, TYPES[schema.get("type", "any")]):
        return [f"{at}: not {schema['type']}"]
    if isinstance(value, dict):
        return _object(value, schema, root, at)
    if isinstance(value, list):
        return [e for i, item in enumerate(value) for e in conforms(item, schema["items"], root, f"{at}[{i}]")]
    allowed = schema.get("enum", [schema.get("const", value)])
    return [] if value in allowed else [f"{at}: not one of {allowed}"]


def _one_of(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str) -> list[str]:
    if "anyOf" in schema:
        found = [conforms(value, choice, root, at) for choice in schema["anyOf"]]
        return [] if any(not errors for errors in found) else [f"{at}: none of anyOf"]
    key, choices = schema["discriminator"]["propertyName"], schema["discriminator"]["mapping"]
    chosen = choices.get(value.get(key))
    return (
        [f"{at}.{key}: not one of {sorted(choices)}"] if chosen is None else conforms(value, {"$ref": chosen}, root, at)
    )


def _object(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], at: str) -> list[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    errors = [f"{at}.{name}: missing" for name in schema.get("required", []) if name not in value]
    for name, item in value.items():
        if name in known:
            errors += conforms(item, known[name], root, f"{at}.{name}")
        elif others is False:
            errors.append(f"{at}.{name}: surplus")
        elif isinstance(others, dict):
            errors += conforms(item, others, root, f"{at}.{name}")
    return errors
