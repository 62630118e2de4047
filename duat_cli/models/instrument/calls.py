"""Parameters, arguments and outputs of modules, and the tensors among them that matter."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import Cache

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.slots import Arguments, Key, by_slot, parted, put, slots_of

Path = tuple[Any, ...]
"""The path to a tensor in nested arguments: the argument's position or name, then the keys inside it."""

_known: WeakKeyDictionary[Callable[..., Any], frozenset[str]] = WeakKeyDictionary()


ANY = "**"


def taken_by(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the parameters of a function, or of a method with its `self`, and ANY where it takes any name.

    This is called before every pass and every attention, so the names are read once, which takes 0.1 ms, and kept as
    long as the function lives.
    """
    plain = getattr(function, "__func__", function)
    found = _known.get(plain)
    if found is None:
        parameters = inspect.signature(plain).parameters
        any_name = {ANY for one in parameters.values() if one.kind is one.VAR_KEYWORD}
        found = _known[plain] = frozenset({*parameters, *any_name})
    return found


class SmallTensors(TorchFunctionMode):
    """While active, raises MemoryError as soon as a function returns a tensor of more than `most` entries."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() > self._most:
            raise MemoryError(f"a tensor of shape {tuple(result.shape)} is made of it")
        return result


def without_cache(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments for a replay, without caches. A cache already holds the keys of the real run, and a replay that saw
    it would attend to them twice."""
    args, kwargs = apart(args, kwargs)
    caches = {key: None for key, value in kwargs.items() if isinstance(value, Cache)}
    return [None if isinstance(value, Cache) else value for value in args], kwargs | caches


def apart(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with each mapping copied, so that what another call puts into one (keys and values for later
    blocks) does not reach the real run."""
    args, kwargs = with_handed(args, kwargs, lambda _path, tensor: tensor)
    return tuple(args), kwargs


def handed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Path, Tensor]:
    """The floating-point tensors in the mappings among the arguments, by the path to each."""
    return {path: tensor for key, one in mappings_in(args, kwargs).items() for path, tensor in tensors_in(one, (key,))}


def beside_handed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The floating-point tensors in all arguments that are no mappings."""
    others = [value for value in (*args, *kwargs.values()) if not isinstance(value, MutableMapping)]
    return [tensor for _, tensor in tensors_in(others)]


def with_handed(args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Path, Tensor], Tensor]) -> Arguments:
    """The arguments with each mapping copied, and `change` applied to each tensor of `handed` in it."""

    def other(value: Any, path: Path) -> Any:
        if isinstance(value, Tensor):
            return change(path, value) if value.is_floating_point() else value
        if isinstance(value, MutableMapping):
            found = copy.copy(value)
            found.update({key: other(inner, (*path, key)) for key, inner in value.items()})
            return found
        if isinstance(value, tuple | list):
            made = [other(inner, (*path, place)) for place, inner in enumerate(value)]
            return type(value)(made) if type(value) in (tuple, list) else type(value)(*made)  # a named tuple
        return value

    return put(args, kwargs, {key: other(one, (key,)) for key, one in mappings_in(args, kwargs).items()})


def hand_on(args: Sequence[Any], kwargs: Mapping[str, Any], known: tuple[Sequence[Any], Mapping[str, Any]]) -> None:
    """Fills each mapping with its content in another call of the same module. This replaces blocks that do not run,
    which hand nothing on themselves."""
    held = mappings_in(*apart(*known))
    for key, mapping in mappings_in(args, kwargs).items():
        mapping.update(held[key])


def mappings_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Key, MutableMapping[Any, Any]]:
    """The arguments that are mappings, by position or name; blocks may put tensors into them for later blocks."""
    return {key: value for key, value in by_slot(args, kwargs) if isinstance(value, MutableMapping)}


def tensors_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every floating-point tensor in nested lists, tuples and mappings; indices and masks have no gradient."""
    return ((at, tensor) for at, tensor in every_tensor(value, path) if tensor.is_floating_point())


def every_tensor(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in nested lists, tuples and mappings, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from every_tensor(inner, (*path, key))


def first_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    return next((value for _, value in slots_of(args, kwargs)), None)


def only_tensor(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The input of a norm. Raises UnsupportedModelError if there is a second one, which a frozen norm would drop.
    Integers, such as the places of tokens, are none."""
    tensors = [value for _, value in slots_of(args, kwargs) if _is_input(value)]
    if len(tensors) != 1:
        raise UnsupportedModelError(f"{type(module).__name__} is held as a norm, but takes {len(tensors)} tensors")
    return tensors[0]


def on_another(forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """A function from another tensor, in place of the one that a norm is called with, to the norm's output."""

    def called(z: Tensor) -> Tensor:
        named = {key: z if _is_input(value) else value for key, value in kwargs.items()}
        return parted(forward(*(z if _is_input(value) else value for value in args), **named))[0]

    return called


def _is_input(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
