"""Which way round weights are kept, by the files alone."""

from __future__ import annotations

from pathlib import Path

import bad_checkpoints as bad
import pytest
from quantising import gpt2
from refusals import refusal_of_files
from sharing import model_of

from duat_cli.loading.checkpoint.orientation import inputs_first
from duat_cli.loading.checkpoint.preflight import inspect_folder


@pytest.mark.parametrize(("model_type", "stacks"), [("gpt2", {"h": {True}}), ("opt", {"layers": {False}})])
def test_what_biases_say(model_type: str, stacks: dict[str, set[bool]], tmp_path: Path) -> None:
    model_of(model_type).save_pretrained(tmp_path)
    assert inputs_first(inspect_folder(tmp_path).tensors) == stacks


def test_layers_without_biases_say_nothing(sound: Path) -> None:
    assert inputs_first(inspect_folder(sound).tensors) == {}


@pytest.mark.parametrize("way", ["nf4", "llm_int8", "gptq", "awq"])
def test_a_square_weight_that_was_turned_is_refused(way: str, tmp_path: Path) -> None:
    """Its shape fits either way."""
    message = refusal_of_files(gpt2(tmp_path, way, "attn.c_proj"))
    assert "'transformer.h.0.attn.c_proj.weight': quantised as (out, in), but the layers beside it" in message
    assert bad.W in message
    assert "give the checkpoint in full precision" in message


@pytest.mark.parametrize("way", ["fp8", "int4"])
def test_formats_that_turn_nothing_are_read(way: str, tmp_path: Path) -> None:
    assert inspect_folder(gpt2(tmp_path, way, "attn.c_proj")).quantised is not None
