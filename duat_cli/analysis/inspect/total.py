"""Adds up the prompts of `duat inspect` one by one into the report, to the same bits in any order.

The memory for it is constant, except with --per-prompt, which lists the values of each prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field

from duat_cli import __version__
from duat_cli.analysis.aggregate import Mean, spreads
from duat_cli.analysis.inspect.notable import summarise
from duat_cli.models.instrument.activations import Place
from duat_cli.results.base import Certificate, Environment, ModelFacts, PromptFacts, Result, Run, Skipped
from duat_cli.results.inspect import Block, EndToEnd, InspectReport, PromptBlock, Range
from duat_cli.results.prompts import Roll
from duat_cli.results.terms import UatTerm

GROUPS = ("operator", "density", "coupling", "coupling_weighted", "terms")
_BESIDE = ("null", "cross", "certificate_error", "routing", "heads")
_NEAR = 0.5  # share of the dtype's largest number at which to warn, as other prompts may go higher
_WIDE = torch.finfo(torch.bfloat16).max


@dataclass
class PromptSweep:
    """Results of one prompt."""

    blocks: dict[int, PromptBlock] = field(default_factory=dict)
    errors: list[float] = field(default_factory=list)  # certificate errors of all blocks, chosen or not
    terms: list[UatTerm] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)  # blocks whose factors this prompt refuted
    largest: dict[int, tuple[float, Place]] = field(default_factory=dict)  # largest activation of every chosen block
    end_to_end: EndToEnd | None = None
    beside: Annotated[Any, Field(exclude=True)] = None
    """Answer of `Beside.ended` for this prompt; not kept in files."""


class InspectHead(Result):
    """The part of a report that no prompt changes."""

    environment: Environment
    model: ModelFacts
    heads_differ: bool = False
    """Whether blocks have other numbers of heads than the model facts name."""
    block_names: list[str]
    """Names of all blocks of the model."""
    stored_dtype: str | None
    """Dtype of most stored bytes."""
    loaded_dtype: str | None
    """Dtype in which transformers loads the checkpoint."""
    certificate: Certificate
    """Tolerance and way of capture; the errors come from the prompts."""
    skipped: list[Skipped]
    warnings: list[str]


class InspectTotal:
    """The prompts so far. No number depends on their order; only reasons and faults that differ between prompts do."""

    def __init__(self, layers: list[int], terms: bool, per_prompt: bool) -> None:
        self._means: dict[int, Mean[PromptBlock]] = {i: Mean() for i in layers}
        self._largest: dict[int, tuple[float, Place]] = {}
        self._terms: list[Mean[UatTerm]] = []
        self._end_to_end: Mean[EndToEnd] | None = None
        self._with_terms = terms
        self._rows: dict[int, list[PromptBlock]] | None = {i: [] for i in layers} if per_prompt else None
        self._faults: dict[int, str] = {}
        self._error = 0.0
        self._prompts = Roll(every=per_prompt)

    def add(self, facts: PromptFacts, sweep: PromptSweep) -> None:
        """Adds the next prompt of the report."""
        self._faults |= sweep.faults
        self._error = max([self._error, *sweep.errors])
        for index, row in sweep.blocks.items():
            self._means[index].add(row.model_copy(update={"prompt": 0}))  # a mean has no prompt number
            largest = sweep.largest[index]
            self._largest[index] = max(self._largest.get(index, largest), largest)
            if self._rows is not None:
                self._rows[index].append(row.model_copy(update={"prompt": len(self._prompts)}))
        self._terms = self._terms or [Mean() for _ in sweep.terms]
        for mean, term in zip(self._terms, sweep.terms, strict=True):
            mean.add(term)
        if sweep.end_to_end is not None:
            self._end_to_end = self._end_to_end or Mean()
            self._end_to_end.add(sweep.end_to_end)
        self._prompts.add(facts)

    def report(self, head: InspectHead, plain_error: float, run: Run) -> InspectReport:
        """The report; at least one prompt has to be added. plain_error: the largest of all processes."""
        certificate = head.certificate.with_errors(self._error, plain_error)
        dtypes = head.stored_dtype, head.loaded_dtype, head.environment.dtype
        ranges = {i: block_range(*dtypes, size) for i, size in self._largest.items()}
        blocks = [self._block(i, head.block_names[i], ranges[i]) for i in self._means]
        faults = [Skipped(what=f"operator of block {i}", why=why) for i, why in sorted(self._faults.items())]
        return InspectReport(
            duat_version=__version__,
            environment=head.environment,
            model=head.model,
            prompts=self._prompts.listed,
            prompt_set=self._prompts.facts,
            certificate=certificate,
            blocks=blocks,
            terms=[mean.value() for mean in self._terms] if self._with_terms else None,
            end_to_end=None if self._end_to_end is None else self._end_to_end.value(),
            summary=summarise(blocks, certificate, None if head.heads_differ else head.model.heads),
            skipped=[*head.skipped, *faults],
            warnings=[*head.warnings, *range_warnings(ranges)],
            run=run,
        )

    def _block(self, index: int, name: str, within: Range) -> Block:
        mean = self._means[index].value()
        rows = None if self._rows is None else self._rows[index]
        values = None if rows is None else {group: [getattr(row, group) for row in rows] for group in GROUPS}
        return Block(
            index=index,
            name=name,
            **{group: getattr(mean, group) for group in (*GROUPS, *_BESIDE)},
            range=within,
            spreads=None if values is None else spreads(values),
            prompts=rows,
        )


# -- whether activations fit into the dtype in which the checkpoint is loaded ------------------------------------


def block_range(stored: str | None, loaded: str | None, dtype: str, largest: tuple[float, Place]) -> Range:
    """How near activations of one block come to the largest number of the dtype in which transformers loads them.

    stored: the dtype of most stored bytes; loaded: that of transformers; None where there is none. dtype: of the run;
    largest: activation over all prompts.
    """
    size, place = largest
    limit = math.inf if loaded is None else torch.finfo(getattr(torch, loaded)).max
    reasons = {}
    if not math.isfinite(size):
        reasons = dict.fromkeys(("largest_activation", "share"), f"an output is not finite in {dtype}")
    elif limit >= _WIDE:
        reasons = {"share": "no activation comes near the largest number of the checkpoint's dtype"}
    return Range(
        largest_activation=None if "largest_activation" in reasons else size,
        place=place,
        stored_dtype=stored,
        dtype=loaded,
        share=None if reasons else size / limit,
        reasons=reasons if stored is not None else reasons | {"stored_dtype": "no floating-point tensor is stored"},
    )


def range_warnings(ranges: Mapping[int, Range]) -> list[str]:
    """A warning about the worst block, if its activations come near the largest number of the checkpoint's dtype."""
    share, block = max(((r.share or 0.0, i) for i, r in ranges.items()), default=(0.0, 0))
    if share <= _NEAR:
        return []
    worst = ranges[block]
    what = "overflows" if share > 1 else "is close to overflowing"
    return [
        f"activations reach {worst.largest_activation:.3g} in block {block}, {share:.3g} of the largest number of "
        f"{worst.dtype}, in which the checkpoint is {'stored' if worst.dtype == worst.stored_dtype else 'loaded'}: run "
        f"in it, it {what}"
    ]
