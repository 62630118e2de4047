"""Figures on the parts of a prediction, token by token and block by block."""

from __future__ import annotations

from duat_cli.report.html.drawing.cells import cell_map, depth, words
from duat_cli.report.html.drawing.figure import Figure, noted
from duat_cli.report.html.drawing.plot import Axis, Plot, curve, level
from duat_cli.report.html.drawing.scales import Band, Linear
from duat_cli.report.html.drawing.table import Head, Table, table_by
from duat_cli.report.tables import numbers
from duat_cli.report.tables.attribute.columns import SOURCES, STATES
from duat_cli.report.tables.attribute.words import (
    BARE,
    added,
    by_block,
    by_token,
    called,
    choice,
    computed,
    is_bare,
    leading,
    title,
    token,
    unit,
)
from duat_cli.report.tables.grid import on_page
from duat_cli.report.tables.numbers import SIGNED
from duat_cli.report.tables.page import TARGET, cut
from duat_cli.results.attribute import AttributeReport, Attribution, Continuation
from duat_cli.text import plural

_STATES = 200  # most encoder states in their table, those with the largest parts
_TOKENS = 64  # most tokens in a map, those with the largest parts
_SERIES = (("UAT terms, through later blocks", "s1"), ("biases, through later blocks", "s2"),
           ("heads, straight to the output", "s3"), ("UAT terms, straight to the output", "s4"))  # fmt: skip


def coloured(report: AttributeReport, number: int, *, whole: bool = True) -> Figure:
    """The text coloured by what each token adds. number: of the prediction in the report. whole: whether to add a table
    of the sums."""
    one = report.attribution[number]
    tokens = [
        (t.text, value, f"token {t.position}: {SIGNED(value)}")
        for t, value in zip(one.parts.tokens, added(one), strict=True)
    ]
    largest = max((abs(value) for _, value, _ in tokens), default=0.0)
    kept = [i for i, (_, value, _) in enumerate(tokens) if depth(value, largest) != "z"]
    left = len(tokens) - len(kept)
    return Figure(
        key=f"text-{number}",
        name=title(one, len(report.prompts)),
        title=f"{title(one, len(report.prompts))}: {called(one)} {numbers.plain(one.logit)}{choice(one)}",
        says="Each token with what it adds: its embedding, and the UAT terms computed at it. + raises the "
        f"{called(one)}, \N{MINUS SIGN} lowers it; unmarked tokens add little.{f' {BARE}' if is_bare(one) else ''}",
        picture=words(tokens),
        tables=[_tokens(one, number, kept), *_encoder(one, number), *([_sums(one)] if whole else [])],
        terms=[
            "attribution[].parts.tokens[].value",
            "attribution[].parts.units[].tokens",
            "attribution[].logit",
            "attribution[].probability",
        ],
        notes=[f"{plural(left, 'unmarked token')}: in the JSON."] if left else [],
    )


def _tokens(one: Attribution, number: int, kept: list[int]) -> Table:
    here = computed(one)
    return table_by(
        f"attribution.{number}.parts.tokens[]",
        kept,
        (Head("token", number=False), lambda i: token(one, i)),
        (Head("its own part", "logits", "value"), lambda i: SIGNED(one.parts.tokens[i].value)),
        (Head("of it straight to the output", "logits", "direct"), lambda i: SIGNED(one.parts.tokens[i].direct)),
        (Head("UAT terms at it", "logits"), lambda i: SIGNED(here[i])),
        numbers=kept,
    )


def _encoder(one: Attribution, number: int) -> list[Table]:
    """A table of the leading states of the encoder, for a decoder."""
    if one.parts.encoder is None:
        return []
    tokens = one.parts.encoder.tokens
    kept = sorted(leading((token.value for token in tokens), _STATES))
    return [
        table_by(
            f"attribution.{number}.parts.encoder.tokens[]",
            [tokens[k] for k in kept],
            (Head("token of the encoder", number=False), lambda t: f"{t.position} '{t.text}'"),
            *on_page(STATES),
            numbers=kept,
        )
    ]


def _sums(one: Attribution) -> Table:
    p, d = one.parts, one.direct
    units = sum(unit.value for unit in p.units)
    rows = [
        ["through all later blocks", SIGNED(sum(t.value for t in p.tokens)), SIGNED(p.static.value), "", SIGNED(units),
         SIGNED(p.head_bias)],
        ["straight to the output", SIGNED(d.tokens), SIGNED(d.static), SIGNED(sum(h.value for h in d.heads)),
         SIGNED(sum(u.value for u in d.units)), SIGNED(d.head_bias)],
    ]  # fmt: skip
    names = ["tokens", "biases", "heads", "UAT terms", "head bias"]
    if p.encoder is not None:
        names.append("encoder")
        rows = [[*row, SIGNED(value)] for row, value in zip(rows, (p.encoder.value, p.encoder.direct), strict=True)]
    return Table([Head("reading", number=False), *(Head(n, "logits") for n in names)], rows)


def continued(found: Continuation, number: int, unit: str) -> Figure:
    """A continuation: the text before its last token, coloured by what each token did for the whole continuation.

    unit: that of its parts.
    """
    tokens = [(s.text, s.value, f"token {s.position}: {SIGNED(s.value)}") for s in found.sources]
    added = "".join(token.text for token in found.tokens)
    count = plural(len(found.tokens), "token")
    says = f"What was attributed adds up to {numbers.plain(found.logits)} {unit} over {count}."
    if found.log_probability is not None:
        says += (
            f" The log-probability is {numbers.plain(found.log_probability)} nats; parts are of its linearisation, "
            f"which misses {SIGNED(found.first_order_error)} nats of what is gained over equal logits."
        )
    return Figure(
        key=f"continuation-{number}",
        name=f"Continuation of prompt {found.prompt}",
        title=f"Prompt {found.prompt}, continued by '{cut(added, TARGET)}': what each token did for all of it",
        says=says,
        picture=words(tokens),
        tables=[
            table_by(
                f"continuations.{number}.sources[]",
                found.sources,
                (Head("token", number=False), lambda s: f"{s.position} '{s.text}'"),
                *on_page(SOURCES),
            )
        ],
        terms=["continuations[].logits", "continuations[].sources[].value"],
    )


def token_by_layer(report: AttributeReport, number: int) -> Figure:
    one = report.attribution[number]
    rows = by_token(one)
    count = len(one.parts.tokens)
    kept = sorted(leading((sum(abs(row[t]) for row in rows) for t in range(count)), _TOKENS))
    names = ["x_0", *(str(block) for block in range(len(rows) - 1))]
    values = [[row[t] for t in kept] for row in rows]
    plot = Plot(
        Axis("token (position)", Band([str(one.parts.tokens[t].position) for t in kept], most=32)),
        Axis("block", Band(names, most=24)),
        height=90 + min(400, 24 * len(rows)),
    )

    def said(row: int, place: int) -> str:
        return f"{_row(names[row])}, token {token(one, kept[place])}"

    table = Table(
        heads=[Head("token", number=False), *(Head(name, "logits") for name in names)],
        rows=[[token(one, t), *(SIGNED(row[t]) for row in rows)] for t in kept],
    )
    return Figure(
        key=f"layers-{number}",
        title=f"Where it is formed: parts by block and token, {title(one, len(report.prompts))}",
        says="x_0 is the token's embedding; the rows above are the UAT terms that each block computed at the token. A "
        "dash marks parts against the prediction.",
        picture=cell_map(plot, values, said, "Map of parts, a row a block, a column a token."),
        tables=[table],
        terms=["attribution[].parts.units[].tokens", "attribution[].parts.tokens[].value"],
        notes=noted(count - len(kept), "tokens with smaller parts are left out."),
    )


def blocks(report: AttributeReport, number: int) -> Figure:
    one = report.attribution[number]
    columns = by_block(one)
    names = [str(block) for block in range(len(one.parts.static.blocks))]
    plot = Plot(
        Axis("block", Band(names, most=12)),
        Axis(f"part ({unit(one)})", Linear.over([v for column in columns for v in column])),
        width=500,
        height=260,
    )
    drawn = [level(plot, 0.0)]
    for (name, series), values in zip(_SERIES, columns, strict=True):
        drawn += curve(plot, values, series, [_row(block) for block in names], name, SIGNED)
    return Figure(
        key=f"blocks-{number}",
        half=True,
        title=f"What each block adds: {title(one, len(report.prompts))}",
        says="Two readings, each adding up to the output with the tokens: through later blocks, and straight to it.",
        picture=plot.svg(drawn, "Four lines over blocks."),
        tables=[
            Table(
                heads=[Head("block"), *(Head(name, "logits") for name, _ in _SERIES)],
                rows=[[names[b], *(SIGNED(column[b]) for column in columns)] for b in range(len(names))],
            )
        ],
        terms=["attribution[].parts.static.blocks", "attribution[].direct.units[].value"],
        legend=[("line", series, name) for name, series in _SERIES],
    )


def _row(name: str) -> str:
    return "embedding" if name == "x_0" else f"block {name}"
