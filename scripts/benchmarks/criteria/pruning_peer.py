"""torch-pruning, run for real in an environment of its own on the same windows."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.criteria.judging import Judge, Judged
from benchmarks.criteria.texts import Texts
from benchmarks.peer import environment_of

PEER = "torch-pruning==1.6.1"


def torch_pruning(
    checkpoint: Path, texts: Texts, judge: Judge, shares: Sequence[float]
) -> dict[tuple[str, float], tuple[Judged, float]]:
    """(importance, share) -> what its smaller model is worth, and the parameters that it lost."""
    with tempfile.TemporaryDirectory() as folder:
        windows = Path(folder) / "windows.pt"
        torch.save({"calibration": texts.calibration, "held_out": texts.held_out}, windows)
        child = Path(__file__).with_name("pruning_peer_child.py")
        words = [environment_of(PEER), child, checkpoint, windows, ",".join(f"{share:g}" for share in shares), folder]
        subprocess.run([str(word) for word in words], check=True, capture_output=True)
        found = {}
        for file in sorted(Path(folder).glob("*-*.pt")):
            name, _, share = file.stem.partition("-")
            one = torch.load(file)
            found[name, float(share)] = judge.of(one["outputs"]), float(one["removed"])
    return found
