"""Turns tensors into the report of `duat attribute`."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import torch

from duat_cli.analysis.attribute.leading import Leading
from duat_cli.analysis.attribute.measure import Measurer
from duat_cli.analysis.attribute.parts import PromptParts
from duat_cli.analysis.attribute.targets import Chooser, Odds, Target
from duat_cli.analysis.attribute.work import Found
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.prompts import Prompt
from duat_cli.loading.words import Words
from duat_cli.results.attribute import (
    Attribution,
    Direct,
    DirectUnit,
    EncoderPart,
    HeadPart,
    InnerPart,
    Parts,
    PicturePart,
    Rival,
    StaticPart,
    TargetFacts,
    TokenName,
    TokenPart,
    UnitPart,
)

_Named = tuple[int | None, str]  # id of a token, None if it is no token, and its text


def attributions(
    found: Found, prompt: Prompt, chooser: Chooser, words: Words, top: int, measurer: Measurer | None
) -> list[Attribution]:
    """The attributions of some targets of one prompt. top: how many neurons and experts are shown. measurer: removes
    parts for real, if asked for; there is then one target."""
    ids = prompt.input_ids[0].tolist()
    numbers = defaultdict[str, Iterator[int]](lambda: itertools.count(1))  # of the pieces of each kind
    pieces = {place: f"<{kind} {next(numbers[kind])}>" for place, kind in prompt.pieces.items()}
    texts = [pieces.get(place) or words.text(token) for place, token in enumerate(ids)]
    named: list[_Named] = list(zip(ids, texts, strict=True))
    if found.parts.tokens.shape[1] != len(texts):  # the blocks read other vectors than the prompt's tokens
        texts = [f"vector {place}" for place in range(found.parts.tokens.shape[1])]
        named = [(None, text) for text in texts]
    sources: list[_Named] | None = None
    if (source := prompt.source) is not None and source.prepared is None:
        sources = [(token, words.text(token)) for token in source.input_ids[0].tolist()]
    total, direct = found.parts.residuals()
    if not bool(torch.isfinite(torch.cat([total, direct, found.parts.output])).all()):
        raise UnsupportedModelError(
            f"prompt {found.prompt + 1}: the model's output, or a part of it, is not finite; --dtype float32 may help, "
            "and duat check finds weights that are not"
        )
    measured = None if measurer is None else measurer.of(found, texts)
    return [
        Attribution.explained(
            "",
            _ABSENT,
            measured=measured,
            capped=found.capped[k],
            position=target.position,
            rank=found.ranks[k],
            probability=None if odds is None else odds.own,
            rival=_rival(odds, target, chooser),
            prompt=found.prompt,
            target=_facts(target, chooser),
            logit=float(found.parts.output[k]),
            parts=_parts(found, k, named, sources, top, prompt.pieces),
            direct=_direct(found, k, float(direct[k]), top),
            flows=found.leading[k].flows,
            residual=float(total[k]),
        )
        for k, (target, odds) in enumerate(zip(found.targets, found.odds, strict=True))
    ]


_NO_ODDS = "the output is no distribution over tokens or classes"
_ABSENT = {
    "measured": "not removed without --measure",
    "capped": "the model caps nothing",
    "position": "the model has one output a prompt",
    "rank": "the model has no head",
    "probability": _NO_ODDS,
    "rival": _NO_ODDS,
}


def _rival(odds: Odds | None, target: Target, chooser: Chooser) -> Rival | None:
    if odds is None:
        return None
    return Rival(id=odds.rival, text=chooser.text(target, odds.rival), probability=odds.rivals)


def _facts(target: Target, chooser: Chooser) -> TargetFacts:
    def named(token: int | None) -> TokenName | None:
        return None if token is None else TokenName(id=token, text=chooser.text(target, token))

    return TargetFacts.explained(
        "no other token or class is subtracted",
        {"token": "the norm of a vector is no entry of it"},
        kind=target.kind,
        token=named(target.token),
        given=target.given,
        against=named(target.against),
        against_mean=target.against_mean,
    )


def _parts(
    found: Found, k: int, named: Sequence[_Named], sources: Sequence[_Named] | None, top: int, pieces: Collection[int]
) -> Parts:
    parts, leading = found.parts, found.leading[k]
    tokens = zip(named, parts.tokens[k].tolist(), parts.tokens_direct[k].tolist(), strict=True)
    static = [float(block.static[k]) for block in parts.blocks]
    units = [
        UnitPart.explained(
            "its output has no row for every token",
            block=block.number,
            unit=place,
            name=unit.name,
            mixes=unit.mixes,
            value=float(unit.total[k]),
            tokens=None if unit.tokens is None else unit.tokens[k].tolist(),
        )
        for block in parts.blocks
        for place, unit in enumerate(block.units)
    ]
    return Parts(
        tokens=[
            TokenPart(position=place, id=token, text=text, value=value, direct=straight)
            for place, ((token, text), value, straight) in enumerate(tokens)
        ],
        static=StaticPart(value=sum(static), blocks=static),
        units=units,
        head_bias=float(parts.head[k]),
        neurons=_inner(leading, "neurons", "total", top, parts),
        experts=_inner(leading, "experts", "total", top, parts),
        encoder=_encoder(parts, k, sources),
        picture=_picture(parts, k, pieces),
    )


def _picture(parts: PromptParts, k: int, places: Collection[int]) -> PicturePart | None:
    """The part of pictures, videos and sounds; None without any. places: positions of their pieces."""
    if not places:
        return None
    at = list(places)
    rows = [unit.tokens[k, at].sum() for block in parts.blocks for unit in block.units if unit.tokens is not None]
    return PicturePart(
        positions=len(at),
        value=float(parts.tokens[k, at].sum()),
        direct=float(parts.tokens_direct[k, at].sum()),
        computed=float(sum(rows)),
    )


def _encoder(parts: PromptParts, k: int, sources: Sequence[_Named] | None) -> EncoderPart | None:
    """The part of the encoder's states; None where there is none. sources: tokens that the encoder read; None where it
    read no tokens."""
    each = [block.encoder for block in parts.blocks]
    known = [one for one in each if one is not None]
    if not known:
        return None
    total, direct = (torch.stack([getattr(one, name)[k] for one in known]) for name in ("total", "direct"))
    by_token = zip(total.sum(dim=0).tolist(), direct.sum(dim=0).tolist(), strict=True)
    if sources is None or len(sources) != total.shape[1]:
        sources = [(None, f"state {place}") for place in range(total.shape[1])]
    return EncoderPart(
        value=float(total.sum()),
        direct=float(direct.sum()),
        blocks=[0.0 if one is None else float(one.total[k].sum()) for one in each],
        tokens=[
            TokenPart(position=place, id=token, text=text, value=value, direct=straight)
            for place, ((token, text), (value, straight)) in enumerate(zip(sources, by_token, strict=True))
        ],
    )


def _inner(leading: Leading, kind: str, reading: str, top: int, parts: PromptParts) -> list[InnerPart]:
    found = []
    for place in leading.places[kind, reading][:top]:
        expert, index = place.within(parts.blocks) if kind == "neurons" else (None, place.number)
        found.append(
            InnerPart(
                block=place.block, unit=place.unit, expert=expert, index=index, value=place.total, direct=place.direct
            )
        )
    return found


def _direct(found: Found, k: int, residual: float, top: int) -> Direct:
    parts, leading = found.parts, found.leading[k]
    return Direct(
        tokens=float(parts.tokens_direct[k].sum()),
        static=sum(float(block.static_direct[k]) for block in parts.blocks),
        heads=[
            HeadPart(block=block.number, head=head, value=value, moved=moved)
            for block in parts.blocks
            for head, (value, moved) in enumerate(
                zip(block.heads_direct[k].tolist(), block.heads[k].tolist(), strict=True)
            )
        ],
        units=[
            DirectUnit(block=block.number, unit=place, value=float(unit.direct[k]))
            for block in parts.blocks
            for place, unit in enumerate(block.units)
        ],
        head_bias=float(parts.head[k]),
        neurons=_inner(leading, "neurons", "direct", top, parts),
        experts=_inner(leading, "experts", "direct", top, parts),
        residual=residual,
    )
