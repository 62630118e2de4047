"""`duat matrix --network`: all layers of a small case as explicit matrices, and Eq. 21, 23, 33 evaluated with them."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli import __version__
from duat_cli.analysis.clock import Clock
from duat_cli.analysis.network.evaluation import Evaluation, Own, StepErrors
from duat_cli.analysis.network.file import FORMAT, NetworkFile, require_room
from duat_cli.analysis.network.layer import Hidden, hidden_of, layer_of, own_pre_activation, places_of
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Session, prompt_facts
from duat_cli.errors import InputError, UnsupportedModelError, needed
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.block.slots import taken
from duat_cli.models.discovery.modality import DISCOVERY_TOKENS, probe_ids
from duat_cli.models.discovery.structure import ModelStructure, probe_trace
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.routers import Routers, routing_slots
from duat_cli.models.instrument.tracing import Trace
from duat_cli.models.terms.experts import Experts
from duat_cli.models.terms.feedforward import FeedForward
from duat_cli.models.terms.inner import form_of
from duat_cli.models.terms.sites import block_sites
from duat_cli.results.base import Run
from duat_cli.results.matrix import NetworkLayer, NetworkReport

LARGEST_SIDE = 4096  # N M
_UNSEEN = "experts hold their weights fused: no module of the model shows what their activation reads"
UNPLANNED = "the plan is of the model and one block, and knows nothing of the matrices of all layers"
_NO_FFN = "the layer has no FFN"
ORIENTATION = (
    "linear layers act on each token, as I_N (x) W; the paper's act from the left and mix tokens (Eq. 5, 6), and its "
    "heads read a slice of x each"
)
RESIDUAL = "W'_{j,1} of one layer is the residual stream and attention; Eq. 28 writes attention alone"
GATED = (
    "gated FFNs have two pre-activations a neuron: sigma is sigma(gate) o up, a function of both, where the paper's is "
    "one of one number; W'_{j,2} and b'_{j,2} hold a token's gates in front of its ups"
)
ROUTED = (
    "routed experts: router weights are dynamic parameters, held like H and norm scales; the FFN of a token is that of "
    "its own k experts, k n neurons, and their weights stand in W'_{j,3}"
)
NORMS = (
    "norms: the paper has none; their scales are dynamic parameters, held, so a norm is a matrix and a constant, which "
    "are part of W' and b'"
)


@dataclass(frozen=True)
class Known:
    """The FFN of one block: its unit, the unit's form, and how many experts each token gets."""

    unit: nn.Module
    form: FeedForward | Experts
    experts: int = 1

    def sizes(self) -> tuple[int, int]:
        """(pre-activations, neurons) per token."""
        if isinstance(self.form, FeedForward):
            neurons = self.form.neurons
        else:
            neurons = self.experts * self.form.up.shape[1]
            neurons += 0 if self.form.shared is None else self.form.shared.neurons
        return neurons * (1 if self.form.gate is None else 2), neurons

    def layers(self) -> tuple[nn.Module, ...]:
        """The modules whose outputs show the input of σ."""
        return places_of(self.form, self.unit) if isinstance(self.form, FeedForward) else ()


def network(
    loaded: LoadedModel, prompt: Prompt, decode: Callable[[int], str], progress: Progress, path: Path | None = None
) -> NetworkReport:
    """The report on all layers under one prompt. decode: gives the text of a token; path: the file to write, if any.

    Raises InputError where N M is over 4,096, and UnsupportedModelError where a block is not of the paper's form
    (Eq. 20).
    """
    dtype = loaded.model.dtype
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"--network: evaluated in float32 or float64, not in {loaded.dtype}; give --dtype float32")
    if prompt.prepared is not None:
        raise InputError("--network: written for models that read token ids; this one reads images or sound")
    if loaded.paged is not None:
        raise InputError(
            "--network: needs all weights in memory, and they are read in parts here; give more --memory, and leave "
            "out --device-map"
        )
    clock, session = Clock(), Session(loaded, progress, cache=False)
    session.whole = True
    structure = session.structure
    _require_small(prompt.input_ids.shape[1], structure.hidden_size)
    blocks = [structure.block(call).parts for call in range(len(structure.calls))]
    known = known_units(structure, loaded.device, blocks)
    facts = _metadata(session, prompt, decode)
    with _place(path) as part:
        side = prompt.input_ids.numel() * structure.hidden_size
        sizes = [(0, 0) if one is None else one.sizes() for one in (known[parts.module] for parts in blocks)]
        tokens = prompt.input_ids.numel()
        require_room(part.parent, side, [(r * tokens, n * tokens) for r, n in sizes], dtype.itemsize)
        file = NetworkFile(part, blocks, facts, dtype)
        try:
            found = _swept(session, prompt, known, file, progress)
            progress(0, 0, "W'_{j,3} of all layers together")
            whole = found.evaluation.finish()
            file.finish()
        finally:
            file.close()
    return _report(session, prompt, found, whole, clock.run(None, UNPLANNED, device=loaded.device))


@contextlib.contextmanager
def _place(path: Path | None) -> Iterator[Path]:
    """The file to write; a temporary one if none is wanted, because not all matrices fit in memory at once."""
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="duat-") as folder:
        yield Path(folder) / "network.safetensors"


def _require_small(tokens: int, width: int) -> None:
    side = tokens * width
    if side <= LARGEST_SIDE:
        return
    fitting = LARGEST_SIDE // width
    rest = f"use --max-tokens {fitting}" if fitting else "no prompt is short enough for this width"
    raise InputError(f"--network: N M = {tokens:,} x {width:,} = {side:,}, more than {LARGEST_SIDE:,}; {rest}")


def _metadata(session: Session, prompt: Prompt, decode: Callable[[int], str]) -> dict[str, str]:
    return {
        "format": FORMAT,
        "duat_version": __version__,
        "model_type": session.loaded.model.config.model_type,
        "fingerprint": session.fingerprint,
        "dtype": session.loaded.dtype,
        "sha256": prompt.sha256,
        "tokens": json.dumps([decode(token) for token in prompt.input_ids[0].tolist()]),
        "equation": "x'_{L} = W'_{L,1} x'_{0} + b'_{L,3} + sum_j W'_{j,3} sigma(W'_{j,2} x'_{0} + b'_{j,2})",
    }


# -- the FFN of every block ----------------------------------------------------------------------------------


def known_units(structure: ModelStructure, device: str, blocks: list[BlockParts]) -> dict[nn.Module, Known | None]:
    """The FFN of every block module; None where it has no FFN. Raises UnsupportedModelError where an FFN is not of the
    paper's form."""
    written = probe_trace(structure.stack, probe_ids(structure.stack, DISCOVERY_TOKENS, device))
    found: dict[nn.Module, Known | None] = {}
    for number, parts in enumerate(blocks):
        if parts.module not in found:
            found[parts.module] = _known(number, parts, block_sites(parts, written).of("expert"), written)
    return found


def _known(number: int, parts: BlockParts, routed: Any, written: Trace) -> Known | None:
    where = f"--network: block {number} ({parts.name})"
    if not parts.units:
        return None
    if len(parts.units) > 1:
        raise UnsupportedModelError(f"{where} has {len(parts.units)} nonlinear units; a layer of Eq. 20 has one FFN")
    [unit] = parts.units
    form = form_of(parts, routed, written, unit, 0)
    if isinstance(form, str):
        raise UnsupportedModelError(f"{where} has no FFN whose activation stands between two matrices: {form}")
    if isinstance(form, FeedForward):
        return Known(unit, form)
    event = written.calls(form.module)[0]
    slots = needed(routing_slots(event.args, event.kwargs))
    return Known(unit, form, taken(event.args, event.kwargs, slots.index).shape[1])


# -- one prompt ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    evaluation: Evaluation
    errors: list[StepErrors]
    hidden: list[Hidden | None]
    tokens: int


def _swept(
    session: Session, prompt: Prompt, known: Mapping[nn.Module, Known | None], file: NetworkFile, progress: Progress
) -> _Found:
    """Evaluates every layer as the model's own pass comes to it."""
    outputs: dict[nn.Module, Tensor] = {}  # of the layers in front of σ, from the model's own pass
    routers, found = Routers(), list[_Found]()
    depth = len(session.structure.calls)

    def heard(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outputs[module] = output.detach().clone()

    def listen(run: BlockRun) -> None:
        number, one = run.index + 1, known[run.parts.module]
        x0, side = run.input[0], run.input.numel()
        if not found:
            _require_small(*x0.shape)
            file.start(prompt.input_ids[0], x0)
            found.append(_Found(Evaluation(x0, file), [], [], len(x0)))
        here = found[0]
        try:
            hidden, own = _ffn(run, one, routers, outputs)
        except UnsupportedModelError as fault:
            raise UnsupportedModelError(f"--network: block {run.index} ({run.parts.name}): {fault}") from fault
        layer = layer_of(run, hidden, lambda done: progress(run.index * side + done, depth * side, f"layer {number}"))
        file.dynamic(number, run)
        file.said(run.parts.name, None if hidden is None else hidden.sigma)
        here.errors.append(here.evaluation.add(layer, own))
        here.hidden.append(hidden)

    modules = {module for one in known.values() if one is not None for module in one.layers()}
    with routers.seen(session.loaded.model), hooked(list(modules), after=heard):
        session.sweep(prompt, listen)
    return found[0]


def _ffn(
    run: BlockRun, known: Known | None, routers: Routers, outputs: dict[nn.Module, Tensor]
) -> tuple[Hidden | None, Own]:
    """The FFN of one block under this prompt, and what the model itself computed. Call it before any replay."""
    output = run.output[0]
    if known is None:
        return None, Own(output)
    if len(run.units) != 1:
        raise UnsupportedModelError(f"its FFN runs {len(run.units)} times; a layer of Eq. 20 has it once")
    [unit] = run.units
    form, routed = known.form, None
    if isinstance(form, Experts):
        routed = routers.inside(run.parts.module).get(form.module)
    pre = own_pre_activation(form, unit.input, outputs) if isinstance(form, FeedForward) else None
    hidden = hidden_of(form, known.unit, routed)  # runs the layers again, so `pre` was taken before
    return hidden, Own(output, unit.output.reshape(len(output), -1), pre)


# -- report --------------------------------------------------------------------------------------------------


def _report(session: Session, prompt: Prompt, found: _Found, whole: float, run: Run) -> NetworkReport:
    hidden = [one for one in found.hidden if one is not None]
    deviations = [
        ORIENTATION,
        RESIDUAL,
        *([NORMS] if any(block.parts.norms for block in session.structure.blocks) else []),
        *([GATED] if any(one.sigma.gated for one in hidden) else []),
        *([ROUTED] if any(one.sigma.experts for one in hidden) else []),
    ]
    width, error = session.structure.hidden_size, max([whole, *(errors.largest() for errors in found.errors)])
    return NetworkReport(
        prompt=prompt_facts([prompt])[0],
        tokens=found.tokens,
        hidden_size=width,
        side=found.tokens * width,
        layers=[
            _layer(number, session.structure.block(number - 1).parts.name, errors, one)
            for number, (errors, one) in enumerate(zip(found.errors, found.hidden, strict=True), 1)
        ],
        whole_error=whole,
        deviations=deviations,
        **session.report_facts(error) | {"run": run},
    )


def _layer(number: int, name: str, errors: StepErrors, hidden: Hidden | None) -> NetworkLayer:
    sigma = None if hidden is None else hidden.sigma
    return NetworkLayer.explained(
        _NO_FFN,
        {} if sigma is None else {"experts": "its FFN has none", "pre_activation_error": _UNSEEN},
        layer=number,
        name=name,
        equation="21" if number == 1 else "23" if number == 2 else "33",
        activation=None if sigma is None else sigma.activation.name,
        gated=None if sigma is None else sigma.gated,
        neurons=None if sigma is None else sigma.neurons,
        experts=None if sigma is None else sigma.experts,
        unit_error=errors.unit,
        pre_activation_error=errors.pre_activation,
        output_error=errors.output,
    )
