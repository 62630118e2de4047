"""What was loaded is what the files hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import bad_checkpoints as bad
import pytest
import torch
from quantising import gpt2
from refusals import refusal_of_load

from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.model.load import load, skeleton
from duat_cli.loading.model.weights_check import compare_with_files, refuse_turned


def test_random_weights_are_noticed(sound: Path) -> None:
    loaded = load(str(sound))
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.normal_()
    with pytest.raises(CheckpointError, match="was not loaded as stored"):
        compare_with_files(loaded.model, loaded.files)


def test_a_changed_row_is_a_note(sound: Path) -> None:
    loaded = load(str(sound))
    with torch.no_grad():
        loaded.model.lm_head.weight[0] = 0
    notes = compare_with_files(loaded.model, loaded.files)
    assert notes == [f"'lm_head.weight': {1 / bad.VOCAB:.2%} of its values are not those of the file"]


def test_permuted_weights_are_still_the_file(sound: Path) -> None:
    """As the rotary conversion does with the rows of q_proj and k_proj."""
    loaded = load(str(sound))
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.copy_(parameter.flip(0))
    assert compare_with_files(loaded.model, loaded.files) == []


def test_integers_in_the_place_of_weights(sound: Path) -> None:
    bad.wedit(sound, lambda s: {k: (v * 9).to(torch.int8) if "q_proj" in k else v for k, v in s.items()})
    message = refusal_of_load(str(sound))
    assert "q_proj.weight' is stored as I8" in message


EVERY = "c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"


@pytest.mark.parametrize("way", ["nf4", "llm_int8", "gptq", "awq"])
def test_weights_that_a_quantiser_turned_are_refused(way: str, tmp_path: Path) -> None:
    """Where every layer was turned, the model alone knows."""
    message = refusal_of_load(str(gpt2(tmp_path, way, *EVERY)))
    assert "quantised as (out, in), but its layer (Conv1D) keeps it as (in, out)" in message
    files = inspect_folder(tmp_path)
    square = {name: entry for name, entry in files.tensors.items() if name.endswith("1.attn.c_proj.weight")}
    with pytest.raises(CheckpointError, match=r"'transformer\.h\.1\.attn\.c_proj\.weight': quantised as"):
        refuse_turned(skeleton(files), replace(files, tensors=square))


def test_nonfinite_values_are_counted(tmp_path: Path) -> None:
    bad.build("w_nan", tmp_path / "m")
    bad.wedit(tmp_path / "m", lambda s: {k: v / 0 if k == "lm_head.weight" else v for k, v in s.items()})
    loaded = load(str(tmp_path / "m"))
    assert loaded.nonfinite_weights == {"lm_head.weight": bad.VOCAB * 32, "model.layers.1.mlp.down_proj.weight": 1}
