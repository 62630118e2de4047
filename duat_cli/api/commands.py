"""The commands as functions. Each gives the report that the command writes, computes what it computes by default, and
raises what it says: `DuatError` with the same one line.

In every call: `model` is a folder or hub id, None for the bundled demo, or, where it says so, a transformers or PEFT
model in memory with its `tokenizer`, which is left as it is. `prompts` is a text or several, `prompts_file` a file of
them; without either the bundled set runs. `max_tokens` cuts every prompt. `progress` is called with (done, total, what
is done). Nothing is printed, and nothing of the process stays changed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

from duat_cli.analysis.plan.task import PruneOptions, Task
from duat_cli.api.asking import Asked, Loading, Model, Texts, folder
from duat_cli.api.ground import heard, undisturbed
from duat_cli.api.results import (
    CheckResult,
    InspectResult,
    LoraResult,
    MatrixResult,
    PlanResult,
    PruneResult,
    SupportResult,
    VerifyResult,
)
from duat_cli.api.settings import at_least, blocks_of, kinds_of, one_of
from duat_cli.errors import InputError
from duat_cli.text import PAPER_PROMPT

if TYPE_CHECKING:
    from duat_cli.analysis.progress import Progress
    from duat_cli.api.operator import Operator
    from duat_cli.kinds import MetricName
    from duat_cli.results.plan import Planned

File = str | os.PathLike[str]


def inspect(
    model: Model = None,
    tokenizer: Any = None,
    *,
    prompts: Texts | None = None,
    prompts_file: File | None = None,
    max_tokens: int | None = None,
    layers: Iterable[int] | None = None,
    threshold: float = 0.01,
    conv_width: int = 3,
    spectrum: bool = False,
    terms: bool = False,
    per_prompt: bool = False,
    null: Literal["all", "uniform"] = "all",
    cache: bool = True,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> InspectResult:
    """`duat inspect`: what each block's attention operator does, exactly. Also of a model in memory.

    layers: numbers of the blocks to report; null: 'all' compares with the re-initialised architecture as well, which
    takes a second model; cache: whether Gram matrices and nulls are kept. The others are as `duat inspect --help` says.
    """
    _load_libraries()
    with undisturbed():
        from duat_cli.analysis.inspect.run import InspectOptions
        from duat_cli.analysis.inspect.run import inspect as compute

        one_of("null", null, ("all", "uniform"))
        at_least("--threshold", threshold, 0)
        at_least("conv_width", conv_width, 1)
        blocks = blocks_of(layers)
        options = InspectOptions(blocks, threshold, conv_width, spectrum, terms, per_prompt, null, cache)
        asked = Asked(model, tokenizer, prompts, prompts_file, max_tokens, loading)
        opened = asked.open(Task("inspect", reinitialised=null == "all"), heard(progress))
        report = compute(opened.loaded, opened.prompts, options, heard(progress))
    return InspectResult.of(report).with_operators(functools.partial(_operator, asked, report.model.fingerprint))


def verify(
    model: Model = None,
    tokenizer: Any = None,
    *,
    prompts: Texts | None = None,
    prompts_file: File | None = None,
    max_tokens: int | None = None,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> VerifyResult:
    """`duat verify`: only the certificate, block by block. Also of a model in memory."""
    _load_libraries()
    with undisturbed():
        from duat_cli.analysis.inspect.run import verify as compute

        asked = Asked(model, tokenizer, prompts, prompts_file, max_tokens, loading)
        opened = asked.open(Task("verify"), heard(progress))
        report = compute(opened.loaded, opened.prompts, heard(progress))
    return VerifyResult.of(report).with_operators(functools.partial(_operator, asked, report.model.fingerprint))


def matrix(
    model: Model = None,
    tokenizer: Any = None,
    *,
    prompt: str = PAPER_PROMPT,
    layer: int = 0,
    max_tokens: int | None = None,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> MatrixResult:
    """`duat matrix`: the paper's explicit matrices of one block and one prompt. Also of a model in memory."""
    _load_libraries()
    with undisturbed():
        from duat_cli.analysis.matrix.run import matrix as compute

        opened = Asked(model, tokenizer, [prompt], None, max_tokens, loading).open(Task("matrix"), heard(progress))
        report = compute(opened.loaded, opened.prompts[0], layer, opened.text, heard(progress))
    return MatrixResult.of(report)


def prune_bound(
    model: Model = None,
    tokenizer: Any = None,
    *,
    prompts: Texts | None = None,
    prompts_file: File | None = None,
    holdout: File | float | None = None,
    max_tokens: int | None = None,
    granularity: str | Iterable[str] | None = None,
    metric: MetricName | None = None,
    probes: int = 32,
    measure: int = 24,
    budget: float = 0.1,
    ablate: Literal["zero", "mean"] = "zero",
    confidence: float = 0.95,
    exceed: float = 0.1,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> PruneResult:
    """`duat prune-bound`: what can be removed, and how far the output moves. Also of a model in memory.

    holdout: a file of prompts that test the chosen sets, or a share of the prompts. Sets are written by the command.
    """
    _load_libraries()
    with undisturbed():
        from duat_cli.analysis.prune.run import prune_bound as compute

        one_of("metric", metric, (None, "hidden", "kl", "nll"))
        one_of("ablate", ablate, ("zero", "mean"))
        at_least("probes", probes, 2)
        at_least("measure", measure, 0)
        kinds = kinds_of(granularity)
        options = PruneOptions(kinds, metric, probes, measure, budget, confidence, exceed, ablate == "mean")
        asked = Asked(model, tokenizer, prompts, prompts_file, max_tokens, loading)
        task, held = Task("prune-bound", pruning=options), None if holdout is None else str(holdout)
        outcome = compute(*asked.open_apart(task, held, heard(progress)), options, heard(progress))
    return PruneResult.of(outcome.report)


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
    _load_libraries()
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
        _load_libraries()
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


def support(
    model: Model = None,
    *,
    all_types: bool = False,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> SupportResult:
    """`duat support`: how far duat understands a model, in memory too; all_types: every type of text model."""
    _load_libraries()
    with undisturbed():
        from duat_cli.analysis.clock import Clock
        from duat_cli.analysis.support import support_all, support_of, support_report

        clock, asked = Clock(), Asked(model, loading=loading)
        if all_types and model is not None:
            raise InputError("all_types: stands in place of a model; give one of them")
        entries = support_all(heard(progress)) if all_types else [support_of(asked.load(heard(progress)))]
        report = support_report(entries, clock.run())
    return SupportResult.of(report)


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


def _operator(asked: Asked, fingerprint: str, prompt: int, block: int) -> Operator:
    with undisturbed():
        from duat_cli.api.operator import operator_of

        return operator_of(asked, fingerprint, prompt, block, heard(None))


def _load_libraries() -> None:
    """Before anything runs: the garbage collector is not stopped for it, as a command's is."""
    import duat_cli.loading.model.load  # noqa: F401
