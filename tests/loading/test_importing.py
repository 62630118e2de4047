"""How torch and transformers are imported."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import suppress

import pytest

from duat_cli.loading.importing import LAST, uncollected


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that has imported nothing yet."""
    monkeypatch.delitem(sys.modules, LAST, raising=False)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("fault", [None, ImportError])
def test_garbage_is_collected_again_but_not_looked_for_in_what_was_imported(fault: type[Exception] | None) -> None:
    try:
        with suppress(ImportError), uncollected():
            assert not gc.isenabled()
            imported = [object()]
            if fault is not None:
                raise fault
        assert gc.isenabled()
        assert not any(found is imported for found in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(found is imported for found in gc.get_objects())  # or the line above could not fail


@pytest.mark.usefixtures("fresh")
def test_what_was_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.usefixtures("fresh")
def test_a_process_that_has_imported_them_freezes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LAST, sys)
    before = gc.get_freeze_count()
    with uncollected():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


ENDS = """
import sys
from duat_cli.loading.importing import uncollected

class Held:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("collected")

with uncollected():
    Held()
    sys.modules[sys.argv[1]] = sys
"""


@pytest.mark.parametrize(("name", "said"), [("triton", "collected\n"), ("another", "")])
def test_what_triton_made_is_collected_at_the_end_of_the_process(name: str, said: str) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS, name], capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout == said
