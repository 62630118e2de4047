"""Functions that read files: checkpoints and adapters in folders or on the hub."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, Unpack, get_args

from duat_cli.analysis.clock import Clock
from duat_cli.analysis.plan.task import PruneOptions, Task
from duat_cli.analysis.progress import Progress
from duat_cli.api.asking import (
    Asked,
    File,
    Loading,
    Model,
    Pictures,
    Tensors,
    Texts,
    computing,
    folder,
    input_files,
    options_known,
)
from duat_cli.api.ground import heard, load_libraries, undisturbed
from duat_cli.api.results import CheckResult, LoraResult, PlanResult
from duat_cli.api.settings import one_of, whole_numbers
from duat_cli.api.target import FileTarget, refuse_overwriting
from duat_cli.errors import InputError
from duat_cli.kinds import Extra, Patched, Planned
from duat_cli.loading.inputs.request import StackName


@computing
def lora_diff(
    base: File | None = None,
    tuned: File | None = None,
    other: File | None = None,
    *,
    prompts: Texts | None = None,
    prompts_file: File | None = None,
    default_prompts: bool = False,
    max_tokens: int | None = None,
    chat: bool = False,
    image: Pictures | None = None,
    audio: File | Sequence[File] | None = None,
    inputs: Tensors | None = None,
    stack: StackName | None = None,
    decoder_prompt: str | None = None,
    lint: bool = False,
    no_base: bool = False,
    directions: bool = False,
    cache: bool = True,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> LoraResult:
    """`duat lora-diff`: what an adapter, or a full fine-tune, really changed. For folders and hub ids.

    `tuned` and `other` may name a revision, as in 'org/name@v2'. Without prompts, and without `default_prompts`, the
    weights alone are compared. image, audio, inputs, stack, decoder_prompt: as in `inspect`.
    """
    from duat_cli.analysis.lora.run import LoraRequest, texts_to_run
    from duat_cli.analysis.lora.run import lora_diff as compute

    files = input_files(image, audio, inputs, stack, decoder_prompt)
    asked, clock = Asked(base, None, prompts, prompts_file, max_tokens, loading, files, chat=chat), Clock()
    wanted = asked.request(own_code=False)
    texts = texts_to_run(asked.texts, default_prompts=default_prompts)
    request = LoraRequest(
        wanted, folder(tuned), folder(other), texts, lint=lint, no_base=no_base, large=directions, cache=cache
    )
    report = compute(request, heard(progress), clock.run)
    assert report is not None  # None only with a folder for results
    return LoraResult.of(report)


@options_known
def check(
    model: Model = None,
    tokenizer: Any = None,
    *,
    policy: File | None = None,
    baseline: File | None = None,
    update_baseline: bool = False,
    base: File | None = None,
    adapter: File | None = None,
    select: Sequence[str] = (),
    weights_only: bool = False,
    prompts: Texts | None = None,
    prompts_file: File | None = None,
    max_tokens: int | None = None,
    chat: bool = False,
    image: Pictures | None = None,
    audio: File | Sequence[File] | None = None,
    inputs: Tensors | None = None,
    stack: StackName | None = None,
    decoder_prompt: str | None = None,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> CheckResult:
    """`duat check`: is the checkpoint sound, within a policy's bounds, and as its baseline? Also for a model in memory,
    by the rules that need no file; it has no baseline, and its adapter is PEFT's.

    A failed check raises no exception: `verdict` is 'failed'. update_baseline: whether `baseline` is written anew if no
    check fails.
    """
    if not weights_only:
        load_libraries()
    with undisturbed():
        from duat_cli.checks.verdict.conclude import plan as planned

        if isinstance(select, str):
            raise InputError(f"select '{select}': expected a list of rules, such as ['integrity.*']")
        files = input_files(image, audio, inputs, stack, decoder_prompt)
        asked, clock = Asked(model, tokenizer, prompts, prompts_file, max_tokens, loading, files, chat=chat), Clock()
        if asked.in_memory:
            given = {"baseline": baseline, "base": base, "adapter": adapter, "update_baseline": update_baseline or None}
            for name, value in given.items():
                if value is not None:
                    raise InputError(f"{name}: only of a checkpoint's files; give a folder or a hub id")
        dtype = loading.get("dtype", "float32")
        target = FileTarget.of("baseline", folder(baseline)) if update_baseline and baseline is not None else None
        if target is not None:
            named = {"model": model, "adapter": adapter, "policy": policy, "prompts_file": prompts_file}
            refuse_overwriting([("baseline", baseline)], named.items())
        kept = (folder(baseline), update_baseline)
        settled = planned(folder(policy), select, *kept, weights_only, dtype, folder(base))
        if asked.in_memory:
            from duat_cli.analysis.check.given import check_given
            from duat_cli.analysis.check.run import refuse_prompts

            refuse_prompts(settled, asked.texts)
            opened = asked.open(Task("check"), heard(progress))
            loaded = opened.loaded
            own = opened.tokenizer if loaded.like is None else None
            report, _ = check_given(settled, loaded, opened.prompts, own, heard(progress), clock.run)
            return CheckResult.of(report)
        from duat_cli.analysis.check.against import check_against as compute
        from duat_cli.analysis.check.run import CheckRequest

        request = CheckRequest(asked.request(), asked.texts, folder(adapter))
        report, text = compute(settled, request, heard(progress), clock.run)
        if target is not None and text is not None:
            target.write(text)
    return CheckResult.of(report)


@options_known
def plan(
    model: File | None = None,
    *,
    command: Planned = "inspect",
    prompts: Texts | None = None,
    prompts_file: File | None = None,
    tokens: Sequence[int] | None = None,
    max_tokens: int | None = None,
    chat: bool = False,
    null: Literal["all", "uniform"] = "all",
    extras: Collection[Extra] = (),
    tuned: File | None = None,
    default_prompts: bool = False,
    holdout: File | float | None = None,
    pruning: PruneOptions | None = None,
    policy: File | None = None,
    select: Sequence[str] = (),
    position: Literal["all"] | None = None,
    steps: int = 0,
    fixed: bool = False,
    patch: Patched | None = None,
    time: bool = False,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> PlanResult:
    """`duat plan`: what a command takes on the CPU, from config.json and headers alone. For a folder or hub id.

    tokens: numbers of tokens in place of texts; extras: what `inspect` is asked for, of 'spectrum', 'terms',
    'end_to_end' and 'routing'; pruning: options of `prune_bound`; position, steps: those of
    `attribute`; fixed, patch: those of `compare`.
    """
    with undisturbed():
        from duat_cli.api.planning import PlanRequest, plan_report

        one_of("command", command, get_args(Planned))
        one_of("null", null, ("all", "uniform"))
        for name in extras:
            one_of("extras", name, get_args(Extra))
        one_of("position", position, (None, "all"))
        one_of("patch", patch, (None, *get_args(Patched)))
        whole_numbers(0, steps=steps)
        if tokens is not None and not isinstance(tokens, Iterable):
            raise InputError(f"tokens: expected numbers of tokens, such as [512], got {type(tokens).__name__}")
        for number, count in enumerate([] if tokens is None else tokens):
            whole_numbers(1, **{f"tokens[{number}]": count})
        asked, clock = Asked(model, None, prompts, prompts_file, max_tokens, loading, chat=chat), Clock()
        wanted = asked.request(own_code=False)
        request = PlanRequest(
            model=wanted, texts=asked.texts, tokens=None if tokens is None else list(tokens), command=command,
            null=null, extras=frozenset(extras), tuned=folder(tuned), default_prompts=default_prompts,
            holdout=None if holdout is None else str(holdout), pruning=pruning or PruneOptions(), policy=folder(policy),
            select=list(select), position=position, steps=steps, fixed=fixed, patch=patch, time=time,
        )  # fmt: skip
        report = plan_report(request, clock, heard(progress))
    return PlanResult.of(report)
