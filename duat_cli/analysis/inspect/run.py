"""`duat inspect`: prompts through the model, block by block, into a report."""

from __future__ import annotations

import itertools
import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from duat_cli.analysis.decomposition import Decomposition, Step, shares
from duat_cli.analysis.inspect.assemble import end_to_end, measured_block, unmeasured_block
from duat_cli.analysis.inspect.batch import add_uniform, batches, leaders_of, sweep_batch
from duat_cli.analysis.inspect.heads import heads, tokens_of
from duat_cli.analysis.inspect.maps import Maps
from duat_cli.analysis.inspect.measured.cross import cross_of
from duat_cli.analysis.inspect.operator import measure
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.routing import routing
from duat_cli.analysis.inspect.save.states import StateFiles
from duat_cli.analysis.inspect.total import InspectHead, InspectTotal, PromptSweep
from duat_cli.analysis.inspect.uniform import UniformNulls
from duat_cli.analysis.inspect.untrained import Untrained, untrained, with_untrained
from duat_cli.analysis.operator_file import OperatorFile
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Listener, Session, prompt_facts
from duat_cli.errors import InputError, or_reason
from duat_cli.loading.checkpoint.stored import most_stored
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.model.processes import Processes
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.structure import Discovery
from duat_cli.models.instrument.activations import largest_activations
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.lockstep import Guest
from duat_cli.results.inspect import InspectReport, PromptBlock, UatTerm


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


def inspect(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    options: InspectOptions,
    progress: Progress,
    filled: Filled = Filled(),
) -> InspectReport:
    """The report on `loaded` over `prompts`."""
    matrices, maps, beside = filled.matrices, filled.maps, filled.beside
    session = Session(loaded, progress, cache=options.cache)
    chosen(options.layers, session.depth)
    for file in (matrices, filled.states):
        if file is not None:
            file.open(session, prompts, chosen(options.layers, len(session.structure.calls)))
    processes = Processes(loaded.processes, progress, loaded.model)
    sweeps: Iterable[PromptSweep]
    if loaded.paged is matrices is filled.states is None:
        known = _null(session, prompts, options, processes)  # first, so that what prompts gave need not wait for it
        sweeps = sweep_in_order(session, prompts, options, processes, filled)
    else:
        sweeps = sweep_prompts(session, prompts, options, progress, filled)
        if matrices is not None:
            matrices.finish()
        known = _null(session, prompts, options, processes)
    total = InspectTotal(chosen(options.layers, len(session.structure.calls)), options.terms, options.per_prompt)
    error = 0.0
    for facts, sweep in zip(prompt_facts(prompts), sweeps, strict=True):
        if beside is not None:
            beside.take(sweep.beside)
        total.add(facts, sweep if known is None else with_untrained(sweep, facts.tokens, known))
        error = max([error, *sweep.errors])
    session.save_cache()
    head, certificate = report_head(session), session.certificate(error)  # weights may be read for it once more
    report = total.report(head, certificate, session.run_facts(processes.memory))
    return report if maps is None else report.model_copy(update={"maps": maps.maps()})


def _null(
    session: Session, prompts: Sequence[Prompt], options: InspectOptions, processes: Processes
) -> Untrained | None:
    """None where it is not asked for."""
    if options.null != "all":
        return None
    like = {p.input_ids.shape[1]: p.prepared for p in prompts if p.prepared is not None}  # by the count of positions
    return untrained(
        session.loaded,
        len(session.structure.calls),
        [prompt.input_ids.shape[1] for prompt in prompts],
        options.threshold,
        cache=options.cache,
        processes=processes,
        like=like or None,
    )


def sweep_in_order(
    session: Session,
    prompts: Sequence[Prompt],
    options: InspectOptions,
    processes: Processes,
    filled: Filled = Filled(),
) -> Iterator[PromptSweep]:
    """Of each prompt, over weights that are in memory: those of as many tokens together where there are enough of them
    and nothing is asked beside, each batch in one of the processes. The first ones run here: the others find the Gram
    matrices of every block."""
    count = len(prompts)
    begun, others = 1 if filled.maps is None else max(1, filled.maps.count), replace(filled, maps=None)

    def work(numbered: tuple[int, list[int]]) -> list[PromptSweep]:
        before, batch = numbered
        some, progress = [prompts[number] for number in batch], within(processes, session, before, count)
        if filled.beside is None:
            return sweep_together(session, some, options, progress)
        return sweep_prompts(session, some, options, progress, others)

    yield from sweep_prompts(session, prompts[:begun], options, within(processes, session, 0, count), filled)
    if begun >= count:
        return
    tokens = [prompt.input_ids.shape[1] for prompt in prompts]
    rest = batches(leaders_of(session, options, tokens) if filled.beside is None else array("I", range(count)), begun)
    before = itertools.accumulate(map(len, rest), initial=begun)
    waiting = dict[int, bytes]()  # for prompts in front of them; pickled they take a tenth of the memory
    for batch, sweeps in zip(rest, processes.each(work, zip(before, rest, strict=False)), strict=True):
        for number, sweep in zip(batch, sweeps, strict=True):
            if number == begun:
                yield sweep
                begun += 1
            else:
                waiting[number] = pickle.dumps(sweep)
        while begun in waiting:
            yield pickle.loads(waiting.pop(begun))
            begun += 1


def report_head(session: Session) -> InspectHead:
    """What no prompt changes. The number of heads is known once a prompt has run."""
    stored = most_stored(session.loaded.files)
    return InspectHead(
        environment=session.environment(),
        model=session.model_facts(),
        heads_differ=session.heads_differ,
        block_names=[session.structure.block(i).parts.name for i in range(len(session.structure.calls))],
        stored_dtype=None if stored is None else str(stored).removeprefix("torch."),
        skipped=session.skipped(),
        warnings=session.warnings(),
    )


# -- one prompt ----------------------------------------------------------------------------------------------


def sweep_prompts(
    session: Session,
    prompts: Sequence[Prompt],
    options: InspectOptions,
    progress: Progress,
    filled: Filled = Filled(),
) -> list[PromptSweep]:
    """Everything that the blocks of each prompt add."""
    under_way, found = dict[int, _UnderWay](), dict[int, PromptSweep]()
    tick, beside = ticker(progress, session, prompts), filled.beside

    def listener(number: int) -> Listener:
        held = under_way[number] = _UnderWay(session, number, prompts[number], options, filled)

        def listen(run: BlockRun) -> None:
            held.take(run)
            tick(number)

        return listen

    def ended(number: int, output: Any) -> None:
        found[number] = under_way.pop(number).end(output)

    session.sweep_all(prompts, listener, ended, None if beside is None else beside.guest_of(session))
    if beside is not None and session.loaded.paged is not None:
        beside.swept(session)
    return [found[number] for number in range(len(prompts))]


def sweep_together(
    session: Session, prompts: Sequence[Prompt], options: InspectOptions, progress: Progress
) -> list[PromptSweep]:
    """The same of prompts of as many tokens, as one batch if the model takes them so and its weights are in memory; not
    before one prompt has run."""
    if (
        session.loaded.paged is None
        and len(prompts) > 1
        and (found := sweep_batch(session, prompts, options)) is not None
    ):
        steps = len(prompts) * session.depth
        progress(steps, steps, f"{len(prompts)} prompts together")
        return found
    return sweep_prompts(session, prompts, options, progress)


class _UnderWay:
    """One prompt while it goes through the blocks."""

    def __init__(self, session: Session, number: int, prompt: Prompt, options: InspectOptions, filled: Filled) -> None:
        self._sweep = PromptSweep()
        self._session, self._number, self._prompt = session, number, prompt
        self._options, self._filled = options, filled
        self._decomposition = Decomposition(one_by_one=options.terms, own=True, by_source=options.end_to_end)
        self._uniform = UniformNulls(options.threshold, together=session.loaded.paged is None)
        self._output: Tensor | None = None  # of the last block, (N, M)
        if filled.states is not None:
            filled.states.begin(number, prompt)

    def take(self, run: BlockRun) -> None:
        """The next block."""
        step = self._decomposition.advance(run)
        self._output = run.output[0]
        self._sweep.errors.append(step.terms.error)
        if self._options.layers is None or run.index in self._options.layers:
            [self._sweep.largest[run.index]] = largest_activations(run)
            if self._filled.states is not None:
                self._filled.states.block(self._number, run, step, self._decomposition)
            self._sweep.blocks[run.index] = self._block(run, step)

    def _block(self, run: BlockRun, step: Step) -> PromptBlock:
        session, options, number = self._session, self._options, self._number
        matrices, maps = self._filled.matrices, self._filled.maps
        operator = or_reason(lambda: session.operator(run, step))
        beside: dict[str, Any] = {
            "cross": cross_of(run, session.structure.block(run.index), lambda: session.geometry(run.index, cross=True)),
            "routing": routing(run) if options.routing else None,
            "heads": heads(run, [tokens_of(self._prompt)])[0] if options.heads else None,
        }
        if isinstance(operator, str):
            if session.structure.block(run.index).factors is not None:
                self._sweep.faults[run.index] = operator
            if matrices is not None:
                matrices.missing(run.index, operator)
            return unmeasured_block(number, operator, step.terms, options, run.input, **beside)
        geometry = session.geometry(run.index)
        mapped = maps if maps is not None and maps.wants(number) else None
        whole = matrices is not None or mapped is not None
        numbers = measure(operator, geometry, threshold=options.threshold, spectrum=options.spectrum, matrix=whole)
        if matrices is not None and numbers.matrix is not None:
            matrices.block(number, run.index, operator, run.input[0], numbers.matrix)
        if mapped is not None and numbers.matrix is not None:
            mapped.add(number, run.index, numbers.matrix)
        self._uniform.add(run.index, operator, geometry, numbers)
        return measured_block(
            number, numbers, step.terms, options, run.input, operator=operator, error=operator.error, **beside
        )

    def end(self, output: Any) -> PromptSweep:
        """What the prompt gave. output: what the stack returned."""
        sweep, carried, beside = self._sweep, self._decomposition.carried, self._filled.beside
        if self._filled.states is not None:
            self._filled.states.end(self._number)
        if beside is not None:
            sweep = replace(sweep, beside=beside.ended(self._session, self._prompt, output))
        if self._options.terms:
            assert self._output is not None
            sweep.terms.extend(_uat_terms(self._decomposition, self._output))
        if self._options.end_to_end:
            assert carried is not None
            sweep = replace(sweep, end_to_end=end_to_end(carried))
        add_uniform([sweep], self._uniform, self._prompt.input_ids.shape[1])
        return sweep


def within(progress: Progress, session: Session, before: int, count: int) -> Progress:
    """Of some of so many prompts, of which others are through, as that of all."""
    depth = session.depth

    def some(done: int, _of: int, _what: str) -> None:
        progress(before * depth + done, count * depth, f"prompt {before + -(-done // depth)} of {count}")

    return some


def ticker(progress: Progress, session: Session, prompts: Sequence[Prompt]) -> Callable[[int], None]:
    """Called behind every block of a prompt with the prompt's number."""
    done, total = itertools.count(1), len(prompts) * session.depth
    return lambda number: progress(next(done), total, f"prompt {number + 1} of {len(prompts)}")


def _uat_terms(decomposition: Decomposition, output: Tensor) -> list[UatTerm]:
    """Every term of the sum at the last block's output."""
    carried = decomposition.carried
    assert carried is not None
    encoder = [] if carried.encoder is None else [carried.encoder]
    kinds: list[tuple[str, Literal["linear", "static", "dynamic", "encoder"], int | None]] = [
        ("x_0", "linear", None),
        ("bias", "static", None),
        *(("encoder", "encoder", None) for _ in encoder),
        *((f"block {i}", "dynamic", i) for i, _ in enumerate(carried.terms, decomposition.began)),
    ]
    static = torch.zeros_like(carried.linear) if carried.static is None else carried.static
    numbers = shares([carried.linear, static, *encoder, *carried.terms], output)
    return [
        UatTerm(name=name, kind=kind, block=block, share=n.share, norm=n.norm)
        for (name, kind, block), n in zip(kinds, numbers, strict=True)
        if n.share is not None and n.norm is not None
    ]


def chosen(layers: frozenset[int] | None, count: int) -> list[int]:
    if layers is None:
        return list(range(count))
    beyond = sorted(i for i in layers if i >= count)
    if beyond:
        raise InputError(f"--layers: no block {beyond[0]}; the model has blocks 0 to {count - 1}")
    return sorted(layers)
