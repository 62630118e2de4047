"""`duat report`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_SOUND, InputError

Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE", show_default=False, help="Reports that a command wrote as JSON."),
]
FormOption = Annotated[
    Literal["html", "model-card"],
    options.output_option(
        "--format",
        metavar="FORMAT",
        help="html, or model-card: a section for a model's README, of one report of inspect or check.",
    ),
]


def report(
    files: Files,
    form: FormOption = "html",
    output: options.Output = None,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> int:
    """Saved JSON reports as one HTML page with pictures; several of one command stand side by side. Or one as a section
    of a model card.

    Exit code: 0 written, 2 a file is no report that can be shown.
    """
    from duat_cli.api.pages import page_of
    from duat_cli.cli.shared.pages import read_report
    from duat_cli.cli.shared.presentation import Presentation, talk_of

    talk = talk_of(quiet, False, no_color)
    presentation = Presentation.of(output, form, False, no_color)
    if form == "model-card":
        from duat_cli.report.forms.model_card import COMMANDS, model_card

        if len(files) > 1:
            raise InputError("--format model-card: a section is of one report; give one FILE")
        text = model_card(read_report(files[0], COMMANDS, "model card"))
    else:
        text = page_of([(file if len(files) > 1 else None, read_report(file)) for file in files])
    presentation.target.write(text)
    if presentation.target.path is not None:
        talk.note(f"wrote {presentation.target.path}")
    return EXIT_SOUND
