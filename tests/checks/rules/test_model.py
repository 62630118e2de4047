"""Rules on what the model does."""

from __future__ import annotations

from pathlib import Path

import bad_checkpoints as bad
import pytest
import torch
from running_checks import Duat


@pytest.mark.parametrize(("factor", "code", "status"), [(1.0, 0, "passed"), (2e4, 0, "warned"), (6e4, 1, "failed")])
def test_activations_beyond_the_stored_dtype(factor: float, code: int, status: str, tmp_path: Path, duat: Duat) -> None:
    """A norm's gain scales its output, whose largest entry is about 2.5 of it."""
    bad.llama(tmp_path / "m", dtype="float16")

    def larger(state: dict[str, torch.Tensor]) -> None:
        state["model.layers.1.input_layernorm.weight"] *= factor
        state["model.layers.1.self_attn.o_proj.weight"] *= 0

    bad.wedit(tmp_path / "m", larger)
    policy = tmp_path / "p.toml"
    policy.write_text('[rules]\n"integrity.*" = "off"\n')
    done = duat("check", tmp_path / "m", "--prompt", "hello", "-q", "--json", "--policy", policy)
    assert done.code == code
    outcomes = [o for o in done.json["outcomes"] if o["rule"] == "exactness.range"]
    assert [o["status"] for o in outcomes] == [status]
    assert outcomes[0]["measured"] == pytest.approx(2.5 * factor / 65504, rel=0.5)
    assert outcomes[0]["where"] == ("blocks.1.range.share" if factor > 1 else outcomes[0]["where"])
    assert any("float16" in w for w in done.json["warnings"]) == (status != "passed")


def test_a_wide_dtype_has_no_range_to_measure(small: Path, duat: Duat) -> None:
    done = duat("check", small, "--prompt", "hello", "-q", "--json", "--select", "exactness.range")
    (outcome,) = done.json["outcomes"]
    assert (done.code, outcome["status"], outcome["measured"]) == (0, "passed", None)
    assert "no activation comes near" in outcome["message"]


def test_the_range_is_no_drift_metric(small: Path, tmp_path: Path, duat: Duat) -> None:
    file = tmp_path / "b.json"
    assert duat("check", small, "--prompt", "hello", "-q", "--baseline", file, "--update-baseline").code == 0
    assert "largest_activation" not in file.read_text()
    assert ".range." not in file.read_text()


# --- unused tensors ---------------------------------------------------------------------------------------------


def _unexpected(duat: Duat, folder: Path) -> tuple[int, list[tuple[str, str]]]:
    done = duat("check", folder, "--prompt", "hello", "-q", "--json", "--select", "integrity.unexpected")
    return done.code, [(o["status"], o["message"]) for o in done.json["outcomes"]]


@pytest.mark.parametrize("stated", [5, 3])
def test_whole_blocks_that_are_unused_fail(stated: int, demo: Path, duat: Duat) -> None:
    bad.jedit(demo / bad.CFG, num_hidden_layers=stated)
    code, ((status, message),) = _unexpected(duat, demo)
    assert (code, status) == (1, "failed")
    assert f"config.json says num_hidden_layers {stated}, the files hold 6 blocks ('model.layers')" in message
    assert f"{9 * (6 - stated)} unused tensors" in message


def test_other_unused_tensors_warn(demo: Path, duat: Duat) -> None:
    bad.wedit(demo, lambda s: {**s, "model.layers.2.extra.weight": torch.ones(2), "tower.layers.0.w": torch.ones(2)})
    code, ((status, message),) = _unexpected(duat, demo)
    assert (code, status) == (0, "warned")
    assert "2 unexpected tensors" in message


def test_blocks_that_the_config_announces_beside_the_model_warn(demo: Path, duat: Duat) -> None:
    bad.jedit(demo / bad.CFG, num_hidden_layers=5, num_nextn_predict_layers=1)
    code, ((status, _),) = _unexpected(duat, demo)
    assert (code, status) == (0, "warned")


# --- what is declared of single layers --------------------------------------------------------------------------


def _per_layer(duat: Duat, folder: Path, *more: str) -> tuple[int, list[tuple[str, str, str]]]:
    done = duat("check", folder, "--prompt", "hello", "-q", "--json", "--select", "integrity.per_layer_config", *more)
    return done.code, [(o["status"], o["where"], o["message"]) for o in done.json["outcomes"]]


def test_a_skip_that_the_class_ignores_fails(demo: Path, duat: Duat) -> None:
    bad.jedit(demo / bad.CFG, per_layer_config={"2": {"skip": ["mlp"]}})
    code, ((status, where, message),) = _per_layer(duat, demo)
    assert (code, status, where) == (1, "failed", "per_layer_config.2.skip")
    assert "declares skip" in message
    assert "the model ignores it" in message


def test_a_checkpoint_without_a_declaration_passes(small: Path, duat: Duat) -> None:
    assert [status for status, _, _ in _per_layer(duat, small)[1]] == ["passed"]
