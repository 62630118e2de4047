"""Settings of the whole test run: one thread, a cache of its own, a small heap."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import InDouble
from hypothesis import settings
from short_demo import FEW, short_adapter, short_demo

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start, which otherwise share a command's prompts as well
gc.set_threshold(10_000, 20, 20)  # models and reports are made by the thousand, and hardly any of it is garbage
settings.register_profile("same every time", derandomize=True, database=None, deadline=None)
settings.load_profile("same every time")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUAT_CACHE", str(tmp_path_factory.mktemp("duat-cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """What lives as long as the process, imported modules and collected tests, is not looked through for garbage again
    and again: in front of a module's own fixtures all that is reachable is such.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def heard() -> None:
    """A command that ran in this process has silenced the libraries, and a test that comes after may listen to them."""
    for name in ("transformers", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the first blocks of the demo and of its adapter, `demo` and `adapter`, which are only read."""
    return _first_blocks(tmp_path_factory.mktemp("short"), FEW)


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one block more: of two, as much as the whole is in memory where they are read one by one."""
    return _first_blocks(tmp_path_factory.mktemp("three"), FEW + 1)


def _first_blocks(folder: Path, blocks: int) -> Path:
    short_demo(folder / "demo", blocks)
    short_adapter(folder / "adapter", blocks)
    return folder


@pytest.fixture
def in_double() -> Iterator[None]:
    """For tests of models whose own norms would compute in float32."""
    with InDouble():
        yield
