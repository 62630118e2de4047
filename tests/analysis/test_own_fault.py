"""A model whose own forward pass fails is refused in one line that names it and points to config.json."""

from __future__ import annotations

from pathlib import Path

import bad_checkpoints as bad
import pytest
import torch

from duat_cli.analysis.own_fault import own_fault
from duat_cli.analysis.session import Session
from duat_cli.errors import ForwardError
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import resolve
from duat_cli.loading.model.load import load_files


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    bad.build("good_moe_per_expert", tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize("paged", [False, True])
def test_more_experts_a_token_than_there_are(paged: bool, experts: Path) -> None:
    bad.jedit(experts / bad.CFG, num_experts_per_tok=9)
    loaded = load_files(resolve(str(experts)), inspect_folder(experts), paged=paged)
    with pytest.raises(ForwardError) as fault:
        _ = Session(loaded, lambda *_: None).structure
    assert str(experts) in str(fault.value)
    assert "forward pass fails: RuntimeError: selected index k out of range" in str(fault.value)
    assert "config.json" in str(fault.value)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("paged", [False, True])
def test_a_model_that_runs_has_no_fault(paged: bool, experts: Path) -> None:
    loaded = load_files(resolve(str(experts)), inspect_folder(experts), paged=paged)
    assert own_fault(loaded) is None
    assert own_fault(loaded, [torch.tensor([[1, 2, 3]])]) is None
    found = own_fault(loaded, [torch.tensor([[10**6]])])
    assert found is not None
    assert "IndexError" in str(found)
