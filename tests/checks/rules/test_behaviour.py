"""Rules about what the model answers: on the demo, on its breakages, and on numbers made up to lie at a bound."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from running_checks import Duat, few_bundled
from safetensors.torch import load_file, save_file
from torch import Tensor

from duat_cli.checks.registry import all_rules
from duat_cli.checks.rule import Evidence, Measurement, Settings
from duat_cli.checks.rules.behaviour import FEW
from duat_cli.loading.checkpoint.source import demo_adapter_path, demo_path
from duat_cli.results.behaviour import NOT_FINITE, Behaviour, TunedBehaviour

W, TABLE = "model.safetensors", "model.embed_tokens.weight"
State = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def few() -> Iterator[None]:
    """Two of the bundled prompts."""
    with few_bundled(2):
        yield


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from duat_cli.cli.main import run

    file = tmp_path_factory.mktemp("behaviour") / "b.json"
    assert run(["check", str(demo_path()), "-q", "--baseline", str(file), "--update-baseline"]) == 0
    return file


def test_a_check_that_found_nothing_to_measure_is_no_error(tmp_path: Path, duat: Duat) -> None:
    file, only = tmp_path / "b.json", ("--select", "behaviour.loss", "--prompt", "a", "--max-tokens", "1")
    done = duat("check", demo_path(), *only, "-q", "--json", "--baseline", file, "--update-baseline")
    assert (done.code, [o["status"] for o in done.json["outcomes"]]) == (0, ["skipped"])
    assert file.exists()


def edited(folder: Path, edit: Callable[[State], None]) -> Path:
    state = load_file(folder / W)
    torch.manual_seed(0)
    edit(state)
    save_file({name: value.contiguous() for name, value in state.items()}, folder / W, metadata={"format": "pt"})
    return folder


def shuffled(s: State) -> None:
    s[TABLE] = s[TABLE][torch.randperm(len(s[TABLE]))]


def lowered(s: State) -> None:
    for name in [n for n in s if "norm" in n]:
        s[name] = s[name] - 1


@pytest.mark.parametrize("breakage", [shuffled, lowered])
def test_a_breakage_of_the_demo(breakage: Callable[[State], None], demo: Path, baseline: Path, duat: Duat) -> None:
    """Which rule finds which of the others is in test_breakages.py."""
    broken = edited(demo, breakage)
    done = duat("check", broken, "-q", "--json", "--baseline", baseline, "--policy", "adapter")
    assert done.code == 1
    status = "warned" if breakage is lowered else "failed"  # 7.5 nats: better than uniform, and that is all
    [found] = [o for o in done.findings(status) if o["rule"] == "behaviour.loss"]
    null = "the prompts' own unigram" if breakage is lowered else "the uniform distribution over 2,048 tokens: 7.62"
    assert f"loss {found['measured']:.3g} nats per token, no better than {null}" in found["message"]
    assert found["measured"] == done.json["behaviour"]["loss_per_token"]
    assert {"behaviour.agreement", "drift.behaviour"} <= done.rules()


def test_the_demo_passes_twice_resharded_and_in_another_order(demo: Path, baseline: Path, duat: Duat) -> None:
    state = load_file(demo / W)
    names = sorted(state, reverse=True)
    index: dict[str, Any] = {"metadata": {"total_size": sum(v.nbytes for v in state.values())}, "weight_map": {}}
    for number, some in enumerate((names[:20], names[20:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: state[name] for name in some}, demo / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(some, file)
    (demo / W).unlink()
    (demo / f"{W}.index.json").write_text(json.dumps(index))
    for folder in (demo, demo_path()):
        done = duat("check", folder, "-q", "--json", "--baseline", baseline)
        assert (done.code, done.findings(), done.findings("warned")) == (0, [], [])
        assert (done.json["behaviour"]["agreement"], done.json["behaviour"]["near_ties"]) == (1.0, 0)
        assert {"behaviour.loss", "behaviour.logits", "behaviour.agreement", "drift.behaviour"} <= done.rules("passed")


def test_a_policy_sets_the_most_that_passes(tmp_path: Path, duat: Duat) -> None:
    policy = tmp_path / "p.toml"
    for most, code in ((5.3, 1), (5.4, 0)):  # its loss is 5.36
        policy.write_text(f'[rules]\n"behaviour.loss" = {{ max = {most} }}\n')
        done = duat("check", demo_path(), "-q", "--json", "--policy", policy, "--select", "behaviour.*")
        assert done.code == code
    policy.write_text('[drift.tolerance]\n"behaviour.*" = { rtol = 0.1 }\n')
    assert duat("check", demo_path(), "-q", "--policy", policy, "--weights-only").code == 0
    policy.write_text('[drift.tolerance]\n"behaviour.los" = { rtol = 0.1 }\n')
    duat("check", demo_path(), "-q", "--policy", policy).refused("behaviour.los")


def test_a_baseline_without_answers_says_that_it_is_older_and_no_more(
    baseline: Path, tmp_path: Path, duat: Duat
) -> None:
    content = json.loads(baseline.read_text())
    del content["answers"]
    content["metrics"] = {k: v for k, v in content["metrics"].items() if not k.startswith("behaviour.")}
    old = tmp_path / "old.json"
    old.write_text(json.dumps({**content, "schema_version": 2}))
    for policy in ("default", "strict"):
        done = duat("check", demo_path(), "-q", "--json", "--baseline", old, "--policy", policy)
        assert (done.code, done.findings(), done.findings("warned")) == (0, [], [])
        assert "behaviour.agreement" in done.rules("skipped")
        assert [w for w in done.json["warnings"] if "schema version 2" in w and "--update-baseline" in w]
    done = duat("check", demo_path(), "-q", "--json", "--baseline", old, "--update-baseline")
    assert {"key": "schema_version", "old": "2", "new": "3"} in done.json["baseline"]["changes"]
    assert json.loads(old.read_text())["metrics"] == json.loads(baseline.read_text())["metrics"]


def test_the_demo_s_adapter_adds_little_and_a_wild_one_is_found(tmp_path: Path, duat: Duat) -> None:
    done = duat("check", demo_path(), "-q", "--json", "--adapter", demo_adapter_path())
    assert done.code == 0
    assert {"adapter.behaviour", "adapter.magnitude"} <= done.rules("passed")
    assert 5.4 < done.json["behaviour"]["tuned"]["loss_per_token"] < 5.5
    wild = tmp_path / "wild"
    wild.mkdir()
    for file in demo_adapter_path().iterdir():
        (wild / file.name).write_bytes(file.read_bytes())
    tensors = load_file(wild / "adapter_model.safetensors")
    save_file({k: v * 300 if "lora_B" in k else v for k, v in tensors.items()}, wild / "adapter_model.safetensors")
    done = duat("check", demo_path(), "-q", "--json", "--adapter", wild)
    assert done.code == 1
    assert {"adapter.behaviour", "adapter.magnitude"} == done.rules()
    [found] = [o for o in done.findings() if o["rule"] == "adapter.behaviour"]
    assert "no better than the uniform distribution over 2,048 tokens: 7.62" in found["message"]


# --- at the bounds ------------------------------------------------------------------------------------------------


def behaviour(loss: float | None, *, scored: int = 100, tuned: float | None = None, bad: int = 0) -> Behaviour:
    nulls = ("agreement", "near_ties", "kl", "cosine", "cosine_error")
    return Behaviour(
        predicts="next token",
        predictions=scored + 1,
        scored=scored,
        scored_bytes=None,
        vocabulary=1000,
        loss_per_token=loss,
        loss_per_byte=None,
        uniform=math.log(1000),
        unigram=5.0,
        entropy=1.0,
        largest_logit=1.0,
        logit_range=1.0,
        never_predicted=0.5,
        nonfinite_logits=bad,
        agreement=None,
        near_ties=None,
        kl=None,
        cosine=None,
        cosine_error=None,
        tuned=None if tuned is None else TunedBehaviour(loss_per_token=tuned),
        reasons={**dict.fromkeys(nulls, "no --baseline was given"), "loss_per_token": "a token has probability 0"},
    )


def measured(rule: str, found: Behaviour, most: float | None = None) -> list[Measurement]:
    it = all_rules()[rule]
    evidence = Evidence(None, None, behaviour=found)  # type: ignore[arg-type]
    return list(it.measure(evidence, Settings(it, it.level, it.max if most is None else most, None)))


@pytest.mark.parametrize(
    ("loss", "scored", "level", "fails"),
    [
        (4.99, 100, None, False),
        (5.0, 100, "warn", True),
        (6.90, 100, "warn", True),
        (math.log(1000), 100, None, True),
        (9.0, FEW, None, True),
        (9.0, FEW - 1, "warn", True),
    ],
)
def test_a_loss_that_equals_its_null_is_no_better(loss: float, scored: int, level: str | None, fails: bool) -> None:
    [found] = measured("behaviour.loss", behaviour(loss, scored=scored))
    assert found.high is not None
    assert (found.level, found.value > found.high) == (level, fails)


def test_a_loss_without_a_value_fails_where_there_was_something_to_predict() -> None:
    assert measured("behaviour.loss", behaviour(None))[0].undefined == "fail"
    assert measured("behaviour.loss", behaviour(None, scored=0))[0].undefined == "skip"


def test_logits_that_are_not_finite_are_counted() -> None:
    [found] = measured("behaviour.logits", behaviour(1.0, bad=3))
    assert (found.value, found.text) == (3, "3 logits of 101 predictions are NaN or infinite")


@pytest.mark.parametrize(
    ("base", "tuned", "level", "high"), [(3.0, 3.5, "warn", None), (3.0, 4.5, "warn", None), (3.0, 7.0, None, 0.0)]
)
def test_what_an_adapter_adds(base: float, tuned: float, level: str | None, high: float | None) -> None:
    [found] = measured("adapter.behaviour", behaviour(base, tuned=tuned))
    assert (found.value, found.level, found.high) == (tuned - base, level, high)


def test_an_adapter_whose_model_was_not_run_warns_and_one_without_a_finite_loss_fails() -> None:
    for why, level in (("layer_replication", "warn"), (NOT_FINITE, None)):
        base = behaviour(3.0).model_copy(update={"tuned": TunedBehaviour.absent(why)})
        [found] = measured("adapter.behaviour", base)
        assert (found.undefined, found.level) == ("fail", level)
        assert found.text == f"the loss with the adapter has no value: {why}"


def test_an_adapter_that_resizes_the_vocabulary_does_not_pass_without_a_word(tmp_path: Path, duat: Duat) -> None:
    adapter = tmp_path / "a"
    shutil.copytree(demo_adapter_path(), adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    saved = {**tensors, f"base_model.model.{TABLE}": torch.zeros(2052, 192)}
    save_file(saved, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    done = duat("check", demo_path(), "-q", "--json", "--adapter", adapter)
    assert done.code == 0
    [found] = [one for one in done.findings("warned") if one["rule"] == "adapter.behaviour"]
    assert "the tuned model cannot be run from this base" in found["message"]
    assert found["location"] == {"file": str(adapter / "adapter_config.json"), "line": 1}
