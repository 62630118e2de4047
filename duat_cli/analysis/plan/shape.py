"""The sizes that the memory of a run depends on, from config.json and the headers of the files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from duat_cli.loading.checkpoint.dtypes import SHORT, SIZES, auto_dtype, no_dtype
from duat_cli.loading.checkpoint.headers import TensorEntry
from duat_cli.loading.checkpoint.parts import Part, Parts, parts_of
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.checkpoint.sizes import DEPTH, EXPERTS, HEAD_WIDTH, HEADS, STREAMS, WIDTH, text_config
from duat_cli.models.budgets import CHANNEL_HEADS

_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
_HEADS_A_CHANNEL = {".rg_lru.recurrent_param": 1, ".time_decay": 2, ".conv.conv.weight": 1}
"""Heads per channel by a tensor's name, for RecurrentGemma, RWKV (whose values are made of two tokens) and LFM2."""
LOADERS = 4  # most threads in which transformers loads tensors


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that decide how much memory a run takes."""

    dtype: str
    """Dtype of weights and arithmetic, such as 'float32'."""
    element: int
    """Bytes of a number of that dtype."""
    parts: Parts
    largest_tensor: int
    """Most bytes of one tensor as it is read; for a quantised one with what the files hold of it."""
    largest_elements: int
    """Most elements of one tensor."""
    cast_at_once: int
    """Bytes as read of the largest tensors that transformers casts from another dtype at the same time."""
    width: int
    """M, the hidden size."""
    streams: int
    """Streams that a token has between blocks."""
    heads: int
    kv_heads: int
    head_width: int
    """d, the head size."""
    inner: int
    """The longest side of a block's matrices, usually the FFN's width."""
    vocabulary: int
    """Width of the logits; 0 where the class has no head."""
    experts: int
    """Routed experts per block."""
    kernels: int
    """How many blocks have a mixer whose kernel treats each channel by itself, like a head."""
    channels: int
    """Channels of such a kernel."""
    state: int
    """Numbers per channel that it carries from token to token."""
    products: float
    """Elements of the matrices that one token meets in all blocks; of routed experts only those that it is sent to."""

    @property
    def weights(self) -> int:
        """Bytes of all weights in memory."""
        every = (self.parts.frame, *self.parts.layers, *self.parts.blocks)
        return sum(part.elements for part in every) * self.element

    @property
    def stream(self) -> int:
        """Numbers of a token between blocks, in all of its streams."""
        return self.width * self.streams

    @property
    def values(self) -> int:
        """Bytes of V of one block, (kv_heads, M, d), held in float32 at least."""
        return self.kv_heads * self.head_width * self.width * self.wide

    @property
    def outputs(self) -> int:
        """Bytes of O of one block, (heads, d, M)."""
        return self.heads * self.head_width * self.width * self.wide

    @property
    def measured_kernels(self) -> int:
        """`kernels`, or 0 if they have too many channels for their W' to be measured."""
        return self.kernels if self.channels <= CHANNEL_HEADS else 0

    @property
    def wide(self) -> int:
        """Bytes of a number computed from activations: at least 4."""
        return max(4, self.element)


def shape_of(files: CheckpointFiles, dtype: str) -> Shape:
    """The shape of a checkpoint. dtype: as for `--dtype`; 'auto' is the one that config.json states or, without it, the
    one of most stored bytes. Raises InputError where models run in no such dtype."""
    named = auto_dtype(files) if dtype == "auto" else SHORT.get(dtype, dtype)
    if named not in SIZES:
        raise no_dtype(dtype)
    element = SIZES[named]
    config = text_config(files.config)
    parts = _loaded(parts_of(files, element), config)
    inside = [tensor for block in parts.blocks for tensor in block.tensors.values()]
    width = _number(config, WIDTH) or _commonest_side(inside)
    heads = _number(config, HEADS) or 1
    kernels = [kernel for block in parts.blocks if (kernel := _kernel(block)) != (0, 0)]
    channels, state = max(kernels, default=(0, 0))
    return Shape(
        dtype=named,
        element=element,
        parts=parts,
        largest_tensor=max((t.read_bytes + (t.bytes if t.made else 0) for t in files.tensors.values()), default=0),
        largest_elements=max((tensor.elements for tensor in files.tensors.values()), default=0),
        cast_at_once=sum(
            sorted(t.read_bytes for t in files.tensors.values() if t.read_bytes != t.elements * element)[-LOADERS:]
        ),
        width=width,
        streams=_number(config, STREAMS) or 1,
        heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_width=_number(config, HEAD_WIDTH) or -(-width // heads),
        vocabulary=_vocabulary(files.config, config),
        experts=_number(config, EXPERTS) or 0,
        inner=max((side for tensor in inside for side in tensor.shape[-2:]), default=width),
        kernels=len(kernels),
        channels=channels,
        state=state,
        products=_products(parts.blocks, config),
    )


def _loaded(parts: Parts, config: Mapping[str, Any]) -> Parts:
    """The parts that are loaded: of a model with one stack of blocks, those that config.json states. Files may hold
    more, such as blocks that predict several tokens ahead. Numbered stages (Swin) are as many as `depths` has."""
    stacks = {block.name.rpartition(".")[0] for block in parts.blocks}
    depth = _number(config, DEPTH)
    if depth is None or len(stacks) != 1 or "depths" in config:
        return parts
    return replace(parts, blocks=tuple(b for b in parts.blocks if int(b.name.rpartition(".")[2]) < depth))


def _number(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """Value of the first of these fields that config has; the largest entry if it is a list with one per layer."""
    for name in names:
        value = config.get(name)
        numbers = [v for v in (value if isinstance(value, list) else [value]) if type(v) is int and v > 0]
        if numbers:
            return max(numbers)
    return None


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    """Number of KV heads. In falcon and gpt_bigcode, multi_query means one; falcon's newer architecture ignores it."""
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:
        return 1
    return _number(config, _KV_HEADS) or heads


def _vocabulary(config: Mapping[str, Any], inner: Mapping[str, Any]) -> int:
    """Size of the vocabulary; 0 for a class such as BertModel, which ends in hidden states."""
    names = [name for name in config.get("architectures") or [] if isinstance(name, str)]
    if names and all(name.endswith("Model") for name in names):
        return 0
    return _number(inner, ("vocab_size",)) or 0


def _commonest_side(tensors: Iterable[TensorEntry]) -> int:
    sides = [side for tensor in tensors if len(tensor.shape) > 1 for side in tensor.shape]
    return max(sides, key=sides.count, default=1)


def _kernel(block: Part) -> tuple[int, int]:
    """How many channels a kernel treats by themselves, and the size of the state of each; zeros without such a kernel.

    Mamba's decay is (channels, state), in Zamba with a first axis of heads; that of Mamba-2 is by head, (heads,).
    """
    for name, tensor in block.tensors.items():
        *channels, state = tensor.shape or (0,)
        if name.endswith(".A_log") and channels:
            return math.prod(channels), state
        if heads := next((heads for end, heads in _HEADS_A_CHANNEL.items() if name.endswith(end)), None):
            return heads * max(tensor.shape, default=0), 1
    return 0, 0


def _products(blocks: Iterable[Part], config: Mapping[str, Any]) -> float:
    """Elements of the matrices that one token meets; matrices of routed experts count by the share it is sent to."""
    experts, chosen = _number(config, EXPERTS), _number(config, _CHOSEN_EXPERTS)
    share = chosen / experts if experts and chosen else 1.0
    return sum(
        tensor.elements * (share if ".experts." in name else 1.0)
        for block in blocks
        for name, tensor in block.tensors.items()
        if len(tensor.shape) > 1
    )
