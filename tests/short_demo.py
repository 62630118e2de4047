"""The bundled demo and its adapter cut to their first blocks, which are most of what a command on the demo takes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from duat_cli.loading.checkpoint.source import demo_adapter_path, demo_path

FEW = 2


def short_demo(folder: Path, blocks: int = FEW) -> Path:
    shutil.copytree(demo_path(), folder)
    _shorten(folder / "model.safetensors", blocks)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": blocks}), encoding="utf-8")
    return folder


def short_adapter(folder: Path, blocks: int = FEW) -> Path:
    shutil.copytree(demo_adapter_path(), folder)
    _shorten(folder / "adapter_model.safetensors", blocks)
    return folder


def _shorten(file: Path, blocks: int) -> None:
    """To the tensors of the first blocks, and of what is in none."""
    weights = load_file(file)
    numbers = {name: re.search(r"\.layers\.(\d+)\.", name) for name in weights}
    save_file({n: weights[n] for n, b in numbers.items() if b is None or int(b[1]) < blocks}, file, {"format": "pt"})
