"""Discovery: blocks, attention, norms and FFN units of any model, found by what they do and proved by replay.

Nothing here knows an architecture. Blocks are the calls of the ModuleList that holds the attention modules. The model
runs once on a short random input; behind every block its parts are found (parts.py) and proved (proof.py), so that no
more than one block's weights and tensors have to be there. What stays unproved is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.compat.transformers import stated, with_places
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import in_narrow
from duat_cli.models.block.mixer import MixerForm
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.chains import (
    ChangedStreamError,
    SeveralStacksError,
    StagesError,
    anew_note,
    by_name,
    chained,
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
    STATES,
    Given,
    cache_off,
    ids_name,
    is_pair,
    noise_like,
    part_within,
    placed,
    require_token_ids,
    stack_of,
    without_decoder,
    writes,
)
from duat_cli.models.discovery.parts import beside, find_parts
from duat_cli.models.discovery.proof import Proof, ProvedBlock, Unproved, Verdict, opened
from duat_cli.models.discovery.unread import beside_notes, unread_attention, why_unchained, why_unseen
from duat_cli.models.instrument.attention import CapturePath, ForeignAttentionError
from duat_cli.models.instrument.calls import ANY, taken_by
from duat_cli.models.instrument.foreign import model_code
from duat_cli.models.instrument.hooks import ExchangedError, unexchanged
from duat_cli.models.instrument.plain import InstrumentedPass, PlainPass, deviation
from duat_cli.models.instrument.rig import Rig
from duat_cli.models.instrument.tracing import Event, Trace, Tracer, trace

DISCOVERY_TOKENS = 11  # short, odd, and unlike a count of heads or experts
SEED = 20240511
UNSTATED_VOCABULARY = 128  # token ids that are tried where a config has no vocabulary (characters that are hashed)
MAX_OPENINGS = 8
ENCODER_ALONE = "decoder stack (cross-attention): only the encoder is read here"
"""What a note begins with of an encoder-decoder, whose encoder alone is read."""


@dataclass(frozen=True)
class ModelStructure:
    """What discovery found and proved."""

    stack: Any  # the module to run: the base model without its head, or one stack of an encoder-decoder
    part: Any  # the part of it that holds the blocks: the stack itself, unless it reads pictures within a text
    blocks: tuple[ProvedBlock, ...]  # one a distinct block module
    calls: tuple[nn.Module, ...]  # block modules in call order; a shared module stands here more than once
    path: CapturePath
    hidden_size: int
    uncovered: tuple[str, ...]  # parts of the model that the DUAT form leaves out
    seams: frozenset[int]  # block calls in front of which features of pictures are added to the stream
    plain_error: float = 0.0  # of a pass of the probe prompt under instruments, relative to one without

    def block(self, call: int) -> ProvedBlock:
        """The block of that call."""
        return next(b for b in self.blocks if b.parts.module is self.calls[call])

    def elements(self) -> list[nn.Module]:
        """Every block module once."""
        return [block.parts.module for block in self.blocks]

    def parts_of(self, module: nn.Module) -> BlockParts:
        """What that block module consists of."""
        return next(b.parts for b in self.blocks if b.parts.module is module)

    @property
    def interface(self) -> bool:
        """As of `Rig`: attention is seen as it was when the blocks were proved."""
        return self.path != "softmax interception"

    def rig(self, *, whole: bool = False, prompts: int = 1) -> Rig:
        """The instruments for a run of `stack`; whole, prompts: as of `Rig`."""
        parts = [b.parts for b in self.blocks]
        return Rig(self.part, parts, interface=self.interface, whole=whole, prompts=prompts, order=self.calls)


def run_stack(stack: Any, given: Given, mask: Tensor | None = None) -> Any:
    """One plain forward pass: unbatched, without a cache. mask: 0 for tokens that no token attends to, (1, N); prepared
    inputs bring their own."""
    if isinstance(given, Tensor):
        every = {"input_ids": given, "attention_mask": torch.ones_like(given) if mask is None else mask}
        given = {name: value for name, value in every.items() if {name, ANY} & taken_by(stack.forward)}
    if (name := ids_name(stack)) != "input_ids" and "input_ids" in given:
        given = {name if key == "input_ids" else key: value for key, value in given.items()}
    return with_places(run_as_loaded(stack, {**given, **cache_off(stack)}))


def probe_ids(stack: Any, tokens: int, device: str | None = None) -> Tensor:
    """Random token ids that are no special ones; device: None is where the weights are."""
    table = getattr(stack, "embed_tokens", None)  # FSMT's encoder has no config
    rows = stated(getattr(stack, "config", None), "vocab_size") or getattr(table, "num_embeddings", UNSTATED_VOCABULARY)
    generator = torch.Generator().manual_seed(SEED)
    low = min(10, rows - 1)
    ids = torch.randint(low, rows, (1, tokens), generator=generator)
    return ids.to(stack.device if device is None else device)


def probe_inputs(
    stack: Any, like: Mapping[str, Tensor] | None, tokens: int, device: str | None = None, seed: int = SEED
) -> Given:
    """What a model is probed with: as of `probe_ids`, or noise of the shapes of prepared inputs."""
    if like is None:
        return probe_ids(stack, tokens, device)
    made = noise_like(like, seed)
    if STATES in made:  # of a decoder: ids of its own, and states of no particular encoder
        shape = 1, tokens + 2, made[STATES].shape[-1]
        made = noise_like({STATES: made[STATES].new_zeros(()).expand(shape)}, seed)
        made["input_ids"] = probe_ids(stack, tokens, device)
    return placed(made, stack.device if device is None else device, stack.dtype)


@torch.no_grad()
def probe_output(model: Any) -> Tensor:
    """What a model gives for the tokens that discovery reads: logits, or hidden states; of an encoder-decoder what its
    encoder gives."""
    stack = without_decoder(model)
    found: Tensor = run_stack(stack, probe_ids(stack, DISCOVERY_TOKENS))[0]
    return found


def probe_trace(stack: Any, given: Given | None = None) -> Trace:
    """What one short pass does, written down. given: what it reads; None: the tokens that discovery reads."""
    read = probe_ids(stack, DISCOVERY_TOKENS) if given is None else given
    return trace(stack, lambda: run_stack(stack, read))


def discover(
    model: Any, like: Mapping[str, Tensor] | None = None, *, chain: str | None = None, factors: bool = True
) -> ModelStructure:
    """Find and prove the structure of `model`; UnsupportedModelError names what could not be proved.

    like: prepared inputs of a model that reads no token ids; it is probed with noise of their shapes.
    chain: the list whose blocks are meant, by its name in the model that is run; None where there is but one.
    factors: whether V and O of the heads are looked for, which are kept for every block.
    """
    with model_code(type(model).__name__):
        interface, staged, exchanged = True, frozenset[str](), False
        while True:
            found = Discovery(model, interface=interface, staged=staged, like=like, chain=chain, factors=factors)
            try:
                found.walk()
                break
            except ForeignAttentionError:  # its own attention function stays, and its softmax is watched
                if not interface:
                    raise
                interface = False
            except StagesError as fault:
                staged |= {fault.name}
            except ExchangedError:  # what it was hooked on is gone
                if exchanged:
                    raise
                exchanged = True
            except ChangedStreamError as fault:
                alone = partial(discover, model, like, chain=fault.name, factors=False)
                raise by_name(fault, alone) from None
        structure = found.structure()
        return replace(structure, plain_error=_instruments_error(structure, found.probe))


def _instruments_error(structure: ModelStructure, probe: Given) -> float:
    """How far a pass under instruments is from the model as transformers runs it."""
    forward = partial(run_stack, structure.stack, probe)
    passes = InstrumentedPass(structure.rig(), forward, lambda _run: None), PlainPass(structure.calls, forward)
    for each in passes:
        with each.active():
            each.run()
    return deviation(passes[0].outputs, passes[1].outputs)


class Discovery:
    """Finds blocks and their parts while the model runs once, and proves them while it runs once more.

    interface: whether attention is to be seen through transformers' interface; `walk` raises ForeignAttentionError
    where the model does something else with it. staged: lists whose elements are stages; StagesError names
    another. device: as of `probe_ids`; like, chain, factors: as of `discover`.
    """

    def __init__(
        self,
        model: Any,
        *,
        interface: bool = True,
        staged: frozenset[str] = frozenset(),
        device: str | None = None,
        like: Mapping[str, Tensor] | None = None,
        chain: str | None = None,
        factors: bool = True,
    ) -> None:
        self.factors, self._chain = factors, chain
        if like is None:
            require_token_ids(model)
        self.model = model
        self.stack, self._uncovered = _stack_of(model)
        self.probe = probe_inputs(self.stack, like, DISCOVERY_TOKENS, device)
        self._names = {module: name for name, module in self.stack.named_modules()}
        within = part_within(self.stack, like)
        self.part = self.stack if within is None else within
        self.seams: set[int] = set()  # block calls whose input is not only what the call in front of them gives
        self._staged, prefix = staged, "" if within is None else f"{self._names[within]}."
        lists = outermost_lists(self.part, [name.removeprefix(prefix) for name in staged], chain)
        self.lists = {prefix + name: found for name, found in lists.items()}
        self.list_of = {module: name for name, found in self.lists.items() for module in found}
        looked_at = None if chain is None else self.part.get_submodule(chain)
        self._tracing = partial(Tracer, self.stack, self.list_of, interface=interface, part=self.part, within=looked_at)
        self.tracer = self._tracing(self.learn)
        self._calls: dict[str, list[Event]] = {name: [] for name in self.lists}
        self.parts: dict[nn.Module, BlockParts | Exception] = {}
        self.mixers: list[nn.Module] = []  # those without softmax
        self._known_mixers: list[MixerForm] = []
        self._unchained: dict[str, UnsupportedModelError] = {}
        self.proved: dict[nn.Module, ProvedBlock] = {}

    def walk(self) -> None:
        """Both passes, one behind the other."""
        self._trace(self.tracer)
        parts = [self.parts_of(module) for module in dict.fromkeys(event.module for event in self.chained())]
        for _ in range(MAX_OPENINGS):
            verdicts: list[Verdict] = []
            interface = self.path == "attention interface"
            proof = Proof(self.part, self.forward, verdicts.append, interface=interface, factors=self.factors)
            for one in parts:
                proof.learn(one)
            with proof.active():
                proof.run()
            if not any(isinstance(verdict, Unproved) for verdict in verdicts):
                self.proved = {v.parts.module: v for v in verdicts if isinstance(v, ProvedBlock)}
                return
            parts = self._opened(verdicts)
        raise UnsupportedModelError(f"{parts[0].name}: its FFN could not be told from its residual stream")

    def _trace(self, tracer: Tracer) -> None:
        with tracer.attached(), tracer.active(), unexchanged(self.stack), weights_kept(self.stack):
            self.forward()

    def _opened(self, verdicts: Sequence[Verdict]) -> list[BlockParts]:
        """The blocks, unproved ones with other units, from one more pass: what happened in all together may not fit."""
        unproved = {verdict.parts.module: verdict for verdict in verdicts if isinstance(verdict, Unproved)}
        found: dict[nn.Module, BlockParts] = {}

        def look(event: Event, written: Trace) -> None:
            if event.module in unproved and event.module not in found:
                found[event.module] = opened(unproved[event.module], written)

        self._trace(self._tracing(look))
        return [found.get(verdict.parts.module, verdict.parts) for verdict in verdicts]

    def structure(self) -> ModelStructure:
        """What was found, but for `plain_error`."""
        ran = self.tracer.ran | set(self.tracer.attention)
        others = [] if is_pair(self.stack) else beside_notes(self.stack, self.part)  # a decoder runs behind its encoder
        unread = [*unread_attention(self.model, ran), *others]
        return self.structure_of(self.chained(), tuple(unread))

    @property
    def path(self) -> CapturePath:
        """How attention was seen."""
        paths = set(self.tracer.attention.values())
        return "softmax interception" if "softmax interception" in paths else "attention interface"

    def structure_of(self, calls: list[Event], unread: tuple[str, ...]) -> ModelStructure:
        modules = tuple(event.module for event in calls)
        blocks = tuple(self.proved[module] for module in dict.fromkeys(modules))
        apart = [] if self._chain is None else anew_note(self.seams)
        proofs = sorted({note for block in blocks for note in block.notes})
        uncovered = (*self._uncovered, *self._mixing_notes(modules), *proofs, *unread, *apart)
        width = blocks[0].parts.hidden.get(calls[0].args, calls[0].kwargs).shape[-1]
        path = self.path if self.tracer.attention else "frozen kernel"
        return ModelStructure(self.stack, self.part, blocks, modules, path, width, uncovered, frozenset(self.seams))

    def _mixing_notes(self, calls: Sequence[nn.Module]) -> list[str]:
        """FFN units act on each token alone; what else is nonlinear, mixes tokens and has no operator is said so, with
        the block calls where these are not all."""
        found: dict[str, list[int]] = {}
        for call, parts in enumerate(self.proved[module].parts for module in calls):
            own = {*parts.attention, *([] if parts.second is None else [parts.second.form.module])}
            for told in {self._of_mixing(unit) for unit in parts.mixing - own}:
                found.setdefault(told, []).append(call)
        some = {told: f" in block {', '.join(map(str, at))}" for told, at in found.items() if len(at) < len(calls)}
        return [told.format(some.get(told, "")) for told in sorted(found)]

    def _of_mixing(self, unit: nn.Module) -> str:
        """What is said of it, with the blocks left open."""
        name = type(unit).__name__
        if self.tracer.attention.keys() & set(unit.modules()):
            where = "reaches the stream only as part of what the token mixer behind it reads"
            return f"the attention in {name}{{}} {where}; it has no W' of its own"
        return f"{name} mixes tokens without softmax attention{{}}; its output counts among the UAT terms"

    def forward(self) -> Any:
        return run_stack(self.stack, self.probe)

    def chained(self) -> list[Event]:
        """The block calls, in order, each of which takes what the one in front of it gives."""
        name = type(self.model).__name__
        if not self.tracer.attention and not self.mixers:
            unseen = why_unseen(self.parts.values(), self.tracer.hidden)
            raise UnsupportedModelError(
                f"{name}: neither softmax attention nor a mixer that is linear in its values runs in its forward pass, "
                f"as far as duat can follow it{unseen}{in_narrow(self.model.dtype)}"
            )
        home = self.home()
        if not self._calls[home]:
            raise UnsupportedModelError(f"{name} never calls the blocks that hold its attention")
        if home in self._unchained:
            if len(inner := inner_lists(self.stack, home, self.tracer.attention)) > 1:
                raise SeveralStacksError(inner)
            if (why := why_unchained(self.stack, home, self._calls, self.tracer.attention)) is not None:
                raise UnsupportedModelError(why)
            fault = self._unchained[home]
            if isinstance(fault, ChangedStreamError):
                fault.name = home
            raise fault
        return self._calls[home]

    def home(self) -> str:
        """The outermost ModuleList around the attention modules."""
        seen = self.tracer.attention or self.mixers
        named = [self._names[module] for module in seen if module in self._names]
        homes = list(dict.fromkeys(next((o for o in self.lists if n.startswith(o + ".")), None) for n in named))
        if None in homes or not homes:
            outside = {type(m).__name__ for m in seen if not any(m in set(b.modules()) for b in self.list_of)}
            raise UnsupportedModelError(f"attention runs outside any list of blocks: {', '.join(sorted(outside))}")
        if len(homes) > 1:
            inner = {o: inner_lists(self.stack, o, seen) for o in map(str, homes) if o in self._unchained}
            raise SeveralStacksError([name for home in map(str, homes) for name in inner.get(home) or [home]])
        return str(homes[0])

    def parts_of(self, module: nn.Module) -> BlockParts:
        parts = self.parts[module]
        if isinstance(parts, Exception):
            raise parts
        return parts

    def learn(self, event: Event, written: Trace) -> None:
        """Behind a call of a module that may be a block. What is wrong with it matters only if it is one."""
        home = self.list_of[event.module]
        if home not in self._staged and is_stage(event, written):
            raise StagesError(home)
        calls = self._calls[home]
        try:
            added = self.part is not self.stack or self._chain is not None
            if calls and not chained(len(calls) - 1, calls[-1], event, added=added):
                self.seams.add(len(calls))
        except UnsupportedModelError as fault:
            self._unchained.setdefault(home, fault)
        calls.append(event)
        if event.module not in self.parts:
            try:
                parts = find_parts(event, self._names[event.module], written)
                require_one_sequence(event, parts)
                if not isinstance(self.probe, Tensor) and STATES in self.probe:
                    require_apart(event, parts, self.probe[STATES])
                if self._chain is not None:
                    parts = replace(parts, anew=True, beside=beside(event, parts.hidden, any_length=True))
                    require_own_tokens(event, parts, written)
                parts = with_mixer(parts, event, written, self._known_mixers)
                self.mixers += parts.attention if parts.mixer is not None else ()
                self.parts[event.module] = parts
            except Exception as fault:  # raised again where it is known that this is a block
                self.parts[event.module] = fault


def _stack_of(model: Any) -> tuple[Any, tuple[str, ...]]:
    stack, pair = stack_of(model), is_pair(model)
    if pair and not hasattr(stack, "config"):
        raise UnsupportedModelError(f"{type(stack).__name__} has no config of its own, so its attention stays unseen")
    way = "; inspect, verify and attribute take --stack decoder" if pair and writes(model) else ""
    return stack, (ENCODER_ALONE + way,) if pair else ()
