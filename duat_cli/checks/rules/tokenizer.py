"""The rule about the tokenizer: whether its ids fit the embedding, and whether the files agree on where a text ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from duat_cli.checks.rule import Evidence, Measurement, Rule, Settings
from duat_cli.errors import needed
from duat_cli.loading.declared.facts import Declared
from duat_cli.loading.declared.tokenizer import TokenizerFacts
from duat_cli.text import clean, listed, plural, shown

# Fields of config.json and generation_config.json that name special tokens, without '_id'
_ROLES = (
    "bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token",
    "decoder_start_token", "forced_bos_token", "forced_eos_token",
)  # fmt: skip
_NO_TOKEN = -1  # the value of some configs where there is no such token


def _tokenizer(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    said = needed(evidence.declared)
    tokenizer = needed(said.tokenizer)
    yield from _beyond(said, tokenizer)
    for role in ("bos_token", "eos_token"):
        yield from _disagreement(said, tokenizer, role)
    if tokenizer.template_fault:
        text = f"chat template: a syntax error, {clean(tokenizer.template_fault)}"
        yield Measurement(1, text, where="chat_template")
    if tokenizer.template_fails:
        text = f"chat template: of one message of a user it {clean(tokenizer.template_fails)}"
        yield Measurement(1, text, where="chat_template", level="warn")
    if said.generation_fault:
        text = f"generation_config.json: transformers does not load a model beside it: {clean(said.generation_fault)}"
        yield Measurement(1, text, where="generation_config.json")
    elif said.sampling_fault:
        text = f"generation_config.json: generate() fails by it: {clean(said.sampling_fault)}"
        yield Measurement(1, text, where="generation_config.json")
    if lost := tokenizer.lost:
        many = plural(len(lost), "text")
        text = f"tokenizer: {many} not the same after encoding and decoding, such as {shown(lost[0], 60)}"
        yield Measurement(len(lost), text, where="tokenizer.json")


# --- ids within the embedding -----------------------------------------------------------------------------------


def _beyond(said: Declared, tokenizer: TokenizerFacts) -> Iterator[Measurement]:
    rows = said.rows
    if rows is None:
        return
    for file, fields in (("config.json", said.stated), ("generation_config.json", said.generation)):
        for role in _ROLES:
            if (other := _no_id(fields, role)) is not None:
                text = f"{file}: {role}_id is {shown(other, 30)}: expected a whole number, or a list of them"
                yield Measurement(1, text, where=file)
            wrong = [i for i in ids_of(fields, role) if i >= rows or i < _NO_TOKEN]
            if wrong:
                text = f"{file}: {role}_id {', '.join(map(str, wrong))} is no row of the embedding, which has {rows}"
                yield Measurement(len(wrong), text, where=file)
    outside = sorted(i for i in tokenizer.vocabulary if i >= rows)
    foreign = [i for i in outside if i in tokenizer.placeholders and i not in tokenizer.roles.values()]
    yield from _outside(tokenizer, [i for i in outside if i not in foreign], rows)
    why = ": placeholders of images or sound, which no text becomes"
    yield from _outside(tokenizer, foreign, rows, why)


def _outside(tokenizer: TokenizerFacts, ids: list[int], rows: int, why: str = "") -> Iterator[Measurement]:
    """Ids of the tokenizer beyond the embedding. why: the reason why they do no harm; empty where they may."""
    if ids:
        names = listed([tokenizer.vocabulary[i] for i in ids])
        span = f"{ids[0]} to {ids[-1]}" if len(ids) > 1 else f"{ids[0]}"
        text = f"tokenizer: {plural(len(ids), 'id')}, {span} ({names}), beyond the {rows} rows of the embedding{why}"
        yield Measurement(len(ids), text, where="tokenizer.json", level="warn" if why else None)


# --- agreement of the files ----------------------------------------------------------------------------------------


def _no_id(fields: dict[str, Any], role: str) -> str | None:
    """The value in the place of an id that is none, as text; None where all are ids."""
    value = fields.get(f"{role}_id")
    other = [i for i in (value if isinstance(value, list) else [value]) if i is not None and type(i) is not int]
    return str(other[0]) if other else None


def ids_of(fields: dict[str, Any], role: str) -> list[int]:
    """The ids of a role: a field may hold one, a list of them, or none."""
    value = fields.get(f"{role}_id", fields.get(f"text_config.{role}_id"))
    ids = value if isinstance(value, list) else [value]
    return [i for i in ids if type(i) is int]


def _disagreement(said: Declared, tokenizer: TokenizerFacts, role: str) -> Iterator[Measurement]:
    """Files whose ids of a role do not include the tokenizer's own. Further ids beside it are an extension, and pass.

    A disagreement with an explanation only warns, such as that generation_config.json overrides config.json.
    """
    own = tokenizer.roles.get(role)
    files = {"config.json": ids_of(said.stated, role), "generation_config.json": ids_of(said.generation, role)}
    files = {file: [i for i in ids if i != _NO_TOKEN] for file, ids in files.items()}
    files = {file: ids for file, ids in files.items() if ids}
    if own is None:
        yield from _two_files(files, tokenizer, role)
        return
    for file, ids in files.items():
        if own in ids or (said.rows is not None and max(ids) >= said.rows):  # such an id is reported already
            continue
        others = any(own in other for name, other in files.items() if name == "generation_config.json" != file)
        explained = _explained(tokenizer, role, ids, overridden=others)
        mine = f"{own} ({shown(tokenizer.vocabulary.get(own, ''), 30)})"
        text = f"{file}: {role}_id {_named(tokenizer, ids)}, the tokenizer's {role} is {mine}{explained}"
        yield Measurement(1, text, where=file, level="warn" if explained else None)


def _explained(tokenizer: TokenizerFacts, role: str, ids: list[int], *, overridden: bool) -> str:
    """The reason why a disagreement does no harm; empty where there is none."""
    if role == "bos_token":
        if not tokenizer.starts_with_bos:
            return "; the tokenizer puts none in front of a text"
        special = all(i in tokenizer.special for i in ids)
        return "; generation_config.json says the same, and stands over it" if overridden and special else ""
    no_end = {tokenizer.roles.get(name) for name in ("bos_token", "unk_token", "pad_token", "mask_token")}
    ends = [i for i in ids if i in tokenizer.special and i not in no_end]
    if len(ends) == len(ids) and overridden:
        return "; generation_config.json says the same, and stands over it"
    if any(tokenizer.vocabulary.get(i, "\0") in tokenizer.template for i in ends):
        return "; the chat template ends a turn with it"
    return ""


def _two_files(files: dict[str, list[int]], tokenizer: TokenizerFacts, role: str) -> Iterator[Measurement]:
    """The disagreement of both files, for a tokenizer that names no such token."""
    if len(files) < 2 or set(files["config.json"]) & set(files["generation_config.json"]):
        return
    both = " and ".join(f"{_named(tokenizer, ids)} in {file}" for file, ids in files.items())
    special = all(i in tokenizer.special for ids in files.values() for i in ids)
    yield Measurement(1, f"{role}_id is {both}", where="generation_config.json", level="warn" if special else None)


def _named(tokenizer: TokenizerFacts, ids: list[int]) -> str:
    return ", ".join(f"{i} ({shown(tokenizer.vocabulary.get(i, ''), 30)})" for i in ids[:4])


RULES = [
    Rule(
        "integrity.tokenizer",
        "ids that the embedding lacks, of the tokenizer, config.json and generation_config.json; bos and eos on which "
        "these disagree; texts that a tokenizer of bytes does not give back; a chat template with a syntax error, or "
        "that fails on one message of a user; a generation_config.json that transformers refuses",
        "Restore the tokenizer and the two configs from one checkpoint; after adding tokens, resize the embedding.",
        _tokenizer,
        ("tokenizer",),
        unit="faults",
    ),
]
