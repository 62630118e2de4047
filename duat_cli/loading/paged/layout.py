"""The pages of a model, and the tensors of the files that belong to each.

A page is a module whose weights go into memory and out of it together: a block, or a large layer outside of blocks.
Everything else is the frame, which stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from duat_cli.compat.torch import buffers_of, is_list, parameters_of
from duat_cli.loading.checkpoint.parts import FRAME_BYTES


@dataclass(frozen=True, eq=False)
class Page:
    """The weights of one module."""

    name: str  # name of the module; "" is the frame
    doors: tuple[nn.Module, ...]  # modules that need the page to run: its own, and those that share its weights
    tensors: tuple[str, ...]  # names in the files
    block: bool  # an element of a module list
    by_rows: bool  # one matrix, stored in the form in which it is used, so that single rows can be read


def layout(model: nn.Module, targets: Mapping[str, tuple[str, bool]], *, kept: int = FRAME_BYTES) -> list[Page]:
    """The pages of a model: the frame first, then the others in the order of the model's modules.

    targets: tensor of the files -> (parameter or buffer of the model, whether its values are changed). kept: bytes, see
    `FRAME_BYTES`. A tensor that several blocks share belongs to the frame.
    """
    modules = dict(model.named_modules())
    blocks = set(block_names(model))
    layers = list(large_layers(model, kept))
    same = {name: group for group in tied(model) for name in group}
    paths = dict(model.named_modules(remove_duplicate=False))
    first_path = {module: name for name, module in modules.items()}
    pages = blocks | set(layers)

    def home_of(name: str) -> str:
        """The page of a parameter by this name, or by the first name of its module, which may be in several places."""
        path, _, own = name.rpartition(".")
        return _home(name, pages) or _home(f"{first_path[paths[path]]}.{own}", pages)

    at = {tensor: {home_of(name) for name in same.get(target, [target])} for tensor, (target, _) in targets.items()}
    together = {name: name for name in layers}  # layer -> the first layer that it shares weights with
    for homes in at.values():
        if len(homes) > 1 and homes <= set(layers):
            firsts = {together[name] for name in homes}
            together |= {name: min(firsts, key=layers.index) for name in layers if together[name] in firsts}
    found: dict[str, list[str]] = {name: [] for name in modules if name in blocks or together.get(name) == name}
    frame: list[str] = []
    for tensor, homes in at.items():
        merged = {together.get(name, name) for name in homes}
        (found[merged.pop()] if len(merged) == 1 and "" not in merged else frame).append(tensor)
    return [Page("", (), tuple(frame), False, False)] + [
        Page(
            name,
            (modules[name], *(modules[other] for other in layers if other != name and together[other] == name)),
            tuple(tensors),
            name in blocks,
            name not in blocks and [targets[t][1] for t in tensors] == [False],
        )
        for name, tensors in found.items()
        if tensors
    ]


def block_names(model: nn.Module) -> list[str]:
    """Names of the blocks: the elements of the outermost module lists, or of lists in these. Every architecture keeps
    its blocks there."""
    return list(_blocks(model, "", inside=False))


def _blocks(module: nn.Module, name: str, *, inside: bool) -> Iterator[str]:
    if inside and not is_list(module):
        yield name
        return
    for key, child in module.named_children():
        yield from _blocks(child, f"{name}.{key}".lstrip("."), inside=is_list(module))


def large_layers(model: nn.Module, kept: int) -> Iterator[str]:
    """Names of large embeddings and heads: plain layers outside of blocks with more than `kept` bytes."""
    blocks = dict.fromkeys(block_names(model))
    for name, module in model.named_modules():
        plain = isinstance(module, nn.Embedding) or type(module) is nn.Linear
        if plain and not _home(name, blocks) and sum(p.numel() * p.element_size() for p in module.parameters()) > kept:
            yield name


def _home(name: str, pages: Collection[str]) -> str:
    """The page that a dotted name equals or lies in; "" is the frame."""
    parts = name.split(".")
    return next((inner for k in range(len(parts)) if (inner := ".".join(parts[: k + 1])) in pages), "")


def tied(model: nn.Module) -> list[list[str]]:
    """All names of each parameter or buffer that is in several places."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in own_tensors(module):
            names.setdefault(id(value), []).append(f"{path}.{name}".lstrip("."))
    return [group for group in names.values() if len(group) > 1]


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module itself."""
    for values in (parameters_of(module), buffers_of(module)):
        yield from ((name, value) for name, value in values.items() if value is not None)
