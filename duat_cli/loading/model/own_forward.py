"""A `forward` that a caller put on a module, in place of its class's.

Copying a module does not copy such a function. If it holds the module, or is a method of it, it goes on running the
original: in the original's mode, and unseen by the instruments on the copy.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from duat_cli.compat.torch import unwrapped
from duat_cli.errors import UnsupportedModelError
from duat_cli.text import clean

_LIBRARIES = ("torch", "accelerate", "transformers", "peft")


def settle_forwards(copied: nn.Module, copies: Mapping[int, Any]) -> None:
    """Makes each module's own `forward` run the copy. A wrapper of `torch.compile` or accelerate around the class's own
    method is removed. UnsupportedModelError, one line, for a function that runs modules outside of the copy.

    copies: by the id of each original object, what stands for it in the copy, as `copy.deepcopy` leaves it in its memo.
    """
    inside = set(copied.modules())
    for name, module in copied.named_modules():
        own = vars(module)
        if own.get("forward") is None:
            continue
        forward = unwrapped(own["forward"])
        if isinstance(forward, types.MethodType):
            bound = copies.get(id(forward.__self__), forward.__self__)
            if bound is module and forward.__func__ is type(module).forward:
                del own["forward"]
                continue
            if bound in inside:
                forward = own["forward"] = types.MethodType(forward.__func__, bound)
        if any(held not in inside for held in _modules(forward)):
            raise UnsupportedModelError(
                f"{clean(name) or type(copied).__name__}: its forward was replaced by a function that runs the modules "
                "of the model itself, so duat's copy would run them too, in their mode; bind it to its module with "
                "types.MethodType, or put it into a subclass or a forward hook"
            )


def _modules(value: Any) -> Iterator[nn.Module]:
    """The modules that a function can call: those that it, or anything it calls, holds or names."""
    seen: set[int] = set()
    left = [value]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            yield one
        else:
            left += _held(one)


def _held(value: Any) -> Iterable[Any]:
    """The contents of an object that a call of it, or of a part of it, can reach."""
    match value:
        case str() | bytes() | int() | float() | complex() | Tensor() | type() | types.ModuleType():
            return ()
        case list() | tuple() | set() | frozenset():
            return value
        case Mapping():
            return value.values()
        case weakref.ref():
            return (value(),)
        case types.MethodType():
            held: list[Any] = [value.__self__, value.__func__]
        case functools.partial():
            held = [value.func, value.args, value.keywords]
        case types.FunctionType():
            held = [*_cells(value), value.__defaults__, value.__kwdefaults__, *_globals(value)]
        case _:
            held = []
    return [*held, *getattr(value, "__dict__", {}).values()]


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents


def _globals(function: types.FunctionType) -> Iterator[Any]:
    """Global values that a function uses; none for a library's function, since a library keeps no caller's model
    there."""
    known = function.__globals__
    if str(known.get("__name__")).partition(".")[0] in _LIBRARIES:
        return
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        for step in dis.get_instructions(code):
            if step.opname == "LOAD_GLOBAL" and step.argval in known:
                yield known[step.argval]
