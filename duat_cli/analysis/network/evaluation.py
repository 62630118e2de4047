"""Evaluates Eq. 21, 23 and 33 layer by layer with σ live, and compares each step with what the model itself computed.

The parameters of the first j layers come from those of the first j - 1 as below Eq. 33 (old values on the right):

    W'_{j,1} <- W'_{j,1} W'_{j-1,1}                            b'_{j,3} <- W'_{j,1} b'_{j-1,3} + b'_{j,3}
    W'_{j,2} <- W'_{j,2} W'_{j-1,1}                            W'_{k,3} <- W'_{j,1} W'_{k,3} for k < j
    b'_{j,2} <- (W'_{j,2} b'_{j-1,3} + b'_{j,2}) + W'_{j,2} Σ_{k<j} W'_{k,3} σ(W'_{k,2} x'_0 + b'_{k,2})       Eq. 34

so that x'_j = W'_{j,1} x'_0 + b'_{j,3} + Σ_{k<=j} W'_{k,3} σ(W'_{k,2} x'_0 + b'_{k,2}): Eq. 21 for one layer, Eq. 23
for two, Eq. 33 for any number. While layers are added, the sum over k is carried as one vector, UAT^R of Eq. 24. After
the last layer every W'_{k,3} is computed, and Eq. 33 is evaluated again from the matrices alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.analysis.network.file import NetworkFile
from duat_cli.analysis.network.layer import Layer
from duat_cli.errors import needed
from duat_cli.models.arrays import relative_error, token_errors


@dataclass(frozen=True)
class Own:
    """Values that the model itself computed in one layer."""

    output: Tensor  # x_j, (N, M)
    unit: Tensor | None = None  # output of its FFN unit, (N, width)
    pre_activation: Tensor | None = None  # input of σ, (N, rows); None where no module shows it


@dataclass(frozen=True)
class StepErrors:
    """Relative errors of one layer's equation against the model, of all tokens together or of the worst, except that of
    the unit; None where there is nothing to compare."""

    output: float
    unit: float | None
    pre_activation: float | None

    def largest(self) -> float:
        return max(error for error in (self.output, self.unit, self.pre_activation) if error is not None)


class Evaluation:
    """The equations, to which layers are added one by one; their matrices are written to the file layer by layer."""

    def __init__(self, x0: Tensor, file: NetworkFile) -> None:
        """x0: the first layer's input, (N, M)."""
        self._x0, self._file = x0.reshape(-1), file
        self._tokens = len(x0)
        self._W1: Tensor | None = None  # W'_{j,1}; None: no layer yet
        self._b3 = torch.zeros_like(self._x0)
        self._rest = torch.zeros_like(self._x0)  # UAT^R_j
        self._active: list[Tensor | None] = []  # σ(…) of every layer
        self._output = x0  # of the model's own last layer

    def add(self, layer: Layer, own: Own) -> StepErrors:
        """Adds the next layer, and compares it with the model."""
        number = len(self._active) + 1
        W1 = layer.W1 if self._W1 is None else layer.W1 @ self._W1
        before, rest = self._b3, self._rest
        b3, carried = layer.W1 @ before + layer.b3, layer.W1 @ rest
        self._file.originals(number, layer)
        self._file.add(number, W1=W1, b3=b3)
        h, unit, pre = None, None, None
        if layer.hidden is not None:
            assert layer.W2 is not None
            assert layer.b2 is not None
            assert layer.W3 is not None
            W2 = layer.W2 if self._W1 is None else layer.W2 @ self._W1
            b2 = (layer.W2 @ before + layer.b2) + layer.W2 @ rest
            self._file.add(number, W2=W2, b2=b2)
            read = W2 @ self._x0, b2
            a = functools.reduce(torch.add, read)
            h = layer.hidden.sigma(a)
            carried = carried + layer.W3 @ h
            pre = None if own.pre_activation is None else _far(a, own.pre_activation, read)
            if own.unit is not None:
                unit = relative_error(layer.hidden.output(h.reshape(self._tokens, -1)), own.unit)
        self._W1, self._b3, self._rest = W1, b3, carried
        self._active.append(h)
        parts = W1 @ self._x0, b3, carried
        x = functools.reduce(torch.add, parts)
        self._file.add(number, x=x)
        output = _far(x, own.output, [self._output, *parts])
        self._output = own.output
        return StepErrors(output, unit, pre)

    def finish(self) -> float:
        """Computes every W'_{k,3} of all layers together; the relative error of Eq. 33 from the matrices alone."""
        linear = needed(self._W1) @ self._x0
        dynamic = torch.zeros_like(linear)
        behind: Tensor | None = None  # product of the original W'_{L,1} … W'_{k+1,1}; None: the identity
        for k in range(len(self._active), 0, -1):
            h = self._active[k - 1]
            if h is not None:
                W3 = self._file.original(k, "W3").to(linear.device)
                W3 = W3 if behind is None else behind @ W3
                self._file.add(k, W3=W3)
                dynamic = dynamic + W3 @ h
            W1 = self._file.original(k, "W1").to(linear.device)
            behind = W1 if behind is None else behind @ W1
        parts = linear, self._b3, dynamic
        return _far(functools.reduce(torch.add, parts), self._output, parts)


def _far(made: Tensor, own: Tensor, beside: Sequence[Tensor]) -> float:
    """Error of a vector that the equation gives, (N rows), against the model's own, (N, rows). beside: as for
    `token_errors`."""
    [error] = token_errors(made.reshape(own.shape), own, [one.reshape(len(own), -1) for one in beside], 1)
    return error
