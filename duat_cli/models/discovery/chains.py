"""Lists of modules that may hold blocks: which of them are chains, where each block takes what the one in front gives.

A model with one chain is read without a word; of several (a funnel's resolutions, levels that run in cycles, encoder
and decoder within one forward pass) one is chosen by its name, and the whole model runs around it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import NotFiniteError, UnsupportedModelError
from duat_cli.models.arrays import fit, relative_error, rounding, wide
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.modality import stack_of
from duat_cli.models.discovery.parts import hidden_slot
from duat_cli.models.instrument.calls import hidden_of
from duat_cli.models.instrument.tracing import Event, Trace


class ByNameError(UnsupportedModelError):
    """What --stack reads, and no command without it. names: of the lists of blocks, in call order."""

    def __init__(self, said: str, names: Sequence[str]) -> None:
        super().__init__(said)
        self.names = tuple(names)


class SeveralStacksError(ByNameError):
    """Attention runs in several lists of blocks, and none of them was chosen."""

    def __init__(self, names: Sequence[str]) -> None:
        said = f"attention runs in several stacks: {', '.join(names)}"
        super().__init__(f"{said}; duat inspect and verify read one by --stack NAME, each by --stack all", names)


class ChangedStreamError(UnsupportedModelError):
    """The model changes the residual stream between two blocks, and not its shape. name: of their list."""

    def __init__(self, said: str, name: str) -> None:
        super().__init__(said)
        self.name = name


def by_name(fault: ChangedStreamError, read: Callable[[], object]) -> UnsupportedModelError:
    """The error, with how the blocks are read all the same, where they are. read: reads their list alone."""
    try:
        read()
    except UnsupportedModelError:
        return fault
    return ByNameError(f"{fault}; duat inspect and verify read the blocks by --stack {fault.name}", [fault.name])


class StagesError(Exception):
    """The elements of a list of modules are stages, each with a list of blocks: everything begins anew, with those."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def outermost_lists(
    stack: nn.Module, staged: Collection[str] = (), chain: str | None = None
) -> dict[str, list[nn.Module]]:
    """The elements of the ModuleLists that are in no other, by the list's name; of those whose elements are stages what
    stands in these: the elements of their lists, and what leads from one stage to the next. chain: this list alone."""
    if chain is not None:
        return {chain: list(_elements(stack.get_submodule(chain), opened=chain in staged))}
    lists = {name: module for name, module in stack.named_modules() if isinstance(module, nn.ModuleList)}
    outer = {n: found for n, found in lists.items() if not any(n.startswith(other + ".") for other in lists)}
    return {name: list(_elements(found, opened=name in staged)) for name, found in outer.items()}


def has_matrices(modules: Collection[nn.Module]) -> bool:
    """Whether some of them hold one, as blocks do; the convolutions in front of those of models of sound do not."""
    return any(weight.ndim == 2 for module in modules for weight in module.parameters())


def blocks_expected(model: Any) -> int:
    """How many block calls there will be, by the config, or by the longest list of modules."""
    stated = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    of_pair = getattr(model.config, "is_encoder_decoder", False)  # then it may be the other stack's
    if isinstance(stated, int) and not of_pair:
        return stated
    return max(map(len, outermost_lists(stack_of(model)).values()), default=0)


def _elements(modules: nn.Module, *, opened: bool) -> Iterator[nn.Module]:
    """opened: as of stages. A list is never called, so that its own elements stand for it."""
    for module in modules.children():
        if isinstance(module, nn.ModuleList) or opened:
            yield from _elements(module, opened=False)
        else:
            yield module


def is_stage(event: Event, written: Trace) -> bool:
    """Whether what was called holds its attention in the elements of a list, and is no block itself: it gives another
    number of tokens than it takes, or several of the elements attend within windows of the tokens."""
    inner = [module for module in event.module.modules() if isinstance(module, nn.ModuleList)]
    attending = {call.module for call in written.attention}
    blocks = [block for found in inner for block in found if attending & set(block.modules())]
    if not attending or not all(any(module in set(block.modules()) for block in blocks) for module in attending):
        return False
    taken = next((t for t in event.tensors if t.ndim >= 3), None)
    if taken is not None and (event.result is None or event.result.shape != taken.shape):
        return True
    return len(blocks) > 1 and any(len(call.value) > 1 for call in written.attention)


def chained(name: str, position: int, before: Event, after: Event, *, added: bool) -> bool:
    """Whether a block takes what the one in front of it gives; UnsupportedModelError where it does not and may not.

    name: of their list. added: whether features of pictures may come on top of it.
    """
    taken = hidden_slot(after).get(after.args, after.kwargs)
    if not bool(torch.isfinite(taken).all()):
        raise NotFiniteError(f"{name}.{position} puts out values that are not finite")
    given = hidden_of(before.output, taken)
    if torch.equal(taken, given):
        return True
    if not added or taken.shape != given.shape:
        said = (
            f"the input of block {position + 1} is {_instead(given, taken)} the output of block {position}: "
            "the model changes the residual stream between its blocks"
        )
        raise ChangedStreamError(said, name) if taken.shape == given.shape else UnsupportedModelError(said)
    return False


def _instead(given: Tensor, taken: Tensor) -> str:
    """What of it the next block takes, as far as that can be said."""
    if given.shape == taken.shape:
        factor = float(fit(wide(given).reshape(-1), wide(taken).reshape(-1)))
        if relative_error(factor * wide(given), wide(taken)) <= rounding(given.dtype):
            return f"{factor:.3g} times"
    return "not"


def inner_lists(stack: nn.Module, name: str, attending: Collection[nn.Module]) -> list[str]:
    """The lists within that list, by name, where it has no other elements, and each of theirs may be a block."""
    found = stack.get_submodule(name)
    inner = all(isinstance(child, nn.ModuleList) for child in found.children())
    if not inner or in_pieces(found, attending):
        return []
    return [f"{name}.{own}" for own, child in found.named_children() if any(child.children())]


def in_pieces(blocks: nn.Module, attending: Collection[nn.Module]) -> bool:
    """Whether attention stands beside other modules in lists within this one: what makes up a block has no module."""
    inner = [child for child in blocks.children() if isinstance(child, nn.ModuleList)]
    holds = [{any(m in attending for m in piece.modules()) for piece in found.children()} for found in inner]
    return {True, False} in holds


def named(names: Sequence[str], wanted: str) -> str | None:
    """The one list that is called so: by its name, or by the beginning or the end of it; None where none or several."""
    if wanted in names:
        return wanted
    alike = [one for one in names if one.startswith(wanted + ".") or one.endswith("." + wanted)]
    return alike[0] if len(alike) == 1 else None


def require_one_sequence(event: Event, parts: BlockParts) -> None:
    """Refuses a block that takes one input's tokens in groups."""
    sequences = len(parts.hidden.get(event.args, event.kwargs))
    if sequences > 1:
        raise UnsupportedModelError(
            f"{parts.name} takes {sequences} sequences for one input, its tokens in groups (frames, say); W' is of one "
            "sequence"
        )


def require_own_tokens(event: Event, parts: BlockParts, written: Trace) -> None:
    """Refuses an element of a chosen chain that is no block over tokens of its own."""
    name, own = parts.name, parts.hidden
    if any(call.module is event.module for call in written.attention):
        raise UnsupportedModelError(
            f"{name} ({type(event.module).__name__}) is attention with no block around it, from the tokens of one "
            "stack to those of another"
        )
    count = own.get(event.args, event.kwargs).shape[1]
    others = {slot.get(event.args, event.kwargs).shape[1] for slot in parts.beside} - {count}
    if any(others & set(call.value.shape) for call in written.attention):
        raise UnsupportedModelError(
            f"{name} takes its queries from {count} tokens, keys and values from {max(others)}: the stream is pooled "
            "in front of its queries alone, and W' is of one sequence"
        )
    longer = [c.value.shape[-2] for c in written.attention if c.path == "attention interface" and c.windows is None]
    if any(tokens > count for tokens in longer):
        raise UnsupportedModelError(
            f"{name} puts its {count} tokens and {max(longer) - count} of another stack under one softmax; W' is of "
            "one sequence"
        )


def anew_note(seams: Collection[int]) -> list[str]:
    """What a chain leaves out whose blocks are called again on something else than they gave."""
    if not seams:
        return []
    calls = ", ".join(map(str, sorted(seams)))
    return [
        f"between its blocks, in front of block {calls}, the model changes the stream by what belongs to no block of "
        "this stack (a norm, another stack): the sum begins anew there"
    ]
