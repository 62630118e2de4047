"""Rules about the headers, without reading any value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from duat_cli.checks.places import block_of, depth
from duat_cli.checks.rule import Evidence, Measurement, Rule, Settings
from duat_cli.grouping import by_key
from duat_cli.loading.checkpoint.dtypes import RUN_IN, rounded_at_load
from duat_cli.loading.checkpoint.index import INDEX
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.text import clean, listed, plural, shown, some

_WHOLE = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
# fields of configs whose depth counts runs of blocks and not blocks: EfficientNet's, HRM's, Dory's
_OTHERWISE = {"num_block_repeats", "num_layers_per_stack", "n_recurrent_layers"}
_OTHER = {"BOOL": "truth values", "C64": "complex numbers"}  # what no weight is stored as either, matrix or not
_WEIGHTS = ("weight", "gamma", "beta")  # last parts of names that no table has


def _notes(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Warnings about the files. An index that misplaces tensors is an error, because readers by the index miss them."""
    misplaced = f"{INDEX}: weight_map "
    return [
        Measurement(1, text, grave=bool(evidence.files.misplaced) and text.startswith(misplaced))
        for text in evidence.files.warnings
    ]


def _layers(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Blocks that config.json promises and that have no tensor; none if one block serves for all (albert), or if
    the config counts something else."""
    stated = None if _OTHERWISE & set(evidence.files.config) else depth(evidence.files.config)
    places = {place[0] for name in evidence.files.tensors if (place := block_of(name))}
    stacks = Counter(place.stack for place in places)
    if stated is None or not stacks or max(stacks.values()) == 1:
        return
    stack, held = stacks.most_common(1)[0]
    text = f"config.json promises {plural(stated, 'block')}, the files hold {held} ({shown(stack)})"
    yield Measurement(max(0, stated - held), text, where="config.json")


def _labels(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    names, numbers = (evidence.files.config.get(field) for field in ("id2label", "label2id"))
    if not isinstance(names, dict) or not isinstance(numbers, dict):
        return
    # compared as text, because in memory the keys of id2label may be numbers
    said = [(i, name, numbers[name]) for i, name in names.items() if isinstance(name, str) and name in numbers]
    apart = [
        f"{shown(name)} is {clean(str(i))} and {clean(str(other))}" for i, name, other in said if str(other) != str(i)
    ]
    if apart:
        text = f"id2label and label2id contradict each other in {plural(len(apart), 'label')}: {some(apart, 4)}"
        yield Measurement(len(apart), text, where="config.json")


def _dtype(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    allowed = settings.allowed or ()
    for dtype in RUN_IN:
        names = [n for n, t in evidence.files.tensors.items() if t.dtype == dtype]
        if names and dtype not in allowed:
            text = f"{plural(len(names), 'tensor')} stored as {dtype}: {listed(names)}; allowed: {', '.join(allowed)}"
            yield Measurement(len(names), text, where=min(names))


def _stated_dtype(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    rounded = rounded_at_load(evidence.files)
    if rounded is not None:
        stored, loaded = rounded
        what = "rounds them, and what is larger than 65,504 becomes infinite" if loaded == "float16" else "rounds them"
        text = f"config.json says {loaded}, most weights are stored in {stored}: transformers {what}"
        yield Measurement(1, text, where="config.json")


def _mixed(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    count = Counter(t.dtype for t in evidence.files.tensors.values() if t.dtype in RUN_IN)
    text = ", ".join(f"{number} {dtype}" for dtype, number in count.most_common())
    yield Measurement(max(0, len(count) - 1), f"dtypes of the tensors: {text or 'none'}")


def no_floats(files: CheckpointFiles) -> dict[str, tuple[str, str]]:
    """Tensors in the place of weights that hold no floating-point numbers -> the words for one of its kind and for
    several: integers with more than one row and column, and integers, truth values or complex numbers whose name is
    that of a weight."""
    found = {}
    for name, tensor in files.tensors.items():
        if tensor.dtype in _WHOLE and sum(s > 1 for s in tensor.shape) > 1:
            found[name] = "matrix of integers", "matrices of integers"
        elif tensor.dtype in (*_WHOLE, *_OTHER) and tensor.elements and _is_weight(name, tensor.shape):
            content = _OTHER.get(tensor.dtype, "integers")
            found[name] = f"weight of {content}", f"weights of {content}"
    return found


def _is_weight(name: str, shape: tuple[int, ...]) -> bool:
    leaf = name.rpartition(".")[2]
    return leaf in _WEIGHTS or leaf.endswith("_proj") or (leaf == "bias" and len(shape) == 1)


def _quantised(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    kinds = no_floats(evidence.files)
    for kind, names in by_key((kinds[name], name) for name in kinds if name not in evidence.tables).items():
        yield Measurement(len(names), f"{plural(len(names), *kind)}: {listed(names)}", where=min(names))


RULES = [
    Rule(
        "integrity.files",
        "what the index, the headers and the names in them have wrong without being unreadable; an error where the "
        "index seeks a tensor in the wrong shard",
        "Save the checkpoint again with save_pretrained, which writes index and headers that agree.",
        _notes,
        level="warn",
    ),
    Rule(
        "integrity.layers",
        "blocks that config.json promises and the files lack",
        "Fetch the missing shards, or correct num_hidden_layers in config.json.",
        _layers,
        level="warn",
        unit="blocks",
    ),
    Rule(
        "integrity.labels",
        "labels of a classifier on which id2label and label2id of config.json contradict each other",
        "Find out which of both the training used, and correct the other: a reader of the wrong one swaps classes.",
        _labels,
        level="warn",
        unit="labels",
    ),
    Rule(
        "integrity.dtype",
        "tensors stored in a dtype that is not allowed",
        "Store the checkpoint in an allowed dtype, or add the dtype to `allowed` in the policy.",
        _dtype,
        unit="tensors",
        allowed=tuple(RUN_IN),
    ),
    Rule(
        "integrity.stated_dtype",
        "a dtype in config.json, in which transformers loads the weights, that cannot hold what is stored",
        "Correct dtype in config.json, or store the weights in it.",
        _stated_dtype,
        level="warn",
    ),
    Rule(
        "integrity.mixed_dtypes",
        "floating dtypes beyond the first among the tensors",
        "Store all tensors in one dtype, or raise `max` where the mixture is meant.",
        _mixed,
        level="off",
        unit="dtypes",
    ),
    Rule(
        "integrity.quantised",
        "matrices of integers, whose scales duat does not know: config.json names no format that is read; and weights, "
        "also of norms, stored as integers, truth values or complex numbers",
        "Give the checkpoint in full precision, or dequantise it.",
        _quantised,
        unit="tensors",
    ),
]
