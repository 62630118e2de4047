"""How torch and transformers are imported."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest

from duat_cli.loading.importing import uncollected


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


def test_what_was_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
