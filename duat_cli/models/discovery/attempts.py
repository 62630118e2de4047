"""Facts about a model that one attempt at discovery shows and that the next has to know from its beginning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from duat_cli.models.discovery.chains import StagesError
from duat_cli.models.instrument.attention import ForeignAttentionError
from duat_cli.models.instrument.hooks import ExchangedError

T = TypeVar("T")


class PathError(Exception):
    """The attention of a block can only be seen at its softmax, after that of others was seen at the interface."""


@dataclass
class Known:
    """Facts that earlier attempts showed."""

    chain: str | None = None  # as in `discover`, known from the beginning
    interface: bool = True  # whether attention can be seen through transformers' interface
    staged: frozenset[str] = frozenset()  # lists whose elements are stages
    intercepted: bool = False  # whether some attention can only be seen at its softmax, so that all of it has to be
    exchanged: bool = False  # whether a pass replaced modules of the model by others

    def through(self, attempt: Callable[[], T]) -> T:
        """The result of the first attempt that comes to its end; each one that fails is learnt from and begun anew."""
        while True:
            try:
                return attempt()
            except (ForeignAttentionError, PathError, StagesError, ExchangedError) as fault:
                self.learn(fault)

    def learn(self, fault: ForeignAttentionError | PathError | StagesError | ExchangedError) -> None:
        """Learns from the error that ended an attempt. Raises it again where the fact was known already."""
        if isinstance(fault, StagesError):
            self.staged |= {fault.name}
        elif isinstance(fault, PathError):
            self.intercepted = True
        elif isinstance(fault, ExchangedError):  # modules that the attempt had hooked are gone
            if self.exchanged:
                raise fault
            self.exchanged = True
        elif not self.interface:
            raise fault
        else:  # the model keeps its own attention function, and its softmax is watched
            self.interface = False
