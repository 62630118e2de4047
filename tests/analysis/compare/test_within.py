"""`compare` of two pictures within one text, against plain passes in float64: the prediction, what blocks put out, and
tokens of one pass put into the other by hooks."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import picture_texts
import pytest
from helpers import far, two_deep
from numpy.random import default_rng
from paging import differing, streaming
from PIL import Image
from torch import Tensor, no_grad

from duat_cli.api.comparing import compare
from duat_cli.cli.main import run
from duat_cli.errors import InputError, UnsupportedModelError

TEXT = "USER <image> What is in the picture ?"


def made(name: str) -> Any:
    """Of two blocks of text."""
    model = picture_texts.build(name)
    two_deep(model.get_decoder())
    return model


def two_of(name: str, model: Any) -> list[dict[str, Tensor]]:
    """One text with two pictures."""
    a, b = (picture_texts.inputs(name, model, seed) for seed in (0, 1))
    return [a, {**b, "input_ids": a["input_ids"]}]


def passed(
    model: Any, given: dict[str, Tensor], put: tuple[int, int, Tensor] | None = None
) -> tuple[list[Tensor], Any]:
    """What every block reads, and the last log probabilities. put: a block, a token, and what it reads in its place."""
    seen: list[Tensor] = []

    def see(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream = args[0] if args else kwargs["hidden_states"]
        if put is not None and put[0] == number:
            stream = stream.clone()
            stream[0, put[1]] = put[2]
        seen.append(stream)
        return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})

    hooks = [
        block.register_forward_pre_hook(lambda _m, a, k, n=number: see(n, a, k), with_kwargs=True)
        for number, block in enumerate(picture_texts.blocks_of(model))
    ]
    with no_grad():
        logits = model(**picture_texts.doubled(given)).logits[0, -1]
    for hook in hooks:
        hook.remove()
    return seen, logits


@pytest.mark.parametrize("name", picture_texts.RUNNING)
def test_every_number_is_what_plain_passes_say(name: str) -> None:
    model = made(name).double()
    both = two_of(name, model)
    deep = name == "qwen3_vl"  # it adds features of the picture behind its first block as well
    report = compare(model, inputs=both, patch="blocks" if deep else "tokens", cache=False)
    assert report.certificate.exact
    assert report.patched.holds
    (before, p), (after, q) = (passed(model, given) for given in both)
    rough = 1e-5 if name in ("gemma3", "paligemma") else 1e-7  # their norms compute in float32
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    assert report.pairs[0].kl == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum()), rel=rough)
    for block, old, new in zip(report.comparison.blocks, before, after, strict=True):
        if float((new - old).norm()) > 0:
            each = statistics.fmean(map(far, new.squeeze(0), old.squeeze(0)))
            assert block.input == pytest.approx(each, rel=rough)
    if deep:
        with pytest.raises(UnsupportedModelError, match="blocks read more of the input than the stream"):
            compare(model, inputs=both, patch="tokens", cache=False)
        return
    moved = log_q.exp() - log_p.exp()
    up, down = int(moved.argmax()), int(moved.argmin())
    start, end = (float(x[up] - x[down]) for x in (p, q))
    tokens = {(block.index, one.token): one.effect for block in report.patched.blocks for one in block.tokens}
    pictured = (both[0]["input_ids"][0] == picture_texts.MARK).nonzero()[:, 0].tolist()
    for number, token in ((0, pictured[0]), (1, pictured[1]), (1, both[0]["input_ids"].shape[1] - 1)):
        _, out = passed(model, both[0], (number, token, after[number][0, token]))
        effect = (float(out[up] - out[down]) - start) / (end - start)
        assert tokens[number, token] == pytest.approx(effect, rel=rough, abs=rough)


def test_weights_read_block_by_block_give_the_same(tmp_path: Path) -> None:
    """Of a text into which pictures come behind its first block as well."""
    model = made("qwen3_vl")
    model.save_pretrained(tmp_path / "m")
    both = two_of("qwen3_vl", model)
    whole = compare(tmp_path / "m", inputs=both, patch="heads", cache=False, dtype="float64")
    with streaming():
        parts = compare(tmp_path / "m", inputs=both, patch="heads", cache=False, dtype="float64")
    assert differing(whole.comparison.model_dump(), parts.comparison.model_dump()) == []
    assert differing(whole.patched.model_dump(), parts.patched.model_dump()) == []


def test_each_picture_stands_alone_in_the_one_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture_texts.save_llava(tmp_path / "m")
    files = [str(tmp_path / f"{k}.png") for k in range(3)]
    for k, file in enumerate(files):
        Image.fromarray(default_rng(k).integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(file)
    words = ["compare", str(tmp_path / "m"), "--image", files[0], "--image", files[1], "-q", "--no-cache"]
    capsys.readouterr()
    assert run([*words, "--prompt", TEXT, "--patch", "tokens", "--target", "cat", "--against", "What", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(one["label"], one["tokens"]) for one in report["prompts"]] == [(f"--image {f}", 23) for f in files[:2]]
    [pair] = report["patched"]["pairs"]
    assert (pair["token_a"].strip(), pair["token_b"].strip()) == ("What", "cat")
    assert run([*words, "--prompt", TEXT, "--prompt", TEXT]) == 2
    assert "pictures with one --prompt" in capsys.readouterr().err
    assert run([*words, "--prompt", "What is it ?"]) == 2
    assert "cannot put 1 picture into it, one in the place of each <image>" in capsys.readouterr().err
    other = compare(tmp_path / "m", image=files, prompts=TEXT, cache=False)
    assert [(pair.a, pair.b) for pair in other.pairs] == [(0, 1), (0, 2)]
    assert other.pairs[0].kl == pytest.approx(report["pairs"][0]["kl"], rel=1e-5)


def test_texts_that_differ_are_refused() -> None:
    model = picture_texts.build("llava")
    a, b = (picture_texts.inputs("llava", model, seed) for seed in (0, 1))
    with pytest.raises(InputError, match="other input_ids, so that one place in both is another part of them"):
        compare(model, inputs=[a, b])
