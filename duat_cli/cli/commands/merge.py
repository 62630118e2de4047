"""`duat merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND

Directory = Annotated[
    str, typer.Argument(metavar="DIR", show_default=False, help="The folder that duat inspect --out wrote.")
]


def merge(
    directory: Directory,
    form: options.FormatOption = None,
    json: options.Json = False,
    output: options.Output = None,
    wide: options.Wide = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """The report of all prompts whose results lie in a folder, whoever computed them.

    Exit code: 0 exact, 1 the certificate is not exact, 2 could not tell, such as where a prompt is missing.
    """
    from duat_cli.cli.shared.presentation import Presentation, talk_of
    from duat_cli.cli.terminal.progress import Progress

    talk = talk_of(quiet, verbose, no_color)
    presentation = Presentation.of(output, form, json, no_color, wide=wide)
    with Progress(talk) as progress:
        from duat_cli.analysis.clock import Clock

        clock = Clock()
        progress.doing("loading torch")
        from duat_cli.analysis.shards.folder import Folder
        from duat_cli.analysis.shards.merge import merge as compute

        report = compute(Folder.read(Path(directory)), clock.run, progress)

    from duat_cli.report.tables.inspect import render_inspect

    presentation.emit(report, render_inspect, talk)
    return EXIT_SOUND if report.certificate.exact else EXIT_FINDINGS
