"""Parameters with other values for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn


@contextlib.contextmanager
def exchanged(values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """The parameters hold these tensors, of their shapes and dtypes; what they held before, afterwards. No copy is
    made, so that a tensor that is another view of the same memory does not change with them."""
    before = {parameter: parameter.data for parameter in values}
    try:
        for parameter, value in values.items():
            parameter.data = value
        yield
    finally:
        for parameter, held in before.items():
            parameter.data = held
