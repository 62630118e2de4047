"""`duat explain`."""

from __future__ import annotations

import typer

from duat_cli.cli.shared import options
from duat_cli.cli.shared.grouped import grouped
from duat_cli.cli.shared.presentation import Presentation, talk_of
from duat_cli.errors import EXIT_SOUND


@grouped
def explain(
    name: list[str] | None = typer.Argument(
        None,
        metavar="NAME",
        help="A column, a JSON field or its path, a rule, a word, a command, or a topic. Default: the list of all.",
    ),
    *,
    shown: options.Plain,
    quiet: bool = options.Voice.quiet,
    no_color: bool = options.Voice.no_color,
) -> int:
    """What a name in duat's output means: definition, formula, unit, source, and how exact; or a page on a topic.

    Exit code: 0 found, 2 there is no such name.
    """

    voice = options.Voice(quiet=quiet, no_color=no_color)
    talk, presentation = talk_of(voice), Presentation.of(shown, voice)
    from duat_cli.explain.find import explain as look_up

    presentation.emit(look_up(" ".join(name) if name else None), talk)
    return EXIT_SOUND
