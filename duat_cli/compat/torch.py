"""torch: known to work with 2.13 to 2.15."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters, to read and to replace; None stands for a bias that a layer lacks. Without it, no
    model can be cut or tuned."""
    return module._parameters


def writes_to(tensor: Tensor) -> int:
    """How often a tensor was written to in place. Without it, a module's input is taken to have had its present
    values."""
    return tensor._version


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers, saved or not; otherwise like `parameters_of`."""
    return module._buffers


@contextmanager
def standing_in(module: nn.Module, name: str, tensor: Tensor) -> Iterator[None]:
    """A context in which another tensor replaces one of the module's own parameters or buffers. Nothing is written to
    the original, which a caller's model may hold as well. Without it, no part of a layer's weights can be left out."""
    own: dict[str, Any] = next(held for held in (module._parameters, module._buffers, vars(module)) if name in held)
    kept = own[name]
    own[name] = tensor
    try:
        yield
    finally:
        own[name] = kept


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own children, in order. Without it, no block can be cut out of its list."""
    return module._modules


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Names of the buffers that are not saved in a checkpoint. Without it, a fingerprint would cover what modules
    compute for themselves, such as rotary frequencies."""
    return module._non_persistent_buffers_set


def is_hooked(module: nn.Module) -> bool:
    """Whether the module has forward hooks of the caller's; libraries leave some of their own. Without it, hooks on
    modules that are removed from a model would be dropped silently."""
    return bool(_callers(module._forward_pre_hooks, module._forward_hooks))


def hooked_modules(model: nn.Module) -> list[str]:
    """Names of the modules with forward hooks of the caller's. Without it, a report of a model that a hook steers does
    not say so."""
    return [name or type(module).__name__ for name, module in model.named_modules() if is_hooked(module)]


def without_backward_hooks(model: nn.Module) -> list[str]:
    """Removes backward hooks from every module; returns the names of modules that had some of the caller's. Without it,
    a hook that scales or clips gradients in training changes the predicted effects of removals."""
    found = []
    for name, module in model.named_modules():
        if _callers(module._backward_pre_hooks, module._backward_hooks):
            found.append(name or type(module).__name__)
        module._backward_pre_hooks.clear()
        module._backward_hooks.clear()
    return found


def add_hooks(source: nn.Module, target: nn.Module) -> None:
    """Copies the caller's forward hooks of one module around another's. Without it, hooks on a layer that an adapter is
    merged into are lost."""
    found = _callers(source._forward_pre_hooks, source._forward_hooks)
    for kind in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", *_BEHIND):
        held = getattr(target, kind)
        more = {key: value for key, value in getattr(source, kind).items() if key in found}
        merged = {**held, **more} if kind in _BEHIND else {**more, **held}
        held.clear()
        held.update(merged)


def _callers(*hooks: Mapping[int, Any]) -> set[int]:
    every = (pair for some in hooks for pair in some.items())
    return {key for key, hook in every if (getattr(hook, "__module__", None) or "").partition(".")[0] not in _LIBRARIES}


_BEHIND = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_LIBRARIES = ("transformers", "accelerate", "peft", "torch", "duat_cli")


def uncompiled(model: Any) -> Any:
    """The module that `torch.compile` wraps; any other module unchanged. Without it, a compiled model is refused."""
    return getattr(model, "_orig_mod", model)


def uncompile(model: nn.Module) -> None:
    """Replaces every wrapper of `torch.compile` inside the model by the module that it wraps. Without it, a model with
    compiled blocks fails while it is watched."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            module._modules[name] = uncompiled(child)


def unwrapped(function: Any) -> Any:
    """The function that `torch.compile`, a context of torch's, or accelerate's conversion to float32 wraps; any other
    function unchanged. Without it, a model whose forward is compiled is refused."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        # `functools.wraps` copies `__module__` from the wrapped function, so it does not name the wrapper's library
        home = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        if home.partition(".")[0] not in ("torch", "accelerate"):
            break
        function = inner
    return function


def is_convolution(module: nn.Module) -> bool:
    """Whether the module is a convolution, of any number of dimensions, transposed or not. Without it, weights of tiny
    convolutions are drawn too large."""
    from torch import nn

    return isinstance(module, nn.modules.conv._ConvNd)


def is_list(module: nn.Module) -> bool:
    """Whether the module is a list of modules that may be blocks: a ModuleList, or a Sequential of several modules of
    one class that hold matrices. Without it, the blocks of models that call theirs as a Sequential are not found."""
    from torch import nn

    if not isinstance(module, nn.Sequential):
        return isinstance(module, nn.ModuleList)
    kinds = {type(one) for one in module}
    matrices = all(any(weight.ndim == 2 for weight in one.parameters()) for one in module)
    return len(module) > 1 == len(kinds) and matrices and any(any(one.children()) for one in module)


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that this one is a view of; the tensor itself if it is no view. Without it, a mixer's layer that
    multiplies by a part of a parameter is not recognised, and its mixer is not proved (zamba)."""
    return tensor if tensor._base is None else tensor._base


def functions_unwatched() -> AbstractContextManager[Any]:
    """A context in which no torch function mode is called. Without it, a gate that is computed from another gate would
    be recorded twice."""
    import torch

    return torch._C.DisableTorchFunction()


@functools.cache
def open_to_modes(function: Any) -> Any:
    """A copy of a Python function of torch's, such as `multi_head_attention_forward`, which hands its whole call to the
    function modes around it; the copy runs, and hands them the calls inside it. None where torch wrote the function
    otherwise. Without it, attention in such a function is not seen."""
    asks = "has_torch_function"
    if asks not in function.__code__.co_names:
        return None
    inside = {**function.__globals__, asks: lambda tensors: False}
    return types.FunctionType(function.__code__, inside, function.__name__, function.__defaults__)


@contextmanager
def left(mode: Any) -> Iterator[None]:
    """A context in which this function mode, if it is the innermost, is not called. Without it, each look at a tensor
    while discovery examines a block passes through a mode that watches the model alone."""
    from torch.overrides import _pop_mode, _push_mode

    inner = _pop_mode()
    if inner is not mode:
        _push_mode(inner)
        yield
        return
    try:
        yield
    finally:
        _push_mode(mode)


@contextmanager
def operations_left(mode: Any) -> Iterator[None]:
    """A context as `left`, for a mode of `operations_through`; None for no mode."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

    innermost = mode is not None and _get_current_dispatch_mode() is mode
    with _pop_mode_temporarily() if innermost else nullcontext():
        yield


@contextmanager
def uncheckpointed() -> Iterator[None]:
    """A context in which `torch.utils.checkpoint` only calls the function that it is given. Without it, a model's code
    that uses it runs again when gradients are computed, when no dynamic parameter is held fixed any more."""
    from torch.utils import checkpoint

    def around(*_: Any, **__: Any) -> Iterator[None]:
        yield

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
            return function(*args)

    held: dict[str, Any] = vars(checkpoint)
    generator = "_checkpoint_without_reentrant_generator"
    plain = {"CheckpointFunction": Plain, generator: around, f"{generator}_impl": around}  # the last from 2.15 on
    kept = {name: held[name] for name in plain if name in held}
    held.update((name, plain[name]) for name in kept)
    try:
        yield
    finally:
        held.update(kept)


def operations_through(run: Callable[[Any, Any, Any], Any]) -> AbstractContextManager[Any]:
    """A context in which `run(operation, args, kwargs)` is called in place of each operation on tensors. Without it, no
    untrained model can be drawn block by block."""
    found: AbstractContextManager[Any] = _mode_of()(run)
    return found


@functools.cache
def _mode_of() -> Any:
    """The class of such contexts, made once. A class is in a cycle with itself: one made anew for each context would
    keep what `run` holds, such as all weights of a block, until Python looks for cycles."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __init__(self, run: Callable[[Any, Any, Any], Any]) -> None:
            super().__init__()
            self._run = run

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self._run(func, args, kwargs or {})

    return Mode


def written(operation: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that an operation writes to, as its schema declares them. Without it, a forward pass that changes its
    own weights cannot be told from one that does not."""
    values = [args[at] if at < len(args) else kwargs.get(name) for at, name in _written_arguments(operation)]
    return [one for value in values if value is not None for one in (value if isinstance(value, list) else [value])]


@functools.cache
def _written_arguments(operation: Any) -> list[tuple[int, str]]:
    stated = enumerate(operation._schema.arguments)
    return [(at, one.name) for at, one in stated if one.alias_info is not None and one.alias_info.is_write]
