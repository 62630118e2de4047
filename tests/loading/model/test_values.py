"""Values in memory against the same values in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from duat_cli.checks.weights import facts_of
from duat_cli.loading.checkpoint import stream
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.headers import read_header as read
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.checkpoint.stored import STORED
from duat_cli.loading.model import values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_facts_are_those_of_the_file(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stream, values):
        monkeypatch.setattr(module, "PIECE", 60)
        monkeypatch.setattr(module, "LONGEST_ROW", 50)
    torch.manual_seed(0)
    model = nn.Module()
    shapes = {"matrix": (7, 33), "long": (3, 120), "vector": (91,), "stack": (2, 5, 9), "one": (1,), "empty": (0, 4)}
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape).to(dtype), requires_grad=name != "one"))
    with torch.no_grad():
        model.get_parameter("matrix")[2] = 0
        model.get_parameter("stack")[:, :, 4] = 0
        model.get_parameter("vector")[3] = float("nan")
    path = tmp_path / "w.safetensors"
    save_file({name: p.detach() for name, p in model.named_parameters()}, path)
    header = read(path, path.name)
    files = CheckpointFiles(tmp_path, {}, (path.name,), header.tensors, (), 0, {path.name: header.seal})
    names = {kind: name for name, kind in STORED.items()}
    entries = {n: TensorEntry(tuple(p.shape), names[p.dtype], "", 0, 0) for n, p in model.named_parameters()}
    found = facts_of(values.streamed(model, entries), len(entries), lambda *_: None).tensors
    expected = facts_of(stream.stream(files), len(entries), lambda *_: None).tensors
    assert found.keys() == expected.keys() == shapes.keys() - {"empty"}
    for name, facts in found.items():
        other = expected[name]
        assert (facts.rows, facts.columns, facts.nonfinite) == (other.rows, other.columns, other.nonfinite)
        assert (facts.norm, facts.sketch) == (other.norm, other.sketch) or name == "vector"
        assert np.array_equal(facts.zero_rows, other.zero_rows)
        assert np.array_equal(facts.zero_columns, other.zero_columns)
    assert found["vector"].nonfinite == 1
    assert found["matrix"].zero_rows.tolist() == [2]
    assert found["stack"].zero_columns.tolist() == [4]
    assert found["matrix"].norm == pytest.approx(float(model.get_parameter("matrix").double().norm()), rel=1e-6)
