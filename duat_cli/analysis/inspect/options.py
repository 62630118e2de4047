"""What `duat inspect` is asked for: the options that numbers follow from, and what is filled beside the report."""

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
    """What `duat inspect` computes beyond the default."""

    layers: frozenset[int] | None = None
    threshold: float = 0.01
    conv_width: int = 3
    spectrum: bool = False
    terms: bool = False
    end_to_end: bool = False
    routing: bool = False
    heads: bool = False
    per_prompt: bool = False
    null: Literal["all", "uniform"] = "uniform"  # "all": of the re-initialised architecture as well
    cache: bool = True


class Beside(Protocol):
    """What is asked of the same passes."""

    def guest_of(self, session: Session, /) -> Callable[[Discovery], Guest]:
        """What goes through the model beside its discovery, where its weights are read block by block."""
        ...

    def ended(self, session: Session, prompt: Prompt, output: Any, /) -> Any:
        """Called with what the stack returned for a prompt, in the process that ran it; what it gives goes to `take`,
        the first prompt's before any other process is there."""
        ...

    def swept(self, session: Session, /) -> None:
        """Called once all prompts are through, where their weights are read block by block."""
        ...

    def take(self, answer: Any, /) -> None:
        """Called with what `ended` gave for the next prompt, in order."""
        ...


@dataclass(frozen=True)
class Filled:
    """What the sweeps of prompts fill beside the report, each if it is given."""

    matrices: OperatorFile | None = None
    """With every block's factors and C."""
    maps: Maps | None = None
    """With the C of its prompts."""
    states: StateFiles | None = None
    """With what the input sets."""
    beside: Beside | None = None


NOTHING = Filled()
