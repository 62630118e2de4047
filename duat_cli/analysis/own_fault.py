"""Whether a model's own forward pass fails, without any part of duat in it: then its config.json is at fault; or gives
nothing, or each time something else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from duat_cli.analysis.prepared import parts_of
from duat_cli.compat.torch import hooked_modules
from duat_cli.errors import ForwardError, NoSignalError, UnsupportedModelError, is_out_of_memory
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.quiet import described
from duat_cli.loading.texts import numbered
from duat_cli.models.arrays import tolerance_for
from duat_cli.models.discovery.modality import Given, placed, stack_of
from duat_cli.models.discovery.structure import ModelStructure, probe_inputs, run_stack
from duat_cli.models.instrument.plain import PlainPass, deviation
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.alone import has_own_code, require_alone
from duat_cli.models.sweep.lockstep import Pass, forwards
from duat_cli.text import listed

_TOKENS = 8


def own_fault(loaded: LoadedModel, prompts: Iterable[Given] = ()) -> ForwardError | None:
    """The error of a plain pass over these inputs, or over random ones; None where they run."""
    stack = stack_of(loaded.model)
    pager = None if loaded.paged is None else loaded.paged.pager
    for given in prompts or [probe_inputs(stack, loaded.like, _TOKENS, loaded.device)]:
        held = placed(given, loaded.device, loaded.model.dtype)
        try:
            with torch.no_grad():
                forwards(pager, [lambda held=held: run_stack(stack, held)])  # type: ignore[misc]
        except Exception as fault:
            if is_out_of_memory(fault):
                raise
            if len(parts := parts_of(loaded.model)) > 1:
                return ForwardError(
                    f"{loaded.name}: {type(loaded.model).__name__} cannot run on one kind of input "
                    f"({described(fault)}); its parts can: give --stack {', '.join(parts)} or all"
                )
            hooked = hooked_modules(loaded.model)
            return ForwardError(
                f"{loaded.name}: its own forward pass fails: {described(fault)}; "
                + (
                    f"forward hooks of {listed(hooked)} run on every pass, on probes of {_TOKENS} tokens too"
                    if hooked
                    else "its code is not the libraries': see that it runs on token ids by itself"
                    if has_own_code(loaded.model)
                    else "config.json does not describe what these weights are: restore it"
                )
            )
    return None


@contextlib.contextmanager
def blaming(loaded: LoadedModel, prompt: Given | None = None) -> Iterator[None]:
    """Around passes of a prompt, or of probes: ForwardError where the model fails on it without any part of duat as
    well."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, LookupError) as fault:
        if is_out_of_memory(fault) or (own := own_fault(loaded, [] if prompt is None else [prompt])) is None:
            raise
        if not isinstance(prompt, Tensor):
            raise own from fault
        raise ForwardError(
            f"{loaded.name}: its own forward pass fails on a prompt of {prompt.shape[-1]} tokens: {described(fault)}; "
            "if it has no so many positions, --max-tokens cuts prompts"
        ) from fault


def require_map(
    structure: ModelStructure,
    run: Callable[[Sequence[Pass]], None],
    like: Mapping[str, Tensor] | None,
    device: str | None = None,
) -> None:
    """Refuses a model that is no map of its input, block by block: it gives another output each time, or its blocks
    read more than the hidden states.

    run: runs passes. like: as of `probe_inputs`; device: None is where the weights are.
    """
    require_repeatable(structure, run, like, device)
    require_alone(structure, run, like, device)


def require_repeatable(
    structure: ModelStructure,
    run: Callable[[Sequence[Pass]], None],
    like: Mapping[str, Tensor] | None,
    device: str | None = None,
) -> None:
    """Refuses a model that seems to be moved by duat's instruments, but gives another output each time without them.

    run, like, device: as of `require_map`.
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
            "(the noise of ViT-MAE), give it with --inputs"
        )


def require_signal(run: BlockRun, given: Given | None = None) -> None:
    """Refuses a block that puts out zeros alone: |x - rebuilt| / |x| is 0 / 0 there, and so is every share of x. given:
    what the model was run on, of which the first prompt that gives zeros is named."""
    zero = [number for number, (low, high) in enumerate(run.extent) if not (low or high)]
    if not zero:
        return
    ids = given[zero[0]].tolist() if isinstance(given, Tensor) and not given.is_floating_point() else []
    read = numbered(ids[:_TOKENS]) + (" …" if len(ids) > _TOKENS else "")
    raise NoSignalError(
        f"every hidden state behind block {run.index} ({run.parts.name}) is zero, so the certificate, an error "
        f"relative to the hidden states, is undefined; {f'the prompt was {read}: ' if ids else ''}are the weights zero?"
    )
