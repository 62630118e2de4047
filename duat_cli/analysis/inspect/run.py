"""`duat inspect`: runs prompts through the model, block by block, and makes the report."""

from __future__ import annotations

import itertools
import pickle
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from duat_cli.analysis.inspect.batch import batches, leaders_of
from duat_cli.analysis.inspect.options import NOTHING, Filled, InspectOptions
from duat_cli.analysis.inspect.sweep import sweep_prompts, sweep_together
from duat_cli.analysis.inspect.total import InspectHead, InspectTotal, PromptSweep
from duat_cli.analysis.inspect.untrained import Untrained, untrained, with_untrained
from duat_cli.analysis.progress import Progress, within
from duat_cli.analysis.session import Session, prompt_facts
from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.dtypes import loaded_in, most_stored_name
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.model.processes import Processes
from duat_cli.loading.prompts import Prompt
from duat_cli.results.inspect import InspectReport


def inspect(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    options: InspectOptions,
    progress: Progress,
    filled: Filled = NOTHING,
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
        known = _null(session, prompts, options, processes)  # first, so that no results of prompts have to wait for it
        sweeps = sweep_in_order(session, prompts, options, processes, filled)
    else:
        sweeps = sweep_prompts(session, prompts, options, progress, filled)
        if matrices is not None:
            matrices.finish()
        known = _null(session, prompts, options, processes)
    total = InspectTotal(chosen(options.layers, len(session.structure.calls)), options.terms, options.per_prompt)
    for facts, sweep in zip(prompt_facts(prompts), sweeps, strict=True):
        if beside is not None:
            beside.take(sweep.beside)
        total.add(facts, with_untrained(sweep, facts.tokens, known))
    session.save_cache()
    head = report_head(session)  # may read weights once more
    report = total.report(head, session.plain_error, session.run_facts(processes.memory))
    return report if maps is None else report.model_copy(update={"maps": maps.maps()})


def _null(
    session: Session, prompts: Sequence[Prompt], options: InspectOptions, processes: Processes
) -> Untrained | None:
    """The null of the re-initialised architecture; None where it is not asked for."""
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
        like=like,
    )


def sweep_in_order(
    session: Session, prompts: Sequence[Prompt], options: InspectOptions, processes: Processes, filled: Filled = NOTHING
) -> Iterator[PromptSweep]:
    """Sweeps of the prompts in order, where weights are in memory. Prompts with equally many tokens run as batches if
    nothing is asked beside, each batch in one of the processes. The first prompts run here, so that the others find the
    Gram matrices of every block."""
    count = len(prompts)
    begun, others = 1 if filled.maps is None else max(1, filled.maps.count), replace(filled, maps=None)

    def work(numbered: tuple[int, list[int]]) -> list[PromptSweep]:
        before, batch = numbered
        some, progress = [prompts[number] for number in batch], within(processes, session.depth, before, count)
        return sweep_together(session, some, options, progress, others)

    yield from sweep_prompts(session, prompts[:begun], options, within(processes, session.depth, 0, count), filled)
    if begun >= count:
        return
    tokens = [prompt.input_ids.shape[1] for prompt in prompts]
    rest = batches(leaders_of(session, options, tokens) if filled.beside is None else array("I", range(count)), begun)
    before = itertools.accumulate(map(len, rest), initial=begun)
    waiting = dict[int, bytes]()  # sweeps that wait for earlier prompts; pickled they take a tenth of the memory
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
    """The part of a report that no prompt changes. It needs a prompt to have run, as heads are counted then."""
    files = session.loaded.files
    return InspectHead(
        environment=session.environment(),
        model=session.model_facts(),
        heads_differ=session.heads_differ,
        block_names=[session.structure.block(i).parts.name for i in range(len(session.structure.calls))],
        stored_dtype=most_stored_name(files),
        loaded_dtype=loaded_in(files),
        certificate=session.certificate(0.0),
        skipped=session.skipped(),
        warnings=session.warnings(),
    )


def chosen(layers: frozenset[int] | None, count: int) -> list[int]:
    if layers is None:
        return list(range(count))
    beyond = sorted(i for i in layers if i >= count)
    if beyond:
        raise InputError(f"--layers: no block {beyond[0]}; the model has blocks 0 to {count - 1}")
    return sorted(layers)
