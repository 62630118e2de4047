"""How many processes may share the prompts."""

from __future__ import annotations

import os
import sys

import pytest

from duat_cli.cli.shared.cores import processes


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_as_many_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert processes() == 3
    for nothing in ("0", "", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", nothing)
        assert processes() == len(os.sched_getaffinity(0))


def test_one_where_a_fork_is_not_known_to_be_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert processes() == 1
