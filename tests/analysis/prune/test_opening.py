"""What `prune-bound` opens: prompts held out and those that a repair is fitted to; of pictures and sound a share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import quiet
from image_models import build, picture
from safetensors.torch import save_file

from duat_cli.analysis.opening import ModelRequest, PromptRequest
from duat_cli.analysis.plan.task import PruneOptions, Task
from duat_cli.analysis.prune.opening import open_with_calibration
from duat_cli.errors import InputError
from duat_cli.loading.inputs.request import InputFiles
from duat_cli.loading.model import lengths
from duat_cli.loading.prompts import default_prompts, holdout_prompts
from duat_cli.loading.texts import PromptText


def request(model: Path) -> ModelRequest:
    return ModelRequest(str(model), None, None, None, False, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, InputFiles]:
    """A checkpoint, and six pictures for it."""
    root = tmp_path_factory.mktemp("pictures")
    build("vit").save_pretrained(root / "vit")
    names = [str(root / f"{k}.safetensors") for k in range(6)]
    for k, name in enumerate(names):
        save_file({"pixel_values": picture()["pixel_values"] + k}, name)
    return root / "vit", InputFiles(tensors=tuple(names))


def test_what_is_held_out(checkpoint: Path, tmp_path: Path) -> None:
    own, bundled = PromptRequest(["a", "b", "c", "d"], None, 3), PromptRequest(None, None, 3)

    def texts(asked: PromptRequest, holdout: str | None) -> tuple[list[str], list[str]]:
        _, chosen, apart, _ = open_with_calibration(request(checkpoint), asked, holdout, None, quiet)
        return [p.text for p in chosen], [p.text for p in apart]

    assert texts(own, None) == (["a", "b", "c", "d"], [])
    assert texts(bundled, None) == ([p.text for p in default_prompts()], [p.text for p in holdout_prompts()])
    chosen, apart = texts(own, "0.25")
    assert (len(chosen), len(apart), sorted(chosen + apart)) == (3, 1, ["a", "b", "c", "d"])
    file = tmp_path / "apart.txt"
    file.write_text("x\ny\n")
    assert texts(own, str(file)) == (["a", "b", "c", "d"], ["x", "y"])
    for share in ("0", "1", "-0.5", "nan"):
        with pytest.raises(InputError, match="expected a share between 0 and 1, or a file of prompts"):
            texts(own, share)


def test_a_text_that_cannot_be_counted_costs_the_counts_of_its_own_set_alone(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, own = list[tuple[Sequence[int], ...]](), ModelRequest.counted

    def fails_at_x(*_: Any, **__: Any) -> Any:
        def counts(texts: Sequence[PromptText]) -> list[int]:
            if any(text.text == "x" for text in texts):
                raise InputError("the tokenizer fails")
            return [7 for _ in texts]

        return counts

    def counted(model: ModelRequest, *sets: Sequence[int], **more: int) -> ModelRequest:
        planned.append(sets)
        return own(model, *sets, **more)

    monkeypatch.setattr(lengths, "token_counter", fails_at_x)
    monkeypatch.setattr(ModelRequest, "counted", counted)
    apart, fitted = tmp_path / "apart.txt", tmp_path / "fitted.txt"
    apart.write_text("x\ny\n")
    fitted.write_text("z\n")
    asked = replace(request(checkpoint), task=Task("prune-bound", pruning=PruneOptions(exceed=0.9)))
    open_with_calibration(asked, PromptRequest(["a", "b"], None, 3), str(apart), str(fitted), quiet)
    assert planned == [([7, 7], [], [7])]


def test_too_few_held_out_prompts_are_said_before_a_checkpoint_is_looked_for() -> None:
    asked = ModelRequest("/not/there", task=Task("prune-bound", pruning=PruneOptions()))
    with pytest.raises(InputError, match="at least 29 are needed"):
        open_with_calibration(asked, PromptRequest(["a", "b"], None, None), "0.5", None, quiet)


def test_of_pictures_a_share_is_held_out(vit: tuple[Path, InputFiles], monkeypatch: pytest.MonkeyPatch) -> None:
    planned, own = list[tuple[Sequence[int], ...]](), ModelRequest.counted

    def counted(model: ModelRequest, *sets: Sequence[int], **more: int) -> ModelRequest:
        planned.append(sets)
        return own(model, *sets, **more)

    monkeypatch.setattr(ModelRequest, "counted", counted)
    asked = replace(request(vit[0]), task=Task("prune-bound", pruning=PruneOptions(exceed=0.9)))
    loaded, chosen, apart, fitted = open_with_calibration(
        asked, PromptRequest(None, None, None, vit[1]), "0.5", None, quiet
    )
    assert planned == [([17] * 3, [17] * 3)]
    assert loaded.like is not None
    assert (len(chosen), len(apart), fitted) == (3, 3, [])
    assert len({prompt.sha256 for prompt in [*chosen, *apart]}) == 6
    assert all(torch.equal(prompt.input_ids, torch.arange(17)[None]) for prompt in apart)
    _, chosen, apart, _ = open_with_calibration(asked, PromptRequest(None, None, None, vit[1]), None, None, quiet)
    assert (len(chosen), apart) == (6, [])


def test_what_goes_with_texts_alone_is_refused(vit: tuple[Path, InputFiles], tmp_path: Path) -> None:
    asked = replace(request(vit[0]), task=Task("prune-bound", pruning=PruneOptions()))
    lines = tmp_path / "lines.txt"
    lines.write_text("a\nb\n")

    def opened(holdout: str | None, calibration: str | None = None, **files: Any) -> None:
        texts = PromptRequest(None, None, None, replace(vit[1], **files))
        open_with_calibration(asked, texts, holdout, calibration, quiet)

    with pytest.raises(InputError, match="a file holds texts; of pictures or sounds give a share"):
        opened(str(lines))
    with pytest.raises(InputError, match="--calibration: a file holds texts"):
        opened(None, str(lines))
    with pytest.raises(InputError, match="at least 29 are needed"):
        opened("0.5")
    with pytest.raises(InputError, match="--stack encoder: ViTForImageClassification is no encoder with a decoder"):
        opened(None, stack="encoder")
