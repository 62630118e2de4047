"""Where the text model of a config of several models is described."""

from __future__ import annotations

from typing import Any

import pytest

from duat_cli.loading.checkpoint.sizes import text_config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 32}, 32),
        ({"text_config": {"hidden_size": 32}, "vision_config": {"hidden_size": 8}}, 32),
        ({"llm_config": {"hidden_size": 32}, "vision_config": {"hidden_size": 8}}, 32),
        ({"encoder": {"hidden_size": 8}, "decoder": {"hidden_size": 32}}, 32),
        ({"hidden_size": 32, "decoder": "pooled"}, 32),
        ({"hidden_size": 32, "decoder": {"vocab_size": 9}}, 32),
    ],
)
def test_the_config_of_the_text_model(config: dict[str, Any], expected: int) -> None:
    assert text_config(config)["hidden_size"] == expected
