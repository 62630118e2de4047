"""Prompts of `duat attribute` put together into the report, one by one."""

from __future__ import annotations

from dataclasses import dataclass

from duat_cli import __version__
from duat_cli.analysis.attribute.many import Many, PromptSums
from duat_cli.results.attribute import AttributeReport, Attribution, AttributionCertificate, Continuation
from duat_cli.results.base import Environment, ModelFacts, PromptFacts, Result, Run, Skipped


@dataclass(frozen=True)
class Attributed:
    """What one prompt gave."""

    attribution: list[Attribution]
    continuation: Continuation | None
    sums: PromptSums


class AttributeHead(Result):
    """The part of a report that no prompt changes."""

    environment: Environment
    model: ModelFacts
    held: list[str]
    tolerance: float
    skipped: list[Skipped]
    warnings: list[str]


class AttributeTotal:
    """The prompts so far."""

    def __init__(self, top: int) -> None:
        """top: how many heads and neurons lead in the mean."""
        self._top = top
        self._prompts: list[PromptFacts] = []
        self._attribution: list[Attribution] = []
        self._continuations: list[Continuation] = []
        self._many = Many()

    def add(self, facts: PromptFacts, found: Attributed) -> None:
        """The next prompt of the report."""
        self._prompts.append(facts)
        self._attribution += found.attribution
        self._many.add(found.sums)
        if found.continuation is not None:
            self._continuations.append(found.continuation)

    def report(self, head: AttributeHead, run: Run) -> AttributeReport:
        """Of one prediction at least."""
        residual = max(max(one.residual, one.direct.residual) for one in self._attribution)
        summary = self._many.summary(self._attribution, self._top)
        return AttributeReport(
            duat_version=__version__,
            environment=head.environment,
            model=head.model,
            prompts=self._prompts,
            certificate=AttributionCertificate(
                residual=residual, tolerance=head.tolerance, exact=residual <= head.tolerance
            ),
            held=head.held,
            attribution=self._attribution,
            continuations=self._continuations,
            summary=summary,
            reasons={} if summary is not None else {"summary": "there is one prediction"},
            skipped=head.skipped,
            warnings=head.warnings,
            run=run,
        )
