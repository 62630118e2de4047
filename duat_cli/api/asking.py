"""The model and the prompts of a call: its arguments, and both opened, ready to run."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar, get_args

from duat_cli.analysis.opening import ModelRequest, PromptRequest, open_texts, tokens_of
from duat_cli.analysis.prune.opening import inputs_apart, of_stack, open_with_calibration
from duat_cli.api.ground import load_libraries, undisturbed
from duat_cli.api.settings import one_of, whole, whole_numbers
from duat_cli.checks.nearest import suggestion
from duat_cli.errors import CheckpointError, InputError
from duat_cli.loading.inputs.request import EVERY, InputFiles, StackName
from duat_cli.loading.texts import PromptText, conversation, numbered, token_ids
from duat_cli.text import expanded

if TYPE_CHECKING:
    from duat_cli.analysis.plan.task import Task
    from duat_cli.analysis.progress import Progress
    from duat_cli.loading.model.load import LoadedModel
    from duat_cli.loading.prompts import Prompt

Model = Any  # a folder or hub id (str or path), None for the bundled demo, or a transformers or PEFT model in memory
Text = str | Iterable[int] | Iterable[Mapping[str, Any]]  # a text, token ids or messages
Texts = str | Iterable[Text]
File = str | os.PathLike[str]
Pictures = Any  # a file or a PIL picture, or a list of them
Tensors = File | Mapping[str, Any] | Sequence[File | Mapping[str, Any]]
Given = ParamSpec("Given")
Made = TypeVar("Made")


class Loading(TypedDict, total=False):
    """How a checkpoint is loaded; a model in memory takes none of it."""

    dtype: str
    """float32 (default), float64, bfloat16, float16, or auto: as stored."""
    device: str
    """cpu, cuda, cuda:1, or auto (default): a GPU if there is one."""
    device_map: str | None
    """auto, balanced, sequential or a JSON file: where weights that are read block by block are kept."""
    memory: int | None
    """Bytes that the process may take; weights that do not fit are read block by block."""
    revision: str | None
    """Branch, tag or commit of a hub checkpoint."""
    token: str | None
    """Hub access token."""
    cache_dir: str | None
    """Where hub files are kept."""
    trust_remote_code: bool
    """Run Python code that comes with the checkpoint."""


def options_known(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """The function, made to check first that it knows every option. TypeError names the nearest known one."""
    own = inspect.signature(function).parameters
    known = [name for name, one in own.items() if one.kind is not one.VAR_KEYWORD] + list(Loading.__annotations__)

    @functools.wraps(function)
    def checked(*args: Given.args, **given: Given.kwargs) -> Made:
        for name in given:
            if name not in known:
                what = f"{function.__name__}() got an unexpected keyword argument '{name}'"
                raise TypeError(what + suggestion(name, known))
        return function(*args, **given)

    return checked


def computing(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """`options_known` for a function that computes: imports torch first, and restores the state of the process."""

    @functools.wraps(function)
    def computed(*args: Given.args, **given: Given.kwargs) -> Made:
        load_libraries()
        with undisturbed():
            return function(*args, **given)

    return options_known(computed)


@dataclass(frozen=True)
class Opened:
    """A model and its prompts, ready to run."""

    loaded: LoadedModel
    prompts: list[Prompt]
    tokenizer_of: Callable[[], Any]

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer given with the model, or the checkpoint's; None where prompts are token ids and there is none.
        Otherwise raises InputError."""
        return self.tokenizer_of()

    def text(self, token: int) -> str:
        """Text of a token; it may be part of a character."""
        return self.texts([token])

    def texts(self, tokens: list[int]) -> str:
        """Text of consecutive tokens; positions of a picture or a sound are given as numbers."""
        from duat_cli.loading.prompts import said

        return said(self.tokenizer, tokens) if self.loaded.reads_tokens else numbered(tokens)


@dataclass(frozen=True)
class Asked:
    """The arguments that every call takes."""

    model: Model
    tokenizer: Any = None
    prompts: Texts | None = None
    file: str | os.PathLike[str] | None = None
    max_tokens: int | None = None
    loading: Loading = field(default_factory=Loading)
    files: InputFiles | None = None
    """Inputs beside texts, for a function that knows models of images, of sound and of several stacks."""
    made_up: bool = False
    """Whether the prompts are the function's, not the caller's."""
    chat: bool = False
    """Whether a text is what a user says in a conversation, which the model's chat template writes out."""

    def __post_init__(self) -> None:
        if self.in_memory:
            if self.loading:
                names = ", ".join(sorted(self.loading))
                raise InputError(f"{names}: the model is in memory already; give it for a folder or a hub id alone")
            if self.tokenizer is not None and not callable(self.tokenizer):
                raise InputError(
                    f"tokenizer: expected one that is loaded, got {type(self.tokenizer).__name__}; "
                    "AutoTokenizer.from_pretrained loads it"
                )
        elif self.tokenizer is not None:
            raise InputError("tokenizer: only beside a model in memory; a checkpoint's own is read from its folder")

    @property
    def in_memory(self) -> bool:
        return self.model is not None and not isinstance(self.model, (str, os.PathLike))

    @functools.cached_property
    def texts(self) -> PromptRequest:
        """The prompts. Raises InputError for arguments that cannot be prompts."""
        given = None if self.prompts is None else _prompts(self.prompts)
        if given and _ids(given[0]) and self.files is not None and self.files.option is not None:
            raise InputError(f"{self.files.option}: stands in a text, not among token ids; give the prompt as a text")
        file = None if self.file is None else os.fspath(self.file)
        if file == "-":
            raise InputError("prompts_file '-': expected a file; standard input is the command line's")
        whole_numbers(1, max_tokens=self.max_tokens)
        return PromptRequest(given, file, self.max_tokens, self.files, self.made_up, chat=self.chat)

    def request(self, task: Task | None = None, *, own_code: bool = True) -> ModelRequest:
        """The checkpoint. Raises InputError for a model in memory, which has no files.

        own_code: whether the command can run code that comes with a checkpoint.
        """
        if self.in_memory:
            raise InputError(f"a {type(self.model).__name__} was given: files are read, give a folder or a hub id")
        given = self.loading
        if (memory := given.get("memory")) is not None and whole(memory) is None:
            raise InputError(f"memory: {memory!r}: expected bytes, a whole number such as 8 * 10**9")
        if given.get("trust_remote_code") and not own_code:
            raise InputError("trust_remote_code: this command runs no code that comes with a checkpoint")
        return ModelRequest(None if self.model is None else os.fspath(self.model), task=task, **given)

    def open(self, task: Task, progress: Progress, given: list[PromptText] | None = None) -> Opened:
        """The model and its prompts. given: the texts, if they have been read."""
        texts, files = self.texts, self.files
        if not self.in_memory:
            request = self.request(task)
            reading = open_texts(request, texts, given or texts.read(progress), progress)
            tokenizer_of = functools.partial(reading.own_tokenizer, trust_remote_code=request.trust_remote_code)
            return Opened(reading.loaded, reading.inputs, tokenizer_of)
        from duat_cli.analysis.prepared import open_given
        from duat_cli.analysis.stacks import with_chosen_blocks

        read, made = given or texts.read(progress), None
        if files is None:
            loaded = self._given(progress)
        else:
            loaded, made = open_given(self._loaded(progress), self.tokenizer, texts, files.without_blocks, read)
        if made is None:
            loaded, made = tokens_of(loaded, self._own_tokenizer(), texts, read)
        if files is not None and files.names_blocks:
            loaded, made = with_chosen_blocks(loaded, made, files, tokenizer=self._of_decoder(files))
        return Opened(loaded, made, self._own_tokenizer)

    def _of_decoder(self, files: InputFiles) -> Any:
        """The tokenizer for a decoder's prompt; None where none is given. Raises InputError where there is none."""
        tokenizer = None if files.decoder_prompt is None else self._own_tokenizer()
        if files.decoder_prompt is not None and tokenizer is None:
            raise InputError("decoder_prompt: a text needs the tokenizer of the model in memory")
        return tokenizer

    def open_apart(
        self, task: Task, holdout: str | None, progress: Progress
    ) -> tuple[LoadedModel, list[Prompt], list[Prompt]]:
        """The model, its prompts, and prompts held out."""
        if not self.in_memory:
            return open_with_calibration(self.request(task), self.texts, holdout, None, progress)[:3]
        read, apart, bundled = self.texts.read_apart(holdout, progress)
        loaded, made = self._loaded(progress), None
        if (files := self.files) is not None:
            from duat_cli.analysis.prepared import open_given

            loaded, made = open_given(loaded, self.tokenizer, self.texts, files.without_blocks, read)
        if made is not None:
            sets = inputs_apart(made, holdout, task.pruning)
        else:
            loaded, prompts = tokens_of(loaded, self._own_tokenizer(), self.texts, read)
            others = replace(self.texts, file=self.texts.file if bundled else holdout)
            loaded, held_out = tokens_of(loaded, self._own_tokenizer(), others, apart)
            sets = prompts, held_out, []
        if files is not None:
            return of_stack(loaded, sets, files, tokenizer=self._of_decoder(files))[:3]
        return loaded, *sets[:2]

    def refuse_unfit(self, read: list[PromptText]) -> None:
        """Raises InputError for a caller's prompt that the model in memory cannot read, before it runs. Does nothing
        for a model that is not one of transformers, or whose weights are elsewhere."""
        from transformers import PreTrainedModel

        from duat_cli.loading.prompts import Limits, encode, limits

        own = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        if not isinstance(own, PreTrainedModel) or not (room := limits(own)).vocab_size:
            return
        if not self.texts.own:  # bundled texts that do not fit are left out later; tests encoding alone
            read, room = read[:1], Limits(sys.maxsize, None)
        try:
            encode(self._own_tokenizer(), read, self.max_tokens, room.max_positions, room.vocab_size, room.why)
        except CheckpointError as fault:  # such as a missing chat template
            raise InputError(str(fault)) from fault

    def load(self, progress: Progress) -> LoadedModel:
        """The model alone."""
        if self.in_memory:
            return self._given(progress)
        request = self.request()
        return request.load(request.find(progress), progress)

    def _loaded(self, progress: Progress) -> LoadedModel:
        progress(0, 0, "looking at the model in memory")
        from duat_cli.loading.model.given import given

        return given(self.model)

    def _given(self, progress: Progress) -> LoadedModel:
        """The model in memory. Refuses a model that reads no token ids."""
        from duat_cli.models.discovery.modality import require_token_ids

        loaded = self._loaded(progress)
        require_token_ids(loaded.model)
        return loaded

    def _own_tokenizer(self) -> Any:
        """The caller's tokenizer, also from a processor; for `max_tokens`, a copy that keeps the beginning of a text.
        None where none was given and prompts are tensors, or are or may be token ids, as a file has not been read."""
        if self.tokenizer is None:
            made = self.files is not None and self.files.tensors
            if made or self.texts.file is not None or all(map(_ids, self.texts.prompts or [""])):
                return None
            raise InputError("tokenizer missing: give the tokenizer of the model in memory behind it")
        from transformers import ProcessorMixin

        tokenizer = self.tokenizer.tokenizer if isinstance(self.tokenizer, ProcessorMixin) else self.tokenizer
        if self.max_tokens is None:
            return tokenizer
        own = copy.deepcopy(tokenizer)
        own.truncation_side = "right"
        return own


def _prompts(given: Texts) -> list[str | PromptText]:
    """Texts as they are, token ids by their numbers, messages as conversations. Raises InputError for anything else."""
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise InputError(f"prompts: expected a text or several, got {type(given).__name__}")
    each: list[Any] = [given] if isinstance(given, str) else list(given)
    if each and all(isinstance(one, Mapping) for one in each):
        each = [each]  # the messages of one conversation
    found = [_prompt(one, number) for number, one in enumerate(each)]
    if not found:
        raise InputError("prompts: an empty list; give a text, or None for the bundled set")
    if "-" in found:
        raise InputError(f"prompts[{found.index('-')}] '-': expected a text; standard input is the command line's")
    if len({_ids(one) for one in found}) > 1:
        raise InputError("prompts: texts and token ids; give all of them in one way")
    return found


def _ids(prompt: str | PromptText) -> bool:
    """Whether a prompt was given as token ids."""
    return isinstance(prompt, PromptText) and prompt.ids is not None


def _prompt(given: Any, number: int) -> str | PromptText:
    if isinstance(given, str):
        return str(given)
    try:
        entries = None if isinstance(given, (bytes, Mapping)) else list(given)
    except TypeError:  # a tensor of no dimensions has no entries
        entries = None
    if entries and all(isinstance(one, Mapping) for one in entries):
        return conversation([dict(one) for one in entries], f"prompts[{number}]", number + 1)
    ids = None if entries is None else [whole(one) for one in entries]
    if ids is None:
        raise InputError(f"prompts[{number}]: expected a text or token ids, got {type(given).__name__}")
    found = tuple(one for one in ids if one is not None)
    if not found or len(found) < len(ids):
        kind = type(given).__name__ + "".join(f" of {type(one).__name__}" for one in (entries or ())[:1])
        raise InputError(f"prompts[{number}]: expected a text, or token ids, one whole number at least; got {kind}")
    return token_ids(found, f"prompts[{number}]", number + 1)


def input_files(
    image: Pictures | None,
    audio: File | Sequence[File] | None,
    inputs: Tensors | None,
    stack: str | None,
    decoder_prompt: str | None,
) -> InputFiles:
    """Inputs in place of texts, one or several of each kind. Raises InputError for arguments that cannot be such."""
    if not isinstance(stack, str) or stack == EVERY:
        one_of("stack", stack, (None, *get_args(StackName)))
    images, sounds, tensors = several(image), several(audio), several(inputs)
    for name, given, kind in (("image", images, "convert"), ("audio", sounds, None), ("inputs", tensors, "items")):
        for number, one in enumerate(given):
            if not isinstance(one, str) and (kind is None or not hasattr(one, kind)):
                raise InputError(f"{name}[{number}]: expected {_EXPECTED[name]}, got {type(one).__name__}")
    return InputFiles(images, sounds, tensors, stack, decoder_prompt).asked()


_EXPECTED = {
    "image": "a file or a PIL picture",
    "audio": "a .wav file",
    "inputs": "a .safetensors file or tensors by the names of the forward pass's arguments",
}


def several(given: Any) -> tuple[Any, ...]:
    """One, several or no arguments as a tuple, with paths as text."""
    found = () if given is None else given if isinstance(given, (list, tuple)) else (given,)
    return tuple(os.fspath(one) if isinstance(one, os.PathLike) else one for one in found)


def folder(name: str | os.PathLike[str] | None) -> str | None:
    """A path as text."""
    return None if name is None else str(expanded(name))
