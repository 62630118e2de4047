"""Adapters of a 7B shape; thin factors against dense ones."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import Row, median_seconds, seconds

_WIDTH, _FFN, _DEPTH, _RANK = 4096, 11008, 32, 16
_LINEARS = {
    "self_attn.q_proj": (_WIDTH, _WIDTH), "self_attn.k_proj": (_WIDTH, _WIDTH), "self_attn.v_proj": (_WIDTH, _WIDTH),
    "self_attn.o_proj": (_WIDTH, _WIDTH), "mlp.gate_proj": (_FFN, _WIDTH), "mlp.up_proj": (_FFN, _WIDTH),
    "mlp.down_proj": (_WIDTH, _FFN),
}  # fmt: skip


def lora(runs: int) -> list[Row]:
    """An adapter of a 7B shape (32 blocks x 7 modules, M = 4096, r = 16); the base is a sparse file."""
    with tempfile.TemporaryDirectory() as folder:
        base, adapter, report = _base_7b(Path(folder)), _adapter_7b(Path(folder)), Path(folder) / "report.json"
        command = [sys.executable, "-m", "duat_cli", "lora-diff", str(base), str(adapter), "--no-base", "-q"]
        times, peaks = [], []
        for _ in range(runs):
            times.append(seconds(lambda: subprocess.run([*command, "-o", str(report)], check=True)))
            peaks.append(json.loads(report.read_text())["run"]["peak_memory_bytes"])
        modules = len(json.loads(report.read_text())["modules"])
    closed, dense_time, error = _dense_svd(runs)
    return [
        Row("modules of the adapter", modules, "", "224"),
        Row("duat lora-diff --no-base, as a process", statistics.median(times), "s", "<= 5"),
        Row("its peak memory", max(peaks) / 2**30, "GiB", "<= 1"),
        Row("singular values from factors, one 4096 x 4096 module", closed * 1e3, "ms"),
        Row("dense product and its singular values, float32", dense_time, "s"),
        Row("times faster", dense_time / closed, "x", ">= 500"),
        Row("largest difference of the singular values, to the largest", error, "", "<= 1e-5"),
    ]


def _base_7b(folder: Path) -> Path:
    """Headers with a hole behind them: nothing of the 12 GiB is on the disk."""
    base = folder / "base"
    base.mkdir()
    header, end = {}, 0
    for name, (rows, columns) in _modules_7b():
        size = 2 * rows * columns
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    with (base / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    config = {"model_type": "llama", "hidden_size": _WIDTH, "num_hidden_layers": _DEPTH}
    (base / "config.json").write_text(json.dumps(config))
    return base


def _adapter_7b(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    adapter = folder / "adapter"
    adapter.mkdir()
    torch.manual_seed(0)
    tensors = {}
    for name, (rows, columns) in _modules_7b():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(_RANK, columns) / 64
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, _RANK) / 64
    save_file(tensors, adapter / "adapter_model.safetensors")
    targets = [name.partition(".")[2] for name in _LINEARS]
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 32, "target_modules": targets}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter


def _modules_7b() -> list[tuple[str, tuple[int, int]]]:
    return [(f"model.layers.{k}.{name}", shape) for k in range(_DEPTH) for name, shape in _LINEARS.items()]


def _dense_svd(runs: int) -> tuple[float, float, float]:
    """(seconds in closed form, seconds by the dense product, largest difference of the singular values)."""
    import torch

    from duat_cli.operators.lowrank import LowRank, singular

    torch.manual_seed(0)
    change = LowRank(torch.randn(_WIDTH, _RANK).double(), torch.randn(_RANK, _WIDTH).double())
    left, right = change.left.float(), change.right.float()
    found: list[torch.Tensor] = []
    slow = seconds(lambda: found.append(torch.linalg.svdvals(left @ right)))
    fast = median_seconds(lambda: singular(change), 10 * runs)
    values = singular(change).values
    return fast, slow, float((found[0][:_RANK].double() - values).abs().max() / values[0])
