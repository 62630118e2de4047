"""The pooling that a checkpoint states, and what it makes of hidden states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from duat_cli.errors import CheckpointError
from duat_cli.loading.declared.pooling import NOT_STATED, POOLING, Pooling, pooling_of

MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
HIDDEN = torch.tensor([[[1.0, -2.0], [3.0, 5.0], [2.0, 0.0]]])


def stated(folder: Path, **content: object) -> Pooling | str:
    (folder / POOLING).parent.mkdir(exist_ok=True)
    (folder / POOLING).write_text(json.dumps({"word_embedding_dimension": 2, **content}))
    return pooling_of(folder)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("cls_token", [1.0, -2.0]),
        ("mean_tokens", [2.0, 1.0]),
        ("max_tokens", [3.0, 5.0]),
        ("mean_sqrt_len_tokens", [6 / 3**0.5, 3 / 3**0.5]),
        ("weightedmean_tokens", [13 / 6, 8 / 6]),
        ("lasttoken", [2.0, 0.0]),
    ],
)
def test_every_mode(tmp_path: Path, mode: str, expected: list[float]) -> None:
    found = stated(tmp_path, **{f"pooling_mode_{one}": one == mode for one in MODES})
    assert isinstance(found, Pooling)
    assert found.stated
    assert found.of(HIDDEN).tolist() == pytest.approx(expected)


def test_several_modes_and_the_short_form(tmp_path: Path) -> None:
    found = stated(tmp_path, pooling_mode_cls_token=True, pooling_mode_mean_tokens=True)
    assert isinstance(found, Pooling)
    assert found.of(HIDDEN).tolist() == [1.0, -2.0, 2.0, 1.0]
    assert found.name == "first token, mean over tokens"
    assert stated(tmp_path, pooling_mode="lasttoken") == Pooling(("lasttoken",), stated=True)


def test_what_is_not_known(tmp_path: Path) -> None:
    assert pooling_of(tmp_path).name == NOT_STATED  # type: ignore[union-attr]
    assert "states attention; known are" in str(stated(tmp_path, pooling_mode="attention"))
    assert "states no mode" in str(stated(tmp_path, pooling_mode_cls_token=False))
    (tmp_path / POOLING).write_text("[")
    with pytest.raises(CheckpointError, match="not JSON"):
        pooling_of(tmp_path)


def test_the_module_s_own_path(tmp_path: Path) -> None:
    for place, mode in (("1_Pooling", "mean"), ("pool", "cls")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "st.Pooling", "path": "pool"}]))
    found = pooling_of(tmp_path)
    assert isinstance(found, Pooling)
    assert found.modes == ("cls_token",)
