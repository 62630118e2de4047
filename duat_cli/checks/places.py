"""What a tensor's name says of its place: block, attention or not. Names only; no architecture is known here."""

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
_KEYS_VALUES = "kv_b_proj"  # of each head, behind what all heads have in common
_FUSED = frozenset(("c_attn", "query_key_value", "in_proj", "in_proj_weight")).union(f.format("qkv") for f in _FORMS)
_OUTPUTS = "o_proj", "c_proj", "out_proj", "out_lin", "out", "o", "wo", "Wo", "to_out", "proj", "dense"
_FFN = re.compile(r"(?:^|[._])(?:mlp|ffn?|feed_?forward|experts?|fc\d)(?:[._]|$)", re.IGNORECASE)
_LINEAR = re.compile(r"(?:^|\.)linear_att(?:n|ention)\.")  # a mixer with heads of its own, beside softmax attention

Role = Literal["routing", "values", "FFN"]
"""Queries and keys; values and outputs of attention; layers of FFNs."""


@dataclass(frozen=True, order=True)
class BlockPlace:
    """'model.layers', 3: the stack that a block belongs to, and its number there."""

    stack: str
    index: int

    def __str__(self) -> str:
        return f"block {self.index}"


def block_of(name: str) -> tuple[BlockPlace, str] | None:
    """The block of a tensor and its name within it: the first number of a name is the block's."""
    found = _NUMBERED.search(name)
    if found is None:
        return None
    return BlockPlace(name[: found.start()].rstrip("."), int(found[1])), name[found.end() + 1 :]


def block_number(name: str) -> int | None:
    """Of the block of a tensor; None where it belongs to none."""
    place = block_of(name)
    return place[0].index if place else None


def is_attention(name: str) -> bool:
    return bool(_ATTENTION.search(name))


def role_of(module: str) -> Role | None:
    """What a linear layer does, by its name; None where the name does not say, or where it is queries, keys and values
    in one."""
    leaf = leaf_of(module)
    if not is_attention(module):
        return "FFN" if _FFN.search(module) else None
    if leaf in _QUERIES | _KEYS:
        return "routing"
    return "values" if leaf in _VALUES.union(_OUTPUTS) else None


def config_of_blocks(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config that says how large the blocks of the files are: that of its text model, if it has one. Beside a
    decoder stands an encoder, whose blocks have sizes of their own: then the whole."""
    found = text_config(config)
    return config if found is config.get("decoder") else found


def head_width(config: dict[str, Any]) -> int | None:
    """Columns a head takes, where the config says so."""
    text = config_of_blocks(config)
    stated = _number(text, HEAD_WIDTH)
    if stated:
        return stated
    heads, width = _number(text, HEADS), _number(text, WIDTH)
    return width // heads if heads and width and width % heads == 0 else None


@dataclass(frozen=True)
class Heads:
    """Which side of an attention matrix its heads lie along, one behind the other."""

    made: bool
    """Its outputs are what heads have; else its inputs are."""
    width: int
    """Of a head on that side."""
    numbered: bool
    """Whether it holds one thing of each head: not queries, keys and values together."""
    count: int | None = None
    """How many there are: of queries and outputs, where the config says so. Keys and values may have fewer."""


def heads_of(name: str, config: dict[str, Any]) -> Heads | None:
    """Of a matrix; None where its name does not say, or the config does not say how wide a head is."""
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
    """What the output matrix of the same attention may be called."""
    front = name.removesuffix(".weight").removesuffix(leaf_of(name))
    return [f"{front}{leaf}.weight" for leaf in _OUTPUTS]


def leaf_of(name: str) -> str:
    """The name of a weight's layer, without what it stands in and its number in a sequence of layers."""
    return next((part for part in reversed(name.removesuffix(".weight").split(".")) if not part.isdecimal()), "")


def hidden_size(config: dict[str, Any]) -> int | None:
    return _number(config_of_blocks(config), WIDTH)


def depth(config: dict[str, Any]) -> int | None:
    found = depth_field(config)
    return None if found is None else found[1]


def depth_field(config: dict[str, Any]) -> tuple[str, int] | None:
    """The field that says how many blocks there are, and what it says."""
    text = config_of_blocks(config)
    return next(((name, number) for name in DEPTH if (number := _number(text, (name,))) is not None), None)


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((config[n] for n in names if type(config.get(n)) is int and config[n] > 0), None)
