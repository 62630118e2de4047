"""`duat verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from duat_cli.cli.shared import options
from duat_cli.cli.shared.grouped import grouped
from duat_cli.cli.shared.many import processes
from duat_cli.cli.shared.presentation import Presentation, announce, talk_of
from duat_cli.cli.terminal.progress import Progress
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND
from duat_cli.loading.inputs.request import EVERY

if TYPE_CHECKING:
    from duat_cli.loading.model.load import LoadedModel
    from duat_cli.loading.prompts import Prompt
    from duat_cli.results.inspect import VerifyReport


@grouped
def verify(
    model: str | None = options.MODEL,
    *,
    texts: options.Texts,
    files: options.Files,
    loading: options.Loading,
    shown: options.Plain,
    wide: bool = options.WIDE,
    voice: options.Voice,
) -> int:
    """Only the certificate, block by block: is the DUAT form the model's own output?

    Exit code: 0 exact, 1 not exact, 2 could not tell.
    """
    from duat_cli.analysis.opening import of_stacks
    from duat_cli.analysis.plan.task import Task

    wanted = loading.request(model, Task("verify", processes=processes()))
    read = texts.request(files.given())
    talk = talk_of(voice)
    presentation = Presentation.of(shown, voice, wide=wide)

    announce(model, talk)
    with Progress(talk) as progress:

        def report_of(loaded: LoadedModel, inputs: list[Prompt]) -> VerifyReport:
            from duat_cli.analysis.inspect.verify import verify as compute

            return compute(loaded, inputs, progress)

        reports = of_stacks(wanted, read, progress, report_of)

    from duat_cli.results.inspect import VerifyStacks

    every = files.stack == EVERY
    report = VerifyStacks(duat_version=reports[0].duat_version, stacks=reports) if every else reports[0]
    presentation.emit(report, talk)
    return EXIT_SOUND if all(one.certificate.exact for one in reports) else EXIT_FINDINGS
