"""The hub's cache is where its environment variable puts it."""

from __future__ import annotations

import os
import subprocess
import sys

from children import PATIENCE


def test_the_cache_is_where_the_variable_says() -> None:
    script = "from duat_cli.compat.huggingface_hub import cache_folder; print(cache_folder())"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "HF_HUB_CACHE": "/nowhere/hub"},
        capture_output=True, text=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "/nowhere/hub"
