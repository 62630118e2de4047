"""`duat explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_SOUND

Name = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME",
        show_default=False,
        help="A column, a JSON field or its path, a rule, a word, or a topic. Without it: the list of all.",
    ),
]


def explain(
    name: Name = None,
    form: options.FormatOption = None,
    json: options.Json = False,
    output: options.Output = None,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> int:
    """What a name in duat's output means: definition, formula, unit, source, and how exact; or a page on a topic.

    Exit code: 0 found, 2 there is no such name.
    """
    from duat_cli.cli.shared.presentation import Presentation, talk_of

    talk = talk_of(quiet, False, no_color)
    presentation = Presentation.of(output, form, json, no_color)
    from duat_cli.explain.find import explain as look_up
    from duat_cli.report.explain import render_explain

    presentation.emit(look_up(" ".join(name) if name else None), render_explain, talk)
    return EXIT_SOUND
