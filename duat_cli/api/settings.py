"""Checks of values that the command line refuses by their type, for callers of the API."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, SupportsFloat, SupportsIndex, cast, get_args

from duat_cli.errors import InputError
from duat_cli.kinds import KINDS, Kind, Patched
from duat_cli.loading.inputs.request import InputFiles, StackName
from duat_cli.text import PAPER_PROMPT, clean, one_line

if TYPE_CHECKING:
    from duat_cli.analysis.opening import PromptRequest
    from duat_cli.loading.texts import PromptText

LAYERS_LIMIT = 10_000  # no model has more blocks; a larger range would only fill the memory


def one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """Raises InputError with the choices for a value that is none of them."""
    if value not in choices:
        raise InputError(f"{name} {value!r}: expected {', '.join(map(str, choices))}")


def not_negative(name: str, value: object) -> None:
    """Raises InputError for a value below 0, and for one that is no finite number."""
    if not 0 <= _number(value) < math.inf:
        raise InputError(f"{name} {_given(value)}: expected a number of at least 0")


def numbers(**given: object) -> None:
    """Raises InputError for a value that is given and is no number; its range is checked later."""
    for name, value in given.items():
        if value is not None and math.isnan(_number(value)) and not isinstance(value, float):
            raise InputError(f"{name} {_given(value)}: expected a number")


def whole_numbers(low: int | None = None, **given: object) -> None:
    """Raises InputError for a value that is given and is no whole number, or is below `low`."""
    for name, value in given.items():
        number = whole(value)
        if value is not None and (number is None or (low is not None and number < low)):
            least = "" if low is None else f" of at least {low}"
            raise InputError(f"{name} {_given(value)}: expected a whole number{least}")


def _number(value: object) -> float:
    """The value as a float; NaN for a value that is no number."""
    if isinstance(value, (bool, str)) or not isinstance(value, (SupportsFloat, SupportsIndex)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several
        return math.nan


def _given(value: object) -> str:
    return one_line(repr(value), 60)


def kinds_of(names: str | Iterable[str] | None) -> tuple[Kind, ...]:
    """Kinds of terms that may go: one, several, or as in --granularity, such as 'neuron,head'; None is every kind."""
    if names is None:
        return KINDS
    found = [name.strip().lower() for name in names.split(",")] if isinstance(names, str) else list(names)
    for name in found:
        one_of("--granularity", name, KINDS)
    if not found:
        raise InputError(f"granularity: none given; expected some of {', '.join(KINDS)}")
    return cast("tuple[Kind, ...]", tuple(dict.fromkeys(found)))


def blocks_of(layers: int | str | Iterable[int] | None) -> frozenset[int] | None:
    """Numbers of blocks: one, several, or as in --layers, such as '0-3,7'; None is every block."""
    if layers is None:
        return None
    if isinstance(layers, str):
        return frozenset(number for part in layers.split(",") for number in _range(part.strip(), layers))
    found = [whole(number) for number in (layers if isinstance(layers, Iterable) else [layers])]
    if any(number is None or number < 0 for number in found):
        raise InputError(f"layers: {layers!r} are no numbers of blocks; expected such as [0, 3]")
    if not found:
        raise InputError("layers: no block given; None is every block")
    return frozenset(number for number in found if number is not None)


def whole(value: object) -> int | None:
    """A whole number of any library as Python's; None for a value that is no whole number."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # a tensor of several
        return None


def _range(part: str, text: str) -> range:
    first, dash, last = part.partition("-")
    if not _is_number(first) or (dash and not _is_number(last)):
        raise InputError(f"--layers '{clean(text)}': '{clean(part)}' is no block or range; expected such as 0-3,7")
    start, stop = int(first), int(last) if dash else int(first)
    if stop < start or stop >= LAYERS_LIMIT:
        raise InputError(f"--layers '{clean(text)}': '{part}' is no range of blocks; expected such as 0-3,7")
    return range(start, stop + 1)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def texts_only(**given: object) -> None:
    """Raises InputError for a value that is given and is no text."""
    for name, value in given.items():
        if value is not None and not isinstance(value, str):
            raise InputError(f"{name}: expected a text, got {type(value).__name__}")


def one_input(files: InputFiles | None, count: int) -> None:
    """Raises InputError for several input files of `matrix`."""
    if files is not None and files.option is not None and count > 1:
        raise InputError(f"{files.option}: given {count} times; a matrix belongs to one input")


def or_papers(texts: PromptRequest) -> PromptRequest:
    """The prompts of `matrix`: the paper's, if none is given."""
    return texts if texts.own else replace(texts, prompts=[PAPER_PROMPT], made_up=True)


def one_prompt(read: list[PromptText]) -> list[PromptText]:
    """The prompt of `matrix`; raises InputError for several."""
    if len(read) > 1:
        raise InputError(f"{read[1].where}: one of {len(read)} prompts; a matrix belongs to one")
    return read


def one_stack(stack: str | None) -> str | None:
    """The stack. Raises InputError for the name of one of several chains of blocks, which `inspect` and `verify` read,
    and for 'all'."""
    one_of("stack", stack, (None, *get_args(StackName)))
    return stack


def beside_shared(max_tokens: int | None, align: str, shared: str | None, patch: str | None, stack: str | None) -> None:
    """Raises InputError for options of `compare` that cannot stand beside --shared."""
    one_of("--align", align, ("text", "position"))
    one_of("--patch", patch, (None, *get_args(Patched)))
    if patch is not None and shared is not None:
        raise InputError("--patch: what is b's stands in its place in a; give both texts whole, with --prompt")
    if stack == "decoder" and shared is not None:
        raise InputError("--shared: the encoder reads it, and what is compared is the decoder; give --prompt, twice")
    if max_tokens is not None and shared is not None:
        raise InputError("--max-tokens: would cut the --shared text, which stands last; shorten the texts themselves")
    if align != "text" and shared is not None:
        raise InputError("--align: of --shared its own tokens are compared, whatever stands in front; leave it out")


def one_question(
    target: str | None,
    against: str | None,
    position: object,
    steps: int,
    continuation: str | None,
    target_field: str | None = None,
    against_field: str | None = None,
) -> None:
    """Raises InputError for options of `attribute` that state twice what is attributed."""
    texts_only(target=target, against=against, continuation=continuation)
    texts_only(target_field=target_field, against_field=against_field)
    if position not in (None, "all") and whole(position) is None:
        raise InputError(f"position: {position!r}: expected one whole number, such as -1, or 'all'")
    if target is not None and not target:
        raise InputError("--target: an empty text is no token; a class without a name is given by its number")
    asks = {
        "--steps": steps or None,
        "--continuation": continuation,
        "--target": target,
        "--target-field": target_field,
        "--position": position,
        "--against": against,
        "--against-field": against_field,
    }
    first, *others = [name for name, given in asks.items() if given is not None] or [""]
    if others and first in ("--steps", "--continuation"):
        raise InputError(f"{first}: says by itself what is attributed; leave out {' and '.join(others)}")
