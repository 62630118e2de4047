"""The pre-flight and the weight-only gate."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.common import Row, interleaved, median_seconds, processes, python


def check(runs: int) -> list[Row]:
    """The gate's own reading: headers of a large checkpoint, and the pass over the values of a smaller one."""
    from duat_cli.checks.weights import weight_facts
    from duat_cli.loading.checkpoint.preflight import inspect_folder

    with tempfile.TemporaryDirectory() as folder:
        big = _shards(Path(folder) / "big", 4, 1 << 29, holes=True)
        preflight = median_seconds(lambda: inspect_folder(big), 5 * runs)
        real = _shards(Path(folder) / "real", 4, 1 << 28, holes=False)
        files = inspect_folder(real)
        summing, passing = interleaved(
            [lambda: sum_tensors(real), lambda: weight_facts(files, lambda *_: None)], 2 * runs
        )
        command = [sys.executable, "-m", "duat_cli", "check", str(real), "--weights-only", "-q"]
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); import torch; "
        code += f"from benchmarks.check import sum_tensors; sum_tensors({str(real)!r})"
        plain, gate = processes([python(code), command], dict(os.environ), 2 * runs)
    return [
        Row("pre-flight of 2 GiB in four shards", preflight * 1e3, "ms", "<= 50"),
        Row("reading and summing 1 GiB with torch, as a process", plain, "s"),
        Row("duat check --weights-only of the same, as a process", gate / plain, "x reading and summing", "<= 1.5"),
        Row("the same within a process, files mapped and in memory", summing, "s"),
        Row("its pass alone", passing / summing, "x reading and summing"),
    ]


def sum_tensors(folder: Path | str) -> float:
    from safetensors import safe_open

    total = 0.0
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as reader:
            total += sum(float(reader.get_tensor(name).sum()) for name in reader.keys())  # noqa: SIM118
    return total


def _shards(folder: Path, count: int, size: int, *, holes: bool) -> Path:
    """Shards of `size` bytes each, bfloat16, 2048 columns; of holes, or of random values that are numbers."""
    import torch

    folder.mkdir()
    rows, weight_map = 8192, dict[str, str]()
    for shard in range(1, count + 1):
        file_name = f"model-{shard:05}-of-{count:05}.safetensors"
        each = rows * 2048 * 2
        names = [f"model.layers.{shard * 100 + k}.mlp.up_proj.weight" for k in range(size // each)]
        header = {
            name: {"dtype": "BF16", "shape": [rows, 2048], "data_offsets": [k * each, (k + 1) * each]}
            for k, name in enumerate(names)
        }
        raw = json.dumps(header).encode()
        with (folder / file_name).open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for _ in names if not holes else ():
                file.write(torch.randn(rows, 2048).bfloat16().view(torch.int16).numpy().tobytes())
            file.truncate(8 + len(raw) + len(names) * each)
        weight_map |= dict.fromkeys(names, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {"model_type": "llama", "hidden_size": 2048, "num_attention_heads": 16}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
