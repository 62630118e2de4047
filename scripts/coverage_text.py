"""The page of coverage: every model type by what it reads, how far it is read, and the mechanism where it is not."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable

from duat_cli.results.support import SupportEntry, SupportReport

WIDTH = 118
NOT_TRIED = "not tried"
_TITLES = {
    "text": "Text",
    "vision": "Images and video",
    "audio": "Sound",
    "vision-language": "Images and text",
    "audio-language": "Sound and text",
    "several": "Three kinds of input",
    "other": "Other input",
}
_HEAD = """# Which model types are read

```bash
duat support path/to/checkpoint
```

Written by `python scripts/coverage.py` from tiny random models on transformers {version}; `duat support --all` repeats
it, with the error of each. *Exact*: the whole sum, and W' of every block; where several stacks run in one pass, of each
by itself. *Partly*: exact, without the parts that are named; where a model reads token ids alone, that is the tower
that they do not run. *Refused*: the mechanism stands beside it. *Not tried*: no tiny model, or no input for it, could
be made up, and why; a checkpoint may well be read. A convolutional network has no transformer in it, and is among the
refused for lack of attention.
"""
_PLACES = re.compile(r"^[\w.]+(?:, [\w.]+)* \((\w+)\) holds attention and was not read")
_RULES = (
    (re.compile(rf"^{NOT_TRIED}: .*\bhas no forward pass of its own$"), "its class has no forward pass of its own"),
    (re.compile(rf"^{NOT_TRIED}: .*? requires the (\w+) library .*"), r"its code needs the library \1"),
    (re.compile(rf"^{NOT_TRIED}: \d+ parameters.*"), "its config has no form small enough"),
    (re.compile(rf"^{NOT_TRIED}: no made-up `(\w+)` .*"), r"nothing that could be made up suits it as `\1`"),
    (
        re.compile(rf"^{NOT_TRIED}: transformers itself makes no model of its default config: .*"),
        "transformers itself makes no model of its default config",
    ),
    (re.compile(rf"^{NOT_TRIED}: .*"), "its config could not be made small: parts of it have to agree"),
    (re.compile(r"^as a whole, on one kind of input: .*"), "it does not run on one kind of input alone; its parts do"),
    (re.compile(r"^(?!decoder: )\w+: "), ""),
    (re.compile(r"^operator of block [\d, ]+"), "operator of a block"),
    (re.compile(r"\b(?:[a-z_\d]+\.)*(?:layers?|blocks?|h|encoder)\.\d+(?:\.\d+)*\b"), "a block"),
    (re.compile(r"\bblock \d+(?:, \d+)*"), "a block"),
    (re.compile(r" of (?:\d\.\de[-+]\d+|inf)$"), ""),
    (re.compile(r" \(relative error [^)]*\)| by \d\.\de[-+]\d+"), ""),
    (re.compile(r"\b[A-Z][a-z]\w*(?:[A-Z]\w*)+\b"), "a module"),
)


def coverage(report: SupportReport) -> str:
    """The page, Markdown, lines of 120 characters at most."""
    by_kind: dict[str, list[SupportEntry]] = defaultdict(list)
    for entry in report.entries:
        by_kind[entry.modality].append(entry)
    parts = [_HEAD.format(version=report.transformers), _totals(by_kind)]
    parts += [_section(title, by_kind[kind]) for kind, title in _TITLES.items() if by_kind[kind]]
    return "\n".join(parts)


def status_of(entry: SupportEntry) -> str:
    """Its status on the page."""
    return NOT_TRIED if (entry.reason or "").startswith(NOT_TRIED) else entry.status


def mechanism(text: str) -> str:
    """A reason without the names and numbers of one model."""
    text = _PLACES.sub("a part holds attention and was not read", text)
    for pattern, plain in _RULES:
        text = pattern.sub(plain, text)
    return text


def _totals(by_kind: dict[str, list[SupportEntry]]) -> str:
    names = ("exact", "partly", "refused", NOT_TRIED)
    rows = ["| reads | types | " + " | ".join(names) + " |", "|---" * 6 + "|"]
    for kind, title in _TITLES.items():
        found = [status_of(entry) for entry in by_kind[kind]]
        if found:
            rows.append(f"| {title} | {len(found)} | " + " | ".join(str(found.count(name)) for name in names) + " |")
    return "\n".join([*rows, ""])


def _section(title: str, entries: list[SupportEntry]) -> str:
    groups: dict[str, list[SupportEntry]] = defaultdict(list)
    for entry in entries:
        groups[status_of(entry)].append(entry)
    lines = [f"## {title}", ""]
    if exact := groups["exact"]:
        lines += [_wrapped("Exact: " + _names(entry.model_type for entry in exact)), ""]
    for status in ("partly", "refused"):
        if groups[status]:
            lines += [f"{status.capitalize()}:", "", *_by_mechanism(groups[status]), ""]
    if groups[NOT_TRIED]:
        lines += ["Not tried:", "", *_by_mechanism(groups[NOT_TRIED]), ""]
    return "\n".join([*lines, *_stacks(entries)])


def _by_mechanism(entries: list[SupportEntry]) -> list[str]:
    found: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        said = dict.fromkeys(mechanism(text) for text in (entry.parts or [entry.reason or ""]))
        found["; ".join(said)].append(entry.model_type)
    return [
        _wrapped(f"- {why}: {_names(names)}", indent="  ")
        for why, names in sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def _stacks(entries: list[SupportEntry]) -> list[str]:
    """What --stack reads of them, beside what stands above."""
    found: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        readable = [one for one in entry.stacks if one.status != "refused"]
        if readable:
            words = " and ".join(
                f"`{one.stack}` {'' if one.status == 'exact' else '(partly)'}".rstrip() for one in readable
            )
            found[words].append(entry.model_type)
    if not found:
        return []
    rows = [
        _wrapped(f"- {words}: {_names(names)}", indent="  ")
        for words, names in sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    return ["With `--stack`, exact unless it says partly:", "", *rows, ""]


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
