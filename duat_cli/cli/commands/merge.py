"""`duat merge`."""

from __future__ import annotations

import typer

from duat_cli.cli.shared import options
from duat_cli.cli.shared.grouped import grouped
from duat_cli.cli.shared.presentation import Presentation, talk_of
from duat_cli.cli.terminal.progress import Progress
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND
from duat_cli.text import expanded


@grouped
def merge(
    directory: str = typer.Argument(
        metavar="DIR", show_default=False, callback=options.named("DIR"), help="The folder that --out wrote."
    ),
    *,
    shown: options.Page,
    wide: bool = options.WIDE,
    every: bool = options.output_option(
        False, "--all", help="For lora-diff: show a row for every changed parameter, instead of one for every kind."
    ),
    voice: options.Voice,
) -> int:
    """The report of all prompts whose results lie in a folder, whoever computed them.

    Exit code: 0 exact, 1 the certificate is not exact, 2 could not tell, such as where a prompt is missing.
    """
    talk = talk_of(voice)
    presentation = Presentation.of(shown, voice, wide=wide, every=every)
    with Progress(talk) as progress:
        from duat_cli.analysis.clock import Clock

        clock = Clock()
        progress.doing("loading torch")
        from duat_cli.analysis.shards.folder import Folder
        from duat_cli.analysis.shards.merge import merge as compute

        report = compute(Folder.read(expanded(directory)), clock.run, progress)

    from duat_cli.cli.commands.lora_diff import is_sound

    presentation.emit(report, talk)
    sound = is_sound(report) if report.command == "lora-diff" else report.certificate.exact
    return EXIT_SOUND if sound else EXIT_FINDINGS
