"""Second ways to remove a term: the weights themselves set to zero, or the term scaled in the model's own pass.

`Own` names modules by hand; nothing of the package finds them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from helpers import token_ids
from sharing import SHARING, model_of
from torch import Tensor, nn

from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.terms.sites import TermId


@dataclass(frozen=True)
class Own:
    """Where a model type keeps what writes to the residual stream, inside a block; `experts` is a fused module."""

    blocks: str
    attention: str
    down: str | None = None
    experts: str | None = None
    second: str | None = None  # what another unit ends in
    calls: int = 1  # blocks share their weights: how often each is called


_LAYERS = "model.layers"
OWN = {
    "llama": Own(_LAYERS, "self_attn.o_proj", "mlp.down_proj"),  # grouped heads
    "gpt2": Own("transformer.h", "attn.c_proj", "mlp.c_proj"),  # Conv1D, biases
    "bert": Own("bert.encoder.layer", "attention.output.dense", "output.dense"),  # post-norm
    "gemma2": Own(_LAYERS, "self_attn.o_proj", "mlp.down_proj"),  # sandwich
    "phi3": Own(_LAYERS, "self_attn.o_proj", "mlp.down_proj"),  # fused
    "falcon": Own("transformer.h", "self_attention.dense", "mlp.dense_4h_to_h"),  # adds in place
    "cohere": Own(_LAYERS, "self_attn.o_proj", "mlp.down_proj"),  # parallel
    "mixtral": Own(_LAYERS, "self_attn.o_proj", experts="mlp.experts"),
    "qwen3_moe": Own(_LAYERS, "self_attn.o_proj", "mlp.down_proj", "mlp.experts"),  # a dense block, sparse ones
    "xlnet": Own("transformer.layer", "", "ff.layer_2"),  # tokens in front of the batch; the residual inside attention
    "gpt_oss": Own(_LAYERS, "self_attn.o_proj", experts="mlp.experts"),  # sinks; experts with biases
    "gemma4 sharing": Own(
        _LAYERS, "self_attn.o_proj", "mlp.down_proj", second="per_layer_projection"
    ),  # the last blocks read keys of blocks in front
}


def head_dim(model: Any) -> int:
    """d of a head, as its modules or the config have it."""
    stated = (getattr(module, "head_dim", None) for module in model.modules())
    config = model.config.get_text_config()
    return next((d for d in stated if d), None) or config.hidden_size // config.num_attention_heads


@contextlib.contextmanager
def weights_zeroed(model: Any, own: Own, terms: list[TermId]) -> Iterator[None]:
    """While active, the weights that make these terms are zero; a block is passed over."""
    blocks = model.get_submodule(own.blocks)
    kept: dict[nn.Parameter, Tensor] = {}
    with contextlib.ExitStack() as stack, torch.no_grad():
        for term in terms:
            block = blocks[term.block]
            if term.kind == "block":
                before = block.forward
                stack.callback(setattr, block, "forward", before)
                block.forward = _passed_over(before)
                continue
            for parameter, rows in _rows(block, own, term, head_dim(model)):
                kept.setdefault(parameter, parameter.detach().clone())
                parameter[rows] = 0
        try:
            yield
        finally:
            for parameter, value in kept.items():
                parameter.copy_(value)


def _passed_over(forward: Callable[..., Any]) -> Callable[..., Any]:
    def identity(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(hidden.clone(), *args, **kwargs)
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    return identity


def _rows(block: nn.Module, own: Own, term: TermId, width: int) -> list[tuple[nn.Parameter, Any]]:
    everything = slice(None)
    if term.kind in ("attention", "head"):
        linear = block.get_submodule(own.attention)
        if term.kind == "attention":
            return [(p, everything) for p in linear.parameters()]
        assert term.index is not None
        return [_features(linear, slice(term.index * width, (term.index + 1) * width))]
    dense = own.down is not None and _has(block, own.down)
    if term.kind == "neuron":
        assert own.down is not None
        return [_features(block.get_submodule(own.down), term.index)]
    if term.kind == "ffn" and dense:
        end = own.second if term.index else own.down
        return [(p, everything) for p in block.get_submodule(str(end)).parameters()]
    experts = block.get_submodule(str(own.experts))
    rows = everything if term.kind == "ffn" else term.index
    return [(p, rows) for name, p in experts.named_parameters() if name.startswith("down_proj")]


def _has(block: nn.Module, path: str) -> bool:
    with contextlib.suppress(AttributeError):
        return isinstance(block.get_submodule(path), nn.Module)
    return False


def _features(linear: nn.Module, which: Any) -> tuple[nn.Parameter, Any]:
    """The weights that one of the layer's input features meets."""
    weight: nn.Parameter = linear.weight  # type: ignore[assignment]
    return (weight, (which,)) if type(linear).__name__ == "Conv1D" else (weight, (slice(None), which))


def scaled(structure: Any, sites: Any, forward: Callable[[], Tensor], term: TermId, factor: float) -> Tensor:
    """The pass with one term multiplied by a factor, every block run: for differences by hand."""
    module, turn = structure.calls[term.block], structure.calls[: term.block].count(structure.calls[term.block])
    count = 0

    def here(step: int = 0) -> bool:
        nonlocal count
        count += step
        return count - 1 == turn

    if term.kind == "block":
        seen: list[Tensor] = []
        slot = structure.block(term.block).parts.hidden
        handles = [
            module.register_forward_pre_hook(lambda m, a, k: seen.append(slot.get(a, k).clone()), with_kwargs=True),
            module.register_forward_hook(lambda m, a, o: _mixed(o, seen[-1], factor) if here(1) else None),
        ]
    else:
        site, place = sites[module].find(term)

        def edit(value: Tensor, index: Tensor | None) -> Tensor:
            keep = torch.ones(site.count)
            keep[place] = factor
            if index is not None:
                return value * keep[index]
            return (
                (value.unflatten(-1, (site.count, -1)) * keep[:, None]).flatten(-2) if site.count > 1 else value * keep
            )

        def before(m: Any, args: Any, kwargs: Any) -> Any:
            if not here():
                return None
            if site.routing is None:
                return (edit(args[0], None), *args[1:]), kwargs
            args, kwargs = list(args), dict(kwargs)
            read = lambda key: args[key] if isinstance(key, int) else kwargs[key]  # noqa: E731
            new = edit(read(site.routing.weights), read(site.routing.index))
            (args if isinstance(site.routing.weights, int) else kwargs)[site.routing.weights] = new
            return tuple(args), kwargs

        def after(m: Any, args: Any, output: Any) -> Any:
            if not here():
                return None
            return edit(output, None) if isinstance(output, Tensor) else (edit(output[0], None), *output[1:])

        def begin(m: Any, args: Any) -> None:
            here(1)

        handles = [module.register_forward_pre_hook(begin)]
        if site.place == "output":
            handles.append(site.watched.register_forward_hook(after))
        else:
            handles.append(site.watched.register_forward_pre_hook(before, with_kwargs=True))
    try:
        with torch.no_grad():
            return forward()
    finally:
        for handle in handles:
            handle.remove()


def _mixed(output: Any, before: Tensor, factor: float) -> Any:
    hidden = output if isinstance(output, Tensor) else output[0]
    mixed = before + factor * (hidden - before)
    return mixed if isinstance(output, Tensor) else (mixed, *output[1:])


TYPES = ["llama", "gpt2", "bert", "gemma2", "falcon", "mixtral", "gpt_oss", "albert", "jamba", "t5", *SHARING]


@functools.cache
def prepared(model_type: str) -> tuple[Any, ModelStructure, Tensor]:
    model = model_of(model_type)
    structure = discover(model)
    return model, structure, token_ids(structure.stack)


def forward_of(structure: ModelStructure, ids: Tensor) -> Callable[[], Tensor]:
    return lambda: run_stack(structure.stack, ids)[0]


def untouched(model: nn.Module) -> bool:
    return not any("forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
