"""`check` for a model in memory: every rule that needs no file, from one run of the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from duat_cli.analysis.check.run import NO_ADAPTER, Ran, run_of, seen, settings, with_answers
from duat_cli.analysis.clock import RunFacts
from duat_cli.analysis.progress import Progress
from duat_cli.checks.rule import Evidence
from duat_cli.checks.verdict.conclude import CheckPlan, conclude
from duat_cli.checks.weights import facts_of
from duat_cli.loading.model.given import streamed
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.results.check import CheckReport
from duat_cli.results.inspect import InspectReport

IN_MEMORY = "the model is in memory: there are no files to look at"


def check_given(
    plan: CheckPlan,
    loaded: LoadedModel,
    inputs: list[Prompt],
    tokenizer: Any,
    progress: Progress,
    run: RunFacts,
    also: Iterable[str] = (),
) -> tuple[CheckReport, InspectReport | None]:
    """The report, and the inspect report from the same passes; None where weights are not finite.

    also: options of `inspect` beyond those that the policy asks for. Nothing is cached, as weights in memory change.
    As for files, the DuatError of a model that cannot run is raised if no rule reports it.
    """
    whole = loaded.named
    files = replace(loaded.files, config=whole.config.to_dict())
    weights = facts_of(streamed(whole, files.tensors), len(files.tensors), progress)
    evidence = Evidence(files, weights)
    evidence.absent.update({"load": IN_MEMORY, "tokenizer": IN_MEMORY, "declared": IN_MEMORY, "adapter": NO_ADAPTER})
    ran = Ran(loaded)
    if plan.forward:
        ran = run_of(plan, settings(plan, also, cache=False), loaded, inputs, tokenizer, progress)
    evidence, subject = seen(plan, evidence, ran, inputs, progress)
    found, _ = conclude(plan, with_answers(evidence, ran), subject, run(None, device=loaded.device))
    if ran.fault is not None and found.verdict == "passed":
        raise ran.fault
    return found, ran.report
