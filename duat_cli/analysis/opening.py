"""The steps in front of every analysis: find the checkpoint, read the prompts, load the model, make token ids.

torch and transformers are imported only where the model is loaded, so that errors in names, headers and texts come
without that wait.
"""

from __future__ import annotations

import contextlib
import heapq
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from duat_cli.analysis.progress import expect
from duat_cli.errors import CheckpointError, DuatError, InputError
from duat_cli.loading.importing import uncollected
from duat_cli.loading.inputs.request import EVERY

if TYPE_CHECKING:
    from duat_cli.analysis.plan.task import Task
    from duat_cli.analysis.progress import Progress
    from duat_cli.loading.checkpoint.preflight import CheckpointFiles
    from duat_cli.loading.checkpoint.source import Source
    from duat_cli.loading.inputs.request import InputFiles
    from duat_cli.loading.model.load import LoadedModel
    from duat_cli.loading.prompt_set import PromptSet
    from duat_cli.loading.prompts import Prompt
    from duat_cli.loading.texts import PromptText
    from duat_cli.results.plan import Way

R = TypeVar("R")


@dataclass(frozen=True)
class Found:
    """A checkpoint that exists, with files that agree with each other."""

    place: Source
    files: CheckpointFiles


@dataclass(frozen=True)
class ModelRequest:
    """Request for a checkpoint, and how to load it."""

    model: str | None
    """A folder or a hub id; None is the bundled demo."""
    revision: str | None = None
    token: str | None = None
    cache_dir: str | None = None
    trust_remote_code: bool = False
    dtype: str = "float32"
    device: str = "auto"
    memory: int | None = None
    """Bytes that the process may take; None: as many as the system leaves."""
    task: Task | None = None
    """The command, where it is planned and may read weights block by block; its prompts are counted later."""
    device_map: str | None = None
    """auto, balanced, sequential or a file: where weights that are read block by block are kept; None: nowhere."""

    def find(self, progress: Progress) -> Found:
        """Finds the checkpoint and reads its headers; errors in these are raised before torch is imported."""
        if self.device not in ("auto", "cpu"):  # only torch can check it, which comes before a long download
            progress(0, 0, f"loading torch for --device {self.device}")
            with uncollected():
                from duat_cli.loading.model.load import parse_device

            parse_device(self.device)
        if self.device_map is not None:
            progress(0, 0, "loading torch for --device-map")
            with uncollected():
                from duat_cli.loading.model.device_map import DeviceMap

            DeviceMap.of(self.device_map)
        progress(0, 0, f"looking for {self.model or 'the demo model'}")
        from duat_cli.loading.checkpoint.preflight import inspect_folder
        from duat_cli.loading.checkpoint.source import resolve

        place = resolve(
            self.model,
            revision=self.revision,
            token=self.token,
            cache_dir=self.cache_dir,
            trust_remote_code=self.trust_remote_code,
        )
        return Found(place, inspect_folder(place.path))

    def way(self, found: Found, progress: Progress) -> Way | None:
        """How the planned command holds its weights; None if it is not planned. Raises CheckpointError if it cannot."""
        if self.task is None:
            return None
        from duat_cli.analysis.plan.run import on_device, plan, way_of

        memory, device, task = self.memory, None, self.task
        if self.task.runs:
            progress(0, 0, "loading torch and transformers")  # before memory is measured, as they take some
            with uncollected():
                from duat_cli.loading.model.load import parse_device
            device = parse_device(self.device)
            task, memory = on_device(device, task, memory)
        made = plan(found.files, task, self.dtype, memory, roomy=self.device_map is None)
        if self.device_map is not None:
            made = replace(made, ways=tuple(way for way in made.ways if way.weights == "streamed"))
        try:
            way = way_of(made)
        except CheckpointError:
            if self.task.runs:  # raises if a size in the config, which the weights contradict, is the cause
                from duat_cli.loading.model.load import fit_of

                fit_of(found.files, self.dtype, self.trust_remote_code)
            raise
        if device is not None and made.may_be_long(way):
            progress(0, 0, "measuring how fast this machine is")
            expect(progress, made.seconds(way, made.pace(str(device))))
        return way

    def counted(
        self, tokens: Sequence[int], held_out: Sequence[int] = (), calibration: Sequence[int] = (), *, prompts: int = 0
    ) -> ModelRequest:
        """The request for prompts of so many tokens. prompts: their number, where `tokens` has only the longest."""
        if self.task is None:
            return self
        counts = tuple(count + self.task.steps for count in tokens)
        counted = replace(self.task, tokens=counts, held_out=tuple(held_out), calibration=tuple(calibration))
        return replace(self, task=replace(counted, prompts=prompts))

    def load(self, found: Found, progress: Progress, way: Way | None = None) -> LoadedModel:
        """The model, ready to run. way: how to hold its weights, where that was planned."""
        progress(0, 0, f"loading {self.model or 'the demo model'}")
        with uncollected():
            from duat_cli.loading.model.load import load_files

        kept = None
        if way is not None and self.device_map is not None:
            from duat_cli.analysis.plan.room import placed

            kept = placed(self.device_map, self.device, found.files, self.dtype, way, self.memory)
        loaded = load_files(
            found.place,
            found.files,
            dtype=self.dtype,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            paged=way is not None and way.weights == "streamed",
            placed=kept,
        )
        if way is None:
            return loaded
        stays = 0 if loaded.paged is None else loaded.paged.kept
        return replace(
            loaded,
            waiting=way.waiting_bytes or None,
            memory=self.memory,
            planned_memory=way.peak_memory_bytes + stays,
            processes=way.processes,
        )


@dataclass(frozen=True)
class PromptRequest:
    """Request for texts to run, and how many tokens of them."""

    prompts: Sequence[str | PromptText] | None
    file: str | None
    max_tokens: int | None
    files: InputFiles | None = None
    """Inputs of a model that reads no text; None where the command knows no such models."""
    made_up: bool = False
    """Whether the prompts are the command's, not the user's."""
    chat: bool = False
    """Whether a text is what a user says in a conversation, which the checkpoint's chat template writes out."""
    template: Path | None = None
    """The folder whose chat template and processor stand in for those that the checkpoint lacks."""

    @property
    def own(self) -> bool:
        """Whether the prompts are the user's, not the bundled set."""
        return bool(self.prompts) or self.file is not None

    def home(self, path: Path) -> Path:
        """Folder of the processor that turns pictures and sounds into tensors. path: the checkpoint's folder."""
        from duat_cli.loading.inputs.files import has_processor

        other = self.template
        return path if other is None or has_processor(path) or not has_processor(other) else other

    def read(self, progress: Progress) -> list[PromptText]:
        """The texts, read before anything is loaded."""
        progress(0, 0, "reading the prompts")
        from duat_cli.loading.prompts import read_prompts

        return read_prompts(self.prompts or [], self.file, sys.stdin, chat=self.chat)

    def read_apart(self, holdout: str | None, progress: Progress) -> tuple[list[PromptText], list[PromptText], bool]:
        """The texts, those held out, and whether these are bundled. holdout: a file, a share, or None (bundled)."""
        from duat_cli.loading.prompts import holdout_prompts, read_prompts, set_apart, share_of

        read, share = self.read(progress), share_of(holdout)
        if share is not None:
            return *set_apart(read, share), not self.own
        if holdout is not None:
            return read, read_prompts([], holdout, sys.stdin, "--holdout", chat=self.chat), False
        return read, [] if self.own else holdout_prompts(chat=self.chat), not self.own

    def counter(self, found: Found, *, trust_remote_code: bool) -> Callable[[Sequence[PromptText]], list[int]]:
        """Function that counts the tokens of texts."""
        from duat_cli.loading.model.lengths import token_counter

        positions = found.files.config.get("max_position_embeddings")
        cut = self.max_tokens or (positions if type(positions) is int and positions > 0 and not self.own else None)
        return token_counter(found.place.path, cut, trust_remote_code=trust_remote_code, template=self.template)


def open_session(model: ModelRequest, texts: PromptRequest, progress: Progress) -> tuple[LoadedModel, list[Prompt]]:
    """The model, and the prompts as its token ids. Errors in texts, names and headers come before the load."""
    reading = open_texts(model, texts, texts.read(progress), progress)
    return reading.loaded, reading.inputs


def open_texts(
    model: ModelRequest, texts: PromptRequest, read: list[PromptText], progress: Progress, found: Found | None = None
) -> Reading:
    """`open_session` for texts that have been read; the result has the tokenizer. found: the checkpoint, if found."""
    reading = open_reading(model, found or model.find(progress), texts, read, progress)
    if reading.fault is not None:
        raise reading.fault
    return reading


@dataclass(frozen=True)
class Reading:
    """A loaded model and its inputs."""

    loaded: LoadedModel
    tokenizer: Any
    """The tokenizer; None for a model that reads no text."""
    inputs: list[Prompt]
    fault: InputError | None = None
    """Why the texts cannot be turned into tokens."""

    def own_tokenizer(self, *, trust_remote_code: bool) -> Any:
        """The tokenizer, looked for in the checkpoint where none was needed for the inputs; None where it has none."""
        if self.tokenizer is not None:
            return self.tokenizer
        from duat_cli.loading.model.tokenizer import tokenizer_if_any

        return tokenizer_if_any(self.loaded.files.path, trust_remote_code=trust_remote_code)


def open_reading(
    model: ModelRequest, found: Found, texts: PromptRequest, read: list[PromptText], progress: Progress
) -> Reading:
    """`open_texts` for a found checkpoint. Where texts cannot be turned into tokens, it gives no inputs but a fault."""
    made, tokenizer = None, None
    if (files := texts.files) is not None:
        asked = files.without_blocks
        texts = replace(texts, files=asked)
        progress(0, 0, "loading torch and transformers")
        with uncollected():
            from duat_cli.analysis.prepared import open_prepared
            from duat_cli.analysis.stacks import part_of
        made = open_prepared(model, found, texts, asked, read, progress)
    if made is None:
        loaded, tokenizer = load_found(model, found, texts, read, progress)
        loaded = loaded if texts.files is None else part_of(loaded, texts.files.part)
        try:
            made = tokens_of(loaded, tokenizer, texts, read)
        except InputError as fault:
            return Reading(loaded, tokenizer, [], fault)
    loaded, inputs = made
    if files is not None and files.names_blocks:
        from duat_cli.analysis.stacks import with_chosen_blocks

        loaded, inputs = with_chosen_blocks(loaded, inputs, files, trust_remote_code=model.trust_remote_code)
    return Reading(loaded, tokenizer, inputs)


def of_stacks(
    model: ModelRequest, texts: PromptRequest, progress: Progress, report_of: Callable[[LoadedModel, list[Prompt]], R]
) -> list[R]:
    """Reports by `report_of` on what `open_session` returns: one, or with --stack all one for each stack in turn."""
    if texts.files is None or texts.files.stack != EVERY:
        return [report_of(*open_session(model, texts, progress))]
    progress(0, 0, "loading torch and transformers")
    with uncollected():
        from duat_cli.analysis.prepared import asked_of_parts
        from duat_cli.analysis.stacks import all_chains, both_stacks, parts_of
        from duat_cli.loading.model.load import skeleton
        from duat_cli.models.discovery.modality import is_pair
    shell = skeleton(model.find(progress).files, model.trust_remote_code)
    if not is_pair(shell) and len(parts_of(shell)) > 1:
        return [report_of(*open_session(model, one, progress)) for one in asked_of_parts(shell, texts, texts.files)]
    loaded, inputs = open_session(model, replace(texts, files=replace(texts.files, stack=None)), progress)
    if not is_pair(shell):
        return [report_of(chain, inputs) for chain in all_chains(loaded)]
    return both_stacks(loaded, inputs, texts.files, report_of, trust_remote_code=model.trust_remote_code)


def open_set(
    model: ModelRequest, texts: PromptRequest, progress: Progress, gpu: int, found: Found | None = None
) -> tuple[LoadedModel, PromptSet]:
    """`open_session` for any number of prompts: every text is read once before anything is loaded, and is turned into
    tokens when asked for. gpu: number of the GPU that 'cuda' means; found: the checkpoint, if found."""
    from duat_cli.analysis.plan.waves import SIDE_BY_SIDE
    from duat_cli.loading.model.gpu import use_gpu
    from duat_cli.loading.prompt_set import PromptSet, keys_of
    from duat_cli.loading.prompts import encode, limits, open_prompts

    progress(0, 0, "reading the prompts")
    read = open_prompts(texts.prompts or [], texts.file, sys.stdin, chat=texts.chat)
    keys = keys_of(read)
    found = found or model.find(progress)
    use_gpu(gpu)
    longest = heapq.nlargest(SIDE_BY_SIDE, read, key=lambda text: len(text.text))
    loaded, tokenizer = load_found(model, found, texts, longest, progress, prompts=len(keys))
    room, cut = limits(loaded.model), texts.max_tokens
    if not texts.own:  # a bundled text that does not suit the tokenizer is left out
        prompts, notes = encoded(tokenizer, loaded, list(read), cut, bundled=True)
        lines = {prompt.line for prompt in prompts}
        read = [replace(text, where=f"bundled prompt {text.line}") for text in read if text.line in lines]
        loaded, cut = noted(loaded, notes), cut or room.max_positions
        keys = keys_of(read)

    def made(some: Sequence[PromptText]) -> list[Prompt]:
        return encode(tokenizer, some, cut, room.max_positions, room.vocab_size, room.why)

    return loaded, PromptSet(
        read, keys, made, "" if texts.template is None else str(getattr(tokenizer, "chat_template", None) or "")
    )


def load_found(
    model: ModelRequest,
    found: Found,
    texts: PromptRequest,
    read: list[PromptText],
    progress: Progress,
    *more: list[PromptText],
    prompts: int = 0,
) -> tuple[LoadedModel, Any]:
    """The model, loaded in the way planned for the texts, and its tokenizer; None where it has none and all prompts are
    token ids. more: texts that are held out, and texts that a repair is fitted to; prompts: how many there are, where
    `read` has the longest alone."""
    way = model.counted(*_counts(model, found, texts, read, *more), prompts=prompts).way(found, progress)
    progress(0, 0, "loading torch and transformers")
    with uncollected():
        from duat_cli.loading.model.tokenizer import templated_tokenizer
        from duat_cli.models.discovery.modality import require_token_ids

    loaded = model.load(found, progress, way)
    require_token_ids(loaded.model)  # before the tokenizer, as a model of images has none
    needed, trusted = any(text.ids is None for text in read), model.trust_remote_code
    return loaded, templated_tokenizer(loaded.files.path, texts.template, needed=needed, trust_remote_code=trusted)


def tokens_of(
    loaded: LoadedModel, tokenizer: Any, texts: PromptRequest, read: list[PromptText]
) -> tuple[LoadedModel, list[Prompt]]:
    """The model with notes on the texts, and the texts as token ids."""
    prompts, notes = encoded(tokenizer, loaded, read, texts.max_tokens, bundled=not texts.own)
    return noted(loaded, notes), prompts


def _counts(model: ModelRequest, found: Found, texts: PromptRequest, *sets: list[PromptText]) -> list[list[int]]:
    """Numbers of tokens of the texts of each set; an empty list for a set with a text that cannot be counted."""
    counts: list[list[int]] = [[] for _ in sets]
    if model.task is not None:
        counter = texts.counter(found, trust_remote_code=model.trust_remote_code)
        for number, some in enumerate(sets):
            with contextlib.suppress(DuatError):  # reported when the tokenizer is loaded, if the model reads tokens
                counts[number] = counter(some)
    return counts


def noted(loaded: LoadedModel, notes: list[str]) -> LoadedModel:
    return replace(loaded, warnings=(*loaded.warnings, *notes)) if notes else loaded


def encoded(
    tokenizer: Any, loaded: LoadedModel, read: list[PromptText], max_tokens: int | None, *, bundled: bool
) -> tuple[list[Prompt], list[str]]:
    """Token ids, and notes. A bundled text that is too long or foreign for this tokenizer is left out with a note."""
    from duat_cli.loading.prompts import encode, limits

    room = limits(loaded.model)
    if not bundled:
        return encode(tokenizer, read, max_tokens, room.max_positions, room.vocab_size, room.why) if read else [], []
    kept: list[Prompt] = []
    notes: list[str] = []
    for text in read:
        try:
            kept += encode(tokenizer, [text], max_tokens or room.max_positions, room.max_positions, room.vocab_size)
        except InputError as fault:
            notes.append(f"bundled prompt left out: {fault}")
    if read and not kept:
        raise InputError(f"no bundled prompt suits this tokenizer, give --prompt; {notes[0]}")
    return kept, notes
