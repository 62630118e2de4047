"""Two blocks of a model type and what discovery finds of them: made once a process, for tests that leave both as they
are. A test that changes the package's code asks for them before it does; one of what is left behind makes its own,
since transformers leaves hooks on a model that has returned its attention weights.
"""

from __future__ import annotations

import functools
from typing import Any

from helpers import InDouble, double_model, first_two, single_model

from duat_cli.models.discovery.structure import ModelStructure, discover


@functools.cache
def single(model_type: str) -> tuple[Any, ModelStructure]:
    """In float32."""
    model = first_two(single_model(model_type))
    return model, discover(model)


@functools.cache
def double(model_type: str) -> tuple[Any, ModelStructure]:
    """In float64."""
    model = first_two(double_model(model_type))
    with InDouble():
        return model, discover(model)
