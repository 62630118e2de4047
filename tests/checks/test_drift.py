"""Drift of the demo's first blocks: what damage each rule finds, where, and what it lets pass."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import bad_checkpoints as bad
import pytest
import torch
from running_checks import Duat
from safetensors.torch import load_file, save_file

from duat_cli.checks.baseline import Baseline
from duat_cli.checks.drift import Deviation, compare
from duat_cli.checks.policy import read_policy
from duat_cli.checks.rule import Evidence, Settings
from duat_cli.checks.rules.drift import RULES
from duat_cli.checks.tolerances import Tolerance
from duat_cli.loading.checkpoint.source import demo_adapter_path, demo_path

State = dict[str, torch.Tensor]
PROMPT = ("--prompt", "def main(argv):\n    return len(argv)", "-q")


def head(state: State) -> None:
    state["model.layers.1.self_attn.o_proj.weight"][:, 32:64] = 0


def layer(state: State) -> None:
    for name in [n for n in state if ".layers.1." in n]:
        state[name.replace(".1.", ".2.")] = state[name].clone()


def norm(state: State) -> None:
    state["model.layers.1.input_layernorm.weight"] *= 2


def merge(state: State, times: float = 1) -> None:
    """B A of the bundled adapter, times its scaling lora_alpha / r = 2."""
    adapter = load_file(demo_path().parent / "adapter" / "adapter_model.safetensors")
    for name in (n for n in adapter if n.endswith("lora_A.weight")):
        up, down = adapter[name.replace("lora_A", "lora_B")].float(), adapter[name].float()
        target = name.removeprefix("base_model.model.").replace(".lora_A", "")
        if target in state:
            state[target] = (state[target].float() + times * 2.0 * up @ down).to(state[target].dtype)


def merge_twice(state: State) -> None:
    merge(state, 2)


def rounded(dtype: torch.dtype) -> Callable[[State], None]:
    def change(state: State) -> None:
        for name in state:
            state[name] = state[name].to(dtype).to(state[name].dtype)

    return change


def widened(state: State) -> None:
    """float32, and no value that bfloat16 holds."""
    for name in state:
        state[name] = state[name].float()
    merge(state)


def damaged(model: Path, folder: Path, *changes: Callable[[State], None]) -> Path:
    shutil.copytree(model, folder)
    state = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    for change in changes:
        change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model(three: Path) -> Path:
    return three / "demo"


@pytest.fixture(scope="module")
def baseline(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of these blocks as they are."""
    from duat_cli.cli.main import run

    file = tmp_path_factory.mktemp("baseline") / "b.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duat_cli.cli.terminal.libraries.calm", lambda talk: None)
        assert run(["check", str(model), *PROMPT, "--baseline", str(file), "--update-baseline"]) == 0
    return file


CASES = {
    # change -> rule, block, tensor that must be named; another rule that must fail
    "head": (head, 1, "model.layers.1.self_attn.o_proj.weight", "drift.operator"),
    "layer": (layer, 2, "model.layers.2.mlp.up_proj.weight", "integrity.duplicate_blocks"),
    "norm": (norm, 1, "model.layers.1.input_layernorm.weight", "drift.operator"),
    "merge": (merge, 0, "model.layers.0.self_attn.q_proj.weight", "drift.operator"),
    "merge twice": (merge_twice, 0, "model.layers.0.self_attn.q_proj.weight", "drift.operator"),
    "fp8": (rounded(torch.float8_e4m3fn), 2, "model.layers.2.mlp.down_proj.weight", "drift.coupling"),
}


@pytest.mark.parametrize("name", CASES)
def test_damage_is_found_and_named(model: Path, name: str, baseline: Path, tmp_path: Path, duat: Duat) -> None:
    change, block, tensor, other = CASES[name]
    done = duat("check", damaged(model, tmp_path / "c", change), *PROMPT, "--baseline", baseline, "--json")
    assert done.code == 1
    found = {o["where"]: o for o in done.findings() if o["rule"] == "drift.weights"}
    assert found[f"weights.{tensor}"]["block"] == block
    assert {other, "drift.weights"} <= done.rules()
    assert any(o["block"] == block for o in done.findings() if o["rule"] == other)
    touched = {o["block"] for o in found.values()}
    if name in ("head", "layer", "norm"):
        assert touched == {block}  # and no tensor that did not change
        deeper = {o["block"] for o in done.findings() if o["rule"].startswith("drift.") and o["block"] is not None}
        assert min(deeper) == block  # what stands in front of the damage does not drift
    if name == "head":
        assert "integrity.constant_heads" in done.rules("warned")
        assert "head 1" in next(o["message"] for o in done.findings("warned"))


def test_the_distance_is_the_true_one(tmp_path: Path, duat: Duat) -> None:
    """Of the whole demo, from the sketch, against |W - W'| / |W'| of both tensors."""
    args = ("-q", "--weights-only", "--baseline", tmp_path / "b.json", "--json")
    assert duat("check", demo_path(), *args, "--update-baseline").code == 0
    folder = damaged(demo_path(), tmp_path / "c", merge_twice, rounded(torch.float8_e4m3fn))
    done = duat("check", folder, *args)
    old, new = (load_file(path / "model.safetensors") for path in (demo_path(), folder))
    ratios = []
    for outcome in done.findings():
        if outcome["rule"] == "drift.weights":
            a, b = (s[outcome["where"].removeprefix("weights.")].double() for s in (old, new))
            ratios.append(outcome["measured"] / float((a - b).norm() / a.norm()))
    assert len(ratios) > 50
    assert 0.9 < torch.tensor(ratios).square().mean().sqrt() < 1.1  # unbiased in the square
    assert min(ratios) > 0.2
    assert max(ratios) < 2.5


def test_rounding_to_bfloat16_is_within_its_tolerance(short: Path, tmp_path: Path, duat: Duat) -> None:
    """Of a float32 checkpoint, stored as float32 and as bfloat16; float8 is not, and float32 has no such tolerance."""
    model = short / "demo"
    whole = damaged(model, tmp_path / "float32", widened)
    half = damaged(model, tmp_path / "rounded", widened, rounded(torch.bfloat16))
    stored = damaged(model, tmp_path / "stored", widened, lambda s: s.update({n: t.bfloat16() for n, t in s.items()}))
    eighth = damaged(model, tmp_path / "eighth", widened, rounded(torch.float8_e4m3fn))
    policy = tmp_path / "p.toml"
    policy.write_text('[drift]\ndtype = "bfloat16"\n')
    file = tmp_path / "b.json"
    args = (*PROMPT, "--baseline", file, "--json")
    assert duat("check", whole, *args, "--update-baseline").code == 0
    assert duat("check", half, *args, "--policy", policy).rules("failed") == set()
    assert duat("check", stored, *args, "--policy", policy).rules("failed") == set()
    assert "drift.weights" in duat("check", eighth, *args, "--policy", policy).rules()
    strict = duat("check", half, *args)
    assert "drift.weights" in strict.rules()
    assert all(0.0005 < o["measured"] < 0.008 for o in strict.findings() if o["rule"] == "drift.weights")
    duat("check", stored, *args).refused("another dtype", 'dtype = "bfloat16"')
    narrow = tmp_path / "n.json"
    args = (*PROMPT, "--baseline", narrow, "--dtype", "bfloat16", "--json")
    assert duat("check", whole, *args, "--update-baseline").code == 0
    assert duat("check", half, *args).code == 0
    assert duat("check", eighth, *args).code == 1


def test_an_inserted_layer(model: Path, baseline: Path, tmp_path: Path, duat: Duat) -> None:
    import json

    def deeper(state: State) -> None:
        for name in [n for n in state if ".layers.2." in n]:
            state[name.replace(".2.", ".3.")] = state[name].clone()

    folder = damaged(model, tmp_path / "c", deeper)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    done = duat("check", folder, *PROMPT, "--baseline", baseline, "--json")
    assert done.code == 1
    assert any((o["rule"], o["block"]) == ("integrity.duplicate_blocks", 3) for o in done.findings())
    assert any((o["rule"], o["block"]) == ("drift.new", 3) for o in done.findings("warned"))
    removed = tmp_path / "removed"
    shutil.copytree(model, removed)
    (removed / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    done = duat("check", removed, *PROMPT, "--baseline", baseline, "--json")
    assert any((o["rule"], o["block"]) == ("drift.vanished", 2) for o in done.findings())


def test_groups_that_a_baseline_lacks_are_skipped(model: Path, tmp_path: Path, duat: Duat) -> None:
    file = tmp_path / "b.json"
    assert duat("check", model, "-q", "--weights-only", "--baseline", file, "--update-baseline").code == 0
    done = duat("check", model, *PROMPT, "--baseline", file, "--json")
    assert {"drift.coupling", "drift.behaviour", "drift.density"} <= done.rules("skipped")
    assert {"drift.weights", "drift.integrity"} <= done.rules("passed")
    said = {o["message"] for o in done.json["outcomes"] if o["rule"] == "drift.coupling"}
    assert said == {"the baseline has none of these metrics"}


def test_the_width_of_an_interval_is_part_of_the_bounds() -> None:
    key = "blocks.2.density.numerical"
    limit = Tolerance(0.0, 1e-3, None, "tolerance of float32")
    drift = Deviation(key, "within", 0.15, 0.13, -0.02, limit, slack=0.03)
    [rule] = [rule for rule in RULES if rule.id == "drift.density"]
    evidence = Evidence(None, None, drift=(drift,), baseline_file="b.json")  # type: ignore[arg-type]
    [found] = rule.measure(evidence, Settings(rule, "error", None, None))
    assert (found.low, found.high) == (pytest.approx(0.119), pytest.approx(0.181))
    assert found.source == "tolerance of float32 and the width of its interval"


@pytest.mark.parametrize("better", ["", ', better = "lower"'])
@pytest.mark.parametrize(("old", "room", "new"), [(2.8897, 0.002, 2.8917), (18.255, 0.01, 18.265), (4.5, 0.25, 4.75)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_change_as_large_as_the_tolerance_is_within_it(
    old: float, room: float, new: float, better: str, sign: int, tmp_path: Path
) -> None:
    """In the decimals that baseline and policy hold; the next float is beyond it."""
    old, new = (old, new) if sign > 0 else (new, old)
    key, file = "summary.effective_context", tmp_path / "p.toml"
    file.write_text(f'[drift.tolerance]\n"{key}" = {{ atol = {room}, rtol = 0.0{better} }}\n')
    baseline, [rule] = Baseline.model_construct(metrics={key: old}), [r for r in RULES if r.id == "drift.summary"]
    further = math.nextafter(new, sign * math.inf)
    beyond = "better" if better and sign < 0 else "beyond"
    for value, status in ((new, "within"), (further, beyond)):
        drift = compare(baseline, {key: value}, {}, {}, read_policy(str(file)), "float32", forward=True, shapes={})
        assert [one.status for one in drift] == [status]
        evidence = Evidence(None, None, drift=drift, baseline_file="b.json")  # type: ignore[arg-type]
        fails = [found.fails for found in rule.measure(evidence, Settings(rule, "error", None, None))]
        assert any(fails) == (status == "beyond")


def test_how_much_of_a_baseline_was_compared(model: Path, baseline: Path, duat: Duat) -> None:
    held = len(json.loads(baseline.read_text())["metrics"])
    done = duat("check", model, "-q", "--weights-only", "--baseline", baseline, "--json")
    assert done.json["baseline"]["entries"] == held
    assert 29 <= done.json["baseline"]["compared"] < held
    whole = duat("check", model, *PROMPT, "--baseline", baseline, "--json")
    assert whole.json["baseline"]["compared"] == held


def test_what_a_baseline_says_nothing_of(model: Path, tmp_path: Path, duat: Duat) -> None:
    """An adapter, and a policy for adapters that has none to look at."""
    done = duat("check", model, "-q", "--policy", "adapter")
    done.refused("--policy adapter", "give --adapter DIR, or --baseline FILE")
    file = tmp_path / "b.json"
    args = ("check", demo_path(), "-q", "--weights-only", "--adapter", demo_adapter_path(), "--baseline", file)
    done = duat(*args, "--update-baseline", "--json")
    assert done.code == 0
    assert "what the adapter changes is compared with nothing" in " ".join(done.json["warnings"])


def test_a_tensor_of_another_shape_has_no_distance(tmp_path: Path, duat: Duat) -> None:
    """Sketches of two shapes have nothing to do with each other. An older baseline does not know the shape."""
    folder, file = tmp_path / "m", tmp_path / "b.json"
    bad.llama(folder)
    args = ("check", folder, "--weights-only", "-q", "--baseline", file)
    assert duat(*args, "--update-baseline").code == 0
    name = "model.layers.0.mlp.up_proj.weight"

    def shorten(tensors: State) -> None:
        tensors[name] = tensors[name][:-4].clone()

    rows, columns = load_file(folder / bad.W)[name].shape
    bad.wedit(folder, shorten)
    done = duat(*args, "--json")
    [finding] = [one for one in done.findings() if one["rule"] == "drift.weights"]
    said = f"'{name}' has another shape, {rows}x{columns} → {rows - 4}x{columns}; a distance is not defined"
    assert (finding["message"], finding["measured"]) == (said, None)
    content = json.loads(file.read_text())
    assert content["shapes"].pop(name) == [rows, columns]
    for shapes in ({"shapes": content["shapes"]}, {}):
        file.write_text(json.dumps({key: value for key, value in content.items() if key != "shapes"} | shapes))
        [finding] = [one for one in duat(*args, "--json").findings() if one["rule"] == "drift.weights"]
        assert "moved by about" in finding["message"]


def test_a_fine_tune_is_held_against_its_base_without_a_file(
    model: Path, baseline: Path, tmp_path: Path, duat: Duat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--base finds what a baseline of the base finds, lets the weights move, and writes nothing."""
    tuned = damaged(model, tmp_path / "c", lambda state: merge(state, 0.2))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT[1]))  # which is read once
    done = duat("check", tuned, "--prompt", "-", "-q", "--base", model, "--json")
    assert (done.code, done.rules("warned")) == (0, {"drift.weights"})
    assert done.json["policy"] == ["policy default", "policy adapter", "policy fine-tune"]
    held = done.json["baseline"]
    assert (held["file"], held["base"], held["compared"]) == (str(model), True, held["entries"])
    assert list(Path().iterdir()) == []
    assert {o["location"]["file"] for o in done.findings("warned")} == {(tuned / "config.json").as_posix()}
    filed = duat("check", tuned, *PROMPT, "--baseline", baseline, "--policy", "fine-tune", "--json")
    numbers = [[(o["rule"], o["status"], o["where"], o["measured"]) for o in d.json["outcomes"]] for d in (done, filed)]
    assert numbers[0] == numbers[1]
    strict = duat("check", tuned, *PROMPT, "--base", model, "--policy", "default", "--select", "drift.weights")
    assert strict.code == 1
    assert "--policy fine-tune lets weights move" in " ".join(strict.stdout.split())


def test_a_fine_tune_may_be_stored_in_a_coarser_dtype_than_its_base(model: Path, tmp_path: Path, duat: Duat) -> None:
    """Whether more than rounding moved its weights cannot be told, which matters where weights may not move."""
    base = damaged(model, tmp_path / "base", widened)
    tuned = damaged(
        model, tmp_path / "tuned", widened, lambda s: s.update({n: 1.001 * t.bfloat16() for n, t in s.items()})
    )
    check = ("check", tuned, "-q", "--weights-only", "--base", base)
    done = duat(*check, "--json")
    assert (done.code, done.rules("warned")) == (0, {"drift.weights"})
    assert done.json["warnings"] == [
        f"--base {base}: of a checkpoint stored as F32, this one is BF16: another dtype; allow its rounding by [drift] "
        'dtype = "bfloat16" in the policy'
    ]
    for selected in ((), ("--select", "drift.config")):
        duat(*check, "--policy", "default", *selected).refused("another dtype", "or make a new baseline")


def test_a_base_that_cannot_be_one(model: Path, tmp_path: Path, duat: Duat) -> None:
    broken = damaged(model, tmp_path / "c", lambda state: state["model.norm.weight"].fill_(torch.nan))
    check = ("check", model, "-q", "--weights-only")
    duat(*check, "--base", broken).refused(f"--base '{broken}': fails itself: integrity.nonfinite", "sound base")
    for other in (("--baseline", tmp_path / "b.json"), ("--update-baseline",)):
        duat(*check, "--base", broken, *other).refused(f"--base and {other[0]} contradict")
    duat("check", tmp_path / "nope", "--base", model, "-q").refused("nope: no such folder")
    duat(*check, "--base", model, "--adapter", demo_adapter_path()).refused("--base and --adapter contradict")
    bad.llama(tmp_path / "m")
    duat(*check, "--base", tmp_path / "m").refused(f"--base {tmp_path / 'm'}: belongs to another model")
    duat("check", model, "-q", "--policy", "fine-tune").refused("--policy fine-tune", "give --base BASE, or")


def test_what_a_fine_tune_may_do_beside_moving(model: Path, baseline: Path, tmp_path: Path, duat: Duat) -> None:
    """The loss may rise by half a nat, a template may come; other tokens of the same texts cannot be compared."""
    file, content = tmp_path / "b.json", json.loads(baseline.read_text())
    args = ("check", model, *PROMPT, "--baseline", file, "--json", "--policy")
    loss = content["metrics"]["behaviour.loss_per_token"]
    for rise, code in ((0.45, 0), (0.55, 1), (-2.0, 0)):
        content["metrics"]["behaviour.loss_per_token"] = loss - rise
        file.write_text(json.dumps(content))
        done = duat(*args, "fine-tune", "--select", "drift.behaviour")
        assert (done.code, len(done.findings())) == (code, code)
    content = json.loads(baseline.read_text())
    content["declared"]["tokenizer.parts.template"] = "another"
    file.write_text(json.dumps(content))
    done = duat(*args, "fine-tune", "--select", "drift.tokenizer")
    assert (done.code, done.rules("warned")) == (0, {"drift.tokenizer"})
    content["prompts"]["ids"] = "0" * 64
    file.write_text(json.dumps(content))
    done = duat(*args, "fine-tune", "--select", "drift.tokenizer")
    assert [o["where"] for o in done.findings()] == ["prompts"]


def test_a_baseline_without_a_forward_pass_is_one_warning(model: Path, tmp_path: Path, duat: Duat) -> None:
    file = tmp_path / "b.json"
    args = ("check", model, "--baseline", file)
    assert duat(*args, "-q", "--weights-only", "--update-baseline").code == 0
    done = duat(*args, *PROMPT, "--json")
    assert done.code == 0
    [found] = done.findings("warned")
    assert (found["rule"], found["message"]) == (
        "drift.new",
        "the baseline was made with --weights-only: 90 numbers of the forward pass are new",
    )
    assert found["advice"] == "--update-baseline without --weights-only adds the forward pass."
