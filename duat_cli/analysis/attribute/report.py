"""From tensors to the report of `duat attribute`."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.analysis.attribute.leading import HeadFlow
from duat_cli.analysis.attribute.parts import PromptParts
from duat_cli.analysis.attribute.targets import Chooser, Target, Words
from duat_cli.analysis.attribute.work import Found
from duat_cli.loading.prompts import Prompt
from duat_cli.results.attribute import (
    Attribution,
    Direct,
    DirectUnit,
    Flow,
    HeadPart,
    InnerPart,
    Move,
    Parts,
    StaticPart,
    TargetFacts,
    TokenName,
    TokenPart,
    UnitPart,
)


def attributions(found: Found, prompts: Sequence[Prompt], chooser: Chooser, words: Words) -> list[Attribution]:
    """Those of some targets of one prompt."""
    ids = prompts[found.prompt].input_ids[0].tolist()
    texts = [words.text(token) for token in ids]
    total, direct = found.parts.residuals()
    return [
        Attribution(
            prompt=found.prompt,
            position=target.position,
            target=_facts(target, chooser),
            logit=float(found.parts.output[k]),
            capped=found.capped[k],
            rank=found.ranks[k],
            parts=_parts(found, k, texts),
            direct=_direct(found.parts, k, float(direct[k])),
            flows=[_flow(flow) for flow in found.leading[k].flows],
            residual=float(total[k]),
            reasons=_reasons(target, found.capped[k]),
        )
        for k, target in enumerate(found.targets)
    ]


def _reasons(target: Target, capped: float | None) -> dict[str, str]:
    found = {}
    if capped is None:
        found["capped"] = "the model caps nothing"
    if target.position is None:
        found["position"] = "the model has one output a prompt"
    if target.kind in ("component", "norm"):
        found["rank"] = "the model has no head"
    return found


def _facts(target: Target, chooser: Chooser) -> TargetFacts:
    def named(token: int | None) -> TokenName | None:
        return None if token is None else TokenName(id=token, text=chooser.text(target, token))

    reasons = {} if target.token is not None else {"token": "the norm of a vector is no entry of it"}
    if target.against is None:
        reasons["against"] = "no other token or class is subtracted"
    return TargetFacts(
        kind=target.kind,
        token=named(target.token),
        given=target.given,
        against=named(target.against),
        against_mean=target.against_mean,
        reasons=reasons,
    )


def _parts(found: Found, k: int, texts: Sequence[str]) -> Parts:
    parts, leading = found.parts, found.leading[k]
    tokens = zip(texts, parts.tokens[k].tolist(), parts.tokens_direct[k].tolist(), strict=True)
    static = [float(block.static[k]) for block in parts.blocks]
    units = []
    for block in parts.blocks:
        for place, unit in enumerate(block.units):
            rows = None if unit.tokens is None else unit.tokens[k].tolist()
            units.append(
                UnitPart(
                    block=block.number,
                    unit=place,
                    name=unit.name,
                    mixes=unit.mixes,
                    value=float(unit.total[k]),
                    tokens=rows,
                    reasons={} if rows is not None else {"tokens": "its output has no row for every token"},
                )
            )
    return Parts(
        tokens=[TokenPart(position=t, text=text, value=v, direct=d) for t, (text, v, d) in enumerate(tokens)],
        static=StaticPart(value=sum(static), blocks=static),
        units=units,
        head_bias=float(parts.head[k]),
        neurons=[InnerPart(block=b, unit=u, index=i, value=v) for b, u, i, v in leading.neurons],
        experts=[InnerPart(block=b, unit=u, index=i, value=v) for b, u, i, v in leading.experts],
    )


def _direct(parts: PromptParts, k: int, residual: float) -> Direct:
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
        residual=residual,
    )


def _flow(flow: HeadFlow) -> Flow:
    moves = [
        Move(source=m.source, target=m.target, value=m.value, attention=m.attention, carried=m.carried)
        for m in flow.moves
    ]
    return Flow(block=flow.block, head=flow.head, moved=flow.moved, moves=moves)
