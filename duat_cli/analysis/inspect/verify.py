"""`duat verify`: how exact the DUAT form is, and W' in every block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from duat_cli import __version__
from duat_cli.analysis.decomposition import Decomposition, crossing
from duat_cli.analysis.inspect.run import ticker
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Listener, Session, prompt_facts
from duat_cli.errors import or_reason
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.results.inspect import BlockCertificate, VerifyReport


def verify(loaded: LoadedModel, prompts: Sequence[Prompt], progress: Progress) -> VerifyReport:
    """The certificate alone: blocks, factors of W', and how far each is from the model's own output."""
    session = Session(loaded, progress, cache=False, every_plain=True)
    errors: dict[tuple[int, int], float] = {}  # by block and prompt
    operators: dict[tuple[int, int], float] = {}
    crossed: dict[tuple[int, int], float] = {}
    reasons: dict[int, str] = {}
    uncrossed: dict[int, str] = {}
    tick = ticker(progress, session, prompts)

    def listener(number: int) -> Listener:
        decomposition = Decomposition()

        def listen(run: BlockRun) -> None:
            step = decomposition.advance(run)
            errors[run.index, number] = step.terms.error
            operator = or_reason(lambda: session.operator(run, step))
            if isinstance(operator, str):
                reasons[run.index] = operator
            else:
                operators[run.index, number] = operator.error
            cross = or_reason(lambda: crossing(run, session.structure.block(run.index)))
            if isinstance(cross, str):
                uncrossed[run.index] = cross
            elif cross is not None:
                crossed[run.index, number] = cross.error
            tick(number)

        return listen

    session.sweep_all(prompts, listener)
    certificate = session.certificate(max(errors.values()))
    return VerifyReport(
        duat_version=__version__,
        environment=session.environment(),
        model=session.model_facts(),
        prompts=prompt_facts(prompts),
        certificate=certificate,
        blocks=[
            BlockCertificate(
                index=i,
                name=session.structure.block(i).parts.name,
                certificate_error=max(e for (block, _), e in errors.items() if block == i),
                operator_error=_largest(operators, i) if i not in reasons else None,
                operator_reason=reasons.get(i),
                cross_error=_largest(crossed, i) if i not in uncrossed else None,
                cross_reason=uncrossed.get(i),
            )
            for i in sorted({block for block, _ in errors})
        ],
        skipped=session.skipped(),
        warnings=session.warnings(),
        run=session.run_facts(),
    )


def _largest(errors: Mapping[tuple[int, int], float], index: int) -> float | None:
    """Over the prompts of one block."""
    return max((error for (block, _), error in errors.items() if block == index), default=None)
