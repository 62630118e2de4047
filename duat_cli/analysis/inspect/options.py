"""Requests to `duat inspect`: the options that set the numbers, and what is filled beside the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from duat_cli.analysis.inspect.maps import Maps
    from duat_cli.analysis.inspect.save.states import StateFiles
    from duat_cli.analysis.operator_file import OperatorFile
    from duat_cli.analysis.session import Session
    from duat_cli.loading.prompts import Prompt
    from duat_cli.models.discovery.structure import Discovery
    from duat_cli.models.sweep.lockstep import Guest


@dataclass(frozen=True)
class InspectOptions:
    """Options of `duat inspect`: what it computes beyond the default."""

    layers: frozenset[int] | None = None
    threshold: float = 0.01
    conv_width: int = 3
    spectrum: bool = False
    terms: bool = False
    end_to_end: bool = False
    routing: bool = False
    heads: bool = False
    per_prompt: bool = False
    null: Literal["all", "uniform"] = "uniform"  # "all": also the null of the re-initialised architecture
    cache: bool = True


class Beside(Protocol):
    """An analysis that shares the passes of `duat inspect`."""

    def guest_of(self, session: Session, /) -> Callable[[Discovery], Guest]:
        """Makes the passes that run beside discovery, where weights are read block by block."""
        ...

    def ended(self, session: Session, prompt: Prompt, output: Any, /) -> Any:
        """Called with the stack's output for a prompt, in the process that ran it. The answer goes to `take`; that of
        the first prompt does so before any other process is started."""
        ...

    def swept(self, session: Session, /) -> None:
        """Called once all prompts are through, where weights are read block by block."""
        ...

    def take(self, answer: Any, /) -> None:
        """Called with the answer of `ended` for the next prompt, in order."""
        ...


@dataclass(frozen=True)
class Filled:
    """Outputs that the sweeps of prompts fill beside the report, each if it is given."""

    matrices: OperatorFile | None = None
    """Takes every block's factors and C."""
    maps: Maps | None = None
    """Takes C of the prompts to be mapped."""
    states: StateFiles | None = None
    """Takes what the input sets (H, scales, biases)."""
    beside: Beside | None = None


NOTHING = Filled()
