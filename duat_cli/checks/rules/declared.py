"""Rules about drift of a checkpoint's declarations, which cause most changes that the forward pass shows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from duat_cli.checks.rule import Evidence, Measurement, Rule, Settings
from duat_cli.errors import needed
from duat_cli.grouping import by_key
from duat_cli.loading.declared.embedder import PATHS, TYPES
from duat_cli.loading.declared.facts import (
    CONFIG,
    EMBEDDER,
    FILE,
    GENERATION,
    PROCESSOR,
    RESOLVED_BY,
    TOKENIZER,
    Declared,
    below,
)
from duat_cli.loading.declared.tokenizer import CALLS, DIGITS, LATER, TokenizerFacts, range_length
from duat_cli.text import clean, plural, shown, some

_SHORT_TYPES = "modules.json.modules"
_SHOWN = 4  # number of fields, ranges or tokens that are named
_LONGEST = 60  # characters of a value that are shown
Change = tuple[str, Any, Any]
"""Field, old and new value; None where there is none."""


def _config(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """One measurement for each changed field, or group of fields such as rope_parameters."""
    old, declared = needed(evidence.old), needed(evidence.declared)
    groups = by_key((_group(change[0]), change) for change in config_changes(old, declared))
    for group, changes in groups.items():
        yield Measurement(len(changes), f"config.json: {told(changes)}", where=f"{CONFIG}.{group}")
    if alone := _stated_by_one(old, declared):
        why = "the baseline was made without a load, so whether that was the class's default is not known"
        yield Measurement(len(alone), f"config.json: {told(alone)}; {why}", where=CONFIG, level="warn")
    files: dict[str, list[Change]] = {}
    for kind, now in ((EMBEDDER, declared.embedder.fields), (PROCESSOR, declared.processor)):
        before = below(old, kind)  # empty for a baseline that may hold nothing of these files
        for name, was, here in _differing(before, _as_known(before, now)) if before else ():
            file, found, field = name.rpartition(".json.")
            file, field = (f"{file}.json", field) if found else (name.removesuffix(".weights"), "weights")
            files.setdefault(f"{kind}.{file}", []).append((field, was, here))
    for where, changes in files.items():
        yield Measurement(len(changes), f"{clean(where.partition('.')[2])}: {told(changes)}", where=where)
    if evidence.retokenised and declared.tokenizer is None and not files:  # otherwise the tokenizer's rule reports it
        yield Measurement(1, evidence.retokenised, where="prompts")


def _as_known(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """These fields as an older baseline would hold them: for an embedder's modules only the last part of their types,
    not their paths and weights."""
    if _SHORT_TYPES not in before:
        return now
    types = now.get(TYPES)
    now = {name: value for name, value in now.items() if name not in (TYPES, PATHS) and ".json." in name}
    return now | {_SHORT_TYPES: types and [one.rpartition(".")[2] for one in types]}


def config_changes(old: Mapping[str, Any], new: Declared) -> Iterator[Change]:
    """Fields of the config that differ from a baseline's entries.

    Where both have resolved fields, these are compared, and the settings of generation. If one of them comes from a run
    without a load, the fields that both state are compared, and fields that a resolved baseline does not have at all.
    For other fields that only one of them states, the class's default is not known.
    """
    before, written = below(old, CONFIG), below(old, FILE)
    if new.resolved is not None and before:
        yield from _resolved_changes(before, new, same=old.get(RESOLVED_BY) == f"transformers {new.resolved_by}")
        yield from _generation_settings(before, written, new)
        return
    known = before | written
    for name, here in new.stated.items():
        if known.get(name) != here and (name in known or before):
            yield name, known.get(name), here


def _stated_by_one(old: Mapping[str, Any], new: Declared) -> list[Change]:
    """Fields that only one of config.json and a baseline made without a load states."""
    written = below(old, FILE)
    if below(old, CONFIG) or not written:
        return []
    return [one for one in _differing(written, new.stated) if None in one[1:]]


def _generation_settings(before: Mapping[str, Any], written: Mapping[str, Any], new: Declared) -> Iterator[Change]:
    """Changed settings of generation in config.json. transformers reads them if there is no generation_config.json, and
    leaves them out of the resolved config."""
    names = dict.fromkeys([] if new.generation else [*written, *new.stated])
    for name in names:
        known = next((part for part in name.split(".") if part in new.generation_defaults), None)
        if known is None or name in before or name in (new.resolved or {}):
            continue
        default = new.generation_defaults[known]
        was, here = written.get(name, default), new.stated.get(name, default)
        if was != here:
            yield name, was, here


def _differing(
    old: Mapping[str, Any], new: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Iterator[Change]:
    """Entries that differ between two mappings. defaults: values of missing entries; without one None."""
    stated = defaults or {}
    for name in dict.fromkeys([*old, *new]):
        was, here = (side.get(name, stated.get(name)) for side in (old, new))
        if was != here:
            yield name, was, here


def _resolved_changes(before: Mapping[str, Any], new: Declared, *, same: bool) -> Iterator[Change]:
    """Changed fields of the resolved config. same: whether one release of transformers resolved both. Classes of
    another release may have other fields, which then count only if config.json states them."""
    now = new.resolved or {}
    for change in _differing(before, now):
        if same or (change[0] in before and change[0] in now) or change[0] in new.stated:
            yield change


def _group(name: str) -> str:
    """The top field of the config, or of a config inside it, that a path belongs to."""
    parts = name.split(".")
    depth = next((n for n, part in enumerate(parts) if not part.endswith("_config")), len(parts) - 1)
    return ".".join(parts[: depth + 1])


def _tokenizer(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    old, declared = needed(evidence.old), needed(evidence.declared)
    parts = list(_tokenizer_changes(below(old, TOKENIZER), needed(declared.tokenizer))) if below(old, TOKENIZER) else []
    for name, text in parts:
        yield Measurement(1, f"tokenizer: {text}", where=f"{TOKENIZER}.{name}")
    changes = list(generation_changes(below(old, GENERATION), declared))
    if changes:
        yield Measurement(len(changes), f"generation_config.json: {told(changes)}", where=GENERATION)
    if evidence.retokenised and evidence.written and not parts and not changes:
        yield Measurement(0.0, f"as in the baseline; {evidence.retokenised}", where="prompts", undefined="pass")
    elif evidence.retokenised:
        yield Measurement(1, evidence.retokenised, where="prompts", grave=True)  # its effects cannot be compared


def _tokenizer_changes(old: Mapping[str, Any], here: TokenizerFacts) -> Iterator[tuple[str, str]]:
    before = below(old, "parts")
    for name in dict.fromkeys([*before, *here.parts]):
        was, now = before.get(name, "none"), here.parts.get(name, "none")
        if was == now or (name in CALLS and name not in before):  # the baseline is older than this part
            continue
        if name == "vocabulary":
            yield name, _vocabulary_change(old, here)
        elif "none" in (was, now):
            yield name, f"{clean(name)} {'dropped' if now == 'none' else 'added'}"
        else:
            yield name, f"{clean(name)} changed"
    fields = below(old, "fields")
    changes = [one for one in _differing(fields, here.fields) if one[0] not in LATER or one[0] in fields]
    if changes:
        yield "fields", told(changes)


def _vocabulary_change(old: Mapping[str, Any], here: TokenizerFacts) -> str:
    """The text on where the vocabularies differ, as far as hashes of ranges of ids show it."""
    size, ranges = old.get("size"), old.get("ranges")
    if type(size) is not int or not isinstance(ranges, str) or size < 1:
        return "vocabulary changed"
    step, now = range_length(size), here.ranges(size)
    starts = [
        at // DIGITS * step for at in range(0, len(now), DIGITS) if now[at : at + DIGITS] != ranges[at : at + DIGITS]
    ]
    sizes = f"{size} ids → {here.size}" if size != here.size else f"{size} ids"
    if not starts:
        added = [here.vocabulary[i] for i in sorted(here.vocabulary) if i >= size]
        return f"vocabulary: {sizes}{_tokens(added)}"
    runs = ", ".join(f"{at}-{min(at + step, size) - 1}" if step > 1 else str(at) for at in starts[:_SHOWN])
    more = f" and {plural(len(starts) - _SHOWN, 'more range')}" if len(starts) > _SHOWN else ""
    first = [token for i, token in sorted(here.vocabulary.items()) if starts[0] <= i < starts[0] + step]
    return f"vocabulary: {sizes}, other tokens among ids {runs}{more}{_tokens(first)}"


def _tokens(tokens: list[str]) -> str:
    more = ", ..." if len(tokens) > _SHOWN else ""
    return f" (now {', '.join(shown(t, 20) for t in tokens[:_SHOWN])}{more})" if tokens else ""


def generation_changes(old: Mapping[str, Any], new: Declared) -> Iterator[Change]:
    """Fields of generation_config.json that differ; a field that is not stated has its default."""
    return _differing(old, new.generation, new.generation_defaults)


def told(changes: list[Change]) -> str:
    """A text such as 'rope_theta 10000 → 1000000' for the first few changes."""
    return some([f"{clean(name)} {_value(old, new)}" for name, old, new in changes], _SHOWN, "; ", "; and ")


def _value(old: Any, new: Any) -> str:
    """The text 'old → new'; for two lists of one length, at the first place where they differ."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        at = next(n for n, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1])
        count = sum(a != b for a, b in zip(old, new, strict=True))
        more = f" and {count - 1} more of {len(old)}" if count > 1 else ""
        return f"[{at}] {_text(old[at])} → {_text(new[at])}{more}"
    return f"{_text(old)} → {_text(new)}"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    text = clean(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


RULES = [
    Rule(
        "drift.config",
        "fields of config.json, with their defaults, and of an embedder's files (modules, pooling, weights), that "
        "differ from the baseline's; fields that cannot change a result, such as transformers_version or dtype, are "
        "left out",
        "Restore the field; what follows in weights and forward pass may be its effect. If it is meant, run again with "
        "--update-baseline; with --base, let a policy allow it.",
        _config,
        ("baseline", "declared"),
        unit="fields",
    ),
    Rule(
        "drift.tokenizer",
        "vocabulary, merges, normaliser, special tokens, truncation and padding of the file, code that it names, chat "
        "template and generation_config.json against the baseline's, and whether the same texts are still the same "
        "tokens",
        "Restore the tokenizer's files and generation_config.json of the checkpoint that the baseline was made of.",
        _tokenizer,
        ("baseline", "declared", "tokenizer"),
        unit="parts",
    ),
]
