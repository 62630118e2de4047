"""What is declared of single layers, as it is written in the wild and as it is not meant."""

from __future__ import annotations

from typing import Any

import pytest

from duat_cli.loading.declared.per_layer import Override, overrides


@pytest.mark.parametrize("nested", [False, True])
def test_what_differs_from_the_config_itself(nested: bool) -> None:
    text: dict[str, Any] = {
        "intermediate_size": 64,
        "per_layer_config": {"03": {"intermediate_size": 32, "skip": ["mlp"]}, "1": {"intermediate_size": 64}},
    }
    found = overrides({"text_config": text} if nested else text)
    assert found == [Override(3, "intermediate_size", 32), Override(3, "skip", ["mlp"])]


@pytest.mark.parametrize(
    "declared", [None, [], {}, "mlp", {"1": {"skip": []}}, {"1": ["mlp"]}, {"first": {"skip": ["mlp"]}}, {"2": None}]
)
def test_nothing_is_declared(declared: Any) -> None:
    assert overrides({"per_layer_config": declared}) == []
    assert overrides({}) == []
