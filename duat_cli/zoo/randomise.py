"""Random weights under which no mistake stays hidden: gains differ from 1, biases from 0, attention is not uniform."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from duat_cli.compat.torch import buffers_of, is_convolution, parameters_of, unsaved_buffers
from duat_cli.compat.transformers import is_conv1d

# Dynamics of state-space and recurrent layers; only their own initial values are stable.
_DYNAMICS = re.compile(r"\.(A_log|A|D|dt_bias|dt_proj\.bias|time_decay|time_first|recurrent_param)$")
# Computed from the config, but saved; other values are no decay, and let tokens see later ones.
_MADE = re.compile(r"\.(slope_rate|(query|key|diagonal)_decay)$")
_QUERY_KEY = re.compile(r"[._](q|k|qk|kv|qkv|query|key|query_key_value|c_attn|Wqkv|attn_qkv|in_proj)([._]|$)")
_SCALE = re.compile(r"[._](scale|temp)$")  # start at 0 in some files: attention would be uniform


def randomise(model: nn.Module, seed: int) -> None:
    """Draw every parameter and every saved buffer anew, in place, from the seed alone.

    Weights N(0, 1/fan-in), queries and keys 1.4 times that (attention is then not uniform), embeddings
    N(0, 1/4), biases N(0, 0.01), gains within 0.3 of the 1 or 0 they start from.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module, name, tensor in _tensors(model):
            if tensor.is_floating_point() and tensor.numel():
                tensor.copy_(_draw(module, name, tensor, generator))


def _tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """(owner, full name, tensor) of every parameter and persistent buffer, shared ones once."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        buffers = buffers_of(module)
        saved = sorted(set(buffers) - unsaved_buffers(module))
        for name, tensor in [*parameters_of(module).items(), *((b, buffers[b]) for b in saved)]:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield module, f"{path}.{name}", tensor


def _draw(owner: nn.Module, name: str, old: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(old.shape, generator=generator)
    if _MADE.search(name):
        return old
    if _DYNAMICS.search(name):
        return old + 0.05 * noise
    if isinstance(owner, nn.Embedding):
        return 0.5 * noise
    if old.ndim >= 2:
        sharp = 1.4 if _QUERY_KEY.search(name) else 1.0
        return noise * sharp / _fan_in(owner, old) ** 0.5
    if name.endswith("bias"):
        return 0.1 * noise
    uniform = torch.rand(old.shape, generator=generator) * 2 - 1
    return _start(name, old) + 0.3 * uniform


def _start(name: str, old: Tensor) -> Tensor:
    """The value a gain varies around: the constant it is stored around, 1 or (gemma) 0."""
    if _SCALE.search(name):
        return torch.ones(())
    first = old.flatten()[0]
    return first if torch.equal(old, first.expand_as(old)) else torch.zeros(())


def _fan_in(owner: nn.Module, weight: Tensor) -> int:
    if is_convolution(owner):
        return weight[0].numel()
    if is_conv1d(owner):  # stored (in, out)
        return weight.shape[0]
    return weight.shape[-1]
