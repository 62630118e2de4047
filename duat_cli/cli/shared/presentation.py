"""Presentation of a result by the output options, and the notes on the way to it."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from duat_cli.api.target import FileTarget
from duat_cli.cli.shared.options import Card, CardFormat, Page, Plain, Voice
from duat_cli.cli.terminal import libraries, streams
from duat_cli.cli.terminal.talk import Talk, redact
from duat_cli.errors import CheckpointError, InputError
from duat_cli.text import clean, expanded

if TYPE_CHECKING:
    from duat_cli.report.tables.page import Page as Sheet
    from duat_cli.results.base import Report


NARROWEST = 20


class Target(FileTarget):
    """The place named by -o/--output or by another option for a file to write, which is written whole or not at all."""

    def write(self, text: str) -> None:
        """Writes a whole text, with access tokens redacted."""
        text = redact(text)
        if self.path is None:
            streams.write_result(text)
        else:
            super().write(text)


@dataclass(frozen=True)
class Presentation:
    """Place and form of the result; made, and so checked, before anything is computed."""

    target: Target
    form: CardFormat
    color: bool
    wide: bool = False
    every: bool = False

    @classmethod
    def of(cls, shown: Page | Card | Plain, voice: Voice, *, wide: bool = False, every: bool = False) -> Presentation:
        """The presentation by the options. Raises InputError for contradictions, and for an unwritable place."""
        output, json = shown.output, shown.json
        form: CardFormat | None = shown.form
        if json and form in ("table", "html", "model-card"):
            raise InputError(f"--json and --format {form} contradict each other; give one of them")
        if form is None and not json and output is not None and output.lower().endswith((".html", ".htm")):
            if isinstance(shown, Plain):
                raise InputError(f"--output {clean(output)}: this command writes no page; give another name")
            form = "html"
        target = Target.of_text("--output", output)
        implied: CardFormat = "json" if json or (target.path and target.path.suffix == ".json") else "table"
        terminal = target.path is None and sys.stdout.isatty()
        if form == "html" and terminal:
            raise InputError("--format html: a page is no text for a terminal; name a file, such as -o report.html")
        return cls(target, form or implied, _is_colorful(terminal, voice.no_color), wide, every)

    def emit(self, report: Report, talk: Talk) -> None:
        """Writes the report."""
        if self.form == "json":
            from duat_cli.report.json import to_json

            self.target.write(to_json(report))
        elif self.form == "html":
            from duat_cli.api.words import page_of

            self.target.write(page_of([(None, report)]))
        elif self.form == "model-card":
            from duat_cli.report.forms.model_card import model_card

            self.target.write(model_card(report))
        else:
            from duat_cli.report.text import to_text

            self.target.write(to_text(report, self.page()))
        if self.target.path is not None:
            talk.note(f"wrote {self.target.path}")

    def page(self) -> Sheet:
        """The sheet to print on."""
        from duat_cli.report.tables.page import Page as Sheet

        width = max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)
        boxes = self.target.path is not None or streams.boxes()
        return Sheet(width=width, color=self.color, boxes=boxes, wide=self.wide, every=self.every)


def talk_of(voice: Voice) -> Talk:
    """The settings of what a command writes to standard error."""
    if voice.quiet and voice.verbose:
        raise InputError("--quiet and --verbose contradict each other; give one of them")
    return Talk(quiet=voice.quiet, verbose=voice.verbose, color=_is_colorful(sys.stderr.isatty(), voice.no_color))


def announce(model: str | None, talk: Talk) -> None:
    """Checks the checkpoint's name before torch is imported, so that a typing error does not cost those seconds."""
    from duat_cli.compat.libc import return_freed_memory

    if model is None:
        talk.note("no MODEL given: using the bundled demo model")
    elif model.startswith((".", "/", "~")) and not _exists(model):
        from duat_cli.loading.checkpoint.files import near_folder

        raise CheckpointError(f"{model}: no such folder{near_folder(expanded(model))}")
    libraries.calm(talk)
    return_freed_memory()  # a setting of the whole process, which a command owns


def _exists(name: str) -> bool:
    """Whether a path exists; False also for a name that no file can have."""
    try:
        expanded(name).stat()
        return True
    except PermissionError:
        return True  # reading it will raise the error
    except (OSError, ValueError):
        return False


def _is_colorful(terminal: bool, no_color: bool) -> bool:
    plain = no_color or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return terminal and not plain
