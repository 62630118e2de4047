"""`duat inspect` and `duat verify`: prompts through the model, block by block, into a report."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from duat_cli import __version__
from duat_cli.analysis.decomposition import Decomposition, Step, crossing, shares
from duat_cli.analysis.inspect.assemble import (
    block_terms,
    coupling,
    density,
    no_coupling,
    no_density,
    no_operator,
    null_stats,
    nulls,
    operator_stats,
)
from duat_cli.analysis.inspect.end_to_end import end_to_end
from duat_cli.analysis.inspect.maps import Maps
from duat_cli.analysis.inspect.measured.cross import cross_of
from duat_cli.analysis.inspect.operator import measure
from duat_cli.analysis.inspect.routing import routing
from duat_cli.analysis.inspect.states import StateFiles
from duat_cli.analysis.inspect.total import InspectHead, InspectTotal, PromptSweep
from duat_cli.analysis.inspect.uniform import UniformNulls
from duat_cli.analysis.inspect.untrained import untrained, with_untrained
from duat_cli.analysis.operator_file import OperatorFile
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Listener, Session, prompt_facts
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.loading.checkpoint.stored import most_stored
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.growing import Growing
from duat_cli.models.instrument.activations import largest_activation
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.guest import Guest
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.results.inspect import BlockCertificate, InspectReport, PromptBlock, UatTerm, VerifyReport

NOT_ASKED = "computed with --null all"


class Beside(Protocol):
    """What is asked of the same passes."""

    def guest_of(self, session: Session, /) -> Callable[[Growing], Guest]:
        """What goes through the model beside its discovery, where its weights are read block by block."""
        ...

    def ended(self, session: Session, number: int, output: Any, /) -> None:
        """Called with what the stack returned for a prompt."""
        ...

    def swept(self, session: Session, /) -> None:
        """Called once all prompts are through."""
        ...


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
    per_prompt: bool = False
    null: Literal["all", "uniform"] = "uniform"  # "all": of the re-initialised architecture as well
    cache: bool = True


def inspect(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    options: InspectOptions,
    progress: Progress,
    matrices: OperatorFile | None = None,
    beside: Beside | None = None,
    maps: Maps | None = None,
    states: StateFiles | None = None,
) -> InspectReport:
    """The report on `loaded` over `prompts`. matrices: filled with every block's factors and C if given; maps: with the
    C of its prompts; states: with what the input sets."""
    session = Session(loaded, progress, cache=options.cache)
    chosen(options.layers, session.depth)
    if matrices is not None:
        matrices.open(session, prompts, chosen(options.layers, len(session.structure.calls)))
    if states is not None:
        states.open(session, prompts, chosen(options.layers, len(session.structure.calls)))
    sweeps = sweep_prompts(session, prompts, options, matrices, progress, beside, maps, states)
    layers = chosen(options.layers, len(session.structure.calls))
    if matrices is not None:
        matrices.finish()
    session.save_cache()
    if options.null == "all":
        counts = [p.input_ids.shape[1] for p in prompts]
        known = untrained(
            loaded,
            len(session.structure.calls),
            counts,
            options.threshold,
            cache=options.cache,
            progress=progress,
            like=_prepared_by_count(prompts),
        )
        sweeps = [with_untrained(s, tokens, known) for s, tokens in zip(sweeps, counts, strict=True)]
    total = InspectTotal(layers, options.terms, options.per_prompt)
    for facts, sweep in zip(prompt_facts(prompts), sweeps, strict=True):
        total.add(facts, sweep)
    certificate = session.certificate(max(e for s in sweeps for e in s.errors))
    report = total.report(report_head(session), certificate, session.run_facts())
    return report if maps is None else report.model_copy(update={"maps": maps.maps()})


def _prepared_by_count(prompts: Sequence[Prompt]) -> dict[int, Mapping[str, Tensor]] | None:
    """What a model that reads no token ids is run on, by the count of its positions; None for token ids."""
    found = {p.input_ids.shape[1]: p.prepared for p in prompts if p.prepared is not None}
    return found or None


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


def verify(loaded: LoadedModel, prompts: Sequence[Prompt], progress: Progress) -> VerifyReport:
    """The certificate alone: blocks, factors of W', and how far each is from the model's own output."""
    session = Session(loaded, progress, cache=False, every_plain=True)
    errors: dict[tuple[int, int], float] = {}  # by block and prompt
    operators: dict[tuple[int, int], float] = {}
    crossed: dict[tuple[int, int], float] = {}
    reasons: dict[int, str] = {}
    uncrossed: dict[int, str] = {}
    tick = ticker(progress, session, prompts)

    def listener(number: int) -> Listener:
        decomposition = Decomposition()

        def listen(run: BlockRun) -> None:
            step = decomposition.advance(run)
            errors[run.index, number] = step.terms.error
            operator, reason = _operator(session, run, step)
            if operator is not None:
                operators[run.index, number] = operator.error
            elif reason is not None:
                reasons[run.index] = reason
            cross, reason = _or_reason(lambda: crossing(run, session.structure.block(run.index)))
            if cross is not None:
                crossed[run.index, number] = cross.error
            elif reason is not None:
                uncrossed[run.index] = reason
            tick(number)

        return listen

    session.sweep_all(prompts, listener)
    certificate = session.certificate(max(errors.values()))
    return VerifyReport(
        duat_version=__version__,
        environment=session.environment(),
        model=session.model_facts(),
        prompts=prompt_facts(prompts),
        certificate=certificate,
        blocks=[
            BlockCertificate(
                index=i,
                name=session.structure.block(i).parts.name,
                certificate_error=max(e for (block, _), e in errors.items() if block == i),
                operator_error=_largest(operators, i) if i not in reasons else None,
                operator_reason=reasons.get(i),
                cross_error=_largest(crossed, i) if i not in uncrossed else None,
                cross_reason=uncrossed.get(i),
            )
            for i in sorted({block for block, _ in errors})
        ],
        skipped=session.skipped(),
        warnings=session.warnings(),
        run=session.run_facts(),
    )


# -- one prompt ----------------------------------------------------------------------------------------------


def sweep_prompts(
    session: Session,
    prompts: Sequence[Prompt],
    options: InspectOptions,
    matrices: OperatorFile | None,
    progress: Progress,
    beside: Beside | None = None,
    maps: Maps | None = None,
    states: StateFiles | None = None,
) -> list[PromptSweep]:
    """Everything that the blocks of each prompt add."""
    found: dict[int, PromptSweep] = {}
    under_way: dict[int, _UnderWay] = {}
    tick = ticker(progress, session, prompts)

    def listener(number: int) -> Listener:
        sweep = found[number] = PromptSweep({}, [], [], {}, {})
        if states is not None:
            states.begin(number, prompts[number])
        held = under_way[number] = _UnderWay(
            Decomposition(one_by_one=options.terms, own=True, by_source=options.end_to_end),
            UniformNulls(options.threshold, together=session.loaded.paged is None),
        )

        def listen(run: BlockRun) -> None:
            step = held.decomposition.advance(run)
            held.output = run.output[0]
            sweep.errors.append(step.terms.error)
            if options.layers is None or run.index in options.layers:
                sweep.largest[run.index] = largest_activation(run)
                if states is not None:
                    states.block(number, run, step, held.decomposition)
                sweep.blocks[run.index] = _prompt_block(
                    session, run, step, number, options, matrices, maps, sweep.faults, held.uniform
                )
            tick(number)

        return listen

    def ended(number: int, output: Any) -> None:
        held = under_way.pop(number)
        if states is not None:
            states.end(number)
        if beside is not None:
            beside.ended(session, number, output)
        if options.terms:
            assert held.output is not None
            found[number].terms.extend(_uat_terms(held.decomposition, held.output))
        if options.end_to_end:
            assert held.decomposition.carried is not None
            found[number] = replace(found[number], end_to_end=end_to_end(held.decomposition.carried))
        _add_uniform(found[number], held.uniform, prompts[number].input_ids.shape[1])

    session.sweep_all(prompts, listener, ended, None if beside is None else beside.guest_of(session))
    if beside is not None:
        beside.swept(session)
    return [found[number] for number in range(len(prompts))]


@dataclass
class _UnderWay:
    """What is held of a prompt while it goes through the blocks."""

    decomposition: Decomposition
    uniform: UniformNulls
    output: Tensor | None = None  # of the last block, (N, M)


def _add_uniform(sweep: PromptSweep, uniform: UniformNulls, tokens: int) -> None:
    """The null of uniform attention, which is computed for all blocks together."""
    for index, numbers in uniform.numbers().items():
        block = sweep.blocks[index]
        stats = null_stats(numbers, tokens)
        sweep.blocks[index] = block.model_copy(update={"null": nulls(stats, block.null.reasons["reinitialised"])})


def ticker(progress: Progress, session: Session, prompts: Sequence[Prompt]) -> Callable[[int], None]:
    """Called behind every block of a prompt with the prompt's number."""
    done, total = itertools.count(1), len(prompts) * session.depth

    def tick(number: int) -> None:
        progress(next(done), total, f"prompt {number + 1} of {len(prompts)}")

    return tick


def _operator(session: Session, run: BlockRun, step: Step) -> tuple[AttentionOperator | None, str | None]:
    """W' of this block and input, or why there is none."""
    return _or_reason(lambda: session.operator(run, step))


def _or_reason(operator: Callable[[], AttentionOperator | None]) -> tuple[AttentionOperator | None, str | None]:
    try:
        return operator(), None
    except UnsupportedModelError as fault:
        return None, str(fault)


def _largest(errors: Mapping[tuple[int, int], float], index: int) -> float | None:
    """Over the prompts of one block."""
    return max((error for (block, _), error in errors.items() if block == index), default=None)


def _prompt_block(
    session: Session,
    run: BlockRun,
    step: Step,
    number: int,
    options: InspectOptions,
    matrices: OperatorFile | None,
    maps: Maps | None,
    faults: dict[int, str],
    uniform: UniformNulls,
) -> PromptBlock:
    tokens, width = run.input.shape[1:]
    operator, reason = _operator(session, run, step)
    terms = block_terms(step.terms)
    cross = cross_of(run, session.structure.block(run.index))
    heads = routing(run) if options.routing else None
    if operator is None:
        reason = reason or "unknown"
        if session.structure.block(run.index).factors is not None:
            faults[run.index] = reason
        if matrices is not None:
            matrices.missing(run.index, reason)
        return PromptBlock(
            prompt=number,
            operator=no_operator(tokens, width, run.input.element_size(), reason),
            density=no_density(tokens, width, options, reason),
            coupling=no_coupling(reason),
            coupling_weighted=no_coupling(reason),
            null=nulls(reason, reason),
            terms=terms,
            cross=cross,
            certificate_error=step.terms.error,
            routing=heads,
        )
    geometry = session.geometry(run.index)
    mapped = maps if maps is not None and maps.wants(number) else None
    numbers = measure(
        operator,
        geometry,
        threshold=options.threshold,
        spectrum=options.spectrum,
        matrix=matrices is not None or mapped is not None,
    )
    if matrices is not None and numbers.matrix is not None:
        matrices.block(number, run.index, operator, run.input[0], numbers.matrix)
    if mapped is not None and numbers.matrix is not None:
        mapped.add(number, run.index, numbers.matrix)
    uniform.add(run.index, operator, geometry, numbers)
    return PromptBlock(
        prompt=number,
        operator=operator_stats(numbers, tokens, width, run.input.element_size(), operator, options.spectrum),
        density=density(numbers, tokens, width, options),
        coupling=coupling(numbers.coupling, tokens),
        coupling_weighted=coupling(numbers.weighted, tokens),
        null=nulls("computed for all blocks together", NOT_ASKED),  # the first follows once all blocks are through
        terms=terms,
        cross=cross,
        certificate_error=step.terms.error,
        routing=heads,
    )


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
