"""`duat lora-diff`: which checkpoints and adapters are compared, and the report on them.

torch is imported only once the files are known to be there and to agree, so that errors in them are reported at once.
transformers is imported only where prompts run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from duat_cli.analysis.opening import Found, ModelRequest, PromptRequest, open_set, open_texts
from duat_cli.analysis.plan.task import Task
from duat_cli.errors import CheckpointError, InputError
from duat_cli.loading.adapter.folder import AdapterFiles, is_adapter, open_adapter
from duat_cli.loading.adapter.keys import read_keys
from duat_cli.loading.importing import uncollected
from duat_cli.text import clean, expanded

if TYPE_CHECKING:
    from duat_cli.analysis.clock import RunFacts
    from duat_cli.analysis.lora.prompts import Decode
    from duat_cli.analysis.lora.report import Pair
    from duat_cli.analysis.progress import Progress
    from duat_cli.loading.adapter.base_weights import BaseWeights
    from duat_cli.loading.checkpoint.source import Source
    from duat_cli.loading.model.load import LoadedModel
    from duat_cli.loading.prompt_set import PromptSet
    from duat_cli.loading.prompts import Prompt
    from duat_cli.results.lora import LoraReport


@dataclass(frozen=True)
class Asked:
    """The base model and the prompts that it runs, and the report's facts on the run."""

    loaded: LoadedModel
    prompts: Sequence[Prompt] | PromptSet
    decode: Decode
    run: RunFacts


@dataclass(frozen=True)
class LoraRequest:
    """Request to compare a base with an adapter, two adapters, or a tuned checkpoint."""

    base: ModelRequest
    tuned: str | None
    """Folder or hub id of an adapter or of a checkpoint; None is the bundled adapter."""
    other: str | None
    """Folder or hub id of a second adapter."""
    texts: PromptRequest | None
    """Prompts that both models run; None: the weights alone are compared."""
    lint: bool
    """Whether to report only the adapter's findings."""
    no_base: bool
    """Whether to leave the tensors of the base unread."""
    large: bool
    """Whether to compute also the directions that take long."""
    cache: bool
    processes: int = 1
    """How many processes may share the prompts."""
    into: Callable[[Pair, Asked], LoraReport | None] | None = None
    """Stores the results of prompts that processes share, and returns the report on all of them in the first process.
    None: this process runs all prompts, and nothing is stored."""
    gpu: int = 0
    """Number of the GPU that 'cuda' means, where there are several."""

    def __post_init__(self) -> None:
        if self.base.model is not None and self.tuned is None:
            raise InputError("TUNED missing: give an adapter or a tuned checkpoint behind BASE")
        if self.texts is None:
            return
        if self.lint or self.no_base:
            option, does = ("--lint", "runs no model") if self.lint else ("--no-base", "reads no weights of the base")
            raise InputError(f"{option}: {does}, and prompts run both: leave out {option}, or the prompts")
        if self.other is not None:
            raise InputError(
                f"OTHER '{self.other}': prompts run one adapter against its base: give '{self.tuned}' and "
                f"'{self.other}' one after the other, or leave out the prompts"
            )


def texts_to_run(texts: PromptRequest, *, default_prompts: bool) -> PromptRequest | None:
    """Inputs that both models run: these texts, pictures or sounds, the bundled ones if they are asked for, or None."""
    files = texts.files
    own = texts.own or (files is not None and files.option is not None)
    if default_prompts and own:
        raise InputError("--default-prompts: give either it or prompts of your own")
    if own or default_prompts:
        return texts
    stack = files is not None and files.stack is not None
    for option, given in (("--max-tokens", texts.max_tokens is not None), ("--chat", texts.chat), ("--stack", stack)):
        if given:
            raise InputError(
                f"{option}: there are no prompts; give --prompt, --prompts, --image, --audio, --inputs or "
                "--default-prompts"
            )
    return None


def lora_diff(request: LoraRequest, progress: Progress, run: RunFacts) -> LoraReport | None:
    """The report on an adapter, on two, or on a tuned checkpoint. None in all but the first of several processes.
    Raises InputError where a checkpoint is given in place of an adapter.

    run: makes the report's facts on the run from the memory that is planned for it.
    """
    try:
        found = request.base.find(progress)
    except CheckpointError as fault:
        if request.base.model is not None and is_adapter(expanded(request.base.model)):
            raise CheckpointError(f"{fault} (the order is BASE ADAPTER)") from fault
        raise
    tuned = place_of(request.tuned, request.base, progress)
    if request.texts is not None:  # a base often lacks the chat template that the tuned model has
        request = replace(request, texts=replace(request.texts, template=tuned.path))
    if _as_adapter(tuned):
        return _adapters(request, found, tuned, progress, run)
    if request.other is not None:
        second = place_of(request.other, request.base, progress)
        way = "" if _as_adapter(second) else f"; for two checkpoints: duat lora-diff {request.tuned} {request.other}"
        raise InputError(
            f"OTHER '{request.other}': two adapters can be compared, but '{request.tuned}' is a checkpoint{way}"
        )
    if request.lint or request.no_base:
        option = "--lint" if request.lint else "--no-base"
        raise InputError(f"{option}: is about adapters, but '{request.tuned}' is a checkpoint")
    return _checkpoint(request, found, tuned, progress, run)


def _adapters(
    request: LoraRequest, found: Found, tuned: Source, progress: Progress, run: RunFacts
) -> LoraReport | None:
    places = [tuned, *([place_of(request.other, request.base, progress)] if request.other else [])]
    if not _as_adapter(places[-1]):
        raise InputError(
            f"OTHER '{request.other}': is a checkpoint, and an adapter is compared with an adapter; with the base: "
            f"duat lora-diff {request.base.model or 'BASE'} {request.other}"
        )
    adapters = [open_adapter(place.path, place.name) for place in places]
    progress(0, 0, "loading torch")
    with uncollected():
        from duat_cli.analysis.lora.weights.adapter_diff import adapter_report
        from duat_cli.analysis.lora.weights.weight_change import Directions

    directions = Directions(request.large, request.cache)
    asked, facts = _asked(request, found, adapter_task(request.texts is not None, adapters[0], found), progress, run)
    report = adapter_report(
        _weights(found), adapters, directions, progress, facts, read_base=not request.no_base, lint_only=request.lint
    )
    if asked is None:
        return report
    from duat_cli.analysis.lora.report import adapter_pair

    return _on_prompts(request, adapter_pair(report, _weights(found), adapters[0], asked.loaded, progress), asked)


def _checkpoint(
    request: LoraRequest, found: Found, place: Source, progress: Progress, run: RunFacts
) -> LoraReport | None:
    from duat_cli.loading.checkpoint.preflight import inspect_folder

    tuned = Found(place, inspect_folder(place.path))
    progress(0, 0, "loading torch")
    with uncollected():
        from duat_cli.analysis.lora.weights.checkpoint_diff import checkpoint_report
        from duat_cli.analysis.lora.weights.weight_change import Directions

    task = Task("lora-diff", runs=request.texts is not None, tuned=tuned.files)
    asked, facts = _asked(request, found, task, progress, run)
    directions = Directions(request.large, request.cache)
    report = checkpoint_report(_weights(found), _weights(tuned), directions, progress, facts)
    if asked is None:
        return report
    progress(0, 0, f"loading {place.name}")
    from duat_cli.analysis.lora.report import checkpoint_pair
    from duat_cli.loading.model.load import load_files

    paged = asked.loaded.paged is not None
    other = load_files(tuned.place, tuned.files, dtype=request.base.dtype, device=request.base.device, paged=paged)
    if request.texts is not None and (files := request.texts.files) is not None:
        from duat_cli.analysis.lora.reading import require_alike
        from duat_cli.analysis.stacks import of_decoder, part_of

        if asked.loaded.like is not None:
            assert isinstance(asked.prompts, Sequence)
            require_alike(found.files, tuned.files, files.without_blocks.part, asked.prompts)
        other = replace(part_of(other, files.without_blocks.part), like=asked.loaded.like, stack=asked.loaded.stack)
        if asked.loaded.pair is not None:
            other = of_decoder(other, other.model)
    return _on_prompts(request, checkpoint_pair(report, asked.loaded, other, progress), asked)


def _on_prompts(request: LoraRequest, opened: AbstractContextManager[Pair], asked: Asked) -> LoraReport | None:
    with opened as pair:
        if request.into is not None:
            return request.into(pair, asked)
        assert isinstance(asked.prompts, Sequence)
        return pair.report(asked.prompts, asked.decode, asked.run)


def task_of(found: Found, place: Source, *, runs: bool) -> Task:
    """The task to plan. place: where the adapter or tuned checkpoint is; runs: whether there are prompts."""
    if _as_adapter(place):
        return adapter_task(runs, open_adapter(place.path, place.name), found)
    from duat_cli.loading.checkpoint.preflight import inspect_folder

    return Task("lora-diff", runs=runs, tuned=inspect_folder(place.path))


def adapter_task(runs: bool, adapter: AdapterFiles, found: Found) -> Task:
    """The task to plan for an adapter on its base: the parameters that it changes are held beside the base's."""
    keys = read_keys(adapter)
    changed = {f"{target.module}.weight" for target in keys.targets} | set(keys.saved)
    tensors = found.files.tensors.items()
    touched = (tensor for name, tensor in tensors if changed & {name, name.partition(".")[2], f"model.{name}"})
    return Task("lora-diff", runs=runs, changed=tuple(touched))


def _asked(
    request: LoraRequest, found: Found, task: Task, progress: Progress, run: RunFacts
) -> tuple[Asked | None, RunFacts]:
    """The base model and the prompts as its token ids, where there are prompts, and the report's facts on the run.
    Errors in these come before any tensor is compared. The run is planned wherever tensors of the base are read."""
    base = replace(request.base, task=replace(task, directions=request.large, processes=request.processes))
    if request.texts is None:
        way = None if request.lint or request.no_base else base.way(found, progress)
        return None, functools.partial(run, None if way is None else way.peak_memory_bytes)
    prompts: Sequence[Prompt] | PromptSet
    if request.into is not None:
        loaded, prompts = open_set(base, request.texts, progress, request.gpu, found)
    else:
        opened = open_texts(base, request.texts, request.texts.read(progress), progress, found)
        from duat_cli.analysis.lora.reading import with_note

        loaded, prompts = with_note(opened.loaded, request.texts), opened.inputs
    from duat_cli.loading.model.tokenizer import token_texts

    said, facts = token_texts(loaded, False), functools.partial(run, loaded.planned_memory, device=loaded.device)
    return Asked(loaded, prompts, lambda i: clean(said(i)), facts), facts


def _weights(found: Found) -> BaseWeights:
    from duat_cli.loading.adapter.base_weights import BaseWeights

    return BaseWeights(found.place, found.files)


def place_of(name: str | None, base: ModelRequest, progress: Progress) -> Source:
    """Where an adapter or a tuned checkpoint is. A hub id is fetched with the token of the base, and into its cache."""
    from duat_cli.loading.adapter.source import find_tuned

    progress(0, 0, f"looking for {name or 'the demo adapter'}")
    return find_tuned(name, token=base.token, cache_dir=base.cache_dir)


def _as_adapter(place: Source) -> bool:
    return is_adapter(place.path) or not (place.path / "config.json").exists()
