"""From the output options to a written result."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from duat_cli.cli.shared.options import Format
from duat_cli.cli.terminal import streams
from duat_cli.cli.terminal.output import Target
from duat_cli.cli.terminal.talk import Talk
from duat_cli.errors import InputError

if TYPE_CHECKING:
    from duat_cli.report.tables.page import Page
    from duat_cli.results.base import Result

NARROWEST = 20
Report = TypeVar("Report", bound="Result")


@dataclass(frozen=True)
class Presentation:
    """Where the result goes and in which form; made, and so checked, before anything is computed."""

    target: Target
    form: Format
    color: bool
    wide: bool = False

    @classmethod
    def of(
        cls, output: str | None, form: Format | None, json: bool, no_color: bool, *, wide: bool = False
    ) -> Presentation:
        if json and form == "table":
            raise InputError("--json and --format table contradict each other; give one of them")
        target = Target.of_text("--output", output)
        implied: Format = "json" if json or (target.path and target.path.suffix == ".json") else "table"
        terminal = target.path is None and sys.stdout.isatty()
        return cls(target, form or implied, _is_colorful(terminal, no_color), wide)

    def emit(self, report: Report, render: Callable[[Report, Page], str], talk: Talk) -> None:
        """Write the report."""
        if self.form == "json":
            from duat_cli.report.json import to_json

            self.target.write(to_json(report))
        else:
            self.target.write(render(report, self.page()))
        if self.target.path is not None:
            talk.note(f"wrote {self.target.path}")

    def page(self) -> Page:
        """The sheet to print on."""
        from duat_cli.report.tables.page import Page

        width = max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)
        boxes = self.target.path is not None or streams.boxes()
        return Page(width=width, color=self.color, boxes=boxes, wide=self.wide)


def talk_of(quiet: bool, verbose: bool, no_color: bool) -> Talk:
    """How the command speaks on standard error."""
    if quiet and verbose:
        raise InputError("--quiet and --verbose contradict each other; give one of them")
    return Talk(quiet=quiet, verbose=verbose, color=_is_colorful(sys.stderr.isatty(), no_color))


def _is_colorful(terminal: bool, no_color: bool) -> bool:
    plain = no_color or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return terminal and not plain
