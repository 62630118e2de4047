"""Shows the Markdown of duat's own pages on a terminal: headings, paragraphs, lists, tables and code.

rich's own renderer loads a parser and a syntax highlighter, which the pages do not need.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from duat_cli.report.tables.page import BLANK, Page, indented, item

_FENCE = "```"
_SPAN = re.compile(r"\*\*(.+?)\*\*|`([^`]+)`|\[([^\]]+)\]\([^)]+\)")


def markdown(text: str, page: Page) -> list[RenderableType]:
    """The parts of a page, with blank lines between them."""
    parts: list[RenderableType] = []
    for block in _blocks(text):
        parts += [*([BLANK] if parts else []), *_block(block, page)]
    return parts


def _blocks(text: str) -> Iterator[list[str]]:
    """Groups of lines between blank lines; code with its fences is one group, even with blank lines in it."""
    block: list[str] = []
    for line in text.splitlines():
        in_code = bool(block) and block[0].startswith(_FENCE)
        if in_code and line.startswith(_FENCE):
            yield block
            block = []
        elif line.strip() or in_code:
            block.append(line)
        elif block:
            yield block
            block = []
    if block:
        yield block


def _block(lines: list[str], page: Page) -> list[RenderableType]:
    first = lines[0]
    if first.startswith(_FENCE):
        return [indented(Text("\n".join(lines[1:]), overflow="fold"))]
    if first.startswith("#"):
        return [Text(first.lstrip("# "), style="bold underline" if first.startswith("# ") else "bold")]
    if first.startswith("|"):
        return _table([_cells(line) for line in lines if not set(line) <= set("|-: ")], page)
    if first.startswith("- "):
        return [item(_plain(entry)) for entry in _items(lines)]
    if first.startswith("    "):
        return [Text(line, overflow="fold") for line in lines]
    return [_inline(" ".join(lines))]


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _items(lines: list[str]) -> Iterator[str]:
    """The entries of a list; further lines of an entry are indented."""
    yield from (" ".join(part.split()) for part in re.split(r"^- ", "\n".join(lines), flags=re.MULTILINE) if part)


def _table(rows: list[list[str]], page: Page) -> list[RenderableType]:
    """A table; on a narrow page a list of rows, with the header of its column before every cell."""
    head, *body = rows
    if page.narrow:
        return [item("; ".join(f"{h}: {c}" if h else c for h, c in zip(head, map(_plain, row), strict=True) if c))
                for row in body]  # fmt: skip
    table = page.table()
    for name in head:
        table.add_column(_plain(name), overflow="fold")
    for number, row in enumerate(body):
        if number:
            table.add_row()
        table.add_row(*map(_inline, row))
    return [table]


def _inline(text: str) -> Text:
    """The text with bold and code styled, and links replaced by their names."""
    done, shown = 0, Text(overflow="fold")
    for span in _SPAN.finditer(text):
        bold, code, link = span.groups()
        shown.append(text[done : span.start()])
        shown.append(bold or code or link, style="bold" if bold else "cyan" if code else "")
        done = span.end()
    return shown.append(text[done:])


def _plain(text: str) -> str:
    return _inline(text).plain
