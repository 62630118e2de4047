"""Outlets of the results of `duat check`: standard output or a file in one form, and further files in other forms.

Whatever ends the command, every named outlet gets something in its form, so that a job without a verdict states why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, cast, get_args

from duat_cli import __version__
from duat_cli.api.target import refuse_overwriting
from duat_cli.cli.shared.options import Page, Voice
from duat_cli.cli.shared.presentation import Presentation, Target
from duat_cli.cli.terminal.faults import code_of, kind_of, line_of
from duat_cli.cli.terminal.talk import Talk
from duat_cli.compat.typer import usage_error
from duat_cli.errors import DuatError, InputError
from duat_cli.text import one_line

if TYPE_CHECKING:
    from duat_cli.results.check import CheckReport

CheckForm = Literal["table", "json", "junit", "github", "markdown", "sarif", "html", "eval-results", "model-card"]
_SUFFIXES: dict[str, CheckForm] = {
    ".json": "json",
    ".xml": "junit",
    ".md": "markdown",
    ".sarif": "sarif",
    ".html": "html",
    ".htm": "html",
}


@dataclass(frozen=True)
class _Outlet:
    form: CheckForm
    target: Target


class Outlets:
    """A context of outlets. If an error leaves it, outlets without a result get the error, and the error propagates."""

    def __init__(self, model: str | None) -> None:
        self._model = model
        self._open: list[_Outlet] = []
        """Outlets without a result yet."""
        self._presentation: Presentation | None = None

    def open(
        self,
        form: CheckForm | None,
        json: bool,
        output: str | None,
        reports: list[str],
        voice: Voice,
        every: bool = False,
    ) -> None:
        """Opens the outlet of the result, then the others. Each is checked now; InputError names one that cannot be
        written. every: as for the page of a table."""
        chosen = _form(form, json, output)
        own = Page(form=chosen if chosen in ("json", "html") else "table", output=output)
        self._presentation = Presentation.of(own, voice, every=every)
        self._open.append(_Outlet(chosen, self._presentation.target))
        faults = []
        for text in reports:
            try:
                self._open.append(_outlet(text))
            except InputError as fault:
                faults.append(fault)
        if faults:
            raise faults[0]

    def write(self, report: CheckReport, talk: Talk) -> None:
        """Writes files first, so that standard output does not report success before a file that cannot be written."""
        from duat_cli.api.words import page_of
        from duat_cli.report.forms.check import render

        assert self._presentation is not None
        page = self._presentation.page()
        for outlet in sorted(self._open, key=lambda o: o.target.path is None):
            text = page_of([(None, report)]) if outlet.form == "html" else render(report, outlet.form, page)
            self._open.remove(outlet)  # an outlet that cannot be written keeps its old content
            outlet.target.write(text)
            if outlet.target.path is not None:
                talk.note(f"wrote {outlet.target.path}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._open:
            self._say(error)

    def _say(self, error: BaseException) -> None:
        from duat_cli.api.words import page_of
        from duat_cli.report.forms.check import render_undecided
        from duat_cli.results.check import Problem, UndecidedReport

        problem = Problem(kind=kind_of(error), message=one_line(line_of(error)), exit_code=code_of(error))
        report = UndecidedReport(duat_version=__version__, verdict="undecided", model=self._model, error=problem)
        for outlet in self._open:
            path = outlet.target.path
            if problem.kind == "stopped" and path is not None and _holds_something(path):
                continue  # stopping a run must not delete the last result
            if path is None and outlet.form == "table":
                continue  # reported on standard error
            try:
                html = outlet.form == "html"
                outlet.target.write(page_of([(None, report)]) if html else render_undecided(report, outlet.form))
            except DuatError:
                continue  # the error that propagates may be this one


def say_usage(arguments: Sequence[str], error: BaseException) -> None:
    """Writes a usage error of `duat check` to its outlets. It finds their names itself, as no option is parsed yet."""
    if "check" not in arguments[:1] or usage_error(error) is None:
        return
    given = list(_pairs(arguments))
    model = arguments[1] if len(arguments) > 1 and not arguments[1].startswith("-") else None
    forms = [value for name, value in given if name == "--format" and value in get_args(CheckForm)]
    form = cast(CheckForm, forms[-1]) if forms else None
    output = next((value for name, value in reversed(given) if name in ("--output", "-o")), None)
    reports = [value for name, value in given if name == "--report" and value]
    others = [(name, value) for name, value in given if name not in ("--output", "-o", "--report")]
    with contextlib.suppress(DuatError), Outlets(model) as outlets:
        refuse_overwriting([("-o", name) for name in (output, *(text.partition("=")[2] for text in reports))], others)
        outlets.open(form, "--json" in arguments and form is None, output or None, reports, Voice(no_color=True))
        raise InputError(line_of(error)) from error


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options with the values behind them, of '--format=github' and of '--format github'."""
    for text, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = text.partition("=")
        yield (name, value) if equals else (text, following)


def _holds_something(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def _form(form: CheckForm | None, json: bool, output: str | None) -> CheckForm:
    if json and form not in (None, "json"):
        raise InputError(f"--json and --format {form} contradict each other; give one of them")
    suffix = "" if output is None else output[output.rfind(".") :].lower() if "." in output else ""
    return form or ("json" if json else _SUFFIXES.get(suffix, "table"))


def _outlet(text: str) -> _Outlet:
    form, equals, name = text.partition("=")
    if form not in get_args(CheckForm) or not equals or not name or name == "-":
        forms = ", ".join(get_args(CheckForm))
        raise InputError(f"--report '{text}': expected FORMAT=FILE, such as sarif=duat.sarif; formats: {forms}")
    return _Outlet(cast(CheckForm, form), Target.of_text("--report", name))
