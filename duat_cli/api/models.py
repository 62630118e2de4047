"""Functions that run a model from a folder, from the hub, or in memory."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

from duat_cli.analysis.inspect.save.asked import saved_of
from duat_cli.analysis.plan.task import PruneOptions, Task, effort_of
from duat_cli.api.asking import (
    Asked,
    File,
    Loading,
    Model,
    Pictures,
    Tensors,
    Text,
    Texts,
    computing,
    input_files,
    several,
)
from duat_cli.api.ground import heard, undisturbed
from duat_cli.api.results import AttributeResult, InspectResult, MatrixResult, PruneResult, SupportResult, VerifyResult
from duat_cli.api.settings import (
    blocks_of,
    kinds_of,
    not_negative,
    numbers,
    one_input,
    one_of,
    one_question,
    one_stack,
    whole,
    whole_numbers,
)
from duat_cli.api.target import operator_file, refuse_overwriting, tensor_target
from duat_cli.errors import InputError
from duat_cli.kinds import Extra, apart
from duat_cli.text import PAPER_PROMPT

if TYPE_CHECKING:
    from duat_cli.analysis.progress import Progress
    from duat_cli.api.operator import Operator
    from duat_cli.kinds import MetricName
    from duat_cli.loading.inputs.request import StackName


@computing
def inspect(
    model: Model = None,
    tokenizer: Any = None,
    *,
    prompts: Texts | None = None,
    prompts_file: File | None = None,
    max_tokens: int | None = None,
    chat: bool = False,
    image: Pictures | None = None,
    audio: File | Sequence[File] | None = None,
    inputs: Tensors | None = None,
    stack: str | None = None,
    decoder_prompt: str | None = None,
    layers: int | str | Iterable[int] | None = None,
    threshold: float = 0.01,
    conv_width: int = 3,
    spectrum: bool = False,
    terms: bool = False,
    end_to_end: bool = False,
    routing: bool = False,
    heads: bool = False,
    per_prompt: bool = False,
    maps: int = 0,
    save: str | Iterable[str] | None = None,
    save_to: File | None = None,
    null: Literal["all", "uniform"] = "all",
    cache: bool = True,
    matrices: File | None = None,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> InspectResult:
    """`duat inspect`: what each block's attention operator does, exactly. Also for a model in memory.

    image, audio, inputs: one or several files of each in place of texts; an image may be a PIL picture, and inputs
    tensors by the names of the forward pass's arguments; stack: the part to read, in a model of several. For a model in
    memory, its processor in place of the tokenizer turns pictures and sounds into tensors.
    layers: numbers of the blocks to report, or '0-3,7'; null: 'all' compares with the re-initialised architecture as
    well, which takes a second model; maps: number of prompts whose C is kept token by token; cache: whether Gram
    matrices and nulls are kept; save: some of H, S, bias, for the folder `save_to`; matrices: a .safetensors file for
    every block's W', by its factors. Only the command keeps results in a folder (--out). For the others, see
    `duat inspect --help`.
    """
    from duat_cli.analysis.inspect.maps import Maps
    from duat_cli.analysis.inspect.options import Filled, InspectOptions
    from duat_cli.analysis.inspect.run import inspect as compute
    from duat_cli.analysis.inspect.save.states import saving

    one_of("null", null, ("all", "uniform"))
    not_negative("--threshold", threshold)
    whole_numbers(1, conv_width=conv_width)
    whole_numbers(0, maps=maps)
    blocks, saved = blocks_of(layers), saved_of(save, save_to)
    options = InspectOptions(
        blocks, threshold, conv_width, spectrum, terms, end_to_end, routing, heads, per_prompt, null, cache
    )
    target = tensor_target("matrices", matrices)
    read = [("model", model), ("prompts_file", prompts_file), *(("inputs", one) for one in several(inputs))]
    refuse_overwriting([("matrices", matrices)], read)
    files = input_files(image, audio, inputs, stack, decoder_prompt)
    asked = Asked(model, tokenizer, prompts, prompts_file, max_tokens, loading, files, chat=chat)
    more = frozenset(name for name in get_args(Extra) if getattr(options, name))
    opened = asked.open(Task("inspect", reinitialised=null == "all", extras=more), heard(progress))
    mapped = Maps(opened.prompts[:maps], opened.text) if maps > 0 else None
    with (
        operator_file(target, opened.text) as file,
        contextlib.nullcontext() if saved is None else saving(saved[1], saved[0], opened.text) as states,
    ):
        report = compute(opened.loaded, opened.prompts, options, heard(progress), Filled(file, mapped, states))
    return InspectResult.of(report).with_operators(functools.partial(_operator, asked, report.model.fingerprint))


@computing
def verify(
    model: Model = None,
    tokenizer: Any = None,
    *,
    prompts: Texts | None = None,
    prompts_file: File | None = None,
    max_tokens: int | None = None,
    chat: bool = False,
    image: Pictures | None = None,
    audio: File | Sequence[File] | None = None,
    inputs: Tensors | None = None,
    stack: str | None = None,
    decoder_prompt: str | None = None,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> VerifyResult:
    """`duat verify`: only the certificate, block by block. Also for a model in memory. image to decoder_prompt: as in
    `inspect`."""
    from duat_cli.analysis.inspect.verify import verify as compute

    files = input_files(image, audio, inputs, stack, decoder_prompt)
    asked = Asked(model, tokenizer, prompts, prompts_file, max_tokens, loading, files, chat=chat)
    opened = asked.open(Task("verify"), heard(progress))
    report = compute(opened.loaded, opened.prompts, heard(progress))
    return VerifyResult.of(report).with_operators(functools.partial(_operator, asked, report.model.fingerprint))


@computing
def matrix(
    model: Model = None,
    tokenizer: Any = None,
    *,
    prompt: Text | None = None,
    layer: int = 0,
    max_tokens: int | None = None,
    chat: bool = False,
    image: Pictures | None = None,
    audio: File | Sequence[File] | None = None,
    inputs: Tensors | None = None,
    stack: StackName | None = None,
    decoder_prompt: str | None = None,
    output: File | None = None,
    dense: bool = False,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> MatrixResult:
    """`duat matrix`: the paper's explicit matrices of one block and one prompt. Also for a model in memory.

    prompt: one prompt as in `inspect`; by default the paper's, where text is read; image to decoder_prompt: as in
    `inspect`, for one input; output: a .safetensors file for the block's W', by its factors; dense: whether W' itself
    is written too.
    """
    from duat_cli.analysis.matrix.run import matrix as compute

    target = tensor_target("output", output)
    refuse_overwriting([("output", output)], [("model", model), *(("inputs", one) for one in several(inputs))])
    if dense and target is None:
        raise InputError("dense: writes W' to a file; give output as well")
    files = input_files(image, audio, inputs, one_stack(stack), decoder_prompt)
    whole_numbers(layer=layer)
    text = PAPER_PROMPT if prompt is None else prompt
    asked = Asked(model, tokenizer, [text], None, max_tokens, loading, files, prompt is None, chat=chat)
    opened = asked.open(Task("matrix"), heard(progress))
    one_input(files, len(opened.prompts))
    with operator_file(target, opened.text) as file:
        report = compute(opened.loaded, opened.prompts[0], layer, opened.text, heard(progress), file, dense=dense)
    return MatrixResult.of(report)


@computing
def attribute(
    model: Model = None,
    tokenizer: Any = None,
    *,
    prompts: Texts | None = None,
    prompts_file: File | None = None,
    max_tokens: int | None = None,
    chat: bool = False,
    image: Pictures | None = None,
    audio: File | Sequence[File] | None = None,
    inputs: Tensors | None = None,
    stack: Literal["decoder"] | None = None,
    decoder_prompt: str | None = None,
    target: str | None = None,
    target_field: str | None = None,
    against: str | None = None,
    against_field: str | None = None,
    position: int | Literal["all"] | None = None,
    first_token: bool = False,
    top: int = 10,
    steps: int = 0,
    continuation: str | None = None,
    measure: int = 0,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> AttributeResult:
    """`duat attribute`: what a prediction is made of, in exact parts that add up. Also for a model in memory.

    image, audio, inputs: as in `inspect`, within a text or for a decoder; stack: 'decoder' for that of an
    encoder-decoder, which reads `decoder_prompt` or what the model writes. target_field, against_field: fields in which
    every object of `prompts_file`, JSON lines, has its own `target` and `against`.
    """
    from duat_cli.analysis.attribute.run import AttributeOptions
    from duat_cli.analysis.attribute.run import attribute as compute
    from duat_cli.analysis.attribute.targets import Asked as Target
    from duat_cli.loading.texts import field_beside
    from duat_cli.loading.words import Words
    from duat_cli.models.discovery.modality import require_token_ids

    one_question(target, against, position, steps, continuation, target_field, against_field)
    file = None if prompts_file is None or prompts is not None else os.fspath(prompts_file)
    each = (
        field_beside("--target", target, target_field, file),
        field_beside("--against", against, against_field, file),
    )
    whole_numbers(1, top=top)
    whole_numbers(0, steps=steps, measure=measure)
    wished = Target(target, against, "all" if position == "all" else whole(position), first_token)
    one_of("stack", stack, (None, "decoder"))
    files = input_files(image, audio, inputs, stack, decoder_prompt)
    own = files if stack or files.option else None
    asked = Asked(model, tokenizer, prompts, prompts_file, max_tokens, loading, own, chat=chat)
    task = Task("attribute", every_position=position == "all", steps=steps or int(continuation is not None), top=top)
    opened = asked.open(task, heard(progress))
    require_token_ids(opened.loaded.model)
    options = AttributeOptions(wished, top, steps, continuation, each, measure)
    report = compute(opened.loaded, opened.prompts, Words(opened.tokenizer), options, heard(progress))
    return AttributeResult.of(report)


@computing
def prune_bound(
    model: Model = None,
    tokenizer: Any = None,
    *,
    prompts: Texts | None = None,
    prompts_file: File | None = None,
    holdout: File | float | None = None,
    max_tokens: int | None = None,
    chat: bool = False,
    image: Pictures | None = None,
    audio: File | Sequence[File] | None = None,
    inputs: Tensors | None = None,
    stack: StackName | None = None,
    decoder_prompt: str | None = None,
    granularity: str | Iterable[str] | None = None,
    metric: MetricName | None = None,
    effort: Literal["quick", "default", "thorough"] = "default",
    probes: int | None = None,
    measure: int | None = None,
    budget: float = 0.1,
    ablate: Literal["zero", "mean"] = "zero",
    confidence: float = 0.95,
    exceed: float = 0.1,
    uniform: bool = False,
    remove: float | None = None,
    remove_of: Literal["blocks", "all"] = "blocks",
    rounds: int = 1,
    criteria: bool = False,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> PruneResult:
    """`duat prune-bound`: what can be removed, and how far the output moves. Also for a model in memory.

    holdout: a file of prompts that test the chosen sets, or a share of the prompts. image, audio, inputs, stack,
    decoder_prompt: as in `inspect`. remove: the share of the blocks' or all parameters that a set has to hold.
    criteria: whether sets chosen by other criteria are run on the held-out prompts. Only the command writes sets.
    """
    from duat_cli.analysis.prune.run import prune_bound as compute

    one_of("metric", metric, (None, "hidden", "kl", "nll"))
    one_of("ablate", ablate, ("zero", "mean"))
    one_of("effort", effort, ("quick", "default", "thorough"))
    probes, measure = effort_of(effort, probes, measure)
    whole_numbers(2, probes=probes)
    whole_numbers(0, measure=measure)
    numbers(budget=budget, confidence=confidence, exceed=exceed, remove=remove)
    kinds = kinds_of(granularity)
    one_of("remove_of", remove_of, ("blocks", "all"))
    whole_numbers(1, rounds=rounds)
    options = PruneOptions(
        kinds=kinds, metric=metric, probes=probes, measure=measure, budget=budget, confidence=confidence, exceed=exceed,
        ablate_mean=ablate == "mean", uniform=uniform, joint=apart(kinds), remove=remove, of_all=remove_of == "all",
        rounds=rounds, criteria=criteria, effort=effort,
    )  # fmt: skip
    files = input_files(image, audio, inputs, stack, decoder_prompt)
    asked = Asked(model, tokenizer, prompts, prompts_file, max_tokens, loading, files, chat=chat)
    task, held = Task("prune-bound", pruning=options), None if holdout is None else str(holdout)
    outcome = compute(*asked.open_apart(task, held, heard(progress)), options, heard(progress))
    return PruneResult.of(outcome.report)


@computing
def support(
    model: Model = None, *, all_types: bool = False, progress: Progress | None = None, **loading: Unpack[Loading]
) -> SupportResult:
    """`duat support`: how far duat understands a model, in memory too; all_types: every model type."""
    from duat_cli.analysis.clock import Clock
    from duat_cli.analysis.support import support_all, support_of, support_report

    clock, asked = Clock(), Asked(model, loading=loading)
    if all_types and model is not None:
        raise InputError("all_types: stands in place of a model; give one of them")
    entries = support_all(heard(progress)) if all_types else [support_of(asked.load(heard(progress)))]
    report = support_report(entries, clock.run())
    return SupportResult.of(report)


def _operator(asked: Asked, fingerprint: str, prompt: int, block: int) -> Operator:
    with undisturbed():
        from duat_cli.api.operator import operator_of

        return operator_of(asked, fingerprint, prompt, block, heard(None))
