"""Discovery: finds the blocks, attention, norms and FFN units of any model by what they do, and proves them by replay.

Nothing here knows an architecture. Blocks are the calls of the list of modules that holds the attention modules. The
model runs once on a short random input. After each block its parts are found (parts.py) and proved (proof.py), so that
only one block's weights and tensors need to be in memory. A model whose parts cannot be proved is refused with the
reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.compat.transformers import with_places
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import in_narrow
from duat_cli.models.block.mixer import MixerForm
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.attempts import Known, PathError
from duat_cli.models.discovery.beside import beside
from duat_cli.models.discovery.chains import (
    ChangedStreamError,
    SeveralStacksError,
    StagesError,
    anew_note,
    attending_outside,
    by_name,
    chained,
    has_matrices,
    homes_of,
    inner_lists,
    is_stage,
    outermost_lists,
    require_one_sequence,
    require_own_tokens,
)
from duat_cli.models.discovery.cross import require_apart
from duat_cli.models.discovery.exchanged import run_as_loaded, weights_kept
from duat_cli.models.discovery.mixers import with_mixer
from duat_cli.models.discovery.modality import (
    DISCOVERY_TOKENS,
    STATES,
    Given,
    cache_off,
    ids_name,
    is_pair,
    part_within,
    probe_ids,
    probe_inputs,
    require_token_ids,
    stack_of,
)
from duat_cli.models.discovery.parts import find_parts
from duat_cli.models.discovery.proof import Proof, ProvedBlock, traced_again
from duat_cli.models.discovery.unread import (
    behind_notes,
    decoder_note,
    left_out,
    mixing_notes,
    why_unchained,
    why_unseen,
)
from duat_cli.models.foreign import model_code
from duat_cli.models.instrument.attention import CapturePath
from duat_cli.models.instrument.calls import ANY, taken_by
from duat_cli.models.instrument.hooks import unexchanged
from duat_cli.models.instrument.plain import InstrumentedPass, PlainPass, deviation
from duat_cli.models.instrument.rig import BlockRun, Rig
from duat_cli.models.instrument.towers import Towers
from duat_cli.models.instrument.tracing import Event, Trace, Tracer, trace


@dataclass(frozen=True)
class ModelStructure:
    """The structure of a model, as discovery found and proved it."""

    stack: Any  # the module to run: the base model without its head, or one stack of an encoder-decoder
    part: Any  # the part of it that holds the blocks: the stack itself, unless it reads pictures within a text
    blocks: tuple[ProvedBlock, ...]  # one for each distinct block module
    calls: tuple[nn.Module, ...]  # block modules in call order; a shared module appears more than once
    path: CapturePath
    hidden_size: int
    uncovered: tuple[str, ...]  # parts of the model that the DUAT form leaves out
    seams: frozenset[int]  # block calls whose input is not only the output of the call before (picture features added)
    plain_error: float = 0.0  # relative error of a pass of the probe prompt under instruments, against one without

    def block(self, call: int) -> ProvedBlock:
        """The proved block that block call number `call` runs."""
        return next(b for b in self.blocks if b.parts.module is self.calls[call])

    def elements(self) -> list[nn.Module]:
        """Every block module once."""
        return [block.parts.module for block in self.blocks]

    def parts_of(self, module: nn.Module) -> BlockParts:
        """The parts of this block module."""
        return next(b.parts for b in self.blocks if b.parts.module is module)

    @cached_property
    def towers(self) -> Towers:
        """Its encoders of pictures and sound in front of the blocks."""
        return Towers(self.stack, self.calls)

    @property
    def interface(self) -> bool:
        """`interface` as `Rig` takes it: attention is captured in the same way as when the blocks were proved."""
        return self.path != "softmax interception"

    def rig(self, *, whole: bool = False, prompts: int = 1) -> Rig:
        """The instruments for a run of `stack`. whole, prompts: as in `Rig`."""
        parts = [b.parts for b in self.blocks]
        return Rig(self.part, parts, interface=self.interface, whole=whole, prompts=prompts, order=self.calls)


def run_stack(stack: Any, given: Given, mask: Tensor | None = None) -> Any:
    """Runs one plain forward pass, unbatched and without a cache. mask: 0 for tokens that no token attends to, (1, N);
    not used for prepared inputs, which hold their own."""
    if isinstance(given, Tensor):
        every = {"input_ids": given, "attention_mask": torch.ones_like(given) if mask is None else mask}
        given = {name: value for name, value in every.items() if {name, ANY} & taken_by(stack.forward)}
    if (name := ids_name(stack)) != "input_ids" and "input_ids" in given:
        given = {name if key == "input_ids" else key: value for key, value in given.items()}
    return with_places(run_as_loaded(stack, {**given, **cache_off(stack)}))


def probe_trace(stack: Any, given: Given | None = None, part: Any = None) -> Trace:
    """The trace of one short pass. given: its input; None: the tokens that discovery reads. part: the part of the stack
    that is traced; None: all of it."""
    read = probe_ids(stack, DISCOVERY_TOKENS) if given is None else given
    return trace(stack, lambda: run_stack(stack, read), part, block=part)


def discover(
    model: Any, like: Mapping[str, Tensor] | None = None, *, chain: str | None = None, factors: bool = True
) -> ModelStructure:
    """Finds and proves the structure of `model`. Raises UnsupportedModelError, which names what could not be proved.

    like: prepared inputs of a model that reads no token ids; it is probed with noise of their shapes.
    chain: the name, in the model that is run, of the list whose blocks are meant; None where there is only one list.
    factors: whether to look for V and O of the heads, which are then kept for every block.
    """
    known = Known(chain)

    def attempt() -> Discovery:
        found = Discovery(model, known, like, factors=factors)
        with found.attached(), found.active():
            found.run()
        proof = found.proof()
        with proof.active():
            proof.run()
        return found

    with model_code(type(model).__name__):
        try:
            found = known.through(attempt)
        except ChangedStreamError as fault:
            alone = partial(discover, model, like, chain=fault.name, factors=False)
            raise by_name(fault, alone) from None
        structure = found.structure()
        return replace(structure, plain_error=_instruments_error(structure, found.probe))


def _instruments_error(structure: ModelStructure, probe: Given) -> float:
    """Relative error of a pass under instruments, against the model as transformers runs it."""
    forward = partial(run_stack, structure.stack, probe)
    passes = InstrumentedPass(structure.rig(), forward, lambda _run: None), PlainPass(structure.calls, forward)
    for each in passes:
        with each.active():
            each.run()
    return deviation(passes[0].outputs, passes[1].outputs)


class Discovery:
    """The pass that finds blocks and their parts; `proof` and `rig` make the passes that run behind it.

    Where all weights are in memory, each pass starts once the one in front of it is finished. Where weights are read
    block by block, all passes run side by side, this one at most a block ahead; the weights that a proved block holds
    are dropped once all passes are through it. An attempt that cannot go on raises an error that `known` learns from.
    """

    def __init__(
        self, model: Any, known: Known, like: Mapping[str, Tensor] | None, *, factors: bool, device: str | None = None
    ) -> None:
        """known: what earlier attempts showed. device: as in `probe_ids`. like, factors: as in `discover`."""
        if like is None:
            require_token_ids(model)
        self.model, self._known, self._factors = model, known, factors
        self.stack = stack_of(model)
        if is_pair(model) and not hasattr(self.stack, "config"):
            kind = type(self.stack).__name__
            raise UnsupportedModelError(f"{kind} has no config of its own, so its attention stays unseen")
        self.probe = probe_inputs(self.stack, like, DISCOVERY_TOKENS, device)
        self._forward = partial(run_stack, self.stack, self.probe)
        self._names = {module: name for name, module in self.stack.named_modules()}
        within = part_within(self.stack, like)
        self.part = self.stack if within is None else within
        self._seams: set[int] = set()  # as in `ModelStructure`
        prefix = "" if within is None else f"{self._names[within]}."
        lists = outermost_lists(self.part, [name.removeprefix(prefix) for name in known.staged], known.chain)
        self._lists = {prefix + name: found for name, found in lists.items()}
        self._list_of = {module: name for name, found in self._lists.items() for module in found}
        self._stems = {module for found in self._lists.values() if not has_matrices(found) for module in found}
        looked_at = None if known.chain is None else self.part.get_submodule(known.chain)
        self._tracer = Tracer(
            self.stack, self._list_of, self._learn, interface=known.interface, part=self.part, within=looked_at,
            operations=partial(weights_kept, self.stack),
        )  # fmt: skip
        self._calls: dict[str, list[Event]] = {name: [] for name in self._lists}
        self._parts: dict[nn.Module, BlockParts | Exception] = {}
        self._mixers: list[nn.Module] = []  # those without softmax
        self._known_mixers: list[MixerForm] = []
        self._unchained: dict[str, UnsupportedModelError] = {}
        self._proved: dict[nn.Module, ProvedBlock] = {}
        self.on_proved: Callable[[BlockParts, Trace], None] | None = None  # called after each block is proved
        self._proof: Proof | None = None
        self._rigs: list[Rig] = []

    def attached(self) -> contextlib.AbstractContextManager[None]:
        """The context around this pass and around all passes that run while it is left."""
        return self._tracer.attached()

    def active(self) -> contextlib.AbstractContextManager[None]:
        return self._tracer.active()

    def run(self) -> None:
        """Runs the pass, which finds blocks and their parts."""
        with model_code(type(self.model).__name__), unexchanged(self.stack):
            self._forward()

    @property
    def ready(self) -> bool:
        """Whether the pass has run a block with attention, so that the list that holds the blocks is known."""
        return bool(self._tracer.attention or self._mixers)

    def proof(self) -> Proof:
        """The pass that proves the blocks; it runs behind this one."""
        found = [self.parts_of(event.module) for event in self.chained()]
        self._proof = Proof(
            self.part, self._forward, self._keep, self._factors, interface=self._interface, coming=self.elements()
        )
        for parts in found:
            self._proof.learn(parts)
        return self._proof

    def rig(self) -> Rig:
        """Instruments for one of the passes behind the proof."""
        known = [proved.parts for proved in self._proved.values()]
        self._rigs.append(Rig(self.part, known, interface=self._interface, coming=self.elements()))
        return self._rigs[-1]

    def elements(self) -> list[nn.Module]:
        """The modules of the list that holds the blocks, each of which may be one."""
        return list(self._lists[self._home()])

    def parts_of(self, module: nn.Module) -> BlockParts:
        """The parts of a block module: as proved, or, before that, as found."""
        if module in self._proved:
            return self._proved[module].parts
        parts = self._parts[module]
        if isinstance(parts, Exception):
            raise parts
        return parts

    def forget(self, modules: Iterable[nn.Module]) -> None:
        """Drops the values read from the weights of these blocks, and of blocks inside these modules; keeps shapes."""
        for module in (inner for one in modules for inner in one.modules()):
            if module in self._proved:
                self._proved[module] = self._proved[module].without_values()

    def _keep(self, proved: ProvedBlock, run: BlockRun) -> None:
        self._proved[proved.parts.module] = proved
        if self.on_proved is not None:
            self.on_proved(proved.parts, traced_again(run, self.part))
        for rig in self._rigs:
            rig.learn(proved.parts)

    def structure(self) -> ModelStructure:
        """The structure that was found, without `plain_error`."""
        ran = self._tracer.ran | set(self._tracer.attention)
        unread = left_out(self.model, self.stack, self.part, ran)
        behind = behind_notes({self._names[module]: module for module in self._tracer.behind})
        return self._structure_of(self.chained(), [*unread, *behind])

    def so_far(self) -> ModelStructure:
        """The structure of the blocks proved so far."""
        return self._structure_of([event for event in self.chained() if event.module in self._proved], [])

    def _structure_of(self, calls: list[Event], unread: list[str]) -> ModelStructure:
        modules = tuple(event.module for event in calls)
        blocks = tuple(self._proved[module] for module in dict.fromkeys(modules))
        apart = [] if self._known.chain is None else anew_note(self._seams)
        proofs = sorted({note for block in blocks for note in block.notes})
        mixing = mixing_notes([self._proved[module].parts for module in modules], self._tracer.attention)
        uncovered = (*decoder_note(self.model), *mixing, *proofs, *unread, *apart)
        width = blocks[0].parts.hidden.get(calls[0].args, calls[0].kwargs).shape[-1]
        path = self._path if self._tracer.attention else "frozen kernel"
        return ModelStructure(self.stack, self.part, blocks, modules, path, width, uncovered, frozenset(self._seams))

    @property
    def _path(self) -> CapturePath:
        """The path by which attention was captured."""
        paths = set(self._tracer.attention.values())
        return "softmax interception" if "softmax interception" in paths else "attention interface"

    @property
    def _interface(self) -> bool:
        return not self._known.intercepted and self._path == "attention interface"

    def chained(self) -> list[Event]:
        """The block calls, in order. Each takes the output of the one in front of it."""
        name = type(self.model).__name__
        if not self._attending:
            unseen = why_unseen(self._parts.values())
            raise UnsupportedModelError(
                f"{name}: neither softmax attention nor a mixer that is linear in its values runs in its forward pass, "
                f"as far as duat can follow it{unseen}{in_narrow(self.model.dtype)}"
            )
        home = self._home()
        if not self._calls[home]:
            raise UnsupportedModelError(f"{name} never calls the blocks that hold its attention")
        if home in self._unchained:
            if len(inner := self._inner_lists(home, self._tracer.attention)) > 1:
                raise SeveralStacksError(inner)
            if (why := why_unchained(self.stack, home, self._calls, self._tracer.attention)) is not None:
                raise UnsupportedModelError(why)
            raise self._unchained[home]
        return self._calls[home]

    @property
    def _attending(self) -> Collection[nn.Module]:
        """The modules that mix tokens; those behind the last block where there are no others."""
        return self._tracer.attention or self._mixers or self._tracer.behind

    def _inner_lists(self, home: str, attending: Collection[nn.Module]) -> list[str]:
        """`inner_lists` of a list that is no chain. Between stages the stream changes its shape."""
        staged = not isinstance(self._unchained[home], ChangedStreamError)
        return inner_lists(self.stack, home, attending, staged=staged)

    def _home(self) -> str:
        """The outermost list of modules around the attention modules."""
        seen = self._attending
        homes = homes_of(seen, self._lists, self._names)
        if len(homes) > 1:
            inner = {home: self._inner_lists(home, seen) for home in homes if home in self._unchained}
            raise SeveralStacksError([name for home in homes for name in inner.get(home) or [home]])
        if front := [m for m, later in self._tracer.behind.items() if not later.isdisjoint(self._lists[homes[0]])]:
            raise attending_outside(front)
        return homes[0]

    def _learn(self, event: Event, written: Trace) -> None:
        """Reads the trace of a call of a module that may be a block. A fault in it matters only if it is one."""
        home = self._list_of[event.module]
        if home not in self._known.staged and is_stage(event, written):
            raise StagesError(home)
        if event.module in self._stems and not written.attention and any(t.ndim == 3 for t in event.tensors):
            return  # trying its modules as norms and affine maps takes several times the memory of the model's own pass
        calls = self._calls[home]
        try:
            added = self.part is not self.stack or self._known.chain is not None
            if calls and not chained(home, len(calls) - 1, calls[-1], event, written, added=added):
                self._seams.add(len(calls))
        except UnsupportedModelError as fault:
            self._unchained.setdefault(home, fault)
        calls.append(event)
        if event.module not in self._parts:
            try:
                self._parts[event.module] = self._found(event, written)
            except Exception as fault:  # raised again once this is known to be a block
                self._parts[event.module] = fault
        if self._rigs and self._rigs[0].interface != self._interface:
            raise PathError
        if self._proof is not None and home == self._home():
            self.chained()  # raises where the block does not take the output of the one in front of it
            self._proof.learn(self.parts_of(event.module))

    def _found(self, event: Event, written: Trace) -> BlockParts:
        """The parts of the called module, if it is a block."""
        parts = find_parts(event, self._names[event.module], written)
        if parts.streams > 1 and event.module not in parts.attention:
            self._tracer.attention.pop(event.module, None)
        require_one_sequence(event, parts)
        if not isinstance(self.probe, Tensor) and STATES in self.probe:
            require_apart(event, parts, self.probe[STATES])
        if self._known.chain is not None:
            parts = replace(parts, anew=True, beside=beside(event, parts.hidden, any_length=True))
            require_own_tokens(event, parts, written)
        parts = with_mixer(parts, event, written, self._known_mixers)
        self._mixers += parts.attention if parts.mixer is not None else ()
        return parts


Discovered = Discovery | ModelStructure
"""Discovery while it runs, or its result."""
