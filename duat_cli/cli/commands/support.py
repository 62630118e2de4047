"""`duat support`."""

from __future__ import annotations

from duat_cli.cli.shared import options
from duat_cli.cli.shared.grouped import grouped
from duat_cli.cli.shared.presentation import Presentation, announce, talk_of
from duat_cli.cli.terminal import libraries
from duat_cli.cli.terminal.progress import Progress
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, EXIT_UNDECIDED, InputError

_EXIT_CODES = {"exact": EXIT_SOUND, "partly": EXIT_FINDINGS, "refused": EXIT_UNDECIDED}


class Loading(options.Loading):
    """Without a plan of the memory."""

    device_map: None = None
    memory: None = None


@grouped
def support(
    model: str | None = options.MODEL,
    *,
    all_types: bool = options.compute_option(
        False, "--all", help="Check every model type that transformers has, on tiny random models."
    ),
    loading: Loading,
    shown: options.Plain,
    voice: options.Voice,
) -> int:
    """How far duat understands a model: exact, partly (which parts), or refused, with the reason.

    Exit code for one model: 0 exact, 1 partly, 2 refused, or could not tell. With --all: 0.
    """
    from duat_cli.analysis.clock import Clock
    from duat_cli.loading.importing import uncollected

    if all_types and model is not None:
        raise InputError(f"MODEL '{model}' and --all exclude each other")
    wanted = loading.request(model)
    talk = talk_of(voice)
    presentation = Presentation.of(shown, voice)
    clock = Clock()

    if not all_types:
        announce(wanted.model, talk)
    with Progress(talk) as progress:
        if all_types:
            libraries.calm(talk)
            progress.doing("loading transformers")
            with uncollected():
                from duat_cli.analysis.support import support_all

            entries = support_all(progress)
        else:
            loaded = wanted.load(wanted.find(progress), progress)
            progress.doing("checking its parts")
            from duat_cli.analysis.support import support_of

            entries = [support_of(loaded)]

    from duat_cli.analysis.support import support_report

    presentation.emit(support_report(entries, clock.run()), talk)
    return EXIT_SOUND if all_types else _EXIT_CODES[entries[0].status]
