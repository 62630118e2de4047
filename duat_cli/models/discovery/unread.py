"""Notes on parts of a model with attention that did not run (a vision tower beside a text model, skipped blocks), and
reasons why no attention was seen in the parts that ran."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.grouping import by_key
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.discovery.chains import in_pieces
from duat_cli.models.discovery.modality import is_pair, writes
from duat_cli.models.instrument.calls import taken_by
from duat_cli.models.instrument.tracing import Event
from duat_cli.text import some

_NAMED = re.compile(r"attention|attn", re.IGNORECASE)  # in names of classes, as transformers itself has it
_FUSED = re.compile(r"(?i)^(w_?)?(qkv|query_key_value|c_attn|in_proj)(_proj)?$")
_QUERY = re.compile(r"(?i)^(w_?)?(q|query)(_?(proj|lin|linear))?$")
_SHOWN = 3
ENCODER_ALONE = "decoder stack (cross-attention): only the encoder is read here"
"""The beginning of the note on an encoder-decoder of which only the encoder is read."""


def decoder_note(model: Any) -> list[str]:
    """The note on an encoder-decoder of which only the encoder is read; empty for any other model."""
    if not is_pair(model):
        return []
    commands = "inspect, verify, attribute, prune-bound, lora-diff and check"
    return [ENCODER_ALONE + (f"; {commands} take --stack decoder" if writes(model) else "")]


def unread_attention(model: Any, ran: Collection[nn.Module]) -> list[str]:
    """One note for every outermost module that holds attention and has no module in `ran`.

    ran: the modules whose forward was run by the pass that discovery reads, and those whose attention it captured.
    Modules of one class whose names differ only in numbers, such as blocks of a list, share a note. The decoder of an
    encoder-decoder is left out: discovery has a note of its own for it.
    """
    awake = set(ran) | _decoder(model)
    outermost = _outermost(model, "", awake)
    found = by_key(((re.sub(r"\d+", "*", name), type(module).__name__), name) for name, module in outermost)
    return [
        f"{some(names, _SHOWN)} ({kind}) holds attention and was not read: it does not run on token ids alone"
        for (_, kind), names in found.items()
    ]


def left_out(model: Any, stack: nn.Module, part: nn.Module, ran: Collection[nn.Module]) -> list[str]:
    """The notes on all parts with attention that are not read. stack, part: as in `ModelStructure`. ran: as in
    `unread_attention`."""
    others = [] if is_pair(stack) else beside_notes(stack, part)  # a decoder runs behind its encoder
    return [*unread_attention(model, ran), *others]


def behind_notes(attending: Mapping[str, nn.Module]) -> list[str]:
    """One note for every class of modules that attend behind the last block. attending: such modules, by name."""
    found = by_key((type(module).__name__, name) for name, module in attending.items())
    return [
        f"{some(names, _SHOWN)} ({kind}) attends to what the blocks put out and was not read"
        for kind, names in found.items()
    ]


def beside_notes(stack: nn.Module, part: nn.Module) -> list[str]:
    """One note for every model with attention inside `stack`, except `part`, which holds the blocks."""
    if part is stack:
        return []
    return [
        f"{name} ({type(other).__name__}) runs as well; what it gives is taken as it is{_alone(other)}"
        for name, other in _models(stack, "")
        if other is not part and any(map(_is_attention, other.modules()))
    ]


def mixing_notes(calls: Sequence[BlockParts], attending: Collection[nn.Module]) -> list[str]:
    """The notes on nonlinear modules that mix tokens, unlike FFN units, and have no operator; with their block calls
    where these are not all. attending: every attention module."""
    found: dict[str, list[int]] = {}
    for call, parts in enumerate(calls):
        own = {*parts.attention, *([] if parts.second is None else [parts.second.form.module])}
        for told in {_of_mixing(unit, attending) for unit in parts.mixing - own}:
            found.setdefault(told, []).append(call)
    some = {told: f" in block {', '.join(map(str, at))}" for told, at in found.items() if len(at) < len(calls)}
    return [told.format(some.get(told, "")) for told in sorted(found)]


def _of_mixing(unit: nn.Module, attending: Collection[nn.Module]) -> str:
    """The note on such a module, with a placeholder for the block calls."""
    name = type(unit).__name__
    if any(module in attending for module in unit.modules()):
        where = "reaches the stream only as part of what the token mixer behind it reads"
        return f"the attention in {name}{{}} {where}; it has no W' of its own"
    return f"{name} mixes tokens without softmax attention{{}}; its output counts among the UAT terms"


def why_unseen(found: Collection[BlockParts | Exception]) -> str:
    """The text on why it is not seen how blocks mix tokens; empty where not known."""
    faults = [one for one in found if isinstance(one, UnsupportedModelError)]
    if faults:
        return f": {faults[0]}"
    mixing = [one.mixing for one in found if isinstance(one, BlockParts)]
    kinds = sorted({type(unit).__name__ for units in mixing for unit in units})
    if not kinds:
        return ": nothing inside of its blocks was seen to mix tokens" if mixing else ""
    if max(map(len, mixing)) > 1:
        return f": several modules mix tokens in one block ({', '.join(kinds)}), where W' is defined for one"
    return f": what {', '.join(kinds)} makes of its values is no kernel over tokens with gates of channels behind it"


def why_unchained(
    stack: nn.Module, home: str, calls: Mapping[str, Sequence[Event]], attending: Collection[nn.Module]
) -> str | None:
    """The reason why blocks do not take the output of the one in front of them; None where it is not known. calls: by
    list of modules. home: the list that holds attention, whose modules are `attending`."""
    beside = [name for name, found in calls.items() if name != home and len(found) == len(calls[home]) > 1]
    pieces = in_pieces(stack.get_submodule(home), attending)
    if pieces or (beside and calls[home][0].module in attending):
        return (
            "what makes up a block stands in lists of its own, with no module around it that could be run again: "
            f"{', '.join(sorted([home, *([] if pieces else beside)]))}"
        )
    first = calls[home][0]
    taken = [t for t in first.tensors if t.ndim == 3]
    output = list(first.output.values()) if isinstance(first.output, Mapping) else first.output
    given = output if isinstance(output, (tuple, list)) else [output]
    alike = [t for t in given if isinstance(t, Tensor) and taken and t.shape == taken[0].shape]
    if len(taken) > 1 and len(alike) > 1:
        return f"{type(first.module).__name__} takes and gives {len(alike)} streams side by side; W' is of one"
    return None


def _alone(other: nn.Module) -> str:
    return ", and --stack vision reads it alone" if "pixel_values" in taken_by(other.forward) else ""


def _models(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules inside `module` that are models (have a config), with their names."""
    for child_name, child in module.named_children():
        place = f"{name}.{child_name}".lstrip(".")
        if hasattr(child, "config"):
            yield place, child
        else:
            yield from _models(child, place)


def _decoder(model: Any) -> set[nn.Module]:
    if not is_pair(model):
        return set()
    inside = set(model.get_decoder().modules())  # where a class names no decoder, transformers returns the model
    return set() if model.get_encoder() in inside else inside


def _outermost(module: nn.Module, name: str, awake: Collection[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if not any(inner in awake for inner in module.modules()):
        if any(map(_is_attention, module.modules())):
            yield name, module
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, f"{name}.{child_name}".lstrip("."), awake)


def _is_attention(module: nn.Module) -> bool:
    """Whether a module is attention by its class's name or its query layers: without a run there is no other sign."""
    inside = any(_FUSED.match(name) or _QUERY.match(name) for name, _ in module.named_children())
    return inside or bool(_NAMED.search(type(module).__name__))
