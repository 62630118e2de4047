"""How a checkpoint is refused: in one clean line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from duat_cli.errors import CheckpointError, DuatError
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.model.load import load
from duat_cli.text import clean


def refusal_of_files(folder: Path) -> str:
    """The message of what looks at the files alone."""
    from duat_cli.loading.model.model_class import check_model_type

    with pytest.raises(CheckpointError) as caught:
        check_model_type(inspect_folder(folder), trust_remote_code=False)
    return _clean(caught.value)


def refusal_of_load(*args: Any, **kwargs: Any) -> str:
    """The message of the load."""
    with pytest.raises(DuatError) as caught:
        load(*args, **kwargs)
    return _clean(caught.value)


def _clean(fault: DuatError) -> str:
    message = str(fault)
    assert message == clean(message)
    return message
