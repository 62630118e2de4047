"""Prepared inputs as prompts, checked against the forward pass that reads them, and counted in positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from duat_cli.analysis.stacks import chosen_stack, part_of, parts_of, reads
from duat_cli.errors import InputError
from duat_cli.loading.inputs.drawn import default_inputs, drawn_patches, drawn_video
from duat_cli.loading.inputs.files import Home, digest_of, in_tiles, read_image, read_sound, read_tensors
from duat_cli.loading.inputs.request import READS, InputFiles, StackName, by_part, label
from duat_cli.loading.inputs.within import DEFAULT, pieces_of, with_pictures
from duat_cli.loading.model.load import LoadedModel, class_of, skeleton
from duat_cli.loading.prompts import Prompt, limits, set_apart
from duat_cli.loading.quiet import foreign_errors
from duat_cli.loading.texts import PromptText
from duat_cli.models.discovery.modality import (
    GRID,
    KINDS,
    by_place,
    class_reads_ids,
    input_name,
    kind_read,
    needs_more,
    noise_like,
    placed_tensors,
    require_token_ids,
    stack_of,
)
from duat_cli.models.instrument.calls import taken_by
from duat_cli.models.sweep.lockstep import forwards
from duat_cli.text import clean

if TYPE_CHECKING:
    from duat_cli.analysis.opening import Found, ModelRequest, PromptRequest
    from duat_cli.analysis.progress import Progress

WITHIN = "input_ids", "attention_mask"
"""Tensors of a text whose first axis must be 1; those of pictures are counted in their own ways."""


def asked_of_parts(shell: Any, texts: PromptRequest, files: InputFiles) -> list[PromptRequest]:
    """The requests of --stack all for a model of several parts, no encoder-decoder: one for each, with its inputs."""
    stacks = parts_of(shell)
    if files.tensors:
        raise InputError("--inputs: tensors are of one stack; give it beside --stack vision, audio or text")
    given: tuple[tuple[StackName, str, tuple[str, ...]], ...] = (
        ("vision", "--image", files.images),
        ("audio", "--audio", files.sounds),
    )
    for stack, option, names in given:
        if names and stack not in stacks:
            raise InputError(f"{option}: {type(shell).__name__} has no part that reads {' or '.join(READS[stack])}")
    found = []
    for stack in stacks:
        images, sounds = files.images if stack == "vision" else (), files.sounds if stack == "audio" else ()
        texted = texts if stack == "text" else replace(texts, prompts=None, file=None)
        found.append(replace(texted, files=InputFiles(images, sounds, stack=stack)))
    return found


def open_prepared(
    model: ModelRequest,
    found: Found,
    texts: PromptRequest,
    files: InputFiles,
    read: Sequence[PromptText],
    progress: Progress,
    share: float | None = None,
) -> tuple[LoadedModel, list[Prompt]] | None:
    """The model, or the part of it that --stack names, and the images or sound that it reads; None for a model of token
    ids alone. read: the texts; share: share of the inputs that is planned as held out."""
    trust = model.trust_remote_code

    def shell() -> Any:
        progress(0, 0, "reading the inputs")
        return skeleton(found.files, trust)

    cls, home = class_of(found.files, trust), texts.home(found.place.path)
    prepared = asked_inputs(cls, shell, home, texts, files, read, trust_remote_code=trust)
    if not prepared:
        return None
    counts = [one.positions for one in prepared if one.positions is not None]
    planned = (counts,) if share is None or len(counts) < len(prepared) else set_apart(counts, share)
    counted = model.counted(*planned)
    if counted.task is not None:
        counted = replace(counted, task=replace(counted.task, probe=prepared[0].positions or 0))
    loaded = model.load(found, progress, counted.way(found, progress))
    return _reading(loaded, files, prepared)


def open_given(
    loaded: LoadedModel, processor: Any, texts: PromptRequest, files: InputFiles, read: Sequence[PromptText]
) -> tuple[LoadedModel, list[Prompt] | None]:
    """A model in memory, or the part of it that `stack` names, and its inputs; None in their place where it reads token
    ids. processor: turns pictures and sounds into tensors, if there is one; read: the texts."""
    model = loaded.model
    prepared = asked_inputs(type(model), lambda: model, processor, texts, files, read, trust_remote_code=False)
    if prepared:
        return _reading(loaded, files, prepared)
    part = part_of(loaded, files.part)
    require_token_ids(part.model)
    return part, None


def _reading(loaded: LoadedModel, files: InputFiles, prepared: Sequence[Prepared]) -> tuple[LoadedModel, list[Prompt]]:
    text = prepared[0].text
    loaded = replace(part_of(loaded, files.part) if text is None else loaded, like=prepared[0].tensors)
    if text is not None and text.where == DEFAULT:
        loaded = replace(loaded, warnings=(*loaded.warnings, f"no --prompt was given: read was {text.text!r}"))
    if files.option is None:
        read = " and ".join(one.where for one in prepared)
        loaded = replace(loaded, warnings=(*loaded.warnings, f"no file was given: read was a {read}"))
    return loaded, as_prompts(loaded, prepared)


@dataclass(frozen=True)
class Prepared:
    """Tensors of one file or text, ready for the model."""

    where: str
    tensors: Mapping[str, Tensor]
    positions: int | None
    """How many hidden states the model makes of them; None where only a real pass tells."""
    text: PromptText | None = None
    """The text, where the model reads its inputs within one."""


def asked_inputs(
    cls: type[Any],
    shell_of: Callable[[], Any],
    home: Home,
    texts: PromptRequest,
    files: InputFiles,
    read: Sequence[PromptText],
    *,
    trust_remote_code: bool,
) -> list[Prepared]:
    """Prepared inputs of a model of images or sound; none for a model that reads token ids alone.

    shell_of: makes the model without weights; read: the texts. Raises InputError for another kind of input.
    """
    reads_ids = files.stack == "text" or (files.stack is None and class_reads_ids(cls))
    if reads_ids and files.option is None:
        return []
    if texts.max_tokens is not None:
        raise InputError("--max-tokens: pictures, sounds and texts with pictures are read whole; leave it out")
    if reads_ids:
        own = read if texts.own and not texts.made_up else []
        return within_texts(shell_of(), home, files, own, trust=trust_remote_code)
    shell = shell_of()
    if files.stack is None and input_name(shell) == "input_ids" and len(reads(shell)) > 1:
        return _at_once(shell, files, given=texts.own and not texts.made_up)
    stack = chosen_stack(shell, files.part)
    if texts.own and not texts.made_up:
        raise InputError(f"--prompt(s): {cls.__name__} reads no token ids here; give --image, --audio or --inputs")
    return prepared_inputs(stack, home, files, trust_remote_code=trust_remote_code)


def prepared_inputs(shell: Any, home: Home, given: InputFiles, *, trust_remote_code: bool) -> list[Prepared]:
    """Prepared inputs, one for each file; without files, a drawn picture or computed tone, for a pair also noise.

    shell: the model without weights. InputError names the file, and what was expected of it.
    """
    name, kind = input_name(shell), type(shell).__name__
    read, taken = kind_read(shell) or f"`{name}`", taken_by(stack_of(shell).forward)
    _require_kind(shell, read, given)
    images, sounds, tensors = (list(enumerate(files, 1)) for files in (given.images, given.sounds, given.tensors))
    found = [(label("--image", one, n), read_image(one, home, trust_remote_code, n)) for n, one in images]
    found += [(label("--audio", one, n), read_sound(one, home, trust_remote_code)) for n, one in sounds]
    own = [(label("--inputs", one, n), read_tensors(one, n)) for n, one in tensors]
    if not found and not own:
        if GRID in taken or needs_more(shell, name):
            made = drawn_patches(name, home, trust_remote_code)
        else:
            made = default_inputs(name, getattr(stack_of(shell), "config", shell.config), home, trust_remote_code)
        drawn = "drawn picture" if read == KINDS["pixel_values"] else "computed tone"
        video = _video(shell, name, made)
        found = [(drawn, made) if video is None else ("drawn video", video)]
        found += [("noise of its shape", noise_like(found[0][1], seed=2))] if given.pair else []
    prepared = []
    for place, (where, each) in enumerate((*found, *own)):
        held = _as_taken(each, name, taken)
        if place < len(found):  # drops what a processor makes that the model does not read
            held = {key: value for key, value in held.items() if key in taken}
        _check(held, name, taken, where, kind, whole=(GRID,) if GRID in taken else None)
        prepared.append(Prepared(where, held, expected_positions(shell, held)))
    return prepared


def _video(shell: Any, name: str, picture: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """A drawn video of as many frames as the config states; None unless the model reads videos and no pictures."""
    config = getattr(stack_of(shell), "config", shell.config)
    frames = getattr(config, "num_frames", None)
    if name != "pixel_values" or not isinstance(frames, int) or expected_positions(shell, picture) is not None:
        return None
    video = {name: drawn_video(config, frames)}
    return None if expected_positions(shell, video) is None else video


def _at_once(shell: Any, files: InputFiles, *, given: bool) -> list[Prepared]:
    """Inputs of a model that reads a picture beside its text, not within it (BLIP): one for each file of --inputs.

    given: whether a text was given. Raises InputError for a text, and for pictures and sounds alone.
    """
    if given or files.images or files.sounds or not files.tensors:
        way = f", or --stack {' or '.join(parts)}" if (parts := parts_of(shell)) else ""
        where = f"{files.option or '--prompt(s)'}: " if given or files.option else ""
        raise InputError(
            f"{where}{type(shell).__name__} reads a text and what stands beside it at once; give the tensors of both "
            f"in one file with --inputs{way}"
        )
    return [_with_ids(shell, file, number) for number, file in enumerate(files.tensors, 1)]


def _with_ids(shell: Any, file: Any, number: int) -> Prepared:
    """Prepared input of a file whose tensors hold the text and the pictures within or beside it."""
    where, tensors = label("--inputs", file, number), read_tensors(file, number)
    _check(tensors, "input_ids", taken_by(stack_of(shell).forward), where, type(shell).__name__, WITHIN)
    return _of_text(shell, PromptText(where, where, number), tensors)


def _of_text(shell: Any, text: PromptText, tensors: Mapping[str, Tensor]) -> Prepared:
    """Prepared input of a text and its tensors. Raises InputError where the text is too long."""
    count, room = tensors["input_ids"].shape[1], limits(shell).max_positions
    if room is not None and count > room:
        raise InputError(f"{text.where}: too long, {count} tokens in all, the model has {room} positions")
    return Prepared(text.where, {"attention_mask": torch.ones_like(tensors["input_ids"]), **tensors}, count, text)


def within_texts(
    shell: Any, home: Home, given: InputFiles, read: Sequence[PromptText], *, trust: bool
) -> list[Prepared]:
    """Inputs of a model that reads pictures or sound within a text: one for each text, or for each file of --inputs.

    shell: the model without weights; read: the user's texts. Raises InputError where the model reads no such thing.
    """
    stack, kind = stack_of(shell), type(shell).__name__
    taken, kinds = taken_by(stack.forward), set(pieces_of(shell.config).values())
    if not kinds or "text" not in reads(stack) or len(reads(stack)) < 2 or (given.sounds and "audio" not in kinds):
        raise InputError(f"{given.option}: {kind} reads {by_part(parts_of(shell))}")
    if given.sounds or (given.images and "image" not in kinds):
        raise InputError(
            f"{given.option}: {kind} reads {' and '.join(sorted(kinds))} within a text; give the tensors that its "
            "processor makes of both with --inputs"
        )
    if given.tensors and (read or given.images):
        raise InputError("--inputs: its tensors hold the text as well; leave out --prompt and --image")
    found = [_with_ids(shell, file, number) for number, file in enumerate(given.tensors, 1)]
    made = with_pictures(read, given.images, home, trust, shell.config, apart=given.pair) if given.images else []
    return found + [_of_text(shell, one.text, {k: v for k, v in one.tensors.items() if k in taken}) for one in made]


def as_prompts(loaded: LoadedModel, prepared: Sequence[Prepared]) -> list[Prompt]:
    """Prepared inputs as prompts. Runs a real pass where only that tells how many positions there are."""
    found = []
    for line, one in enumerate(prepared, 1):
        if (text := one.text) is not None:
            ids, kinds = one.tensors["input_ids"], pieces_of(loaded.model.config)
            pieces = {place: kinds[token] for place, token in enumerate(ids[0].tolist()) if token in kinds}
            made = Prompt(text.text, digest_of(one.tensors), ids, text.line, prepared=one.tensors, pieces=pieces)
            found.append(replace(made, answered=None) if text.conversation else made)  # not looked for
            continue
        count = _real_positions(loaded, one) if one.positions is None else one.positions
        found.append(Prompt(one.where, digest_of(one.tensors), torch.arange(count)[None], line, prepared=one.tensors))
    return found


def _as_taken(held: Mapping[str, Tensor], name: str, taken: Set[str]) -> dict[str, Tensor]:
    """Tensors renamed to the arguments of a part of a model, whose own names are `pixel_values` and `image_…`."""
    known = {"pixel_values": name} if GRID in taken and "pixel_values" not in taken else {}
    short = {key: key.removeprefix("image_") for key in held if key not in taken}
    known |= {key: other for key, other in short.items() if other in taken}
    return {known.get(key, key): value for key, value in held.items()}


def _require_kind(shell: Any, kind: str, given: InputFiles) -> None:
    """Refuses a picture for a model of sound, and a sound for a model of pictures. kind: what the model reads."""
    for option, files, wanted in (("--image", given.images, "images"), ("--audio", given.sounds, "sound")):
        if files and kind != wanted:
            raise InputError(f"{label(option, files[0], 1)}: {type(shell).__name__} reads {kind}, no {wanted}")


def _check(
    tensors: Mapping[str, Tensor], name: str, taken: Set[str], where: str, kind: str, whole: Sequence[str] | None
) -> None:
    """Refuses tensors that the model cannot take. whole: those whose first axis must be 1; None: all of them."""
    unknown = sorted(set(tensors) - taken)
    if unknown:
        raise InputError(f"{where}: {clean(unknown[0])}: {kind} takes no such argument")
    if name not in tensors:
        held = ", ".join(map(clean, sorted(tensors))) or "nothing"
        raise InputError(f"{where}: it holds {held}; {kind} reads `{name}`")
    for key, value in tensors.items():
        if (whole is None or key in whole) and (value.ndim == 0 or value.shape[0] != 1):
            raise InputError(
                f"{where}: {clean(key)} has shape {list(value.shape)}; expected 1 in front: one input a file"
            )
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise InputError(f"{where}: {clean(key)} holds values that are not finite")


def expected_positions(shell: Any, tensors: Mapping[str, Tensor]) -> int | None:
    """Positions counted by a pass; None where it fails, as it does without weights in models that look at values."""
    stack = stack_of(shell)
    for asked in ({"output_hidden_states": True}, {}):
        try:
            with torch.no_grad():
                return _positions_of(stack(**placed_tensors(tensors, str(stack.device), stack.dtype), **asked), stack)
        except Exception:  # a real pass will show whether the input is at fault
            continue
    return None


def require_readable(loaded: LoadedModel, one: Prepared) -> Any:
    """The model's output for a prepared input. Raises InputError where the model cannot read it."""
    stack, pager = stack_of(loaded.model), None if loaded.paged is None else loaded.paged.pager
    held = placed_tensors(one.tensors, loaded.device, stack.dtype)
    kind, others = type(loaded.model).__name__, _other_parts(loaded)
    what = f"{one.where}: {kind} cannot read it{in_tiles(one.tensors)}{others}"
    with torch.no_grad(), foreign_errors(what, InputError):
        [output] = forwards(pager, [lambda: stack(**held)])
    return output


def _real_positions(loaded: LoadedModel, one: Prepared) -> int:
    positions = _positions_of(require_readable(loaded, one), stack_of(loaded.model))
    if positions is None:
        kind, others = type(loaded.model).__name__, _other_parts(loaded)
        raise InputError(f"{one.where}: {kind} gives no hidden states of shape (1, N, M) for it{others}")
    return positions


def _other_parts(loaded: LoadedModel) -> str:
    """The end of an error message that names a model's other parts, where one cannot be read; empty without others."""
    parts = [] if loaded.whole is None else [part for part in parts_of(loaded.whole) if part != loaded.stack]
    return f" ({type(loaded.whole).__name__} is read by --stack {' or '.join(parts)} as well)" if parts else ""


def _positions_of(output: Any, stack: Any) -> int | None:
    """Most positions of any of its hidden states, as a model that merges tokens gives fewer than it takes."""
    encoded = getattr(output, "encoder_last_hidden_state", None)  # output of an encoder that runs within its model
    found = (output[0], *(getattr(output, "hidden_states", None) or ())) if encoded is None else (encoded,)
    states = [one for one in found if isinstance(one, Tensor)]
    counts = [int(one.shape[-2]) for one in states if one.ndim == 3] or [len(one) for one in states if one.ndim == 2]
    counts += [by_place(one, stack).shape[1] for one in states if one.ndim == 4]
    return max(counts, default=None)
