"""The re-initialised null of a block's W': the statistics of the same architecture with newly drawn weights.

It takes one pass for each distinct count of tokens in the report; results are kept on disk. Where the trained model's
weights are read block by block, the new ones are drawn block by block, with the same values as otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pydantic
import torch
import transformers
from torch import Tensor

from duat_cli.analysis.decomposition import Decomposition, Step
from duat_cli.analysis.geometry import Geometry, geometry, known_or
from duat_cli.analysis.inspect.assemble import null_stats, nulls
from duat_cli.analysis.inspect.operator import measure
from duat_cli.analysis.inspect.total import PromptSweep
from duat_cli.analysis.plan.memory import SPARE
from duat_cli.analysis.session import Listener, Session
from duat_cli.cache.tensors import DocumentCache, TensorCache, identity
from duat_cli.compat.libc import give_back_free_memory, resident_memory
from duat_cli.errors import DuatError, UnsupportedModelError, needed, or_reason
from duat_cli.loading.model.load import LoadedModel, PagedWeights
from duat_cli.loading.model.memory import available_memory
from duat_cli.loading.model.processes import Processes
from duat_cli.loading.model.weights_check import Scan
from duat_cli.loading.paged.drawn import untrained_model
from duat_cli.loading.prompts import Prompt
from duat_cli.loading.quiet import foreign_errors, hushed
from duat_cli.models.arrays import tolerance_for
from duat_cli.models.discovery.modality import noise_like, placed
from duat_cli.models.discovery.proof import ProvedBlock
from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.edits.reinitialised import SEED, bytes_of, random_ids, reinitialised, seeded
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.results.operator import NullStats

FORMAT = 1  # raise it when the computation of the numbers changes; a document with other fields is not read anyway
_GIB = 1 << 30
Like = Mapping[int, Mapping[str, Tensor]]  # prepared inputs by their count of positions; empty if it reads token ids
_TOKENS: Like = {}
BlockNull = NullStats | str
"""One block of the re-initialised model: its statistics, or the reason why it has none."""
Untrained = Callable[[int], list[BlockNull] | str]
"""Count of tokens -> the re-initialised model's statistics by block, or the reason why there are none."""
_DOCUMENT = pydantic.TypeAdapter(list[BlockNull])


def untrained(
    loaded: LoadedModel,
    blocks: int,
    counts: Sequence[int],
    threshold: float,
    *,
    cache: bool,
    processes: Processes,
    like: Like = _TOKENS,
) -> Untrained:
    """The null for all counts of tokens in the report.

    loaded: the trained model; blocks: how many it has; counts: tokens of each prompt; threshold: of the density;
    processes: share the counts that are not on the disk; like: prepared inputs by their count of positions, where the
    model reads no token ids.
    """
    chosen = sorted(set(counts))
    source = NullSource(loaded, blocks, threshold, cache=cache, expected=chosen, like=like)
    found = {count: kept for count in chosen if (kept := source.kept(count)) is not None}
    missing = [count for count in chosen if count not in found]
    if not missing:
        return found.__getitem__

    def numbers(count: int) -> list[BlockNull]:
        processes(missing.index(count), len(missing), f"null: the re-initialised architecture on {count} tokens")
        return source.numbers(count)

    try:
        found.update(zip(missing, processes.first_here(numbers, missing), strict=True))
    except DuatError as fault:
        why = not_run(fault)
        return lambda _tokens: why
    finally:
        source.close()
    return found.__getitem__


def not_run(fault: DuatError) -> str:
    """The reason given for every null once one of them has failed."""
    return f"the architecture was not re-initialised: {fault}"


def with_untrained(sweep: PromptSweep, tokens: int, known: Untrained | None) -> PromptSweep:
    """The sweep with the re-initialised null, if it is asked for, added to every block that has a uniform null."""
    if known is None:
        return sweep
    rows, found = dict(sweep.blocks), known(tokens)
    for index, row in sweep.blocks.items():
        if row.null.uniform is not None:
            null = nulls(row.null.uniform, found if isinstance(found, str) else found[index])
            rows[index] = row.model_copy(update={"null": null})
    return replace(sweep, blocks=rows)


class NullSource:
    """The statistics by count of tokens, one count at a time: read from the disk or, if missing there, computed with
    the re-initialised model, which is built when it is first needed."""

    def __init__(
        self,
        loaded: LoadedModel,
        blocks: int,
        threshold: float,
        *,
        cache: bool,
        expected: Sequence[int] = (),
        like: Like = _TOKENS,
    ) -> None:
        """expected: counts of tokens that will be asked for; where weights are read block by block, they go through a
        block together. like: as for `untrained`; one input per count will do, as a random model shows no difference.
        """
        model = loaded.model
        named = type(model).__module__.startswith("transformers.")  # code that comes with a checkpoint has no version
        self._store = DocumentCache("null", enabled=cache and named)
        device = model.device if loaded.paged is None else torch.device(loaded.device)
        self._same = {**identity(model), "device": device.type, "format": FORMAT, "threshold": threshold}
        if loaded.chain is not None:
            self._same["stack"] = loaded.chain
        self._loaded, self._blocks, self._threshold = loaded, blocks, threshold
        self._expected, self._like = expected, like
        self._runs: _Runs | _RunsInParts | None = None

    def numbers(self, tokens: int) -> list[BlockNull]:
        """The statistics by block. Raises DuatError where the architecture cannot be built again or run."""
        found = self.kept(tokens)
        if found is None:
            self._runs = self._runs or self._built(tokens)
            found = self._runs.numbers(tokens)
            self._store.put(self._key(tokens), _DOCUMENT.dump_python(found, mode="json"))
        return found

    def close(self) -> None:
        """Frees the re-initialised model; it is built again if needed."""
        self._runs = None
        give_back_free_memory()  # its modules and what discovery found of them refer to each other

    def kept(self, tokens: int) -> list[BlockNull] | None:
        """The statistics that the disk has for this count; None if it has none."""
        return _read(self._store.get(self._key(tokens)), self._blocks)

    def _key(self, tokens: int) -> dict[str, object]:
        return {**self._same, "tokens": tokens}

    def _built(self, tokens: int) -> _Runs | _RunsInParts:
        if self._loaded.paged is None:
            return _Runs(self._loaded, self._blocks, self._threshold, self._like)
        missing = [count for count in sorted({*self._expected, tokens}) if self.kept(count) is None]
        return _RunsInParts(self._loaded, self._blocks, self._threshold, missing, self._like)


def _read(document: object, blocks: int) -> list[BlockNull] | None:
    """The blocks of a stored document; None for anything that is not such a list."""
    try:
        read = _DOCUMENT.validate_python(document)
    except pydantic.ValidationError:
        return None
    return read if len(read) == blocks else None


class _Runs:
    """The re-initialised model, discovered and run like any other."""

    def __init__(self, trained: LoadedModel, blocks: int, threshold: float, like: Like) -> None:
        model = trained.model
        _require_memory(model, trained.memory)
        with hushed(), foreign_errors(f"{type(model).__name__} cannot be built from its config", UnsupportedModelError):
            self._model = reinitialised(model)
        first = next(iter(like.values()), None)
        self._structure: ModelStructure = discover(self._model, first, chain=trained.chain)
        if len(self._structure.calls) != blocks:
            raise UnsupportedModelError(f"it has {len(self._structure.calls)} blocks, the trained model {blocks}")
        self._threshold, self._like = threshold, like
        self._geometries: dict[str, Geometry] = {}

    def numbers(self, tokens: int) -> list[BlockNull]:
        """The statistics by block, on so many random tokens."""
        prompt = _random_prompt(self._model.config, tokens, self._like)
        given = placed(prompt.given, self._model.device, self._model.dtype)
        decomposition, found = Decomposition(), []

        def listen(run: BlockRun) -> None:
            if not bool(torch.isfinite(run.output).all()):
                raise UnsupportedModelError(f"its block {run.index} puts out values that are not finite")
            block, step = self._structure.block(run.index), decomposition.advance(run)
            found.append(_block_null(run, step, block, lambda: self._geometry(block), self._threshold))

        where = f"{type(self._model).__name__} cannot be run as its config builds it"
        with foreign_errors(where, UnsupportedModelError), self._structure.rig().active() as rig:
            rig.run(lambda: run_stack(self._structure.stack, given), listen)
        return found

    def _geometry(self, block: ProvedBlock) -> Geometry:
        name, factors = block.parts.name, needed(block.factors)
        return known_or(lambda: geometry(factors, name, TensorCache("", enabled=False)), name, self._geometries)


class _RunsInParts:
    """The re-initialised model with weights drawn block by block, in one sweep for all counts that are expected."""

    def __init__(self, trained: LoadedModel, blocks: int, threshold: float, counts: Sequence[int], like: Like) -> None:
        needed(trained.paged).pager.release()
        cls, config = type(trained.model), copy.deepcopy(trained.model.config)
        built = f"{cls.__name__} cannot be built from its config"
        with hushed(), foreign_errors(built, UnsupportedModelError), seeded():
            model, pager = untrained_model(cls, config, trained.model.dtype, trained.device)
        first = next(iter(like.values()), None)
        pages = PagedWeights(pager, Scan(), {}, 0)
        loaded = replace(trained, model=model, paged=pages, nonfinite_weights={}, like=first)
        self._session, self._threshold, self._like = Session(loaded, lambda *_: None, cache=False), threshold, like
        self._found: dict[int, list[BlockNull]] = {}
        self._run(counts)
        if (ran := len(self._session.structure.calls)) != blocks:
            raise UnsupportedModelError(f"it has {ran} blocks, the trained model {blocks}")

    def numbers(self, tokens: int) -> list[BlockNull]:
        """The statistics by block, on so many random tokens."""
        if tokens not in self._found:
            self._run([tokens])
        return self._found[tokens]

    def _run(self, counts: Sequence[int]) -> None:
        model = self._session.loaded.model
        prompts = [_random_prompt(model.config, count, self._like) for count in counts]
        with foreign_errors(f"{type(model).__name__} cannot be run as its config builds it", UnsupportedModelError):
            self._session.sweep_all(prompts, lambda number: self._listener(counts[number]))

    def _listener(self, tokens: int) -> Listener:
        found = self._found[tokens] = []
        decomposition, session = Decomposition(), self._session

        def listen(run: BlockRun) -> None:
            block, step = session.structure.block(run.index), decomposition.advance(run)
            found.append(_block_null(run, step, block, lambda: session.geometry(run.index), self._threshold))

        return listen


def _random_prompt(config: Any, tokens: int, like: Like) -> Prompt:
    """Random input with so many tokens or positions."""
    if not like:
        return Prompt("", "", random_ids(config, tokens), 0)
    return Prompt("", "", torch.arange(tokens)[None], 0, prepared=noise_like(like[tokens], SEED))


def _block_null(
    run: BlockRun, step: Step, block: ProvedBlock, known: Callable[[], Geometry], threshold: float
) -> BlockNull:
    if not step.terms.error <= tolerance_for(run.output.dtype):
        raise UnsupportedModelError(f"its form is not exact (relative error {step.terms.error:.1e})")
    operator = or_reason(lambda: step.operator(run, block))
    if isinstance(operator, str):
        return f"re-initialised: {operator}"
    numbers = measure(operator, known(), threshold=threshold, spectrum=False, matrix=False)
    return null_stats(numbers, run.input.shape[1])


def _require_memory(model: transformers.PreTrainedModel, memory: int | None) -> None:
    """Raises UnsupportedModelError where a second model of this size does not fit beside the first."""
    needed, left = SPARE * bytes_of(model), available_memory()  # it is built in main memory, then moved
    gpu = model.device.type == "cuda"
    if memory is not None:
        taken = torch.cuda.memory_allocated(model.device) if gpu else resident_memory()
        left = min(left, memory - taken)
    if gpu:
        left = min(left, torch.cuda.mem_get_info(model.device)[0])
    if needed > left:
        raise UnsupportedModelError(
            f"a second model needs {needed / _GIB:.2f} GiB of memory, {left / _GIB:.2f} GiB are left"
        )
