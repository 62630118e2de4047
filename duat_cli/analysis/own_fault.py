"""Whether a model's own forward pass fails, without any part of duat in it: then its config.json is at fault; or gives
nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from duat_cli.analysis.prepared import parts_of
from duat_cli.errors import ForwardError, NoSignalError, is_out_of_memory
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.quiet import described
from duat_cli.models.discovery.modality import Given, placed, stack_of
from duat_cli.models.discovery.structure import probe_inputs, run_stack
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.forwards import forwards

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
            return ForwardError(
                f"{loaded.name}: its own forward pass fails: {described(fault)}; config.json does not describe what "
                "these weights are: restore it"
            )
    return None


def require_signal(run: BlockRun) -> None:
    """Refuses a block that puts out zeros alone: |x - rebuilt| / |x| is 0 / 0 there, and so is every share of x."""
    if not all(low or high for low, high in run.extent):
        raise NoSignalError(
            f"every hidden state behind block {run.index} ({run.parts.name}) is zero, so the certificate, an error "
            "relative to the hidden states, is undefined; are the weights zero?"
        )
