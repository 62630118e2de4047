"""`duat prune-bound` with nothing faked, on a tiny checkpoint: the report, the set that is written, what is refused."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pruning import WORDS, save
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.loading.model.processes import Processes
from duat_cli.report.tables.page import Page
from duat_cli.report.tables.prune.report import render_prune
from duat_cli.results.prune.report import PruneReport
from duat_cli.text import indices

FAST = ("--probes", "8", "--measure", "4", "-q")
HELD_OUT = 6  # as many as a guarantee takes with --exceed 0.4


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logs and warnings of this process as they are, for the tests that come after."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two prompts that choose, some that are held out, and more of these with those two; each is unlike the others."""
    folder = tmp_path_factory.mktemp("prompts")
    lines = [" ".join(WORDS[(k * step) % 20] for step in range(1, 6)) + f" {WORDS[k // 20]}" for k in range(45)]
    made = {
        "choose": lines[:2],
        "holdout": lines[2 : 2 + HELD_OUT],
        "few": lines[2:12],
        "overlap": [*lines[:2], *lines[2:30], lines[5]],
    }
    for name, content in made.items():
        (folder / f"{name}.txt").write_text("\n".join(content) + "\n")
    return {name: str(folder / f"{name}.txt") for name in made}


@pytest.fixture(scope="module")
def of_llama(llama: str, texts: dict[str, str]) -> list[str]:
    """Of the llama, with the prompts that are held out."""
    return [llama, "--prompts", texts["choose"], "--holdout", texts["holdout"], "--exceed", "0.4"]


@pytest.fixture(scope="module")
def reported(of_llama: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PruneReport]:
    """The report under the options, of one run each; every test has a copy of its own."""
    folder = tmp_path_factory.mktemp("reports")

    @functools.cache
    def text(*options: str) -> str:
        file = folder / f"{len(list(folder.iterdir()))}.json"
        common = ["--budget", "0.3", "--probes", "64", "--measure", "30", "-q", "--json", "-o", str(file)]
        assert run(["prune-bound", *of_llama, *options, *common]) == 0
        return file.read_text()

    return lambda *options: PruneReport.model_validate(json.loads(text(*options), parse_constant=pytest.fail))


def report(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> PruneReport:
    assert run(["prune-bound", *arguments, "--json"]) == 0
    return PruneReport.model_validate(json.loads(capsys.readouterr().out, parse_constant=pytest.fail))


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_processes_share_the_prompts(
    llama: str, texts: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as torch would take threads, with the numbers of one, which another run finds again."""
    begun, share = list[int](), Processes._shared

    def counted(one: Processes, *rest: Any) -> Any:
        begun.append(one.count)
        return share(one, *rest)

    monkeypatch.setattr(Processes, "_shared", counted)
    arguments = [llama, "--prompts", texts["choose"], "--granularity", "head", *FAST]
    alone = report(arguments, capsys)
    assert begun == []
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    shared = report(arguments, capsys)
    assert set(begun) == {2}
    assert shared == alone.model_copy(update={"run": shared.run})


@pytest.mark.parametrize(("metric", "ablate"), [("kl", "zero"), ("hidden", "mean"), ("nll", "zero")])
def test_the_report_is_whole(metric: str, ablate: str, reported: Callable[..., PruneReport]) -> None:
    found = reported("--metric", metric, "--ablate", ablate)
    assert found.protocol.metric == metric
    assert found.protocol.ablate == ablate
    assert found.certificate.exact
    assert {p.granularity: p.of for p in found.plans} == {
        "neuron": 144,
        "head": 12,
        "ffn": 3,
        "attention": 3,
        "block": 3,
    }
    assert len(found.terms) == 144 + 12 + 3 + 3 + 3
    for term in found.terms:
        given = term.model_dump()
        for name in ("local", "frozen", "linearised", "certified", "measured"):
            assert (given[name] is None) == (name in term.reasons), (term, name)
        assert term.linearised_low is not None
        assert term.linearised is not None
        assert term.linearised_high is not None
        assert term.linearised_low <= term.linearised <= term.linearised_high
    assert {t.kind: sum(x.measured is not None for x in found.terms if x.kind == t.kind) for t in found.terms} == {
        "neuron": 30, "head": 12, "ffn": 3, "attention": 3, "block": 3,
    }  # fmt: skip
    for plan in found.plans:
        assert 0 <= plan.removed <= plan.of
        if plan.removed:
            assert plan.measured is not None
            assert plan.measured <= 0.3
        if plan.guarantee is not None and plan.guarantee.removed:
            assert plan.guarantee.holdout_prompts == HELD_OUT
            assert plan.guarantee.removed <= plan.removed
            assert len(plan.guarantee.set) == plan.guarantee.removed
            assert plan.guarantee.exceeded <= HELD_OUT
    neurons = next(p for p in found.prediction if p.granularity == "neuron")
    assert neurons.spearman is not None
    assert neurons.spearman.value > 0.8
    assert neurons.spearman.low <= neurons.spearman.value <= neurons.spearman.high
    assert {"magnitude", "activation x norm", "wanda", "taylor"} <= set(neurons.criteria)
    blocks = next(p for p in found.prediction if p.granularity == "block")
    assert blocks.criteria == {}
    assert blocks.reasons["spearman"] == "3 ablated terms are too few to be ranked"


def test_a_granularity_alone_has_the_numbers_it_has_in_company(reported: Callable[..., PruneReport]) -> None:
    options = ("--metric", "kl", "--ablate", "zero")
    together, alone = reported(*options), reported(*options, "--granularity", "head")
    by_term = {(t.kind, t.block, t.index): t for t in together.terms}
    assert [t.kind for t in alone.terms] == ["head"] * 12
    for term in alone.terms:
        other = by_term[term.kind, term.block, term.index]
        assert term.linearised == pytest.approx(other.linearised, rel=1e-4)
        assert term.measured == pytest.approx(other.measured, rel=1e-6)
        assert term.local == pytest.approx(other.local, rel=1e-6)


@pytest.mark.parametrize("model_type", ["bert", "gemma2", "albert", "lfm2_moe", "t5"])
def test_other_architectures(
    model_type: str, tmp_path: Path, texts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = save(model_type, tmp_path)
    found = report([model, "--prompts", texts["choose"], *FAST], capsys)
    text = render_prune(found, Page(80))
    assert "exact: largest relative error" in text
    assert max(map(len, text.split("\n"))) <= 80
    assert found.protocol.metric == ("hidden" if model_type == "t5" else "kl")
    measured = [t for t in found.terms if t.measured is not None and t.kind in ("ffn", "attention")]
    assert measured
    for term in measured:  # a slope of zero in front of a norm would show here
        assert term.linearised is not None
        assert term.measured is not None
        assert term.linearised > 0.02 * term.measured


def test_one_token_prompts(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = report([llama, "--prompt", "w3", "--granularity", "head,block", *FAST], capsys)
    assert found.protocol.tokens == 1
    assert all(p.guarantee is None for p in found.plans)
    assert all("guarantee" in p.reasons for p in found.plans)
    assert all("taylor" not in p.criteria for p in found.prediction)  # no next token, no loss


def test_held_out_prompts_that_chose_the_set_do_not_test_it(
    llama: str, texts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The file holds the two that choose, and one prompt twice: 28 are left of 31, one fewer than needed."""
    arguments = ["prune-bound", llama, "--prompts", texts["choose"], "--granularity", "head", *FAST]
    assert run([*arguments, "--holdout", texts["overlap"]]) == 2
    assert "28 prompts cannot show" in capsys.readouterr().err
    found = report([*arguments[1:], "--holdout", texts["overlap"], "--exceed", "0.2"], capsys)
    assert any("3 of 31 held-out prompts are left out" in w for w in found.warnings)
    assert run([*arguments, "--holdout", texts["choose"], "--exceed", "0.9"]) == 2
    assert "nothing is left to hold out" in capsys.readouterr().err


# -- what is refused: one line, exit 2 -----------------------------------------------------------------------

REFUSED: dict[str, tuple[list[str], str]] = {
    "budget 0": (["--budget", "0"], "--budget 0: expected a number above 0"),
    "budget -1": (["--budget", "-1"], "--budget -1: expected a number above 0"),
    "budget nan": (["--budget", "nan"], "--budget nan"),
    "confidence 1": (["--confidence", "1"], "--confidence 1: expected a number between 0 and 1"),
    "exceed 0": (["--exceed", "0"], "--exceed 0"),
    "granularity": (["--granularity", "head,layer"], "--granularity 'layer': expected neuron, head, expert"),
    "export of many": (["--export", "set.json"], "choose one, such as --granularity head"),
    "export of a name": (["--export", "set.txt", "--granularity", "head"], "expected a name that ends in .json"),
    "slices of heads": (["--export", "set.yaml", "--granularity", "head"], "use --granularity block"),
    "apply of many": (["--apply", "out", "--granularity", "head,attention"], "choose one"),
    "apply of a part's mean": (["--apply", "out", "--granularity", "ffn", "--ablate", "mean"], "use --ablate zero"),
    "apply of means": (["--apply", "out", "--granularity", "head", "--ablate", "mean"], "attention has no bias"),
    "export of means": (["--export", "a.json", "--granularity", "head", "--ablate", "mean"], "use --ablate zero"),
    "holdout share": (["--holdout", "1.5"], "--holdout 1.5: expected a share between 0 and 1"),
    "holdout file": (["--holdout", "nowhere.txt"], "nowhere.txt"),
    "one prompt": (["--prompt", "w1", "--holdout", "0.5"], "nothing is left to hold out of 1 prompt"),
    "experts": (["--granularity", "expert"], "the model has no such terms; it has neuron, head, ffn, attention, block"),
    "nll of one token": (["--metric", "nll", "--prompt", "w1"], "one token has no next token"),
}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()  # what writing the checkpoint said
    assert run(["prune-bound", *arguments, "-q"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    [line] = [x for x in err.splitlines() if x.strip() and not x.startswith("[transformers]")]
    return line


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line(case: str, llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, expected = REFUSED[case]
    arguments = arguments if "--prompt" in arguments else [*arguments, "--prompt", "w1 w2 w3"]
    assert expected in refused([llama, *arguments], capsys)


def test_too_few_prompts_for_the_confidence(
    llama: str, texts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused([llama, "--prompts", texts["choose"], "--holdout", texts["few"]], capsys)
    assert "10 prompts cannot show with 95 % confidence that at most 10 % exceed the budget; at least 29" in line
    line = refused(
        [llama, "--prompts", texts["choose"], "--holdout", texts["few"], "--confidence", "0.999", "--exceed", "0.125"],
        capsys,
    )
    needed = math.ceil(math.log(0.001) / math.log(0.875))
    assert f"99.9 % confidence that at most 12.5 % exceed the budget; at least {needed} are needed" in line


def test_a_prompt_of_the_users_own_is_never_left_out(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A held-out prompt that is too long is an error, even where the choosing prompts are the bundled ones."""
    file = tmp_path / "long.txt"
    file.write_text("\n".join([f"w{k % 20} w{k // 20}" for k in range(30)] + ["w1 " * 5000]) + "\n")
    assert "long.txt line 31: too long" in refused([llama, "--holdout", str(file), "--max-tokens", "100000"], capsys)


@pytest.mark.parametrize("metric", ["kl", "nll"])
def test_no_lm_head(metric: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save("bert", tmp_path, bare=True)
    line = refused([model, "--metric", metric, "--prompt", "w1 w2"], capsys)
    assert f"--metric {metric}: BertModel is no next-token model: it has no LM head; use --metric hidden" in line
    assert "--metric hidden" in line


def test_a_masked_lm_has_no_next_token_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused([save("bert", tmp_path), "--metric", "nll", "--prompt", "w1 w2"], capsys)
    assert "does not predict the next token" in line


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = value
    save_file(tensors, file, metadata={"format": "pt"})
    line = refused([model, "--prompt", "w1 w2"], capsys)
    assert "model.layers.1.mlp.up_proj.weight holds 1 values that are NaN or infinite" in line


# -- what is written -----------------------------------------------------------------------------------------


def test_the_exported_set_is_the_one_that_holds(
    llama: str, of_llama: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "set.json", tmp_path / "pruned"
    arguments = ["--granularity", "neuron", "--budget", "0.3", "--export", str(file), "--apply", str(folder), *FAST]
    found = report([*of_llama, *arguments], capsys)
    written: dict[str, Any] = json.loads(file.read_text())
    [plan] = found.plans
    assert plan.guarantee is not None
    names = {f"block.{t['block']}.neuron.{t['index']}" for t in written["terms"]}
    assert names == set(plan.guarantee.set)
    assert len(names) == plan.guarantee.removed > 0
    # The checkpoint, by transformers alone, does the damage that the set's own weights at zero do.
    pruned = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    ids = torch.tensor([[41, 45, 50, 47]])
    with torch.no_grad():
        for term in written["terms"]:
            own.model.layers[term["block"]].mlp.down_proj.weight[:, term["index"]] = 0
        a, b = pruned(input_ids=ids).logits, own(input_ids=ids).logits
    assert torch.allclose(a, b, atol=1e-5)


def written(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[PruneReport, list[str]]:
    """The report, and the lines about what was written."""
    capsys.readouterr()
    assert run(["prune-bound", *arguments, *FAST[:-1], "--json"]) == 0
    out, err = capsys.readouterr()
    lines = [line.removeprefix("duat: ") for line in err.splitlines() if line.startswith("duat: ")]
    return PruneReport.model_validate_json(out), lines


def stored(folder: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


@pytest.fixture(scope="module")
def of_heads(of_llama: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The guaranteed set is smaller than the largest. What is asked again finds the results in the folder."""
    out = str(tmp_path_factory.mktemp("kept") / "out")
    return [*of_llama, "--granularity", "head", "--budget", "0.3", "--metric", "kl", "--out", out]


def test_what_is_said_of_heads_that_are_zeroed(
    llama: str, of_heads: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which set is the guaranteed one, and that zeros take the room of what they replace."""
    file, folder = tmp_path / "set.json", tmp_path / "pruned"
    found, lines = written([*of_heads, "--export", str(file), "--apply", str(folder)], capsys)
    [plan] = found.plans
    assert plan.guarantee is not None
    assert 1 < plan.guarantee.removed < plan.removed
    chosen = f"the guaranteed set of {plan.guarantee.removed} of {plan.of} heads "
    chosen += f"(the largest within the budget has {plan.removed})"
    assert f"wrote {file}: {chosen}" in lines
    assert lines[-2] == f"wrote {folder} without {chosen}"
    size = f"{stored(Path(llama)) / 1000:.1f} KB"
    told, _, error = lines[-1].rpartition(" ")
    assert told == (
        f"{plan.guarantee.removed} terms zeroed and still stored; weights {size} -> {size} in float32; "
        "read back: relative distance of its output from the ablated model's"
    )
    assert 0 <= float(error) <= 1e-5


def test_what_is_said_of_blocks_that_are_removed(
    llama: str, texts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget that everything keeps: all blocks but one go, in the checkpoint and in the slices."""
    file, folder = tmp_path / "slices.yaml", tmp_path / "smaller"
    found, lines = written(
        [llama, "--prompts", texts["choose"], "--granularity", "block", "--budget", "1000", "--export", str(file),
         "--apply", str(folder)],
        capsys,
    )  # fmt: skip
    [plan] = found.plans
    assert (plan.removed, plan.of) == (2, 3)
    assert f"wrote {file}: 2 of 3 blocks, the largest set within the budget" in lines
    assert file.read_text().count("layer_range") == 1
    before, after = stored(Path(llama)), stored(folder)
    assert after < before
    assert lines[-1].startswith(
        f"2 blocks removed; weights {before / 1000:.1f} KB -> {after / 1000:.1f} KB in float32; read back: "
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    card = (folder / "README.md").read_text()
    assert "--granularity block" in card
    assert found.written is not None
    assert f"Removed: {indices('block', found.written.removed_blocks)}: 2 blocks removed." in card
    assert "Nothing is guaranteed: no prompts were held out." in card


@pytest.mark.parametrize("which", ["guaranteed", "largest", "3"])
def test_the_set_that_is_asked_for_is_written(
    of_heads: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], which: str
) -> None:
    file = tmp_path / "set.json"
    found, lines = written([*of_heads, "--export", str(file), "--set", which], capsys)
    [plan] = found.plans
    assert plan.guarantee is not None
    count = {"guaranteed": plan.guarantee.removed, "largest": plan.removed, "3": 3}[which]
    terms = json.loads(file.read_text())["terms"]
    assert {f"block.{t['block']}.head.{t['index']}" for t in terms} == set(plan.set[:count])
    said = {
        "guaranteed": f"the guaranteed set of {count} of {plan.of} heads (the largest",
        "largest": f"{count} of {plan.of} heads, the largest set within the budget; it is not guaranteed",
        "3": f"3 of {plan.of} heads, as --set says",
    }
    assert lines[-1].startswith(f"wrote {file}: {said[which]}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "some"], "--set 'some': expected guaranteed, largest or a number of terms"),
        (["--set", "0"], "--set '0': expected guaranteed, largest or a number of terms"),
        (["--set", "largest"], "--set: says which set is written; give --export FILE or --apply DIR"),
        (["--set", "999", "--export", "s.json", *FAST], "--set 999: expected 1 to 12, of 12 heads"),
        (["--set", "guaranteed", "--export", "s.json", *FAST], "--set guaranteed: no held-out prompts: give --holdout"),
    ],
)
def test_sets_that_cannot_be_written(
    llama: str,
    texts: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["prune-bound", llama, "--prompts", texts["choose"], "--granularity", "head", *arguments]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "s.json").exists()


def test_a_set_beyond_the_terms_is_refused_before_any_prompt_is_read(
    llama: str, texts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No report is made of it, and a block has to stay."""
    file = str(tmp_path / "s.json")
    for granularity, most in (("head", "12, of 12 heads"), ("block", "2, of 3 blocks"), ("head,ffn", "15, of 15 ")):
        arguments = ["--granularity", granularity, "--set", "999", "--export", file, *FAST]
        assert run(["prune-bound", llama, "--prompts", texts["choose"], *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"--set 999: expected 1 to {most}" in err


def test_a_uniform_set_leaves_the_file(
    llama: str, texts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "smaller"
    found, lines = written(
        [llama, "--prompts", texts["choose"], "--granularity", "neuron", "--budget", "0.3", "--metric", "hidden",
         "--uniform", "--apply", str(folder)],
        capsys,
    )  # fmt: skip
    [plan] = found.plans
    assert plan.uniform
    assert plan.saves is not None
    assert plan.saves.terms_removed == plan.removed > 0
    assert plan.saves.parameters_zeroed == 0
    assert stored(Path(llama)) - stored(folder) == plan.saves.bytes_removed
    assert lines[-1].startswith(f"{plan.removed // 3} neurons a block removed; weights ")


def test_a_joint_set_of_a_wanted_size_is_written(
    llama: str, texts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "smaller"
    found, lines = written(
        [llama, "--prompts", texts["choose"], "--granularity", "neuron,head", "--remove", "40%", "--metric", "hidden",
         "--uniform", "--apply", str(folder)],
        capsys,
    )  # fmt: skip
    [plan] = found.plans
    assert plan.saves is not None
    assert stored(Path(llama)) - stored(folder) == plan.saves.bytes_removed > 0
    assert plan.saves.parameters_removed == plan.parameters
    assert any("neurons and heads, which hold" in line for line in lines)


@pytest.mark.parametrize("text", ["0", "100%", "20%/some", "x", "20%/", "1.5", "-3%"])
def test_a_share_to_remove_is_a_share(text: str, llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prune-bound", llama, f"--remove={text}"]) == 2
    assert f"--remove '{text}': expected a share of the blocks' parameters such as 20%" in capsys.readouterr().err


def test_uniform_is_about_neurons_and_heads(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prune-bound", llama, "--granularity", "block", "--uniform"]) == 2
    assert "--uniform: is about neurons and heads" in capsys.readouterr().err


def test_nothing_to_write_is_said_with_its_reason(
    of_llama: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too small a budget; and one that holds for the prompts that chose, but for no set on those held out."""
    common = [*of_llama, "--granularity", "head", "--apply", str(tmp_path / "out"), *FAST]
    for arguments, expected in (
        (
            ["--budget", "1e-12"],
            "no set of heads stays within the budget of 1e-12; raise --budget, or name a number of terms with --set",
        ),
        (
            ["--budget", "0.3", "--metric", "hidden"],
            "no set of heads is guaranteed to stay within the budget of 0.3 on the held-out prompts; raise --budget, "
            "or name a number of terms with --set",
        ),
    ):
        assert run(["prune-bound", *common, *arguments]) == 2
        assert capsys.readouterr().err.strip().endswith(expected)
    assert not (tmp_path / "out").exists()


def test_the_one_block_of_a_model_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save("llama", tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=1)
    model.save_pretrained(folder)
    capsys.readouterr()
    arguments = [folder, "--prompt", "w1 w2 w3", "--granularity", "block", "--budget", "1000", *FAST]
    assert run(["prune-bound", *arguments, "--export", str(tmp_path / "set.json")]) == 2
    assert "the model has one block, and one has to stay" in capsys.readouterr().err
    assert not (tmp_path / "set.json").exists()


def test_uniform_that_leaves_no_set_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Heads that share one key and value head go together, and these are all of an attention."""
    folder = save("gpt_bigcode", tmp_path / "whole")
    arguments = [folder, "--prompt", "w1 w2 w3", "--granularity", "head", "--uniform", "--budget", "1000", *FAST]
    capsys.readouterr()
    assert run(["prune-bound", *arguments]) == 0
    assert "head: none; --uniform leaves no set" in " ".join(capsys.readouterr().out.split())
    assert run(["prune-bound", *arguments, "--apply", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.strip().endswith("and never all of one; leave out --uniform")
