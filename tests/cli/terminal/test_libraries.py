"""What torch's threads, and the library that multiplies for it, are told before torch loads."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings

import pytest
from children import PATIENCE

from duat_cli.cli.terminal.libraries import PRODUCTS, SPINS, calm, grow_in_place, keep_few_products, wait_asleep
from duat_cli.cli.terminal.talk import Talk
from duat_cli.loading.checkpoint.source import demo_path

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": SPINS}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_a_user_s_own_setting_stays(
    own: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(own))
    wait_asleep()
    assert os.environ == expected


def test_a_user_s_own_number_of_products_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"LRU_CACHE_CAPACITY": "7"})
    keep_few_products()
    assert os.environ == {"LRU_CACHE_CAPACITY": "7", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": PRODUCTS}


@pytest.mark.skipif(sys.platform != "linux", reason="torch's pieces of a GPU's memory grow on Linux alone")
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_user_s_own_way_to_take_a_gpu_s_memory_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {name: "max_split_size_mb:64"})
    grow_in_place()
    assert os.environ == {name: "max_split_size_mb:64"}
    monkeypatch.setattr(os, "environ", {})
    grow_in_place()
    assert os.environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_a_library_that_is_loaded_already_is_silenced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    logger = logging.getLogger("transformers")
    logger.setLevel(logging.WARNING)
    calm(Talk(verbose=True))
    assert logger.level == logging.WARNING
    with warnings.catch_warnings():
        calm(Talk())
    assert logger.level == logging.ERROR
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"


@pytest.mark.skipif(sys.platform != "linux", reason="torch's threads are libgomp's on Linux alone")
def test_it_is_said_before_torch_loads() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-m", "duat_cli", "plan", str(demo_path()), "--tokens", "8", "--time", "-q"],
        env={**environment, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in done.stderr
