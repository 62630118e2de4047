"""What reads files: checkpoints and adapters of folders and hub ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Unpack

from duat_cli.analysis.plan.task import PruneOptions
from duat_cli.api.asking import Asked, File, Loading, Texts, folder
from duat_cli.api.ground import heard, load_libraries, undisturbed
from duat_cli.api.results import CheckResult, LoraResult, PlanResult
from duat_cli.api.settings import one_of
from duat_cli.errors import InputError

if TYPE_CHECKING:
    from duat_cli.analysis.progress import Progress
    from duat_cli.results.plan import Planned


def lora_diff(
    base: File | None = None,
    tuned: File | None = None,
    other: File | None = None,
    *,
    prompts: Texts | None = None,
    prompts_file: File | None = None,
    default_prompts: bool = False,
    max_tokens: int | None = None,
    lint: bool = False,
    no_base: bool = False,
    directions: bool = False,
    cache: bool = True,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> LoraResult:
    """`duat lora-diff`: what an adapter, or a full fine-tune, really changed. Of folders.

    Without prompts, and unless `default_prompts`, the weights alone are compared.
    """
    load_libraries()
    with undisturbed():
        from duat_cli.analysis.clock import Clock
        from duat_cli.analysis.lora.run import LoraRequest, texts_to_run
        from duat_cli.analysis.lora.run import lora_diff as compute

        asked, clock = Asked(base, None, prompts, prompts_file, max_tokens, loading), Clock()
        wanted = asked.request(own_code=False)
        texts = texts_to_run(asked.texts, default_prompts=default_prompts)
        request = LoraRequest(wanted, folder(tuned), folder(other), texts, lint, no_base, directions, cache)
        report = compute(request, heard(progress), clock.run)
    return LoraResult.of(report)


def check(
    model: File | None = None,
    *,
    policy: File | None = None,
    baseline: File | None = None,
    adapter: File | None = None,
    select: Sequence[str] = (),
    weights_only: bool = False,
    prompts: Texts | None = None,
    prompts_file: File | None = None,
    max_tokens: int | None = None,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> CheckResult:
    """`duat check`: is the checkpoint sound, within a policy's bounds, and as its baseline? Of a folder or hub id.

    A check that fails is no exception: `verdict` is 'failed'. A baseline is written by the command.
    """
    if not weights_only:
        load_libraries()
    with undisturbed():
        from duat_cli.analysis.check.run import CheckRequest
        from duat_cli.analysis.check.run import check as compute
        from duat_cli.analysis.clock import Clock
        from duat_cli.checks.policy import read_policy
        from duat_cli.checks.settings import settings_of
        from duat_cli.checks.verdict.conclude import plan as planned

        if isinstance(select, str):
            raise InputError(f"select '{select}': expected a list of rules, such as ['integrity.*']")
        asked, clock = Asked(model, None, prompts, prompts_file, max_tokens, loading), Clock()
        wanted = asked.request()
        found = read_policy(folder(policy))
        settings = settings_of(found, list(select))
        settled = planned(found, settings, folder(baseline), False, weights_only, wanted.dtype)
        request = CheckRequest(wanted, asked.texts, folder(adapter))
        report, _ = compute(settled, request, heard(progress), clock.run)
    return CheckResult.of(report)


def plan(
    model: File | None = None,
    *,
    command: Planned = "inspect",
    prompts: Texts | None = None,
    prompts_file: File | None = None,
    tokens: Sequence[int] | None = None,
    max_tokens: int | None = None,
    null: Literal["all", "uniform"] = "all",
    tuned: File | None = None,
    default_prompts: bool = False,
    holdout: File | float | None = None,
    pruning: PruneOptions | None = None,
    policy: File | None = None,
    select: Sequence[str] = (),
    time: bool = False,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> PlanResult:
    """`duat plan`: what a command takes on the CPU, from config.json and headers alone. Of a folder or hub id.

    tokens: numbers of tokens in place of texts; pruning: options of `prune_bound`.
    """
    with undisturbed():
        from typing import get_args

        from duat_cli.analysis.clock import Clock
        from duat_cli.api.planning import PlanRequest, check_task, plan_report
        from duat_cli.results.plan import Planned

        one_of("command", command, get_args(Planned))
        one_of("null", null, ("all", "uniform"))
        asked, clock = Asked(model, None, prompts, prompts_file, max_tokens, loading), Clock()
        wanted = asked.request(own_code=False)
        request = PlanRequest(
            command=command,
            model=wanted,
            texts=asked.texts,
            tokens=None if tokens is None else list(tokens),
            reinitialised=null == "all",
            tuned=folder(tuned),
            default_prompts=default_prompts,
            holdout=None if holdout is None else str(holdout),
            pruning=(pruning or PruneOptions()) if command == "prune-bound" else None,
            checked=check_task(folder(policy), list(select), wanted.dtype) if command == "check" else None,
            time=time,
        )
        report = plan_report(request, clock, heard(progress))
    return PlanResult.of(report)
