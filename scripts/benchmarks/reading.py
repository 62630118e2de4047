"""How fast weights come from cold files, against `dd` on the same files."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import Row, peak
from benchmarks.shapes import SHAPES, write

SHAPE, PIECE = "1.1B", "16M"


def reading(runs: int) -> list[Row]:
    """Both in turn; what the system keeps of the files is given up in front of each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, SHAPES[SHAPE])
        files = sorted(folder.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files) / 1e9
        plain, ours = [], []
        for _ in range(min(runs, 3)):
            plain.append(_timed(files, lambda: _copied(files)))
            _forget(files)
            ours.append(peak("reading", folder))
    fast = statistics.median(plain)
    reader, pages = (fast / statistics.median(run[what] for run in ours) for what in ("reader", "pages"))
    return [
        Row(f"dd of a {SHAPE} checkpoint, cold", size / fast, "GB/s"),
        Row("its tensors by duat's reader, to dd", reader, "", ">= 0.8"),
        Row("page by page into the model, hashed and looked through, to dd", pages, ""),
    ]


def reading_child(folder: str) -> None:
    """Seconds of the reader alone, then of all pages of a model, from cold files each."""
    from duat_cli.loading.checkpoint.preflight import inspect_folder
    from duat_cli.loading.checkpoint.reader import Reader
    from duat_cli.loading.checkpoint.source import Source
    from duat_cli.loading.model.load import load_files

    path = Path(folder)
    files, shards = inspect_folder(path), sorted(path.glob("*.safetensors"))
    reader = Reader(files, threads=True)
    by_shard: dict[str, list[str]] = {}
    for name, entry in files.tensors.items():
        by_shard.setdefault(entry.shard, []).append(name)

    def read() -> None:
        for names in by_shard.values():  # a block's, as a page has them
            reader.tensors(names)

    loaded = load_files(Source(path, SHAPE, None), files, dtype="bfloat16", paged=True)
    assert loaded.paged is not None
    pager = loaded.paged.pager

    def turn() -> None:
        for page in pager.pages:
            pager.hold(page)

    found = {"reader": _timed(shards, read), "pages": _timed(shards, turn)}
    print(json.dumps(found))


def _timed(files: list[Path], work: Callable[[], object]) -> float:
    _forget(files)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _forget(files: list[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _copied(files: list[Path]) -> None:
    for file in files:
        subprocess.run(["dd", f"if={file}", "of=/dev/null", f"bs={PIECE}"], check=True, stderr=subprocess.DEVNULL)
