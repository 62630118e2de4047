"""The formula of a quantised weight: its stored tensors, and how rows of the weight are computed from them; and the
result of searching a checkpoint for such weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from duat_cli.loading.quantised.numbers import Floats, scales_of
from duat_cli.text import shown

Arrays = Mapping[str, NDArray[Any]]
"""Role -> the stored tensor, bit for bit, in the numpy dtype of `numbers.RAW`."""


class Tensor(Protocol):
    """A stored tensor, as a header describes it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


FLOATS = ("F32", "BF16", "F16", "F64")
WHOLE = ("I32", "I64")


class UnfitError(Exception):
    """A stored tensor from which its format's formula cannot compute a weight."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{shown(name)}: {text}")
        self.name = name


class UnknownFormatError(Exception):
    """A quantisation format that is not read."""


@dataclass(frozen=True, kw_only=True)
class Formula(ABC):
    """How a weight is computed from stored tensors, in float32."""

    shape: tuple[int, ...]
    """Shape of the weight."""
    parts: Mapping[str, str]
    """Role -> name of the stored tensor; the first holds the weight's values."""
    dtypes: Mapping[str, str]
    """Role -> dtype of the stored tensor, by safetensors' name."""
    scales: tuple[str, ...] = ("scales",)
    """Roles of the numbers that values are multiplied by."""
    largest: float
    """Largest magnitude of a value before it is multiplied by a scale."""
    outs_first: bool = False
    """Whether the format stores a row for each output even if the layer keeps its weight as (in, out)."""
    zero_blocks: bool = False
    """Whether the format gives a block of zeros the scale zero."""
    step: int = 1
    """Rows are computed in multiples of this number, except the last ones."""
    exact_in: ClassVar[str] = "F32"
    """The dtype that holds every value without another rounding."""

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        """(rows, columns) of the weight as a matrix: all dimensions but the last are rows."""
        columns = self.shape[-1]
        return int(np.prod(self.shape[:-1])), columns

    def factors(self, arrays: Arrays) -> Floats:
        """All scales, in one row."""
        return np.concatenate([scales_of(arrays[role], self.dtypes[role]).reshape(-1) for role in self.scales])

    @abstractmethod
    def rows(self, arrays: Arrays, start: int, stop: int) -> Floats:
        """(stop - start, columns) of the weight; start is a multiple of `step`."""


@dataclass(frozen=True)
class Found:
    """The weights of a quantised checkpoint."""

    format: str
    """How they are stored, in words."""
    weights: Mapping[str, Formula]
    """Name of the weight in full precision -> its formula."""
    beside: frozenset[str] = frozenset()
    """Tensors that no weight needs, such as scales to quantise activations or caches."""


def require(
    tensors: Mapping[str, Tensor],
    of: str,
    name: str,
    shape: Sequence[int] | None = None,
    dtypes: Collection[str] = FLOATS,
) -> Tensor:
    """The stored tensor beside `of`; UnfitError where it is missing, or has another shape or dtype."""
    found = tensors.get(name)
    if found is None:
        raise missing(tensors, of, name)
    if shape is not None and found.shape != tuple(shape):
        raise misshapen(tensors, of, name, f"expected {list(shape)}")
    if found.dtype not in dtypes:
        raise UnfitError(name, f"dtype {found.dtype}, beside {shown(of)} expected {' or '.join(dtypes)}")
    return found


def missing(tensors: Mapping[str, Tensor], of: str, name: str) -> UnfitError:
    what = f"quantised ({tensors[of].dtype}), but its {shown(name)} is missing"
    return UnfitError(of, f"{what}: fetch the checkpoint again")


def misshapen(tensors: Mapping[str, Tensor], of: str, name: str, expected: str) -> UnfitError:
    held = tensors[of]
    return UnfitError(
        name,
        f"shape {list(tensors[name].shape)} does not fit the quantised {shown(of)} ({held.dtype}, "
        f"{list(held.shape)}): {expected}",
    )


def leaf_of(name: str) -> str:
    """The last part of a dotted name."""
    return name.rpartition(".")[2]
