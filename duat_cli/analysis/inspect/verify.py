"""`duat verify`: how exact the DUAT form, and W' in every block, are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from duat_cli.analysis.decomposition import Decomposition, crossing
from duat_cli.analysis.progress import Progress, ticker, within
from duat_cli.analysis.session import Listener, Session, prompt_facts
from duat_cli.errors import or_reason
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.model.processes import Processes
from duat_cli.loading.prompts import Prompt
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.results.inspect import BlockCertificate, VerifyReport


class _Seen(NamedTuple):
    """Errors of one block under one prompt."""

    error: float
    operator: float | str
    """Error of W', or the reason why there is no W'."""
    cross: float | str | None
    """Error of W'_c, or the reason why it is not known; None where the block has none."""


def verify(loaded: LoadedModel, prompts: Sequence[Prompt], progress: Progress) -> VerifyReport:
    """The certificate alone: how far each block, and W' in it, is from the model's own output."""
    processes = Processes(loaded.processes, progress, loaded.model)
    session = Session(loaded, processes, cache=False, every_plain=True)
    seen = _swept(session, prompts, processes)
    error = max(one.error for blocks in seen for one in blocks.values())
    return VerifyReport(
        prompts=prompt_facts(prompts),
        blocks=[
            _certified(i, session.structure.block(i).parts.name, [blocks[i] for blocks in seen if i in blocks])
            for i in sorted({block for blocks in seen for block in blocks})
        ],
        **session.report_facts(error, processes.memory),
    )


def _swept(session: Session, prompts: Sequence[Prompt], processes: Processes) -> list[dict[int, _Seen]]:
    """Errors by block, for each prompt. Where all weights are in memory, the first prompt runs here, and the processes
    share the others."""
    if session.loaded.paged is not None:
        return _together(session, prompts, processes)
    count = len(prompts)

    def work(number: int) -> tuple[list[dict[int, _Seen]], float]:
        found = _together(session, [prompts[number]], within(processes, session.depth, number, count))
        return found, session.plain_error

    found = list[dict[int, _Seen]]()
    for one, plain_error in processes.first_here(work, range(count)):
        found += one
        session.plain_error = max(session.plain_error, plain_error)
    return found


def _together(session: Session, prompts: Sequence[Prompt], progress: Progress) -> list[dict[int, _Seen]]:
    found: list[dict[int, _Seen]] = [{} for _ in prompts]
    tick = ticker(progress, session.depth, len(prompts))

    def listener(number: int) -> Listener:
        decomposition = Decomposition()

        def listen(run: BlockRun) -> None:
            step = decomposition.advance(run)
            operator = or_reason(lambda: session.operator(run, step))
            cross = or_reason(lambda: crossing(run, session.structure.block(run.index)))
            found[number][run.index] = _Seen(
                step.terms.error,
                operator if isinstance(operator, str) else operator.error,
                cross if cross is None or isinstance(cross, str) else cross.error,
            )
            tick(number)

        return listen

    session.sweep_all(prompts, listener)
    return found


def _certified(index: int, name: str, seen: Sequence[_Seen]) -> BlockCertificate:
    operator, operator_reason = _largest(one.operator for one in seen)
    cross, cross_reason = _largest(one.cross for one in seen)
    return BlockCertificate(
        index=index,
        name=name,
        certificate_error=max(one.error for one in seen),
        operator_error=operator,
        operator_reason=operator_reason,
        cross_error=cross,
        cross_reason=cross_reason,
    )


def _largest(errors: Iterable[float | str | None]) -> tuple[float | None, str | None]:
    """The largest error of one block over the prompts; or, if a prompt has a reason instead, the last such reason."""
    every = list(errors)
    reason = next((one for one in reversed(every) if isinstance(one, str)), None)
    known = [one for one in every if isinstance(one, float)]
    return (None, reason) if reason is not None else (max(known, default=None), None)
