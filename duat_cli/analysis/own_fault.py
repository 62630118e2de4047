"""Faults of a model itself, found without any part of duat in its forward pass.

The pass may fail (then config.json is usually at fault), give zeros, or differ from run to run; or weights may not be
finite. The error is the same whether weights are in memory or read block by block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from duat_cli.analysis.stacks import parts_of, stack_options
from duat_cli.compat.torch import hooked_modules
from duat_cli.errors import (
    CheckpointError,
    DuatError,
    ForwardError,
    NoSignalError,
    UnsupportedModelError,
    is_out_of_memory,
)
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.quiet import described
from duat_cli.loading.texts import numbered
from duat_cli.models.arrays import tolerance_for
from duat_cli.models.discovery.exchanged import weights_kept
from duat_cli.models.discovery.modality import Given, placed, probe_inputs, stack_of
from duat_cli.models.discovery.structure import Discovery, ModelStructure, run_stack
from duat_cli.models.instrument.plain import PlainPass, deviation
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.alone import has_own_code, require_alone
from duat_cli.models.sweep.lockstep import Pass, forwards, side_by_side
from duat_cli.text import listed

_TOKENS = 8


def own_fault(loaded: LoadedModel, prompts: Sequence[Given | None] = (None,)) -> ForwardError | None:
    """The error of plain passes over these inputs; None where they run. prompts: model inputs; None stands for random
    ones.

    Where weights are read block by block, the passes go side by side.
    """
    stack, failed = stack_of(loaded.model), list[Given | None]()

    def run(prompt: Given | None) -> None:
        given = probe_inputs(stack, loaded.like, _TOKENS, loaded.device) if prompt is None else prompt
        try:
            run_stack(stack, placed(given, loaded.device, loaded.model.dtype))
        except Exception:
            failed.append(prompt)
            raise

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with torch.no_grad(), weights_kept(stack):
            yield

    pager = None if loaded.paged is None else loaded.paged.pager
    try:
        forwards(pager, [partial(run, prompt) for prompt in prompts], around)
    except Exception as fault:
        if is_out_of_memory(fault):
            raise
        if isinstance(fault, UnsupportedModelError) or _absent(loaded, fault) is not None:
            return None
        prompt = failed[0] if failed else None
        return ForwardError(f"{loaded.name}: {_why(loaded.model, described(fault), prompt)}")
    return None


def _why(model: Any, fault: str, prompt: Given | None) -> str:
    """Text of a model's own error, and what to do about it. prompt: the input it failed on; None: the probe."""
    if isinstance(prompt, Tensor):
        return (
            f"its own forward pass fails on a prompt of {prompt.shape[-1]} tokens: {fault}; "
            "if it has no so many positions, --max-tokens cuts prompts"
        )
    if named := stack_options(model):
        what = "its parts" if len(parts_of(model)) > 1 else "a part of it"
        can = f"duat inspect and verify read {what} by --stack {named}"  # other commands read no part, or not every one
        return f"{type(model).__name__} cannot run on one kind of input ({fault}); {can}"
    said = f"its own forward pass fails: {fault}; "
    if hooked := hooked_modules(model):
        return f"{said}forward hooks of {listed(hooked)} run on every pass, on probes of {_TOKENS} tokens too"
    if has_own_code(model):
        return f"{said}its code is not the libraries': see that it runs on token ids by itself"
    config = "config.json does not describe what these weights are: restore it"
    others = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}
    if not others:
        return said + config
    # its code may have a cast or a constant for other dtypes only, or weights that no dtype is asked for
    other = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in others))
    return f"{said}if it runs in float32, its code cannot in {other}; else {config}"


@contextlib.contextmanager
def blaming(loaded: LoadedModel, prompts: Sequence[Given | None] = (None,)) -> Iterator[None]:
    """A context for passes over these inputs. Raises ForwardError where the model fails on them without duat, too.

    prompts: as for `own_fault`.
    """
    try:
        yield
    except (UnsupportedModelError, RuntimeError, ValueError, TypeError, LookupError) as fault:
        if is_out_of_memory(fault) or (own := own_fault(loaded, prompts)) is None:
            raise
        raise own from fault


@contextlib.contextmanager
def pointing() -> Iterator[None]:
    """A context for a discovery: a refusal that says of no command what it reads gets a note on those that read the
    weights alone."""
    try:
        yield
    except UnsupportedModelError as fault:
        if "; duat " not in str(fault):
            fault.add_note("duat check --weights-only and duat lora-diff without prompts read its weights")
        raise


def of_weights(loaded: LoadedModel, fault: DuatError) -> DuatError:
    """The fault, or an error that names a tensor if weights are NaN or infinite. Other errors then mean nothing: a
    sound norm that reads NaN does not behave like a norm."""
    for name, count in loaded.nonfinite_weights.items():
        return CheckpointError(
            f"{loaded.name}: {name} holds {count} values that are NaN or infinite, so nothing that it computes can be "
            "looked at; repair the checkpoint"
        )
    return fault


@contextlib.contextmanager
def refusing(
    loaded: LoadedModel, prompts: Sequence[Given | None], discovery: Callable[[], Discovery]
) -> Iterator[None]:
    """A context for a discovery over weights that are read block by block, with passes over these inputs beside it. It
    raises the errors of a model in memory, where all blocks are found before the first is proved. discovery: begins
    another discovery."""
    try:
        with blaming(loaded, prompts):
            yield
    except (UnsupportedModelError, RuntimeError) as fault:
        if is_out_of_memory(fault):
            raise
        if (absent := _absent(loaded, fault)) is not None:
            raise UnsupportedModelError(
                f"{type(loaded.model).__name__}: uses weights past the modules that hold them, so they cannot be read "
                f"block by block ({str(absent).splitlines()[0]}); give it memory for all of them"
            ) from fault
        if isinstance(fault, UnsupportedModelError) and (blamed := of_weights(loaded, fault)) is not fault:
            raise blamed from fault
        _refused_by_the_rest(loaded, discovery())
        raise


def _absent(loaded: LoadedModel, fault: BaseException) -> BaseException | None:
    """The error of a pass that used weights, read block by block, while they were not in memory; None for others."""
    raised = fault.__cause__ if isinstance(fault, UnsupportedModelError) else fault
    lacks = loaded.paged is not None and isinstance(raised, RuntimeError) and "meta" in str(raised)
    return raised if lacks else None


def _refused_by_the_rest(loaded: LoadedModel, alone: Discovery) -> None:
    """Raises UnsupportedModelError where blocks behind those that a failed attempt reached cannot be read."""
    assert loaded.paged is not None
    with contextlib.suppress(RuntimeError), alone.attached():  # this pass may fail as the attempt did
        side_by_side(loaded.paged.pager, alone, lambda: [alone.proof()] if alone.ready else None, lambda _page: None)
        for event in alone.chained():
            alone.parts_of(event.module)


def require_map(
    structure: ModelStructure,
    run: Callable[[Sequence[Pass]], None],
    like: Mapping[str, Tensor] | None,
    device: str | None = None,
) -> None:
    """Raises UnsupportedModelError for a model that is no map of its input, block by block: its output changes from run
    to run, or its blocks read more than the hidden states.

    run: runs passes. like: as for `probe_inputs`; device: None: where the weights are.
    """
    require_repeatable(structure, run, like, device)
    require_alone(structure, run, like, device)


def require_repeatable(
    structure: ModelStructure,
    run: Callable[[Sequence[Pass]], None],
    like: Mapping[str, Tensor] | None,
    device: str | None = None,
) -> None:
    """Raises UnsupportedModelError for a model whose output seems to change under duat's instruments, but also changes
    from run to run without them.

    run, like, device: as for `require_map`.
    """
    tolerance = tolerance_for(structure.stack.dtype)
    if structure.plain_error <= tolerance:
        return
    given = probe_inputs(structure.stack, like, _TOKENS, device)
    passes = [PlainPass(structure.calls, lambda: run_stack(structure.stack, given)) for _ in range(2)]
    run(passes)
    if not deviation(passes[0].outputs, passes[1].outputs) <= tolerance:
        raise UnsupportedModelError(
            "its forward pass draws random numbers: two passes over one input differ; where it takes them as an input "
            "(as a masked autoencoder's noise), give it with --inputs"
        )


def require_signal(run: BlockRun, given: Given | None = None) -> None:
    """Raises NoSignalError for a block whose output is all zeros: |x - rebuilt| / |x| is 0 / 0 there, and so is every
    share of x. given: the model inputs, to name the first prompt that gives zeros."""
    zero = [number for number, (low, high) in enumerate(run.extent) if not (low or high)]
    if not zero:
        return
    ids = given[zero[0]].tolist() if isinstance(given, Tensor) and not given.is_floating_point() else []
    read = numbered(ids[:_TOKENS]) + (" …" if len(ids) > _TOKENS else "")
    raise NoSignalError(
        f"every hidden state behind block {run.index} ({run.parts.name}) is zero, so the certificate, an error "
        f"relative to the hidden states, is undefined; {f'the prompt was {read}: ' if ids else ''}are the weights zero?"
    )
