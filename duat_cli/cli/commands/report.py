"""`duat report`: reports read back from JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import typer

from duat_cli.cli.shared import options
from duat_cli.cli.shared.presentation import Presentation, talk_of
from duat_cli.errors import EXIT_SOUND, InputError
from duat_cli.text import clean, expanded, one_line

if TYPE_CHECKING:
    from duat_cli.results.base import Report

MOST_BYTES = 64 << 20  # most that a file may have; a larger one takes a minute and gigabytes to read
_OWN = ("schema_version", "command")


def report(
    files: list[str] = typer.Argument(metavar="FILE", show_default=False, help="Reports that a command wrote as JSON."),
    form: Literal["html", "model-card"] = options.output_option(
        "html",
        "--format",
        metavar="FORMAT",
        help="html, or model-card: a section for a model's README, from one report of inspect or check.",
    ),
    output: str | None = options.Page.output,
    quiet: bool = options.Voice.quiet,
    no_color: bool = options.Voice.no_color,
) -> int:
    """Saved JSON reports as one HTML page with pictures; several of one command stand side by side. One report can also
    become a section of a model card.

    Exit code: 0 written, 2 a file is no report that can be shown.
    """
    from duat_cli.api.words import page_of

    voice = options.Voice(quiet=quiet, no_color=no_color)
    talk, presentation = talk_of(voice), Presentation.of(options.Card(form=form, output=output), voice)
    if form == "model-card":
        from duat_cli.report.forms.model_card import COMMANDS, model_card

        if len(files) > 1:
            raise InputError("--format model-card: a section is of one report; give one FILE")
        found = read_report(files[0], COMMANDS, "model card")
        with _made_of(files):
            text = model_card(found)
    else:
        reports = [(file if len(files) > 1 else None, read_report(file)) for file in files]
        with _made_of(files):
            text = page_of(reports)
    presentation.target.write(text)
    if presentation.target.path is not None:
        talk.note(f"wrote {presentation.target.path}")
    return EXIT_SOUND


def read_report(name: str, commands: Collection[str] | None = None, what: str = "page") -> Report:
    """A report from its JSON. Raises InputError, in one line, for a file that is no report, is of another version, or
    is too large.

    commands: those whose reports can be shown as a `what`; None: those with a page.
    """
    from pydantic import ValidationError

    from duat_cli.report.html.sheets import SHEETS
    from duat_cli.report.schema import REPORTS, STACKS
    from duat_cli.results.check import UndecidedReport

    where = f"FILE '{clean(name)}'"
    document = _read(name, where)
    command = _command(document, where)
    known = sorted(SHEETS if commands is None else commands)
    if command not in known:
        raise InputError(f"{where}: a report of duat {command}, which has no {what}; {what}s: {', '.join(known)}")
    try:
        if command == "check" and document.get("verdict") == "undecided":
            return UndecidedReport.model_validate(document)
        return (STACKS if "stacks" in document else REPORTS)[command].model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"{where}: no whole report of duat {command}: {one_line(place)}: {one_line(first['msg'])}"
            f"{_by(document)}; write it again with duat {command} --json"
        ) from error


@contextlib.contextmanager
def _made_of(files: Sequence[str]) -> Iterator[None]:
    """Raises InputError where valid reports cannot be shown within the context: fields contradict each other, or hold
    numbers that no run gives. Only a file written by hand is like that."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        names = ", ".join(f"'{clean(file)}'" for file in files)
        raise InputError(
            f"FILE {names}: no whole report of duat: its fields do not fit together ({type(error).__name__}: "
            f"{one_line(str(error))}); write it again with --json"
        ) from error


def _read(name: str, where: str) -> Any:
    try:
        size = expanded(name).stat().st_size
        if size > MOST_BYTES:
            raise InputError(
                f"{where}: {size / 2**20:.0f} MiB, a page is made of at most {MOST_BYTES >> 20} MiB; write the report "
                "again with fewer prompts or blocks, or without --per-prompt"
            )
        return json.loads(expanded(name).read_bytes(), parse_constant=_no_number)
    except OSError as error:
        raise InputError(f"{where}: cannot read: {error.strerror or error}") from error
    except RecursionError as error:
        raise InputError(f"{where}: no report of duat: JSON nested too deep") from error
    except ValueError as error:
        raise InputError(f"{where}: no JSON: {one_line(str(error))}; duat COMMAND --json writes reports") from error


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _command(document: Any, where: str) -> str:
    """Name of the command that wrote a report; checks first that the version is this one's."""
    from duat_cli.report.schema import REPORTS
    from duat_cli.results.base import SCHEMA_VERSION

    if not isinstance(document, dict) or any(not isinstance(document.get(key), str) for key in _OWN):
        raise InputError(f"{where}: JSON, but no report of duat; expected what duat COMMAND --json writes")
    version, command = document["schema_version"], document["command"]
    if version != SCHEMA_VERSION:
        newer = version.isdecimal() and int(version[:9]) > int(SCHEMA_VERSION)
        step = "update duat" if newer else "write the report again"
        raise InputError(
            f"{where}: schema version {one_line(version, 20)}{_by(document)}, this duat reads {SCHEMA_VERSION}; {step}"
        )
    if command not in REPORTS:
        raise InputError(f"{where}: a report of '{one_line(command, 40)}', no command of this duat{_by(document)}")
    return command


def _by(document: dict[str, Any]) -> str:
    version = document.get("duat_version")
    return f" (written by duat {one_line(version, 40)})" if isinstance(version, str) else ""
