"""Every faulty checkpoint through the command line, judged as its expectation says, under a name that tells nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import bad_checkpoints as bad
import pytest
from running_checks import Duat, few_bundled

UNTRAINED = Path(bad.__file__).with_name("untrained.toml")
ADAPTERS = {name for name, case in bad.CASES.items() if "adapter" in case.inputs}


@pytest.fixture(scope="module", autouse=True)
def few() -> Iterator[None]:
    """Two of the bundled prompts."""
    with few_bundled(2):
        yield


def arguments_of(case: bad.Case, folder: Path) -> list[str]:
    model = str(folder / case.inputs["model"])
    if "adapter" in case.inputs:
        return ["lora-diff", model, str(folder / case.inputs["adapter"])]
    if "prompts" in case.inputs:
        return ["inspect", model, "--prompts", str(folder / case.inputs["prompts"])]
    return ["check", model, "--policy", str(UNTRAINED)]


def judge(case: bad.Case, code: int, text: str, root: Path) -> None:
    if case.kind == "error":
        assert code == 2, text
        assert case.matches(text), text
    elif case.kind == "warn":
        assert code in (0, 1), text
        assert case.matches(text), text
    else:
        assert code == 0, text
    assert not (case.forbid and re.search(case.forbid, text))
    assert "Traceback" not in text
    assert not list(root.rglob("PWNED"))


def test_there_are_as_many_cases_as_ever() -> None:
    assert len(bad.CASES) == 71


@pytest.mark.parametrize("name", sorted(bad.CASES))
def test_a_case(name: str, duat: Duat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = bad.build(name, tmp_path / "c001")
    monkeypatch.chdir(tmp_path / "c001")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    done = duat(*arguments_of(case, tmp_path / "c001"))
    judge(case, done.code, done.text, tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before  # nothing is written unasked


WEIGHTS_TELL = {"w_nan", "w_inf", "w_all_zero", "idx_tensor_in_wrong_shard", "idx_total_size_wrong"}


@pytest.mark.parametrize("name", sorted(n for n in bad.CASES if n.startswith(("st_", "idx_", "w_n", "w_i", "w_a"))))
def test_weights_only_sees_what_the_files_say(name: str, duat: Duat, tmp_path: Path) -> None:
    case = bad.build(name, tmp_path / "c001")
    done = duat("check", tmp_path / "c001" / case.inputs["model"], "--weights-only", "--json")
    if case.kind == "error":
        judge(case, done.code, done.text, tmp_path)
    else:
        assert done.code == (1 if name in ("w_nan", "w_inf", "w_all_zero", "idx_tensor_in_wrong_shard") else 0)
    if name in WEIGHTS_TELL:
        assert case.matches("\n".join(done.json["warnings"]))


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_an_adapter_beside_its_base(name: str, duat: Duat, tmp_path: Path) -> None:
    """The same judgement from the gate, which lints an adapter too."""
    case = bad.build(name, tmp_path / "c001")
    done = duat(
        "check", tmp_path / "c001", "--weights-only", "-q", "--adapter", tmp_path / "c001" / case.inputs["adapter"]
    )
    if name == "lora_shape_mismatch":  # a finding about the adapter, not a file that cannot be read
        assert done.code == 1
        assert "adapter.shape_mismatch" in done.stdout
    elif name == "lora_nan":
        assert (done.code, "NaN" in done.stdout) == (1, True)
    else:
        judge(case, done.code, done.text, tmp_path)
