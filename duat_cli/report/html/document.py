"""The HTML page: one file with everything in it, which loads nothing and runs only its own script."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass

import jinja2
from markupsafe import Markup

from duat_cli import __version__
from duat_cli.grouping import by_key
from duat_cli.report.html.drawing.elements import shown
from duat_cli.report.html.drawing.figure import Figure, Sheet
from duat_cli.report.html.embedded import embedded, packed
from duat_cli.report.html.glossary import Glossary, Known
from duat_cli.report.html.sheets import sheets
from duat_cli.results.base import Report

_ASSETS = importlib.resources.files("duat_cli.report.html") / "assets"


Given = tuple[str | None, Report]
"""The file that a report was read from, None if it comes from a run, and the report."""


@dataclass(frozen=True)
class _Place:
    """A sheet on its page. letter: its name among others; '' if it is the only one."""

    number: int
    letter: str
    source: str | None
    sheet: Sheet


@dataclass(frozen=True)
class _Group:
    """The sheets of one command, with figures of the same key beside each other."""

    command: str
    places: list[_Place]

    @property
    def several(self) -> bool:
        return len(self.places) > 1

    @property
    def rows(self) -> list[list[tuple[_Place, Figure]]]:
        """Figures by key, in the order of the sheet with most figures."""
        order = dict.fromkeys(
            figure.key
            for place in sorted(self.places, key=lambda p: -len(p.sheet.figures))
            for figure in place.sheet.figures
        )
        return [[(p, f) for p in self.places for f in p.sheet.figures if f.key == key] for key in order]


def document(given: Sequence[Given], known: Known) -> str:
    """The page of some reports. known: explanations of their fields.

    If the JSON of all reports takes more than 5 MB, their largest lists are not embedded; the page names these.
    """
    made = sheets([report for _, report in given])
    data, left_out = _embedded(given)
    style, script = _asset("style.css"), _asset("script.js")
    return _template().render(
        title=_title(made),
        version=__version__,
        groups=_groups(made, given),
        glossary=Glossary(made, known),
        data=packed(data),
        left_out=left_out,
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; "
        "form-action 'none'",
    )


def _embedded(given: Sequence[Given]) -> tuple[list[dict[str, object]], list[str]]:
    """The reports as embedded in the page, and descriptions of what was left out."""
    found: list[dict[str, object]] = []
    left_out: list[str] = []
    for number, (source, report) in enumerate(given):
        document, missing = embedded(report.model_dump(mode="json"), 1 / len(given))
        letter = _letter(number, len(given))
        left_out += [f"{letter}: {text}" if letter else text for text in missing]
        found.append({"source": source, "left_out": missing, "report": document})
    return found, left_out


def _groups(made: Sequence[Sheet], given: Sequence[Given]) -> list[_Group]:
    places = [
        _Place(number, _letter(number, len(made)), source, sheet)
        for number, (sheet, (source, _)) in enumerate(zip(made, given, strict=True))
    ]
    return [_Group(command, those) for command, those in by_key((p.sheet.command, p) for p in places).items()]


def _letter(number: int, of: int) -> str:
    """Letter of a sheet: A, B, ..., Z, then 27, 28, ...; empty if there is only one."""
    if of == 1:
        return ""
    return chr(ord("A") + number) if number < 26 else str(number + 1)


def _title(made: Sequence[Sheet]) -> str:
    names = list(dict.fromkeys(f"duat {sheet.command}" for sheet in made))
    models = list(dict.fromkeys(sheet.name for sheet in made))
    return f"{', '.join(names)}: {', '.join(models)}"


@functools.cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@functools.cache
def _template() -> jinja2.Template:
    names = ("page.html.jinja", "parts.html.jinja")
    environment = jinja2.Environment(
        loader=jinja2.DictLoader({name: _asset(name) for name in names}),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = lambda text: text if isinstance(text, Markup) else shown(str(text))
    return environment.get_template(names[0])


def _hash(text: str) -> str:
    """Hash of an inline element, as source in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
