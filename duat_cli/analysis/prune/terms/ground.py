"""Results of the first passes, before any term is removed: sites of terms, the head, and the prompts' own passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from duat_cli.analysis.ahead import Ahead
from duat_cli.analysis.prune.terms.ablation import MeanSums
from duat_cli.analysis.prune.terms.criteria import Activations
from duat_cli.analysis.prune.terms.damage import Metric, last_states, metric_for, why_no_loss
from duat_cli.analysis.session import Session
from duat_cli.errors import InputError, NoSignalError, UnsupportedModelError
from duat_cli.kinds import MetricName
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.causality import HeadTest, LogitsPass, by_row, logits_in, run_headed
from duat_cli.models.discovery.modality import DISCOVERY_TOKENS, Given, probe_inputs
from duat_cli.models.discovery.structure import Discovered, run_stack
from duat_cli.models.edits.parameters import BlockParameters, block_parameters
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.tracing import Trace
from duat_cli.models.sweep.chain import Chain
from duat_cli.models.sweep.lockstep import Placing
from duat_cli.models.sweep.passes import Recorded, RecordingPass
from duat_cli.models.terms.branches import Branches
from duat_cli.models.terms.sites import Site, Sites


@dataclass(frozen=True)
class Ground:
    """Everything that the analysis of terms starts from."""

    sites: Sites
    branches: Branches
    parameters: Mapping[nn.Module, BlockParameters]
    head: HeadTest
    no_loss: str | None  # why the prompts have no next-token loss; None where they have one
    metric: Metric
    recorded: list[Recorded]  # the prompts' own passes
    # logits of the prompts, by number, where the metric looks at other outputs; whoever needs them pops them
    logits: dict[int, Tensor]
    seen: Activations  # activations at the sites under these prompts
    sums: MeanSums | None  # sums for the means of the sites, if asked for


def ground_of(session: Session, name: MetricName | None, prompts: Sequence[Given], *, means: bool) -> Ground:
    """The ground of a model, with each of these prompts recorded beside discovery (`Session.discover_beside`).

    means: whether means are asked for. Only at the end is it known which output the metric looks at. If that is not the
    one that the model's class promises, the prompts are recorded once more.
    """
    guest = session.discover_beside(lambda found: _Guest(session, found, prompts, hidden=name == "hidden", means=means))
    structure = session.structure
    guest.chain.require()
    model = session.loaded.headed
    metric, ahead = metric_for(name, model, structure, guest.head), guest.ahead.why_no_loss
    if name == "nll" and ahead is not None:
        raise InputError(f"--metric nll: {ahead}; use --metric kl")
    no_loss = why_no_loss(model, guest.head) or ahead
    records = guest.records
    if guest.logits != (metric.name != "hidden"):
        records = [RecordingPass(structure, metric.forward(one)) for one in prompts]
        session.together(records)
    recorded = [one.recorded for one in records]
    for one in guest.records if means else ():
        guest.sums.add(one.calls)
    sums = guest.sums if means else None
    logits = {number: head.found for number, head in enumerate(guest.heads) if head.found is not None}
    return Ground(
        guest.sites, guest.branches, guest.parameters, guest.head, no_loss, metric, recorded, logits, guest.seen, sums
    )


class _Guest(Placing):
    """All passes that run beside one attempt to discover the model."""

    def __init__(
        self, session: Session, found: Discovered, prompts: Sequence[Given], *, hidden: bool, means: bool
    ) -> None:
        model, device = session.loaded.headed, session.loaded.device
        super().__init__()
        self.parameters: dict[nn.Module, BlockParameters] = {}
        self._like = like = session.loaded.like
        self.head = HeadTest(model, found.stack, device, like)
        self.logits = bool(self.head.passes) and not hidden
        probe = probe_inputs(found.stack, like, DISCOVERY_TOKENS, device)
        self.ahead = Ahead(model, probe)
        self.chain = Chain(found, lambda: run_stack(found.stack, probe)[0])
        self.seen, self.sums, self._means = Activations(), MeanSums(), means
        self.records = [
            RecordingPass(found, self._output(model if self.logits else found.stack, one), self.sites, self._see)
            for one in prompts
        ]
        besides = prompts if self.head.passes and not self.logits else ()
        self.heads = [LogitsPass(model, one) for one in besides]  # the loss needs logits whatever the metric
        self.passes = [*self.chain.passes, *self.head.passes, *self.ahead.passes, *self.records, *self.heads]

    def proved(self, parts: BlockParts, written: Trace) -> None:
        if parts.hidden.flat:
            raise UnsupportedModelError(
                f"{parts.name} takes hidden states without a batch, and removals are followed in rows of one; duat "
                "inspect, verify and matrix read this model"
            )
        super().proved(parts, written)
        self.parameters[parts.module] = block_parameters(parts, self.sites[parts.module], written)

    def probe(self, run: BlockRun) -> None:
        if self._like is not None and not run.input.any():  # for texts the certificate finds this
            raise NoSignalError(
                f"the stream in front of {run.parts.name} is zero, so what meets it there cannot be told apart: does a "
                "mask leave nothing of the input? give another by --inputs"
            )
        if run.output.shape != run.input.shape:
            before, after = (f"{one.shape[1]} tokens of width {one.shape[2]}" for one in (run.input, run.output))
            raise UnsupportedModelError(
                f"{run.parts.name} makes {after} of {before}: a removal is followed, and compared, along one stream; "
                "duat inspect and verify read this model"
            )
        super().probe(run)

    def _see(self, number: int, site: Site, value: Tensor) -> None:
        self.seen.see(number, site, value)
        if self._means:
            self.sums.see(number, site, value)

    def _output(self, model: Any, given: Given) -> Callable[[], Any]:
        def forward() -> Any:
            output = run_headed(model, given)
            if not self.logits:
                return last_states(output, model)
            logits = logits_in(output)
            return None if logits is None else by_row(logits)

        return forward
