"""What the criteria need of the calibration windows: moments of the layers' inputs, and slopes of a loss in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.criteria.layers import Layer, seeing

Loss = Callable[[Tensor, Tensor], Tensor]  # logits (1, tokens, vocabulary) and token ids (1, tokens) -> nats a token


@dataclass(frozen=True)
class Moments:
    """Of one layer's inputs over all tokens, (inputs,) each, float64."""

    squares: Tensor
    """Σ x²"""
    mean: Tensor
    variance: Tensor
    """With n - 1."""


@dataclass(frozen=True)
class Slopes:
    """Of one layer, (terms,) each, float64: g is the slope of the loss in an input x, a window's mean."""

    of_sums: Tensor
    """Mean over windows of |Σ g x|, the sum over the window's tokens and the term's inputs."""
    of_each: Tensor
    """Mean over windows of Σ |g x|."""


def moments(model: Any, layers: Sequence[Layer], windows: Tensor) -> list[Moments]:
    """Of every layer."""
    seen: list[list[Tensor]] = [[] for _ in layers]

    def see(number: int, value: Tensor) -> None:
        seen[number].append(value.detach().flatten(0, -2).double())

    with torch.no_grad(), seeing(layers, see):
        for ids in windows.split(1):
            model(input_ids=ids)
    rows = [torch.cat(values) for values in seen]
    return [Moments(x.square().sum(dim=0), x.mean(dim=0), x.var(dim=0)) for x in rows]


def slopes(model: Any, layers: Sequence[Layer], windows: Tensor, loss: Loss) -> list[Slopes]:
    """Of every layer."""
    sums = [torch.zeros(layer.terms, dtype=torch.float64) for layer in layers]
    each = [torch.zeros(layer.terms, dtype=torch.float64) for layer in layers]
    for ids in windows.split(1):
        inputs: dict[int, Tensor] = {}

        def see(number: int, value: Tensor, inputs: dict[int, Tensor] = inputs) -> Tensor:
            inputs[number] = value if value.requires_grad else value.requires_grad_()
            return inputs[number]

        with torch.enable_grad(), seeing(layers, see):
            found = loss(model(input_ids=ids).logits, ids)
            gradients = torch.autograd.grad(found, [inputs[k] for k in range(len(layers))])
        for number, (layer, gradient) in enumerate(zip(layers, gradients, strict=True)):
            product = (gradient * inputs[number].detach()).double().reshape(-1, layer.terms, layer.width)
            sums[number] += product.sum(dim=(0, 2)).abs() / len(windows)
            each[number] += product.abs().sum(dim=(0, 2)) / len(windows)
    return [Slopes(a, b) for a, b in zip(sums, each, strict=True)]


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy of the next token."""
    return functional.cross_entropy(logits[0, :-1], ids[0, 1:])


def entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean entropy of the next-token distribution; the text's own tokens do not enter."""
    found = logits.log_softmax(dim=-1)
    return -(found.exp() * found).sum(dim=-1).mean()


def cosines(structure: Any, model: Any, windows: Tensor) -> Tensor:
    """Mean over tokens of the cosine of every block's input and output, (blocks,) float64."""
    found = torch.zeros(len(structure.calls), dtype=torch.float64)

    def hook(number: int) -> Callable[..., None]:
        def after(_module: Any, args: Any, output: Any) -> None:
            hidden = output if isinstance(output, Tensor) else output[0]
            found[number] += functional.cosine_similarity(args[0].double(), hidden.double(), dim=-1).mean()

        return after

    handles = [module.register_forward_hook(hook(number)) for number, module in enumerate(structure.calls)]
    try:
        with torch.no_grad():
            for ids in windows.split(1):
                model(input_ids=ids)
    finally:
        for handle in handles:
            handle.remove()
    return found / len(windows)
