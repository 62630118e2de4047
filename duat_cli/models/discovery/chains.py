"""Lists of modules that may hold blocks, and which are chains: each block takes the output of the one in front of it.

A model with one chain needs no choice. Of several (a funnel's resolutions, levels that run in cycles, encoder and
decoder within one forward pass) one is chosen by its name, and the whole model runs around it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.compat.torch import is_list
from duat_cli.errors import NotFiniteError, UnsupportedModelError
from duat_cli.models.arrays import fit, relative_error, rounding, wide
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.beside import hidden_slot
from duat_cli.models.discovery.modality import stack_of
from duat_cli.models.instrument.tracing import Event, Trace


class ByNameError(UnsupportedModelError):
    """The model can only be read with --stack. names: the lists of blocks, in call order."""

    def __init__(self, said: str, names: Sequence[str]) -> None:
        super().__init__(said)
        self.names = tuple(names)


class SeveralStacksError(ByNameError):
    """Attention runs in several lists of blocks, and none of them was chosen."""

    def __init__(self, names: Sequence[str]) -> None:
        said = f"attention runs in several stacks: {', '.join(names)}"
        super().__init__(f"{said}; duat inspect and verify read one by --stack NAME, each by --stack all", names)


class ChangedStreamError(UnsupportedModelError):
    """The model changes the residual stream between two blocks, but not its shape. name: the list of these blocks."""

    def __init__(self, said: str, name: str) -> None:
        super().__init__(said)
        self.name = name


def by_name(fault: ChangedStreamError, read: Callable[[], object]) -> UnsupportedModelError:
    """The error to raise: if the list of blocks can be read alone, it says how. read: reads that list alone."""
    try:
        read()
    except UnsupportedModelError:
        return fault
    return ByNameError(f"{fault}; duat inspect and verify read the blocks by --stack {fault.name}", [fault.name])


def homes_of(
    attending: Iterable[nn.Module], lists: Mapping[str, Iterable[nn.Module]], names: Mapping[nn.Module, str]
) -> list[str]:
    """The names of the lists that hold these modules, in order. Raises UnsupportedModelError where one is in none.
    names: of all modules."""
    named = {module: names[module] for module in attending if module in names}
    homes = {module: next((o for o in lists if n.startswith(o + ".")), None) for module, n in named.items()}
    found = [home for home in homes.values() if home is not None]
    if not found or len(found) < len(homes):
        raise attending_outside(module for module in attending if homes.get(module) is None)
    return list(dict.fromkeys(found))


def attending_outside(modules: Iterable[nn.Module]) -> UnsupportedModelError:
    """The error of a model in which these modules attend in front of the blocks or between them."""
    kinds = sorted({type(module).__name__ for module in modules})
    return UnsupportedModelError(f"attention runs outside any list of blocks: {', '.join(kinds)}")


class StagesError(Exception):
    """The elements of a list of modules are stages, each with a list of blocks. Discovery begins anew with them."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def outermost_lists(
    stack: nn.Module, staged: Collection[str] = (), chain: str | None = None
) -> dict[str, list[nn.Module]]:
    """The elements of the outermost lists of modules, by the name of the list. For a list of stages these are the
    elements of the lists inside the stages, and the modules between stages. chain: the one list to return; None: all.
    """
    if chain is not None:
        return {chain: list(_elements(stack.get_submodule(chain), opened=chain in staged))}
    lists = {name: module for name, module in stack.named_modules() if is_list(module)}
    outer = {n: found for n, found in lists.items() if not any(n.startswith(other + ".") for other in lists)}
    return {name: list(_elements(found, opened=name in staged)) for name, found in outer.items()}


def has_matrices(modules: Collection[nn.Module]) -> bool:
    """Whether some of these modules hold a matrix, as blocks do; the convolutions in front of a sound model do not."""
    return any(weight.ndim == 2 for module in modules for weight in module.parameters())


def blocks_expected(model: Any) -> int:
    """How many block calls to expect, by the config, or else by the longest list of modules."""
    stated = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    of_pair = getattr(model.config, "is_encoder_decoder", False)  # then the number may be that of the other stack
    if isinstance(stated, int) and not of_pair:
        return stated
    return max(map(len, outermost_lists(stack_of(model)).values()), default=0)


def _elements(modules: nn.Module, *, opened: bool) -> Iterator[nn.Module]:
    """The children of `modules`. opened: whether they are stages, replaced by their own children. A list among them is
    always replaced by its elements, because a list is never called."""
    for module in modules.children():
        if is_list(module) or opened:
            yield from _elements(module, opened=False)
        else:
            yield module


def is_stage(event: Event, written: Trace) -> bool:
    """Whether the called module is a stage: all its attention is in elements of lists inside it, and either its output
    has another shape than its input, or several of these elements attend within windows of the tokens."""
    inner = [module for module in event.module.modules() if is_list(module)]
    attending = {call.module for call in written.attention}
    blocks = [block for found in inner for block in found.children() if attending & set(block.modules())]
    if not attending or not all(any(module in set(block.modules()) for block in blocks) for module in attending):
        return False
    taken = next((t for t in event.tensors if t.ndim >= 3), None)
    if taken is not None and (event.result is None or event.result.shape != taken.shape):
        return True
    return len(blocks) > 1 and any(len(call.value) > 1 for call in written.attention)


def chained(name: str, position: int, before: Event, after: Event, written: Trace, *, added: bool) -> bool:
    """Whether a block takes the output of the one in front of it. Raises UnsupportedModelError if it does not but must.

    name: the list of both blocks. written: the trace of the second. added: whether the model may change the stream
    between them (picture features, say).
    """
    slot = hidden_slot(after, written)
    taken = slot.get(after.args, after.kwargs)
    if not bool(torch.isfinite(taken).all()):
        raise NotFiniteError(f"{name}.{position} puts out values that are not finite")
    given = slot.found(before.output, taken)
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
    """The word between the input of a block and the output of the last: "x times" for a multiple of it, else "not"."""
    if given.shape == taken.shape:
        factor = float(fit(wide(given).reshape(-1), wide(taken).reshape(-1)))
        if relative_error(factor * wide(given), wide(taken)) <= rounding(given.dtype):
            return f"{factor:.3g} times"
    return "not"


def inner_lists(stack: nn.Module, name: str, attending: Collection[nn.Module], *, staged: bool) -> list[str]:
    """The names of the lists inside that list whose elements may be blocks, where it holds lists only, or stages with
    attention in lists of theirs. staged: whether its elements may be stages."""
    found = stack.get_submodule(name)
    if all(map(is_list, found.children())):
        inner = found.named_children()
        return [] if in_pieces(found, attending) else [f"{name}.{own}" for own, child in inner if any(child.children())]
    lists = {own: child for own, child in found.named_modules() if staged and is_list(child) and own}
    outer = {own: child for own, child in lists.items() if not any(own.startswith(f"{other}.") for other in lists)}
    return [f"{name}.{own}" for own, child in outer.items() if _may_hold_blocks(child, attending)]


def _may_hold_blocks(found: nn.Module, attending: Collection[nn.Module]) -> bool:
    """Whether elements of this list hold attention, and none is an attention module itself, as parts of a block are."""
    return not set(found.children()) & set(attending) and any(module in attending for module in found.modules())


def in_pieces(blocks: nn.Module, attending: Collection[nn.Module]) -> bool:
    """Whether a list inside this one holds attention in some elements and none in others: then no module is a block."""
    inner = [child for child in blocks.children() if is_list(child)]
    holds = [{any(m in attending for m in piece.modules()) for piece in found.children()} for found in inner]
    return {True, False} in holds


def named(names: Sequence[str], wanted: str) -> str | None:
    """The list whose name, or the beginning or end of whose name, is `wanted`; None where none or several match."""
    if wanted in names:
        return wanted
    alike = [one for one in names if one.startswith(wanted + ".") or one.endswith("." + wanted)]
    return alike[0] if len(alike) == 1 else None


def require_one_sequence(event: Event, parts: BlockParts) -> None:
    """Refuses a block that takes the tokens of one input in groups."""
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
    """The note on a chain with blocks that are called on something else than the output of the block in front."""
    if not seams:
        return []
    calls = ", ".join(map(str, sorted(seams)))
    return [
        f"between its blocks, in front of block {calls}, the model changes the stream by what belongs to no block of "
        "this stack (a norm, another stack): the sum begins anew there"
    ]
