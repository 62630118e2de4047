"""Discovery side by side with the passes that use what it finds: one block ahead of them, and no more.

Three kinds of passes go through each block, in this order: the first finds its parts, the second proves them, and
those behind run under instruments that learn the block on the way. What a proved block holds of weights is forgotten
once all are through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.chains import StagesError, outermost_lists
from duat_cli.models.discovery.exchanged import weights_kept
from duat_cli.models.discovery.modality import stack_of
from duat_cli.models.discovery.proof import Proof, Unproved, Verdict, opened
from duat_cli.models.discovery.structure import Discovery, ModelStructure
from duat_cli.models.instrument.attention import CapturePath, ForeignAttentionError
from duat_cli.models.instrument.foreign import model_code
from duat_cli.models.instrument.hooks import ExchangedError, unexchanged
from duat_cli.models.instrument.rig import Rig
from duat_cli.models.instrument.tracing import Event, Trace
from duat_cli.models.value_path.factors import BlockFactors


class PathError(Exception):
    """A block's attention is seen by its softmax alone, after others' was seen through transformers' interface."""


class OpenedError(Exception):
    """A block has other parts than were tried: everything begins anew, with these."""

    def __init__(self, parts: BlockParts) -> None:
        super().__init__(parts.name)
        self.parts = parts


BEGIN_ANEW = ForeignAttentionError, PathError, OpenedError, StagesError, ExchangedError
"""What shows that everything has to begin anew, and with what."""


@dataclass
class Known:
    """What an earlier attempt showed."""

    chain: str | None = None  # as of `discover`, from the beginning
    interface: bool = True  # whether attention can be seen through transformers' interface
    staged: frozenset[str] = frozenset()  # lists whose elements are stages
    intercepted: bool = False  # whether some attention is seen by its softmax alone, so that all of it has to be
    exchanged: bool = False  # whether a pass put other modules in the place of some
    parts: dict[nn.Module, BlockParts] = field(default_factory=dict)  # of blocks that were tried with others

    def learn(self, fault: ForeignAttentionError | PathError | OpenedError | StagesError | ExchangedError) -> None:
        """From what ended it."""
        if isinstance(fault, OpenedError):
            self.parts[fault.parts.module] = fault.parts
        elif isinstance(fault, StagesError):
            self.staged |= {fault.name}
        elif isinstance(fault, PathError):
            self.intercepted = True
        elif isinstance(fault, ExchangedError):
            if self.exchanged:
                raise fault
            self.exchanged = True
        elif not self.interface:
            raise fault
        else:
            self.interface = False


def blocks_expected(model: Any) -> int:
    """How many block calls there will be, by the config, or by the longest list of modules."""
    stated = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    of_pair = getattr(model.config, "is_encoder_decoder", False)  # then it may be the other stack's
    return (
        stated
        if isinstance(stated, int) and not of_pair
        else max(map(len, outermost_lists(stack_of(model)).values()), default=0)
    )


def _without_values(factors: BlockFactors | None) -> BlockFactors | None:
    return None if factors is None else replace(factors, heads=factors.heads.without_values())


class Growing(Discovery):
    """The first pass; `proof` and `rig` are for those behind it."""

    def __init__(
        self,
        model: Any,
        *,
        device: str,
        known: Known,
        like: Mapping[str, Tensor] | None = None,
        factors: bool = True,
    ) -> None:
        super().__init__(
            model,
            interface=known.interface,
            staged=known.staged,
            device=device,
            like=like,
            chain=known.chain,
            factors=factors,
        )
        self._known = known
        self.on_proved: Callable[[BlockParts, Trace], None] = lambda _parts, _written: None  # called behind every proof
        self._written: dict[nn.Module, Trace] = {}  # of blocks that are not proved yet
        self._proof: Proof | None = None
        self._rigs: list[Rig] = []
        self._path: CapturePath = "attention interface"  # when they were made

    @property
    def ready(self) -> bool:
        """Whether it has been through a block with attention, so that it is known which list holds the blocks."""
        return bool(self.tracer.attention or self.mixers)

    def attached(self) -> contextlib.AbstractContextManager[None]:
        """Around this pass and all others."""
        return self.tracer.attached()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """What `run` needs around it."""
        with self.tracer.active(), weights_kept(self.stack):
            yield

    def run(self) -> None:
        """The pass that finds blocks and parts."""
        with model_code(type(self.model).__name__), unexchanged(self.stack):
            self.forward()

    def proof(self) -> Proof:
        """The pass behind it that proves them."""
        found = [self.parts_of(event.module) for event in self.chained()]
        interface = not self._known.intercepted and self.path == "attention interface"
        self._proof = Proof(
            self.part,
            self.forward,
            self._proved_one,
            interface=interface,
            coming=self.elements(),
            factors=self.factors,
        )
        for parts in found:
            self._proof.learn(parts)
        return self._proof

    def rig(self) -> Rig:
        """Instruments for one of the passes behind the proof."""
        interface = not self._known.intercepted and self.path == "attention interface"
        known = [proved.parts for proved in self.proved.values()]
        self._path = self.path
        self._rigs.append(Rig(self.part, known, interface=interface, coming=self.elements()))
        return self._rigs[-1]

    def elements(self) -> list[nn.Module]:
        """The modules that may be blocks, of the list that holds them."""
        return list(self.lists[self.home()])

    def parts_of(self, module: nn.Module) -> BlockParts:
        """As they were proved, of those that are."""
        return self.proved[module].parts if module in self.proved else super().parts_of(module)

    def so_far(self) -> ModelStructure:
        """What is known of the blocks that were proved."""
        calls = [event for event in self.chained() if event.module in self.proved]
        return self.structure_of(calls, ())

    def forget(self, modules: Iterable[nn.Module]) -> None:
        """Of what was read from the weights of these blocks, or of those inside of them, keep the shapes alone."""
        for module in (inner for one in modules for inner in one.modules()):
            known = self.proved.get(module)
            if known is not None:
                self.proved[module] = replace(
                    known, factors=_without_values(known.factors), cross=_without_values(known.cross)
                )

    def learn(self, event: Event, written: Trace) -> None:
        module = event.module
        if module not in self.parts:
            self._written[module] = written
        super().learn(event, written)
        if module in self._known.parts:
            self.parts[module] = self._known.parts[module]
        if self._rigs and self.path != self._path and not self._known.intercepted:
            raise PathError
        if self._proof is not None and self.list_of[module] == self.home():
            self.chained()  # raises where the block does not take what the one in front of it gives
            self._proof.learn(self.parts_of(module))

    def _proved_one(self, verdict: Verdict) -> None:
        module = verdict.parts.module
        if isinstance(verdict, Unproved):
            if module in self._known.parts:
                raise UnsupportedModelError(f"{verdict.parts.name}: {verdict.fault}")
            raise OpenedError(opened(verdict, self._written[module]))
        self.proved[module] = verdict
        self.on_proved(verdict.parts, self._written.pop(module))
        for rig in self._rigs:
            rig.learn(verdict.parts)


Discovered = Growing | ModelStructure
"""What discovery has found so far, or all of it."""
