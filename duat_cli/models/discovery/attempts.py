"""What an attempt at discovery shows of a model that the next one has to know from its beginning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from duat_cli.models.discovery.chains import StagesError
from duat_cli.models.instrument.attention import ForeignAttentionError
from duat_cli.models.instrument.hooks import ExchangedError

T = TypeVar("T")


class PathError(Exception):
    """A block's attention is seen by its softmax alone, after others' was seen through transformers' interface."""


@dataclass
class Known:
    """What earlier attempts showed."""

    chain: str | None = None  # as of `discover`, from the beginning
    interface: bool = True  # whether attention can be seen through transformers' interface
    staged: frozenset[str] = frozenset()  # lists whose elements are stages
    intercepted: bool = False  # whether some attention is seen by its softmax alone, so that all of it has to be
    exchanged: bool = False  # whether a pass put other modules in the place of some

    def through(self, attempt: Callable[[], T]) -> T:
        """What an attempt gives, begun anew until one comes to its end."""
        while True:
            try:
                return attempt()
            except (ForeignAttentionError, PathError, StagesError, ExchangedError) as fault:
                self.learn(fault)

    def learn(self, fault: ForeignAttentionError | PathError | StagesError | ExchangedError) -> None:
        """From what ended one; raised again where it was known."""
        if isinstance(fault, StagesError):
            self.staged |= {fault.name}
        elif isinstance(fault, PathError):
            self.intercepted = True
        elif isinstance(fault, ExchangedError):  # what it was hooked on is gone
            if self.exchanged:
                raise fault
            self.exchanged = True
        elif not self.interface:
            raise fault
        else:  # its own attention function stays, and its softmax is watched
            self.interface = False
