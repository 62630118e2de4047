"""The only two ways in which duat changes the calls of a module, hooks and patches; both are undone at the end."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.slots import joined, parted

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[Any, dict[str, Any]] | None]
After = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
Forward = Callable[..., Any]
Instead = Callable[[nn.Module, Forward, tuple[Any, ...], dict[str, Any]], Any]


@contextlib.contextmanager
def hooked(
    modules: Iterable[nn.Module], before: Before | None = None, after: After | None = None, *, first: bool = False
) -> Iterator[None]:
    """While active, `before(module, args, kwargs)` and `after(…, output)` are called around calls of these modules.

    The result of `before`, (args, kwargs), replaces the arguments, and that of `after` the output; None leaves them.
    first: whether `before` runs in front of other hooks.
    """
    with contextlib.ExitStack() as stack:
        for module in modules:
            if before is not None:
                stack.callback(module.register_forward_pre_hook(_Hook(before), prepend=first, with_kwargs=True).remove)
            if after is not None:
                stack.callback(module.register_forward_hook(_Hook(after), with_kwargs=True).remove)
        yield


def giving(modules: Iterable[nn.Module], made: Callable[[Tensor], Tensor]) -> contextlib.AbstractContextManager[None]:
    """While active, these modules return `made(output)`; of a tuple, the first element is changed."""

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        tensor, rest = parted(output)
        return joined(made(tensor), rest)

    return hooked(modules, after=after)


class _Hook:
    """A hook that a copy of its module does not call. Otherwise the owner of the hook, such as a tracer with the model
    that it traces, would be copied too."""

    def __init__(self, called: Callable[..., Any]) -> None:
        self._called = called

    def __call__(self, *args: Any) -> Any:
        return self._called(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return lambda *_: None


class ExchangedError(UnsupportedModelError):
    """A pass replaced modules that were found, hooked or patched by others."""


@contextlib.contextmanager
def unexchanged(model: nn.Module) -> Iterator[None]:
    """The context around a pass whose hooks must see all modules. Raises ExchangedError if the model exchanges some."""
    before = {module: name for name, module in model.named_modules()}
    yield
    if gone := before.keys() - set(model.modules()):
        module = next(module for module in before if module in gone)
        raise ExchangedError(
            f"{type(model).__name__}: on this input its forward pass puts another module in the place of "
            f"{before[module]} ({type(module).__name__}), which duat does not follow; if that depends on the input's "
            "length, --max-tokens cuts prompts"
        )


@contextlib.contextmanager
def patched(module: nn.Module, instead: Instead) -> Iterator[Forward]:
    """While active, `module` runs `instead(module, its own forward, args, kwargs)` in place of its own forward, which
    is yielded."""
    own, original = "forward" in vars(module), module.forward
    module.forward = _Patch(module, original, instead)
    try:
        yield original
    finally:
        if own:
            module.forward = original
        else:
            del module.forward


class _Patch:
    """A forward in the place of a module's own. A copy of the module has its own one again: this one runs the module
    that it was made for, with that one's weights."""

    def __init__(self, module: nn.Module, original: Forward, instead: Instead) -> None:
        self._module, self._original, self._instead = module, original, instead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._instead(self._module, self._original, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        return copy.deepcopy(self._original, memo)  # a bound method is bound to the copy, by the memo
