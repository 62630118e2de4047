"""`check` of a model in memory against `check` of the folder that it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import duat_cli as duat
from duat_cli.analysis.check.given import IN_MEMORY
from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.source import demo_adapter_path, demo_path

TEXTS = ["def main(argv):", "Return the number of items."]
FILES_ALONE = {"integrity.unexpected", "integrity.missing", "integrity.tokenizer", "integrity.per_layer_config"}


def loaded(path: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)


def outcomes(report: Any) -> dict[str, Any]:
    kept = [o for o in report.outcomes if o.rule not in FILES_ALONE and o.status != "skipped"]
    return {o.rule: (o.status, o.measured, o.block) for o in kept}


def test_every_rule_that_needs_no_file_says_the_same() -> None:
    model, tokenizer = loaded(demo_path())
    ours = duat.check(model, tokenizer, policy="strict", prompts=TEXTS)
    theirs = duat.check(demo_path(), policy="strict", prompts=TEXTS)
    assert outcomes(ours) == outcomes(theirs)
    assert len(outcomes(ours)) >= 15
    assert (ours.behaviour, ours.certificate) == (theirs.behaviour, theirs.certificate)
    assert ours.model.fingerprint == theirs.model.fingerprint
    skipped = {o.rule for o in ours.outcomes if o.message == IN_MEMORY}
    assert skipped == FILES_ALONE
    assert ours.model.files == []


def test_weights_only_runs_nothing() -> None:
    model, tokenizer = loaded(demo_path())
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.zero_()
    report = duat.check(model, tokenizer, weights_only=True)
    assert report.certificate is None
    assert [o.where for o in report.outcomes if o.status == "warned"] == ["model.layers.2.mlp.down_proj.weight"]


def test_what_is_broken_in_memory_is_found() -> None:
    model, tokenizer = loaded(demo_path())
    with torch.no_grad():
        weight = model.model.embed_tokens.weight
        weight.copy_(weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))])
    report = duat.check(model, tokenizer, prompts=[*TEXTS, "for i in range(10): print(i, i * i, sum(range(i)))"])
    assert [cause.rules for cause in report.causes] == [["behaviour.loss"]]


def test_a_model_under_peft_is_the_tuned_one() -> None:
    model, tokenizer = loaded(demo_path())
    tuned = peft.PeftModel.from_pretrained(model, demo_adapter_path())
    ours = duat.check(tuned, tokenizer, prompts=TEXTS)
    theirs = duat.check(demo_path(), adapter=demo_adapter_path(), prompts=TEXTS)
    assert ours.behaviour is not None
    assert theirs.behaviour is not None
    assert theirs.behaviour.tuned is not None
    assert ours.behaviour.loss_per_token == pytest.approx(theirs.behaviour.tuned.loss_per_token, rel=1e-6)


@pytest.mark.parametrize("given", [{"baseline": "b.json"}, {"adapter": "a"}])
def test_what_stands_beside_files_alone(given: dict[str, str]) -> None:
    model, tokenizer = loaded(demo_path())
    with pytest.raises(InputError, match="only of a checkpoint's files"):
        duat.check(model, tokenizer, **given)  # type: ignore[arg-type]
