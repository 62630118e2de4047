"""Routed experts in a dtype that transformers' default kernel for them does not know."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers import far, single_model

from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.loading.model.load import load
from duat_cli.loading.prompts import Prompt
from duat_cli.zoo import tiny

NUMBERS = ("operator", "density", "coupling", "coupling_weighted", "terms")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("mixtral")
    single_model("mixtral").save_pretrained(place)
    return str(place)


def report(folder: str, dtype: str) -> Any:
    loaded = load(folder, dtype=dtype)
    ids = tiny.tiny_inputs(loaded.model, 9)["input_ids"]
    return inspect(loaded, [Prompt("", "0" * 64, ids, 1)], InspectOptions(cache=False), lambda *_: None)


def numbers(value: Any) -> list[float]:
    """Every number below a value, in order."""
    if isinstance(value, dict):
        return [
            n for key, inner in value.items() if key not in ("reasons", "certificate_error") for n in numbers(inner)
        ]
    return [float(value)] if isinstance(value, int | float) else []


def test_mixtral_in_float64_is_exact_and_has_the_numbers_of_float32(folder: str) -> None:
    wide, single = report(folder, "float64"), report(folder, "float32")
    assert wide.certificate.exact
    assert wide.certificate.tolerance == 1e-6
    assert single.certificate.exact
    for a, b in zip(wide.blocks, single.blocks, strict=True):
        rows = [json.loads(block.model_dump_json(include=set(NUMBERS))) for block in (a, b)]
        for row in rows:
            row["operator"].pop("dense_bytes")
        found, expected = map(numbers, rows)
        assert len(found) == len(expected) > 20
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_models_own_output_is_that_of_transformers(folder: str) -> None:
    """The loop over the experts and the kernel give one output."""
    ids = torch.arange(40, 49)[None]
    with torch.no_grad():
        wide, single = (load(folder, dtype=dtype).model(input_ids=ids).logits for dtype in ("float64", "float32"))
    assert far(wide, single) < 1e-5
