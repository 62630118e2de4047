"""Reports of 80 blocks and 15 prompts: the samples' lists made long, with numbers of as many digits as real ones."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Any

import sample_reports as sample
from pages import compare_page, inspect_page

from duat_cli.report.schema import REPORTS as MODELS
from duat_cli.results.base import Result

BLOCKS, PROMPTS, HEADS, TOKENS = 80, 15, 32, 128
MAP = 64  # tokens of a map
Lists = dict[str, tuple[int, dict[str, Callable[[int], Any]]]]
"""By path, such as 'blocks[].prompts': how many entries a list has, and the fields that number them."""


def _number(i: int) -> int:
    return i


def _of_head(i: int) -> int:
    return i // HEADS


_INDEXED = (BLOCKS, {"index": _number})
_PROMPTS = (PROMPTS, {"prompt": _number})
_ATTRIBUTE: Lists = {
    "prompts": (PROMPTS, {}),
    "attribution": _PROMPTS,
    "attribution[].parts.tokens": (TOKENS, {"position": _number, "text": lambda i: f" token {i}"}),
    "attribution[].parts.static.blocks": (BLOCKS, {}),
    "attribution[].parts.units": (BLOCKS, {"block": _number, "unit": lambda i: 0}),
    "attribution[].parts.units[].tokens": (TOKENS, {}),
    "attribution[].parts.neurons": (10, {"index": _number}),
    "attribution[].direct.heads": (BLOCKS * HEADS, {"block": _of_head, "head": lambda i: i % HEADS}),
    "attribution[].direct.units": (BLOCKS, {"block": _number, "unit": lambda i: 0}),
    "attribution[].flows": (10, {"block": lambda i: 8 * i}),
    "attribution[].flows[].moves": (10, {"source": lambda i: 9 * i, "target": lambda i: TOKENS - 1 - i}),
    "attribution[].measured.heads": (10, {"block": lambda i: 8 * i}),
    "attribution[].measured.tokens": (10, {"position": _number}),
    "continuations": (1, {}),
    "summary.units": (BLOCKS, {}),
    "summary.heads": (10, {"block": _number}),
}
_INSPECT: Lists = {
    "prompts": (PROMPTS, {}),
    "blocks": _INDEXED,
    "blocks[].prompts": _PROMPTS,
    "terms": (BLOCKS, {"block": _number, "name": lambda i: f"model.layers.{i}.mlp"}),
}
_COMPARE: Lists = {
    "prompts": (PROMPTS, {"label": lambda i: f"--prompt {i + 1}"}),
    "comparison.blocks": _INDEXED,
    "comparison.blocks[].heads": (HEADS, {"head": _number}),
    "pairs": (PROMPTS - 1, {"b": lambda i: i + 1}),
    "pairs[].blocks": _INDEXED,
    "pairs[].blocks[].heads": (HEADS, {"head": _number}),
    "context.runs": (PROMPTS, {"prompt": _number, "label": lambda i: f"--prefix {i}"}),
    "context.runs[].reads": (PROMPTS - 2, {"demonstration": lambda i: i + 1}),
    "context.runs[].reads[].blocks": _INDEXED,
}
_KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_MODULES = (
    BLOCKS * len(_KINDS),
    {"name": lambda i: f"model.layers.{i // len(_KINDS)}.self_attn.{_KINDS[i % len(_KINDS)]}"},
)
_LORA: Lists = {
    "prompts": (PROMPTS, {}),
    "modules": _MODULES,
    "modules[].singular_values": (16, {}),
    "blocks": _INDEXED,
    "by_prompt": _PROMPTS,
}
_NEURONS = 256  # of a block; real ones have more, and leave out more
_TERMS = 3 + HEADS + _NEURONS
_PRUNE: Lists = {
    "prompts": (PROMPTS, {}),
    "blocks": _INDEXED,
    "terms": (
        BLOCKS * _TERMS,
        {
            "block": lambda i: i // _TERMS,
            "index": lambda i: None if i % _TERMS < 3 else i % _TERMS - 3,
            "kind": lambda i: [*("block", "attention", "ffn"), *["head"] * HEADS, *["neuron"] * _NEURONS][i % _TERMS],
        },
    ),
    "plans[].set": (10_000, {}),
    "plans[].curve": (12, {"removed": _number}),
}


def _check(document: dict[str, Any]) -> None:
    """One cause behind the drift of all tensors."""
    moved = document["outcomes"][0]
    names = [f"model.layers.{i}.{kind}.weight" for i in range(BLOCKS) for kind in _KINDS]
    document["outcomes"] += [
        {**moved, "where": f"weights.{name}", "message": f"'{name}' moved", "block": i // len(_KINDS)}
        for i, name in enumerate(names)
    ]
    document["causes"][0]["findings"] += range(len(document["outcomes"]) - len(names), len(document["outcomes"]))


def _maps(document: dict[str, Any]) -> None:
    """Of three prompts, with the four digits that a report keeps of them."""
    draw = random.Random(5)
    document["maps"] = [
        {
            "prompt": prompt,
            "total_tokens": 200,
            "tokens": [f" token {i}" for i in range(MAP)],
            "blocks": [
                {
                    "index": index,
                    "coupling": [[float(f"{draw.random():.4g}") for _ in range(i + 1)] for i in range(MAP)],
                }
                for index in range(BLOCKS)
            ],
        }
        for prompt in range(3)
    ]


def _measured(document: dict[str, Any]) -> None:
    """Only a sample of the terms is ablated for real."""
    for number, term in enumerate(document["terms"]):
        if number % 97:
            term.update(measured=None, reasons={"measured": "not in the sample that was ablated"})


SOURCES: dict[str, tuple[Callable[[], Result], Lists]] = {
    "attribute": (sample.attribute_report, _ATTRIBUTE),
    "check": (sample.check_report, {"prompts": (PROMPTS, {})}),
    "compare": (lambda: compare_page(several=True), _COMPARE),
    "compare, losses": (sample.fixed_report, {}),
    "inspect": (inspect_page, _INSPECT),
    "lora-diff": (lambda: sample.lora_report(full=True, prompts_too=True), _LORA),
    "matrix": (sample.matrix_report, {}),
    "matrix --network": (sample.network_report, {"layers": (BLOCKS + 1, {"layer": _number})}),
    "plan": (sample.plan_report, {"weights.layers": (4, {})}),
    "prune-bound": (lambda: sample.prune_report(repaired=True), _PRUNE),
}
_FINISH = {"check": _check, "inspect": _maps, "prune-bound": _measured}


@functools.cache
def large(name: str) -> Result:
    """A report of 80 blocks and 15 prompts."""
    made, lists = SOURCES[name]
    document = _grown(made().model_dump(mode="json"), lists, random.Random(3), "")
    _FINISH.get(name, lambda document: None)(document)
    return MODELS[document["command"]].model_validate(document)


@functools.cache
def _bounded(path: str) -> bool:
    return re.search("tolerance|share|exceed|high|low", path) is not None


def _grown(value: Any, lists: Lists, draw: random.Random, path: str) -> Any:
    """The JSON with its lists made long; a number becomes one of the same sign and size with 17 digits."""
    if isinstance(value, dict):
        return {key: _grown(inner, lists, draw, f"{path}.{key}".lstrip(".")) for key, inner in value.items()}
    if isinstance(value, list):
        count, numbers = lists.get(path, (len(value), {}))
        entries = [_grown(value[i % len(value)], lists, draw, f"{path}[]") for i in range(count)] if value else []
        for i, entry in enumerate(entries if numbers else ()):
            entry.update({key: make(i) for key, make in numbers.items()})
        return entries
    if isinstance(value, float) and not _bounded(path):
        return value * draw.uniform(0.7, 1.0)
    return value
