"""The API against the command line, and against itself with the model in memory."""

from __future__ import annotations

import gc
import json
import logging
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from children import PATIENCE
from pruning import save
from short_demo import short_adapter, short_demo
from transformers import AutoModelForCausalLM, AutoTokenizer

import duat_cli as duat
from duat_cli.api.settings import kinds_of
from duat_cli.cli.main import run
from duat_cli.errors import InputError
from duat_cli.zoo.tiny import tiny_model

TEXTS = ["The cat sat on the mat.", "def main(argv):"]
BLOCKS = 3
PROMPTS = [word for text in TEXTS for word in ("--prompt", text)]
DEMO, ADAPTER = "demo", "adapter"  # the bundled ones' first blocks; a call without a model takes all of them


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, in which they are."""
    folder = tmp_path_factory.mktemp("api")
    short_demo(folder / DEMO, BLOCKS)
    short_adapter(folder / ADAPTER, BLOCKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture
def demo(here: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(here / DEMO, dtype=torch.float32)


@pytest.fixture(scope="module")
def idle(here: Path) -> Any:
    """The same, for calls that are refused before they run it."""
    return AutoModelForCausalLM.from_pretrained(here / DEMO, dtype=torch.float32)


def without_run(document: Any) -> Any:
    """What does not differ between two runs."""
    return {key: value for key, value in document.items() if key != "run"}


def of_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert run([*arguments, "--json", "-q"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


CASES: dict[str, tuple[list[str], Callable[[], Any]]] = {
    "inspect": (
        ["inspect", DEMO, *PROMPTS, "--null", "uniform", "--layers", "0,2", "--terms", "--per-prompt"],
        lambda: duat.inspect(DEMO, prompts=TEXTS, null="uniform", layers=[0, 2], terms=True, per_prompt=True),
    ),
    "verify": (["verify", *PROMPTS, "--max-tokens", "4"], lambda: duat.verify(prompts=TEXTS, max_tokens=4)),
    "matrix": (
        ["matrix", DEMO, "--layer", "2", "--max-tokens", "8"],
        lambda: duat.matrix(Path(DEMO), layer=2, max_tokens=8),
    ),
    "compare": (["compare", DEMO, "--layers", "1"], lambda: duat.compare(DEMO, layers=[1])),
    "compare --patch": (
        ["compare", DEMO, "--patch", "heads", *PROMPTS, "--max-tokens", "4", "--target", " is", "--against", " and"],
        lambda: duat.compare(DEMO, prompts=TEXTS, max_tokens=4, patch="heads", target=" is", against=" and"),
    ),
    "compare --shared": (
        ["compare", DEMO, "--shared", "def f(x):", "--prefix", "class A:", "--answer", "return x"],
        lambda: duat.compare(DEMO, shared="def f(x):", prefixes=["class A:"], answer="return x"),
    ),
    "compare --fixed": (
        ["compare", DEMO, "--fixed", *PROMPTS, "--max-tokens", "4"],
        lambda: duat.compare_fixed(DEMO, prompts=TEXTS, max_tokens=4),
    ),
    "attribute": (
        ["attribute", DEMO, "--prompt", TEXTS[0], "--position", "-2", "--top", "3"],
        lambda: duat.attribute(DEMO, prompts=TEXTS[0], position=-2, top=3),
    ),
    "inspect --end-to-end": (
        ["inspect", DEMO, "--prompt", "def f(x):", "--end-to-end", "--null", "uniform"],
        lambda: duat.inspect(DEMO, prompts="def f(x):", end_to_end=True, null="uniform"),
    ),
    "prune-bound": (
        ["prune-bound", DEMO, *PROMPTS, "--granularity=head,block", "--measure=2", "--probes=3", "--max-tokens=4"],
        lambda: duat.prune_bound(DEMO, prompts=TEXTS, granularity=["head", "block"], measure=2, probes=3, max_tokens=4),
    ),
    "lora-diff": (["lora-diff", DEMO, ADAPTER], lambda: duat.lora_diff(DEMO, Path(ADAPTER))),
    "lora-diff on prompts": (
        ["lora-diff", DEMO, ADAPTER, *PROMPTS, "--max-tokens", "4"],
        lambda: duat.lora_diff(DEMO, ADAPTER, prompts=TEXTS, max_tokens=4),
    ),
    "check": (
        ["check", DEMO, "--policy", "strict", *PROMPTS],
        lambda: duat.check(DEMO, policy="strict", prompts=TEXTS),
    ),
    "check --weights-only": (["check", DEMO, "--weights-only"], lambda: duat.check(DEMO, weights_only=True)),
    "explain": (["explain", "effective_heads"], lambda: duat.explanation("effective_heads")),
    "support": (["support", DEMO], lambda: duat.support(DEMO)),
    "plan": (
        ["plan", DEMO, "--for", "check", "--tokens", "2x32", "--memory", "4GiB"],
        lambda: duat.plan(DEMO, command="check", tokens=[32, 32], memory=4 << 30),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_and_its_command_give_equal_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, call = CASES[name]
    report = call()
    assert capsys.readouterr() == ("", "")
    expected = of_command(arguments, capsys)
    assert without_run(json.loads(report.to_json())) == without_run(expected)
    assert report.command == expected["command"]


def test_a_schema_is_the_command_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "lora-diff"]) == 0
    assert duat.schema("lora-diff") == json.loads(capsys.readouterr().out)
    with pytest.raises(duat.InputError, match="report 'nope': expected attribute, "):
        duat.schema("nope")


def test_merge_gives_what_inspect_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = of_command(["inspect", DEMO, *PROMPTS, "--null", "uniform", "--out", str(tmp_path / "kept")], capsys)
    merged = duat.merge(tmp_path / "kept")
    assert without_run(json.loads(merged.to_json())) == without_run(expected)
    with pytest.raises(duat.InputError, match="its model is not known"):
        merged.operator()


def test_files_beside_a_report_are_the_command_s(tmp_path: Path) -> None:
    """Byte for byte, of a folder and of the model in memory."""
    ours, theirs, words = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors", PROMPTS[:2]
    duat.inspect(DEMO, prompts=TEXTS[0], null="uniform", matrices=ours)
    assert run(["inspect", DEMO, *words, "--null", "uniform", "--matrices", str(theirs), "-q", "-o", "/dev/null"]) == 0
    assert ours.read_bytes() == theirs.read_bytes()
    duat.matrix(DEMO, prompt="The cat", layer=1, output=ours, dense=True)
    assert run(["matrix", DEMO, "--prompt", "The cat", "--layer", "1", "-o", str(theirs), "--dense", "-q"]) == 0
    assert ours.read_bytes() == theirs.read_bytes()
    for name, call in {
        "dense: writes W' to a file": lambda: duat.matrix(DEMO, dense=True),
        "expected a file name that ends in .safetensors": lambda: duat.inspect(DEMO, matrices="w.bin"),
    }.items():
        with pytest.raises(duat.InputError, match=name):
            call()


def test_a_baseline_is_the_command_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / DEMO).symlink_to(Path(DEMO).resolve())
    monkeypatch.chdir(tmp_path)
    report = duat.check(DEMO, baseline="a.json", update_baseline=True, weights_only=True)
    assert report.baseline is not None
    assert report.baseline.status == "created"
    assert run(["check", DEMO, "--baseline", "b.json", "--update-baseline", "--weights-only", "-q"]) == 0
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()
    assert duat.check(DEMO, baseline="a.json", weights_only=True).verdict == "passed"
    against = duat.check(DEMO, base=DEMO, weights_only=True)
    assert against.baseline is not None
    assert (against.baseline.base, against.policy[-1]) == (True, "policy fine-tune")


def test_a_target_for_every_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"text": t, "next": " a", "other": " is"}) + "\n" for t in TEXTS))
    ours = duat.attribute(DEMO, prompts_file=file, target_field="next", against_field="other", top=2)
    fields = ["--target-field", "next", "--against-field", "other"]
    theirs = of_command(["attribute", DEMO, "--prompts", str(file), *fields, "--top", "2"], capsys)
    assert without_run(json.loads(ours.to_json())) == without_run(theirs)
    named = [(one.target.token, one.target.against) for one in ours.attribution]
    assert [tuple(token and token.text for token in both) for both in named] == [(" a", " is")] * len(TEXTS)
    with pytest.raises(duat.InputError, match="give --prompts FILE, and no --prompt"):
        duat.attribute(DEMO, prompts=TEXTS, target_field="next")


def test_prompts_and_layers_are_any_that_say_it() -> None:
    pandas = pytest.importorskip("pandas")
    expected = duat.verify(DEMO, prompts=TEXTS).blocks
    for prompts in (tuple(TEXTS), (text for text in TEXTS), pandas.Series(TEXTS)):
        assert duat.verify(DEMO, prompts=prompts).blocks == expected
    for layers, blocks in {1: [1], "0,1-2": [0, 1, 2]}.items():
        report = duat.inspect(DEMO, prompts=TEXTS[1], null="uniform", layers=layers)
        assert [block.index for block in report.blocks] == blocks
    for place in (2, torch.tensor(2)):
        assert duat.attribute(DEMO, prompts=TEXTS[0], position=place).attribution[0].position == 2


def in_memory(report: Any) -> Any:
    """Without what says where the model comes from, and in which dtype it was stored there."""
    found = without_run(json.loads(report.to_json()))
    for block in found.get("blocks", []):
        for field in ("stored_dtype", "dtype"):
            block.get("range", {}).pop(field, None)
    found["model"] = {key: value for key, value in found["model"].items() if key != "name"}
    return found


@pytest.mark.parametrize(
    "call",
    [
        lambda *model: duat.inspect(*model, prompts=TEXTS, null="uniform"),
        lambda *model: duat.verify(*model, prompts=TEXTS[0], max_tokens=4),
        lambda *model: duat.matrix(*model, layer=1, max_tokens=8),
        lambda *model: duat.compare(*model, prompts=["The cat sat.", "The cat ran."]),
        lambda *model: duat.attribute(*model, prompts=TEXTS[0], max_tokens=5, measure=2),
        lambda *model: duat.prune_bound(*model, prompts=TEXTS, granularity="head", measure=2, probes=2),
    ],
    ids=["inspect", "verify", "matrix", "compare", "attribute", "prune_bound"],
)
def test_a_model_in_memory_gives_what_its_folder_gives(
    call: Callable[..., Any], demo: Any, tokenizer: Any, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    demo.train()
    capfd.readouterr()
    report = call(demo, tokenizer)
    assert capfd.readouterr() == ("", "")
    assert in_memory(report) == in_memory(call(DEMO))
    assert report.model.name == str(here / DEMO)
    assert demo.training


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral"])
def test_no_weight_of_the_callers_is_written_to(model_type: str, tmp_path: Path) -> None:
    """Another thread may run the model meanwhile, and a graph that was made before may still be needed."""
    words = AutoTokenizer.from_pretrained(save(model_type, tmp_path))
    model = tiny_model(model_type).requires_grad_(True)
    before = {name: parameter._version for name, parameter in model.named_parameters()}
    prompts = ["w1 w2 w3", "w4 w5 w6 w7"]
    duat.support(model)
    duat.inspect(model, words, prompts=prompts)
    duat.attribute(model, words, prompts=prompts, measure=2)
    duat.compare(model, words, prompts=["w1 w2 w3", "w1 w2 w4"])
    duat.prune_bound(model, words, prompts=prompts, measure=2, probes=2)
    duat.check(model, words, prompts=prompts)
    assert {name: parameter._version for name, parameter in model.named_parameters()} == before


def test_hooks_of_the_callers_are_named(tmp_path: Path) -> None:
    words, model = AutoTokenizer.from_pretrained(save("gpt2", tmp_path)), tiny_model("gpt2")
    model.transformer.h[1].mlp.register_forward_hook(lambda module, args, output: output * 2)
    report = duat.inspect(model, words, prompts=["w1 w2 w3"])
    assert report.certificate.exact
    [note] = [text for text in report.warnings if "forward hooks" in text]
    assert "'transformer.h.1.mlp'" in note


def test_support_takes_a_model_in_memory(demo: Any) -> None:
    assert duat.support(demo).entries == duat.support(DEMO).entries


def test_a_peft_model_is_its_merged_model(demo: Any, tokenizer: Any, tmp_path: Path) -> None:
    model = peft.PeftModel.from_pretrained(demo, ADAPTER)
    report = duat.verify(model, tokenizer, prompts=TEXTS)
    peft.PeftModel.from_pretrained(demo, ADAPTER).merge_and_unload().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    merged = duat.verify(tmp_path, prompts=TEXTS)
    assert report.certificate == merged.certificate
    assert report.model.fingerprint == merged.model.fingerprint != duat.verify(DEMO, prompts=TEXTS).model.fingerprint


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "call", "kind"),
    [
        (["inspect", "nowhere/there"], lambda: duat.inspect("./nowhere/there"), duat.DuatError),
        (["matrix", DEMO, "--layer", "9"], lambda: duat.matrix(DEMO, layer=9), duat.InputError),
        (["inspect", DEMO, "--threshold", "-1"], lambda: duat.inspect(DEMO, threshold=-1.0), duat.InputError),
        (["prune-bound", "--budget", "0"], lambda: duat.prune_bound(budget=0), duat.InputError),
        (
            ["prune-bound", "--uniform", "--granularity", "block"],
            lambda: duat.prune_bound(uniform=True, granularity="block"),
            duat.InputError,
        ),
        (["prune-bound", "--exceed", "2"], lambda: duat.prune_bound(exceed=2), duat.InputError),
        (["compare", "--prompt", "x"], lambda: duat.compare(prompts=["x"]), duat.InputError),
        (["attribute", "--steps", "1", "--target", "x"], lambda: duat.attribute(steps=1, target="x"), duat.InputError),
        (["lora-diff", DEMO], lambda: duat.lora_diff(DEMO), duat.InputError),
        (["lora-diff", "--max-tokens", "3"], lambda: duat.lora_diff(max_tokens=3), duat.InputError),
        (["check", DEMO, "--policy", "nope"], lambda: duat.check(DEMO, policy="nope"), duat.InputError),
        (["plan", "--tokens", "3", "--prompt", "x"], lambda: duat.plan(tokens=[3], prompts="x"), duat.InputError),
        (
            ["plan", "--for", "attribute", "--tokens", "3", "--steps", "2", "--position", "all"],
            lambda: duat.plan(command="attribute", tokens=[3], steps=2, position="all"),
            duat.InputError,
        ),
        (["verify", "--prompt", " "], lambda: duat.verify(prompts=[" "]), duat.InputError),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_is_the_line_of_the_command(
    arguments: list[str], call: Callable[[], Any], kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert capsys.readouterr() == ("", "")
    if arguments[0] == "inspect" and arguments[1] != DEMO:
        assert "no such folder" in str(caught.value)
        return
    assert run(arguments) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.partition(": ")[2].lstrip() in (str(caught.value), f"error: {caught.value}")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: duat.inspect(model, prompts=["x"]), "tokenizer missing"),
        (lambda model: duat.inspect(model, "t", prompts=["x"], dtype="bfloat16"), "dtype: the model is in memory"),
        (lambda model: duat.inspect(DEMO, "t", prompts=["x"]), "tokenizer: only beside a model in memory"),
        (lambda model: duat.inspect(DEMO, prompts=[]), "prompts: an empty list"),
        (lambda model: duat.inspect(DEMO, prompts=["-"]), "standard input is the command line's"),
        (lambda model: duat.inspect(DEMO, prompts=[3]), r"prompts\[0\]: expected a text or token ids, got int"),
        (lambda model: duat.inspect(DEMO, prompts_file="-"), "prompts_file '-'"),
        (lambda model: duat.inspect(DEMO, max_tokens=0), "max_tokens 0"),
        (lambda model: duat.inspect(DEMO, null="none"), "null 'none': expected all, uniform"),
        (lambda model: duat.inspect(DEMO, layers=[-1]), r"layers: \[-1\] are no numbers of blocks"),
        (lambda model: duat.inspect(DEMO, layers=[True]), r"layers: \[True\] are no numbers of blocks"),
        (lambda model: duat.inspect(DEMO, layers="a-b"), "--layers 'a-b': 'a-b' is no block or range"),
        (lambda model: duat.attribute(DEMO, position=[3, 4]), r"position: \[3, 4\]: expected one whole number"),
        (lambda model: duat.attribute(DEMO, target=9), "target: expected a text, got int"),
        (lambda model: duat.matrix(DEMO, prompt=["x"]), r"prompts\[0\]: expected a text, or token ids"),
        (lambda model: duat.inspect(model, DEMO, prompts="x"), "expected one that is loaded, got str; AutoTokenizer"),
        (lambda model: duat.inspect(DEMO, prompts={"a": "x"}), "prompts: expected a text or several, got dict"),
        (lambda model: duat.inspect(DEMO, prompts=3), "prompts: expected a text or several, got int"),
        (lambda model: duat.inspect(DEMO, layers=[]), "layers: no block given"),
        (lambda model: duat.prune_bound(DEMO, granularity="layer"), "granularity 'layer': expected"),
        (lambda model: duat.prune_bound(DEMO, granularity=[]), "granularity: none given"),
        (lambda model: duat.prune_bound(DEMO, probes=1), "probes 1: expected a whole number of at least 2"),
        (lambda model: duat.attribute(DEMO, measure=True), "measure True: expected a whole number of at least 0"),
        (lambda model: duat.inspect(DEMO, prompts="x", max_tokens="3"), "max_tokens '3': expected a whole number of"),
        (lambda model: duat.inspect(DEMO, prompts="x", max_tokens=2.5), "max_tokens 2.5: expected a whole number of"),
        (lambda model: duat.inspect(DEMO, prompts="x", threshold="a"), "--threshold 'a': expected a number of at lea"),
        (lambda model: duat.inspect(DEMO, prompts="x", maps="2"), "maps '2': expected a whole number of at least 0"),
        (lambda model: duat.inspect(DEMO, prompts="x", progress=3), "progress: expected a function of .*, got int"),
        (lambda model: duat.matrix(DEMO, layer="1"), "layer '1': expected a whole number"),
        (lambda model: duat.prune_bound(DEMO, budget="0.1"), "budget '0.1': expected a number"),
        (lambda model: duat.prune_bound(DEMO, rounds=1.5), "rounds 1.5: expected a whole number of at least 1"),
        (lambda model: duat.plan(DEMO, tokens=[3, "4"]), r"tokens\[1\] '4': expected a whole number of at least 1"),
        (lambda model: duat.plan(DEMO, tokens=3), r"tokens: expected numbers of tokens, such as \[512\], got int"),
        (lambda model: duat.compare(DEMO, prompts=[("a", "b")]), r"prompts\[0\]: expected .*; got tuple of str"),
        (duat.check, "tokenizer missing"),
        (duat.plan, "a LlamaForCausalLM was given: files are read"),
        (lambda model: duat.check(DEMO, select="integrity.*"), "select 'integrity.*': expected a list"),
        (lambda model: duat.check(DEMO, weights_only=True, prompts="x"), "--weights-only and --prompt contradict"),
        (lambda model: duat.check(model, weights_only=True, prompts=[[5]]), "--weights-only and --prompt contradict"),
        (lambda model: duat.lora_diff(DEMO, ADAPTER, trust_remote_code=True), "trust_remote_code: this command"),
        (lambda model: duat.plan(DEMO, command="explain"), "command 'explain': expected inspect"),
        (lambda model: duat.support(DEMO, all_types=True), "all_types: stands in place of a model"),
    ],
)
def test_what_only_python_can_say_wrong(call: Callable[[Any], Any], said: str, idle: Any) -> None:
    with pytest.raises(duat.InputError, match=said):
        call(idle)


def test_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=re.escape("verify() got an unexpected keyword argument 'devise'; the nearest")):
        duat.verify(DEMO, devise="cpu")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "nearest"),
    [
        (lambda model: duat.attribute(model, None, targets="x"), "target"),
        (lambda model: duat.inspect(model, prompt="x"), "prompts"),
        (lambda model: duat.matrix(model, prompts="x"), "prompt"),
        (lambda model: duat.plan(DEMO, memmory=3), "memory"),
    ],
)
def test_a_misspelt_argument_comes_before_any_other_fault(call: Callable[[Any], Any], nearest: str, idle: Any) -> None:
    with pytest.raises(TypeError, match=f"the nearest known is '{nearest}'"):
        call(idle)


# -- the process --------------------------------------------------------------------------------------------------


def process() -> dict[str, Any]:
    """What belongs to the caller's process."""
    return {
        "threads": torch.get_num_threads(),
        "alive": {thread.name for thread in threading.enumerate()},
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "random": torch.get_rng_state().tolist(),
        "filters": list(warnings.filters),
        "levels": {name: logging.getLogger(name).level for name in ("", "transformers", "huggingface_hub")},
        "handlers": {name: list(logging.getLogger(name).handlers) for name in ("", "transformers", "huggingface_hub")},
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)},
        "streams": (id(sys.stdout), id(sys.stderr)),
        "frozen": gc.get_freeze_count(),
        "collecting": gc.isenabled(),
        "modes": len(torch.overrides._get_current_function_mode_stack()),
    }


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_nothing_of_the_process_changes(mode: Callable[[], Any], demo: Any, tokenizer: Any) -> None:
    with mode():
        before = process()
        reports = [
            duat.inspect(demo, tokenizer, prompts=TEXTS[1]),
            duat.prune_bound(DEMO, prompts=TEXTS[1], granularity="head", measure=2, probes=2, max_tokens=4),
            duat.lora_diff(DEMO, ADAPTER, prompts=TEXTS[1], max_tokens=4),
            duat.check(DEMO, prompts=TEXTS[1]),
        ]
        after = process()
        assert after.pop("alive") <= before.pop("alive")
        assert 0 < after.pop("frozen") <= before.pop("frozen")  # none was added; an object of the caller's may end
        assert after == before
    assert reports[0].certificate.exact


@pytest.mark.parametrize(
    "call",
    [
        lambda model, tokenizer: duat.inspect(model, tokenizer, prompts=TEXTS[1], spectrum=True),
        lambda model, tokenizer: duat.matrix(model, tokenizer, prompt=TEXTS[1]),
        lambda *it: duat.prune_bound(*it, prompts=TEXTS[1], measure=2, probes=2, max_tokens=4),
    ],
    ids=["inspect", "matrix", "prune_bound"],
)
def test_the_callers_default_dtype_changes_no_number(call: Callable[..., Any], demo: Any, tokenizer: Any) -> None:
    expected = without_run(json.loads(call(demo, tokenizer).to_json()))
    torch.set_default_dtype(torch.float64)
    try:
        found = without_run(json.loads(call(demo, tokenizer).to_json()))
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected


def test_parametrized_weights_have_bounds_and_a_reason_why_they_save_nothing(demo: Any, tokenizer: Any) -> None:
    plain = duat.prune_bound(demo, tokenizer, prompts=TEXTS, granularity="neuron", measure=2, probes=2, max_tokens=4)
    torch.nn.utils.parametrizations.weight_norm(demo.model.layers[0].mlp.up_proj)
    found = duat.prune_bound(demo, tokenizer, prompts=TEXTS, granularity="neuron", measure=2, probes=2, max_tokens=4)
    assert found.plans[0].removed == plain.plans[0].removed > 0
    assert found.plans[0].saves is None
    assert "mlp.up_proj.weight is made of other parameters" in found.plans[0].reasons["saves"]
    assert "Parameters removed and zeroed: not counted; mlp.up_proj.weight" in found.to_text()


def test_progress_is_heard() -> None:
    heard: list[tuple[int, int, str]] = []
    duat.verify(DEMO, prompts=TEXTS, progress=lambda *step: heard.append(step))
    calls = BLOCKS * len(TEXTS)
    assert [step for step in heard if step[1] == calls][-1] == (calls, calls, "prompt 2 of 2")


HEAVY = ("torch", "transformers", "pydantic", "rich", "typer", "pandas", "duat_cli.api.results")


def loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True)
    return set(done.stdout.split())


def test_the_import_is_light() -> None:
    assert loaded_by("import duat_cli; dir(duat_cli); duat_cli.DuatError") == set()
    assert "torch" not in loaded_by("import duat_cli; duat_cli.inspect; duat_cli.check(weights_only=True)")
    assert "duat_cli.api.results" not in loaded_by("import duat_cli.cli.main")


def test_every_name_is_there() -> None:
    assert {getattr(duat, name).__name__ for name in duat.__all__ if not name.startswith("__")} <= set(dir(duat))
    with pytest.raises(AttributeError, match="nope"):
        _ = duat.nope


def test_kinds_are_taken_as_the_command_takes_them() -> None:
    assert kinds_of("neuron, head") == kinds_of(["neuron", "head"]) == ("neuron", "head")
    with pytest.raises(InputError, match="--granularity 'layer': expected"):
        kinds_of("neuron,layer")
