"""The ending: the code between the last block and a model's output, as an affine map of the last hidden states.

It is the model's own code, replayed with its dynamic parameters held: norms keep their scale, and activations (of a
masked LM's head, say) their ratio of output to input. Where logits are capped at the end, the output of the head's last
layer stands for them. A short random input shows which of these make the map affine.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import NoSignalError, NotFiniteError, UnsupportedModelError
from duat_cli.models.arrays import random_like, relative_error, tolerance_for
from duat_cli.models.block.norms import FrozenNorm, NormForm, freeze_whole, recognise
from duat_cli.models.holding import holding
from duat_cli.models.instrument.calls import first_tensor, only_tensor
from duat_cli.models.instrument.functions.activations import RatioMode, Ratios
from duat_cli.models.instrument.hooks import hooked, patched
from duat_cli.models.sweep.passes import Behind, run_alone

FAR = 100.0  # how much larger than the hidden states a test vector is: a cap shows there


@dataclass(frozen=True)
class EndingForm:
    """The modules that are held, and the output that is taken, so that the ending is affine."""

    norms: dict[nn.Module, NormForm]
    activations: frozenset[
        nn.Module
    ]  # modules that are held at their ratio; None of them and no function unless `held`
    held: bool
    layer: nn.Module | None  # its output stands for the model's, because the code behind it is not affine

    @property
    def held_kinds(self) -> list[str]:
        """The classes of the norms that keep their scale."""
        return sorted({type(norm).__name__ for norm in self.norms})


class Ending:
    """The ending of one prompt as an affine map."""

    def __init__(self, behind: Behind, form: EndingForm) -> None:
        """behind: that of a pass of the whole model on the prompt, up to its output."""
        self._behind, self._form = behind, form
        self._norms: dict[nn.Module, list[FrozenNorm]] = defaultdict(list)
        self._ratios = Ratios()
        self._numbers: dict[nn.Module, Iterator[int]] | None = None
        """The numbers of the next calls of each norm in a replay; None during the capture."""
        self.hidden = behind.hidden
        self.output = self._run(self.hidden, gradient=False)  # the output that the map stands for, by the model itself

    def __call__(self, hidden: Tensor, *, gradient: bool = False) -> Tensor:
        """The frozen map at `hidden` (1, N, M)."""
        self._numbers = defaultdict(itertools.count)
        self._ratios.hold()
        return self._run(hidden, gradient=gradient)

    def _run(self, hidden: Tensor, *, gradient: bool) -> Tensor:
        kept: list[Tensor] = []
        form = self._form

        def see(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            kept.append(output)

        one = self._behind.on(hidden, gradient=gradient)
        with contextlib.ExitStack() as stack:
            for norm in form.norms:
                stack.enter_context(patched(norm, self._norm))
            if form.held:
                for module in form.activations:
                    stack.enter_context(patched(module, self._ratios.of_module))
                stack.enter_context(RatioMode(self._ratios))
            stack.enter_context(hooked([] if form.layer is None else [form.layer], after=see))
            output = run_alone(one)
        return output if form.layer is None else kept[-1]

    def _norm(self, norm: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        x = only_tensor(norm, args, kwargs)
        if self._numbers is not None:
            return self._norms[norm][next(self._numbers[norm])](x)
        with holding(self._ratios, inside=True):
            y = original(*args, **kwargs)
        self._norms[norm].append(freeze_whole(self._form.norms[norm], x.detach(), y.detach()))
        return y


def find_ending(model: Any, behind: Behind) -> EndingForm:
    """The form of the ending, from a recorded pass of a short input. Raises UnsupportedModelError if none is affine."""
    if not bool(torch.isfinite(behind.recorded.output).all()):
        raise NotFiniteError(f"{type(model).__name__}: its output is not finite; duat check finds such weights")
    if not bool(behind.hidden.any()):
        raise NoSignalError(
            f"{type(model).__name__}: every hidden state behind its last block is zero, so there is nothing that its "
            "output could be made of; are the weights zero?"
        )
    if not bool(behind.recorded.output.any()):
        raise NoSignalError(
            f"{type(model).__name__}: its output is zero, and so is every part of it; is the weight of its last layer "
            "zero?"
        )
    norms, activations = _parts(model, behind)
    layer = _last_layer(model)
    error, bar = 0.0, max(map(tolerance_for, (behind.hidden.dtype, model.dtype)))  # a stream may be wider than weights
    for held in (False, True):
        for whose in (None, layer) if layer is not None else (None,):
            form = EndingForm(norms, activations, held, whose)
            with contextlib.suppress(IndexError):  # a layer that does not run
                error = _distance(Ending(behind, form))
                if error <= bar:
                    return form
    if behind.hidden.dtype == torch.float16 and not bool(Ending(behind, form)(_far(behind.hidden)).isfinite().all()):
        raise UnsupportedModelError(
            f"{type(model).__name__}: what stands between its last block and its output is tried out on {FAR:.0f} "
            "times its hidden states, which leave the range of float16; use --dtype float32"
        )
    raise UnsupportedModelError(
        f"{type(model).__name__}: what stands between its last block and its output is not affine, even with norms and "
        f"activations held (relative error {error:.1e}), so its output has no exact parts"
    )


def _last_layer(model: Any) -> nn.Module | None:
    found = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return found if isinstance(found, nn.Module) else None


def _distance(ending: Ending) -> float:
    """Relative error of the map, against an affine map and against the output that it stands for, the larger of both;
    infinity where the stream does not pass through it."""
    x, far = ending.hidden, _far(ending.hidden)
    at_0, at_x, at_far, at_sum = (ending(z) for z in (torch.zeros_like(x), x, far, x + far))
    if not bool((at_far - at_0).abs().max() > 1e-6 * at_0.abs().max()):
        return float("inf")
    return max(relative_error(at_x + at_far - at_0, at_sum), relative_error(at_x, ending.output))


def _far(x: Tensor) -> Tensor:
    return FAR * random_like(x)


def _parts(model: Any, behind: Behind) -> tuple[dict[nn.Module, NormForm], frozenset[nn.Module]]:
    """The norms and the modules that are activations, behind the last block."""
    blocks = set(behind.structure.calls)
    inside = {inner for block in blocks for inner in block.modules()}
    leaves = [m for m in model.modules() if not any(m.children()) and m not in inside]
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def see(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        x = first_tensor(args, kwargs)
        if module in blocks:
            calls.clear()  # these ran in front of the last block
        elif isinstance(output, Tensor) and x is not None and x.is_floating_point() and x.shape == output.shape:
            calls.append((module, x, output))

    with hooked([*leaves, *blocks], after=see):
        run_alone(behind.on(behind.hidden, gradient=False))
    norms: dict[nn.Module, NormForm] = {}
    activations: set[nn.Module] = set()
    with torch.no_grad():
        for module, x, y in calls:
            form = recognise(module, x.detach(), y.detach())
            if form is not None:
                norms[module] = form
            elif not any(True for _ in module.parameters()) and _is_bent(module, x):
                activations.add(module)
    return norms, frozenset(activations)


def _is_bent(module: nn.Module, x: Tensor) -> bool:
    """Whether a module without weights is nonlinear."""
    z = random_like(x)
    return not relative_error(module(z) + module(-2 * z), module(-z)) <= tolerance_for(x.dtype)
