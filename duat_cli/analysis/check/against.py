"""`duat check --base`: the base is checked first, and its measurements are the fine-tune's baseline."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from duat_cli.analysis.check.run import CheckRequest, check, refuse_prompts
from duat_cli.checks.baseline import identity, of_base
from duat_cli.checks.drift import refuse_other_type
from duat_cli.checks.verdict.conclude import CheckPlan
from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.source import is_local
from duat_cli.text import clean, shown

if TYPE_CHECKING:
    from pathlib import Path

    from duat_cli.analysis.clock import RunFacts
    from duat_cli.analysis.progress import Progress
    from duat_cli.results.check import CheckReport


def check_against(
    plan: CheckPlan, request: CheckRequest, progress: Progress, run: RunFacts
) -> tuple[CheckReport, str | None]:
    """Result of `check`. If the plan has a base, the base is checked first, as with --update-baseline, but nothing is
    written. Raises InputError where a check of the base fails."""
    if plan.base is None:
        return check(plan, request, progress, run)
    if request.adapter is not None:
        raise InputError("--base and --adapter contradict each other: an adapter's base is MODEL; leave one out")
    refuse_prompts(plan, request.texts)
    read = [] if plan.weights_only else request.texts.read(progress)  # for both, as standard input is read only once
    tuned = request.model.find(progress)
    asked = _of_base(request, plan.base, tuned.place.path)
    base = asked.model.find(progress)
    refuse_other_type(f"--base {clean(plan.base)}", identity(base.files), tuned.files)
    report, text = check(replace(plan, update=True), asked, progress, run, read, base)
    if text is None:
        first = next(one for one in report.outcomes if one.status == "failed")
        raise InputError(f"--base {shown(plan.base)}: fails itself: {first.rule}: {first.message}; give a sound base")
    return check(replace(plan, baseline=of_base(plan.base, text)), request, progress, run, read, tuned)


def _of_base(request: CheckRequest, base: str, tuned: Path) -> CheckRequest:
    """The request for the base; a hub id may have its revision after an @. tuned: the fine-tune's folder, whose chat
    template is used if the base has none."""
    name, _, revision = (base, "", "") if is_local(base) else base.partition("@")
    model, texts = replace(request.model, model=name, revision=revision or None), replace(request.texts, template=tuned)
    return replace(request, model=model, texts=texts)
