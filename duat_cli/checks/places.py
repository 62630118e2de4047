"""The place of a tensor by its name: its block, and whether it is attention. No architecture is known here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from duat_cli.loading.checkpoint.sizes import DEPTH, HEAD_WIDTH, HEADS, WIDTH, text_config

_NUMBERED = re.compile(r"(?:^|(?<=\.))(\d{1,6})(?=\.)")
_ATTENTION = re.compile(r"attn|attention|(?:^|\.)att(?:\.|$)", re.IGNORECASE)

# Layers of attention, by the last part of their names
_FORMS = "{}_proj", "{}_lin", "{}", "w{}", "W{}", "to_{}"
_QUERIES = frozenset(("query", "query_proj", "q_b_proj", "q_attn")).union(form.format("q") for form in _FORMS)
_KEYS = frozenset(("key", "key_proj")).union(form.format("k") for form in _FORMS)
_VALUES = frozenset(("value", "value_proj")).union(form.format("v") for form in _FORMS)
_KEYS_VALUES = "kv_b_proj"  # keys and values of each head, made of a latent that all heads share
_FUSED = frozenset(("c_attn", "query_key_value", "in_proj", "in_proj_weight")).union(f.format("qkv") for f in _FORMS)
_OUTPUTS = "o_proj", "c_proj", "out_proj", "out_lin", "out", "o", "wo", "Wo", "to_out", "proj", "dense"
_FFN = re.compile(r"(?:^|[._])(?:mlp|ffn?|feed_?forward|experts?|fc\d)(?:[._]|$)", re.IGNORECASE)
_LINEAR = re.compile(r"(?:^|\.)linear_att(?:n|ention)\.")  # a mixer with heads of its own, beside softmax attention

Role = Literal["routing", "values", "FFN"]
"""Role of a layer: queries and keys; values and outputs of attention; layers of FFNs."""


@dataclass(frozen=True, order=True)
class BlockPlace:
    """The stack that a block belongs to and its number there, such as 'model.layers', 3."""

    stack: str
    index: int

    def __str__(self) -> str:
        return f"block {self.index}"


def block_of(name: str) -> tuple[BlockPlace, str] | None:
    """The block of a tensor and the tensor's name within it; the first number in a name is that of the block."""
    found = _NUMBERED.search(name)
    if found is None:
        return None
    return BlockPlace(name[: found.start()].rstrip("."), int(found[1])), name[found.end() + 1 :]


def block_number(name: str) -> int | None:
    """The number of a tensor's block; None where it belongs to none."""
    place = block_of(name)
    return place[0].index if place else None


def is_attention(name: str) -> bool:
    return bool(_ATTENTION.search(name))


def role_of(module: str) -> Role | None:
    """The role of a linear layer, by its name; None where the name does not show it, or where the layer makes queries,
    keys and values together."""
    leaf = leaf_of(module)
    if not is_attention(module):
        return "FFN" if _FFN.search(module) else None
    if leaf in _QUERIES | _KEYS:
        return "routing"
    return "values" if leaf in _VALUES.union(_OUTPUTS) else None


def config_of_blocks(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config that states the sizes of the blocks: that of the text model, if there is one. If that is a decoder, it
    is the whole config, because the blocks of the encoder beside it have other sizes."""
    found = text_config(config)
    return config if found is config.get("decoder") else found


def head_width(config: dict[str, Any]) -> int | None:
    """Number of columns of a head, if the config states it."""
    text = config_of_blocks(config)
    stated = _number(text, HEAD_WIDTH)
    if stated:
        return stated
    heads, width = _number(text, HEADS), _number(text, WIDTH)
    return width // heads if heads and width and width % heads == 0 else None


@dataclass(frozen=True)
class Heads:
    """The side of an attention matrix along which its heads are concatenated."""

    made: bool
    """Whether heads lie along its outputs; else along its inputs."""
    width: int
    """Width of a head on that side."""
    numbered: bool
    """Whether it holds one kind of vectors for each head, not queries, keys and values together."""
    count: int | None = None
    """Number of heads, for queries and outputs, if the config states it. Keys and values may have fewer."""


def heads_of(name: str, config: dict[str, Any]) -> Heads | None:
    """The heads of a matrix; None where its name does not show them, or the config does not state their width."""
    leaf, width, text = leaf_of(name), head_width(config), config_of_blocks(config)
    if _LINEAR.search(name):
        return _of_linear(leaf, text)
    plain, rotary, value = (_number(text, (f,)) for f in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries = width if plain is None or rotary is None else plain + rotary
    values, count = value or width, _number(text, HEADS)
    if leaf in _QUERIES | _KEYS:
        return None if queries is None else Heads(True, queries, True, count if leaf in _QUERIES else None)
    if leaf in _VALUES:
        return None if values is None else Heads(True, values, True)
    if leaf == _KEYS_VALUES:
        return None if plain is None or values is None else Heads(True, plain + values, True)
    if leaf in _FUSED:
        return None if width is None else Heads(True, width, False)
    return None if leaf not in _OUTPUTS or values is None else Heads(False, values, True, count)


def _of_linear(leaf: str, text: Mapping[str, Any]) -> Heads | None:
    of = "key" if leaf in _QUERIES | _KEYS else "value"
    width, count = (_number(text, (f,)) for f in (f"linear_{of}_head_dim", f"linear_num_{of}_heads"))
    if width is None or leaf not in _QUERIES.union(_KEYS, _VALUES, _OUTPUTS):
        return None
    return Heads(leaf not in _OUTPUTS, width, True, count)


def outputs_beside(name: str) -> list[str]:
    """Possible names of the output matrix of the same attention."""
    front = name.removesuffix(".weight").removesuffix(leaf_of(name))
    return [f"{front}{leaf}.weight" for leaf in _OUTPUTS]


def leaf_of(name: str) -> str:
    """The name of a weight's layer, without the modules around it and its number in a sequence of layers."""
    return next((part for part in reversed(name.removesuffix(".weight").split(".")) if not part.isdecimal()), "")


def hidden_size(config: dict[str, Any]) -> int | None:
    return _number(config_of_blocks(config), WIDTH)


def depth(config: dict[str, Any]) -> int | None:
    found = depth_field(config)
    return None if found is None else found[1]


def depth_field(config: dict[str, Any]) -> tuple[str, int] | None:
    """The config's field for the number of blocks, and its value."""
    text = config_of_blocks(config)
    return next(((name, number) for name in DEPTH if (number := _number(text, (name,))) is not None), None)


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((config[n] for n in names if type(config.get(n)) is int and config[n] > 0), None)
