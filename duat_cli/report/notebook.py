"""A report's table as HTML, for notebooks."""

from __future__ import annotations

import io
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from duat_cli.report.tables.page import Page

WIDTH = 120
_FORM = (
    "<pre style=\"white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,'DejaVu Sans Mono',consolas,"
    "'Courier New',monospace\">{code}</pre>"
)


def to_html(render: Callable[[Page], str]) -> str:
    """A table as one `pre` element with inline colours; its text is escaped."""
    page = Page(width=WIDTH, color=True)
    console = Console(
        file=io.StringIO(), record=True, width=10_000, color_system="standard", force_terminal=True,
        legacy_windows=False, markup=False, highlight=False, emoji=False,
    )  # fmt: skip
    console.print(Text.from_ansi(render(page)), soft_wrap=True)
    return console.export_html(inline_styles=True, code_format=_FORM)
