"""Runs prompts through the model, block by block, and measures what the blocks of each add.

Prompts with equally many tokens may run as one batch. It has no padding, so each keeps its numbers, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from duat_cli.analysis.decomposition import Decomposition, Step
from duat_cli.analysis.geometry import Geometry
from duat_cli.analysis.inspect.assemble import (
    NOT_ASKED,
    end_to_end,
    measured_block,
    null_stats,
    nulls,
    unmeasured_block,
)
from duat_cli.analysis.inspect.heads import heads, tokens_of
from duat_cli.analysis.inspect.measured.cross import cross_of
from duat_cli.analysis.inspect.measured.numbers import OperatorNumbers
from duat_cli.analysis.inspect.operator import measure, measure_each
from duat_cli.analysis.inspect.options import NOTHING, Filled, InspectOptions
from duat_cli.analysis.inspect.routing import routing
from duat_cli.analysis.inspect.total import PromptSweep
from duat_cli.analysis.inspect.uniform import UniformNulls
from duat_cli.analysis.progress import Progress, ticker
from duat_cli.analysis.session import Listener, Session
from duat_cli.errors import DuatError, UnsupportedModelError, needed, or_reason
from duat_cli.loading.prompts import Prompt
from duat_cli.models.instrument.activations import largest_activations
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.shares import shares
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.results.inspect import PromptBlock
from duat_cli.results.terms import UatTerm

FAULTS = (DuatError, RuntimeError, ValueError, TypeError, LookupError)  # of model code that takes prompts one by one


def sweep_prompts(
    session: Session, prompts: Sequence[Prompt], options: InspectOptions, progress: Progress, filled: Filled = NOTHING
) -> list[PromptSweep]:
    """The sweeps of the prompts, in order."""
    under_way, found = dict[int, _Sweep](), dict[int, PromptSweep]()
    tick, beside = ticker(progress, session.depth, len(prompts)), filled.beside

    def listener(number: int) -> Listener:
        sweep = under_way[number] = _Sweep(session, [prompts[number]], options, filled, number)

        def listen(run: BlockRun) -> None:
            sweep.take(run)
            tick(number)

        return listen

    def ended(number: int, output: Any) -> None:
        [found[number]] = under_way.pop(number).end(output)

    session.sweep_all(prompts, listener, ended, None if beside is None else beside.guest_of(session))
    if beside is not None and session.loaded.paged is not None:
        beside.swept(session)
    return [found[number] for number in range(len(prompts))]


def sweep_together(
    session: Session, prompts: Sequence[Prompt], options: InspectOptions, progress: Progress, filled: Filled = NOTHING
) -> list[PromptSweep]:
    """The sweeps of prompts with equally many tokens, run as one batch if the model takes them so and its weights are
    in memory. One prompt has to have run before. filled: outputs to fill if the prompts run one by one."""
    together = session.loaded.paged is None and len(prompts) > 1
    found = sweep_batch(session, prompts, options) if together else None
    if found is None:
        return sweep_prompts(session, prompts, options, progress, filled)
    steps = len(prompts) * session.depth
    progress(steps, steps, f"{len(prompts)} prompts together")
    return found


def sweep_batch(session: Session, prompts: Sequence[Prompt], options: InspectOptions) -> list[PromptSweep] | None:
    """The sweeps of one batch; None where it fails. Its prompts then run one by one, which shows the error."""
    sweep = _Sweep(session, prompts, options)
    try:
        session.sweep_batch([prompt.input_ids for prompt in prompts], sweep.take)
        return sweep.end(None)
    except FAULTS:
        return None


class _Sweep:
    """One prompt, or those of a batch, while they go through the blocks."""

    def __init__(
        self,
        session: Session,
        prompts: Sequence[Prompt],
        options: InspectOptions,
        filled: Filled = NOTHING,
        number: int = 0,
    ) -> None:
        """filled, number: for a single prompt; a batch fills nothing."""
        self._session, self._prompts, self._options = session, prompts, options
        self._filled, self._number = filled, number
        self._found = [PromptSweep() for _ in prompts]
        self._decomposition = Decomposition(one_by_one=options.terms, own=True, by_source=options.end_to_end)
        self._uniform = UniformNulls(options.threshold, together=session.loaded.paged is None)
        self._output: Tensor | None = None  # output of the last block so far, (N, M)
        if filled.states is not None:
            filled.states.begin(number, prompts[0])

    def take(self, run: BlockRun) -> None:
        """Measures the next block."""
        step = self._decomposition.advance(run)
        self._output = run.output[0]
        for sweep, terms in zip(self._found, step.each, strict=True):
            sweep.errors.append(terms.error)
        if self._options.layers is not None and run.index not in self._options.layers:
            return
        if self._filled.states is not None:
            self._filled.states.block(self._number, run, step, self._decomposition)
        blocks = self._blocks(run, step)
        for sweep, block, largest in zip(self._found, blocks, largest_activations(run), strict=True):
            sweep.blocks[run.index], sweep.largest[run.index] = block, largest

    def _blocks(self, run: BlockRun, step: Step) -> list[PromptBlock]:
        """The block's result for each prompt."""
        session, options = self._session, self._options
        block = session.structure.block(run.index)
        operator = or_reason(lambda: session.operator(run, step))
        cross = cross_of(run, block, lambda: session.geometry(run.index, cross=True))
        routed = routing(run) if options.routing else None
        read = heads(run, [tokens_of(one) for one in self._prompts]) if options.heads else [None] * len(self._prompts)
        beside = [{"cross": cross, "routing": routed, "heads": of_heads} for of_heads in read]
        if len(self._prompts) > 1 and (isinstance(operator, str) or cross is not None):
            raise UnsupportedModelError(f"block {run.index} has no operator of each prompt of a batch")
        if isinstance(operator, str):
            if block.factors is not None:
                self._found[0].faults[run.index] = operator
            if self._filled.matrices is not None:
                self._filled.matrices.missing(run.index, operator)
            return [unmeasured_block(operator, step.terms, options, run.input, **beside[0])]
        numbers = self._numbers(run, operator, session.geometry(run.index))
        errors = operator.each if len(self._prompts) > 1 else [operator.error]
        return [
            measured_block(own, terms, options, run.input, operator=operator, error=error, **more)
            for own, terms, error, more in zip(numbers, step.each, errors, beside, strict=True)
        ]

    def _numbers(self, run: BlockRun, operator: AttentionOperator, geometry: Geometry) -> list[OperatorNumbers]:
        """Statistics of W' under each prompt."""
        options, number, matrices, maps = self._options, self._number, self._filled.matrices, self._filled.maps
        if len(self._prompts) > 1:
            operators = operator.by_prompt()
            every = measure_each(operators, geometry, threshold=options.threshold)
            self._uniform.add_each(run.index, operators, geometry, every)
            return every
        mapped = maps if maps is not None and maps.wants(number) else None
        whole = matrices is not None or mapped is not None
        numbers = measure(operator, geometry, threshold=options.threshold, spectrum=options.spectrum, matrix=whole)
        if matrices is not None and numbers.matrix is not None:
            matrices.block(number, run.index, operator, run.input[0], numbers.matrix)
        if mapped is not None and numbers.matrix is not None:
            mapped.add(number, run.index, numbers.matrix)
        self._uniform.add(run.index, operator, geometry, numbers)
        return [numbers]

    def end(self, output: Any) -> list[PromptSweep]:
        """The finished sweep of each prompt. output: what the stack returned, for a single prompt."""
        first, carried, beside = self._found[0], self._decomposition.carried, self._filled.beside
        if self._filled.states is not None:
            self._filled.states.end(self._number)
        if beside is not None:
            first.beside = beside.ended(self._session, self._prompts[0], output)
        if self._options.terms:
            first.terms = _uat_terms(self._decomposition, needed(self._output))
        if self._options.end_to_end:
            first.end_to_end = end_to_end(needed(carried))
        tokens = self._prompts[0].input_ids.shape[1]
        for prompt, sweep in enumerate(self._found):
            for index, numbers in self._uniform.numbers(prompt).items():
                null = nulls(null_stats(numbers, tokens), NOT_ASKED)
                sweep.blocks[index] = sweep.blocks[index].model_copy(update={"null": null})
        return self._found


def _uat_terms(decomposition: Decomposition, output: Tensor) -> list[UatTerm]:
    """Every term of the sum at the last block's output."""
    carried = needed(decomposition.carried)
    encoder = [] if carried.encoder is None else [carried.encoder]
    kinds: list[tuple[str, Literal["linear", "static", "dynamic", "encoder"], int | None]] = [
        ("x_0", "linear", None),
        ("bias", "static", None),
        *(("encoder", "encoder", None) for _ in encoder),
        *((f"block {i}", "dynamic", i) for i, _ in enumerate(carried.terms, decomposition.began)),
    ]
    found = shares([carried.linear, carried.bias, *encoder, *carried.terms], output)
    return [
        UatTerm(name=name, kind=kind, block=block, share=n.share, norm=n.norm, token_median=n.token_median)
        for (name, kind, block), n in zip(kinds, found.parts, strict=True)
        if n.share is not None and n.norm is not None
    ]
