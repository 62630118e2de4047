"""The only two ways in which duat changes what a module does when it is called; both are undone at the end."""

from __future__ import annotations

import contextlib
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
    """While active, every call of these modules passes `before(module, args, kwargs)` and `after(…, output)`.

    What `before` returns, (args, kwargs), and what `after` returns replaces what the module gets and gives; None does
    not. first: `before` goes in front of other hooks.
    """
    with contextlib.ExitStack() as stack:
        for module in modules:
            if before is not None:
                stack.callback(module.register_forward_pre_hook(_Hook(before), prepend=first, with_kwargs=True).remove)
            if after is not None:
                stack.callback(module.register_forward_hook(_Hook(after), with_kwargs=True).remove)
        yield


def giving(modules: Iterable[nn.Module], made: Callable[[Tensor], Tensor]) -> contextlib.AbstractContextManager[None]:
    """While active, these modules give what `made` makes of what they give, or of the first of a tuple."""

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        tensor, rest = parted(output)
        return joined(made(tensor), rest)

    return hooked(modules, after=after)


class _Hook:
    """Stays with its module: a copy of the module does not call it. What a hook belongs to, such as a tracer with the
    model that it traces, would be copied with it."""

    def __init__(self, called: Callable[..., Any]) -> None:
        self._called = called

    def __call__(self, *args: Any) -> Any:
        return self._called(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing


def _nothing(*_: Any) -> None:
    return None


class ExchangedError(UnsupportedModelError):
    """A pass put other modules in the place of some that were found, hooked or patched."""


@contextlib.contextmanager
def unexchanged(model: nn.Module) -> Iterator[None]:
    """Around a pass whose hooks are to be on all that runs: ExchangedError where the model exchanges its modules."""
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

    def forward(*args: Any, **kwargs: Any) -> Any:
        return instead(module, original, args, kwargs)

    module.forward = forward
    try:
        yield original
    finally:
        if own:
            module.forward = original
        else:
            del module.forward
