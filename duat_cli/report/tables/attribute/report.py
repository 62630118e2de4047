"""`duat attribute` as text for a terminal: the prompt's tokens with their parts as bars, then the leading parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.attribute import columns, words
from duat_cli.report.tables.grid import Column, Labels, grids
from duat_cli.report.tables.numbers import SIGNED
from duat_cli.report.tables.page import BLANK, TARGET, Page, cut, heading, line, note
from duat_cli.results.attribute import (
    AttributeReport,
    Attribution,
    Continuation,
    InnerPart,
    RemovedToken,
    Source,
    Summary,
    TokenPart,
)
from duat_cli.results.base import Result

_Row = TypeVar("_Row", bound=Result)
_ROOM_FOR_BARS = 60  # width from which a page has bars
_BAR = 24  # cells of the longest bar
_SHOWN = 8  # up to so many predictions have all tables; more get one line each
_TOKENS = 40  # most tokens in the table of a prompt, those with the largest parts


def render_attribute(report: AttributeReport, page: Page) -> str:
    """The report as text: the predictions one by one, in full if they are few."""
    parts: list[RenderableType] = [*facts.loaded(report.model, report.prompts, report.environment), BLANK]
    if len(report.attribution) > _SHOWN:
        parts += [*_overview(report, page), BLANK]
    else:
        for one in report.attribution:
            parts += [*_prediction(one, page, len(report.prompts)), BLANK]
    for continuation in report.continuations:
        parts += [*_continuation(continuation, page), BLANK]
    if report.summary is not None and not report.continuations:
        parts += [*_summary(report.summary, words.called(report.attribution[0]), page), BLANK]
    return page.render(
        *parts,
        *facts.section("held fixed between the last block and the output", report.held),
        words.verdict(report.certificate),
        note(words.NOT_CAUSAL),
        *([note(words.BARE)] if any(words.is_bare(one) for one in report.attribution) else []),
        *facts.remarks(report.skipped, report.warnings),
    )


def _prediction(one: Attribution, page: Page, prompts: int) -> list[RenderableType]:
    return [
        heading(_title(one, prompts)),
        *map(line, _sums(one)),
        BLANK,
        *_tokens(one, page),
        BLANK,
        *_encoder(one, page),
        *_map(one, page),
        BLANK,
        *_blocks(one, page),
        BLANK,
        *_heads(one, page),
        *_inner("neurons", one.parts.neurons, page),
        *_inner("experts", one.parts.experts, page),
        *_flows(one),
        *_measured(one, page),
    ]


def _title(one: Attribution, prompts: int) -> str:
    where = "" if one.position is None else f" at position {one.position}"
    prompt = f"prompt {one.prompt}, " if prompts > 1 else ""
    return f"{prompt}{words.named(one)}{where}: {words.called(one)} {numbers.plain(one.logit)}{words.choice(one)}"


def _sums(one: Attribution) -> list[str]:
    p, d = one.parts, one.direct
    tokens, terms, heads, units = (sum(x.value for x in some) for some in (p.tokens, p.units, d.heads, d.units))
    total = f"tokens {SIGNED(tokens)}, biases {SIGNED(p.static.value)}, UAT terms {SIGNED(terms)}"
    direct = f"tokens {SIGNED(d.tokens)}, biases {SIGNED(d.static)}, heads {SIGNED(heads)}, UAT terms {SIGNED(units)}"
    if p.encoder is not None:
        total += f", encoder {SIGNED(p.encoder.value)}"
        direct += f", encoder {SIGNED(p.encoder.direct)}"
    total, direct = (f"{sums}, output bias {SIGNED(of.head_bias)}" for sums, of in ((total, p), (direct, d)))
    capped = [] if one.capped is None else [f"behind the model's cap: {numbers.plain(one.capped)}"]
    return [f"total, through later blocks: {total}", f"direct, straight to the {words.called(one)}: {direct}", *capped]


def _tokens(one: Attribution, page: Page) -> list[RenderableType]:
    """Table with a row per token: what it adds, what was computed at it, and a bar of both."""
    tokens, here, both = one.parts.tokens, words.computed(one), words.added(one)
    sizes = (abs(token.value) + abs(at_it) for token, at_it in zip(tokens, here, strict=True))
    shown = sorted(words.leading(sizes, _TOKENS))
    table = page.table()
    bars = page.width >= _ROOM_FOR_BARS
    table.add_column("token", overflow="fold", vertical="bottom")
    for header in ("its own\npart", "UAT terms\nat it"):
        table.add_column(header, justify="right", overflow="fold", vertical="bottom")
    if bars:
        table.add_column("both", no_wrap=True, overflow="crop", vertical="bottom")
    largest = max((abs(both[t]) for t in shown), default=0.0)
    width = max(4, min(_BAR, (page.width - 48) // 2))
    for t in shown:
        cells = (f"{t} '{cut(tokens[t].text)}'", SIGNED(tokens[t].value), SIGNED(here[t]))
        table.add_row(*map(Text, cells), *([_bar(both[t], largest, width, page)] if bars else []))
    more = _left_out(len(tokens) - len(shown), "tokens")
    picture = one.parts.picture
    if picture is not None:
        own, at_it = SIGNED(picture.value), SIGNED(picture.computed)
        more.append(
            line(f"All {picture.positions} positions that hold no word: own parts {own}, UAT terms at them {at_it}.")
        )
    return [heading("By token: its embedding, and the UAT terms computed at it"), table, *more]


def _encoder(one: Attribution, page: Page) -> list[RenderableType]:
    """Table with a row for each leading state of the encoder, for a decoder."""
    if one.parts.encoder is None:
        return []
    tokens = one.parts.encoder.tokens
    shown = sorted(words.leading((max(abs(t.value), abs(t.direct)) for t in tokens), _TOKENS))
    more = _left_out(len(tokens) - len(shown), "states")
    title = heading("By token of the encoder: what its state brings through cross-attention")
    return [title, *_table("token", [tokens[t] for t in shown], _token, columns.STATES, page), *more, BLANK]


def _map(one: Attribution, page: Page) -> list[RenderableType]:
    """Map of where the prediction is formed: a row for the embeddings and for each block, a column per token."""
    found_rows = words.by_token(one)
    rows = dict(zip(["x_0", *map(str, range(len(found_rows) - 1))], found_rows, strict=True))
    largest = max(abs(value) for row in rows.values() for value in row)
    side, count = max(map(len, rows)), len(one.parts.tokens)
    cell = 1 + max(2, len(str(count - 1)))
    room = max(1, (page.width - side) // cell)
    shown = sorted(words.leading((sum(abs(row[t]) for row in rows.values()) for t in range(count)), room))
    cells = {name: "".join(f"{_digit(row[t], largest):>{cell}}" for t in shown) for name, row in rows.items()}
    return [
        heading("Where it is formed: parts by block (row) and token (column), 9 is the largest"),
        note(" " * side + "".join(f"{t:>{cell}}" for t in shown)),
        *(line(f"{name:>{side}}{text}") for name, text in cells.items()),
        *_left_out(count - len(shown), "tokens"),
    ]


def _left_out(count: int, what: str) -> list[RenderableType]:
    return [note(f"{count} {what} with smaller parts: --json has them.")] if count else []


def _digit(value: float, largest: float) -> str:
    """A digit from -9 to +9, relative to the largest; a dot for what rounds to zero."""
    digit = round(9 * value / largest) if largest else 0
    return f"{digit:+d}" if digit else "."


def _bar(value: float, largest: float, width: int, page: Page) -> Text:
    """A bar, to the left for negative values and to the right for positive ones, so that colour is not needed."""
    full = round(width * abs(value) / largest) if largest else 0
    mark = "█" if page.boxes else "#"
    if value < 0:
        return Text(" " * (width - full) + mark * full + "|", style="red")
    return Text(" " * width + "|" + mark * full, style="green")


def _blocks(one: Attribution, page: Page) -> list[RenderableType]:
    """Table of the leading blocks: their UAT terms and biases (total), and their heads and units (direct)."""
    rows = list(zip(*words.by_block(one), strict=True))
    table = page.table()
    table.add_column("block", justify="right", overflow="fold")
    for header in ("UAT terms\ntotal", "biases\ntotal", "heads\ndirect", "UAT terms\ndirect"):
        table.add_column(header, justify="right", overflow="fold")
    for b in sorted(words.leading((max(map(abs, row)) for row in rows), 10)):
        table.add_row(str(b), *map(SIGNED, rows[b]))
    return [heading("Leading blocks"), table]


def _heads(one: Attribution, page: Page) -> list[RenderableType]:
    heads = [one.direct.heads[place] for place in words.leading_heads(one, 10)]
    if not heads:
        return []
    written = f"written straight to the {words.called(one)}"
    return [
        heading(f"Leading heads: {written}, and moved towards it through later blocks"),
        *_table("head", heads, lambda head: f"{head.block}.{head.head}", columns.HEADS, page),
    ]


def _inner(kind: str, parts: Sequence[InnerPart], page: Page) -> list[RenderableType]:
    if not parts:
        return []
    rows = _table(kind.removesuffix("s"), parts, words.place_of, columns.INNER, page)
    return [BLANK, heading(f"Leading {kind}"), *rows]


def _flows(one: Attribution) -> list[RenderableType]:
    """The largest moves of the leading heads, one per line."""
    if not any(flow.moves for flow in one.flows):
        return []
    texts = [cut(token.text) for token in one.parts.tokens]

    def name(position: int) -> str:
        return f"{position} '{texts[position]}'" if position < len(texts) else str(position)

    found: list[RenderableType] = [BLANK, heading("What the leading heads moved, from token to token")]
    for flow in one.flows[:5]:
        for move in flow.moves[:2]:
            what = f"attention {numbers.plain(move.attention)}, value {SIGNED(move.carried)}"
            way = f"{name(move.source)} -> {name(move.target)}"
            found.append(line(f"{flow.block}.{flow.head}  {way}: {SIGNED(move.value)} ({what})"))
    return found


def _measured(one: Attribution, page: Page) -> list[RenderableType]:
    found = one.measured
    if found is None:
        return []
    tables: list[RenderableType] = [BLANK, heading("Taken out for real, one at a time")]
    if found.heads:
        tables += [*_table("head", found.heads, words.place_of, columns.REMOVED_HEADS, page), BLANK]
    if found.neurons:
        tables += [*_table("neuron", found.neurons, words.place_of, columns.REMOVED, page), BLANK]
    if found.tokens:
        tables += _table("token", found.tokens, _token, columns.REMOVED_TOKENS, page)
    agreement = [f"{a.what} {a.rank_correlation:.2f}" for a in found.agreement if a.rank_correlation is not None]
    said = f"lost: {words.lost(one)}; cut: attention to the token; replaced: its embedding by the mean one."
    order = f" Rank correlation with the parts: {'; '.join(agreement)}." if agreement else ""
    skipped = [note(f"Not taken out: {one.what}: {one.why}.") for one in found.skipped]
    through = [note(words.THROUGH_SCORES)] if found.heads else []
    return [*tables, note(said + order), *through, *map(note, words.without_number(found)), *skipped]


def _continuation(found: Continuation, page: Page) -> list[RenderableType]:
    """The text with its leading tokens marked, and the part of each of these in the whole continuation."""
    sources = found.sources
    leading = words.leading((source.value for source in sources), 10)
    marked = set(leading[: max(1, len(sources) // 4)])
    text = Text(overflow="fold")
    for source in sources:
        here = source.position in marked
        text.append(f"[{source.text}]" if here else source.text, style="bold red" if here else "")
    tokens = "".join(token.text for token in found.tokens)
    said = f"logits {numbers.plain(found.logits)}"
    if found.log_probability is not None:
        said = (
            f"log-probability {numbers.plain(found.log_probability)} nats; parts are of its linearisation, "
            f"{SIGNED(found.logits)}, which misses {SIGNED(found.first_order_error)} nats of what is gained over equal "
            "logits"
        )
    return [
        heading(f"prompt {found.prompt}, continued by '{cut(tokens, TARGET)}': {said}"),
        note("[ ] marks the tokens with the largest parts, their own and the UAT terms at them:"),
        text,
        *_table("token", [sources[t] for t in leading], _token, columns.SOURCES, page),
    ]


def _summary(found: Summary, of: str, page: Page) -> list[RenderableType]:
    """Means over all predictions. of: the word for a prediction's number."""
    means = (
        f"mean {of} {numbers.plain(found.logit)}: tokens {SIGNED(found.tokens)}, biases {SIGNED(found.static)}, "
        f"UAT terms {SIGNED(sum(found.units))}, output bias {SIGNED(found.head_bias)}"
    ) + ("" if found.encoder is None else f", encoder {SIGNED(found.encoder)}")
    parts: list[RenderableType] = [heading(f"Over all {found.predictions} predictions"), line(means)]
    for kind, spreads in (("head", found.heads), ("neuron", found.neurons)):
        parts += [BLANK, *_table(kind, spreads, words.place_of, columns.SPREAD, page)] if spreads else []
    return parts


def _overview(report: AttributeReport, page: Page) -> list[RenderableType]:
    """Table with a row per prediction: the leading token and block."""
    several = len(report.prompts) > 1
    rows = []
    for one in report.attribution:
        added = words.added(one)
        (lead,) = words.leading(added, 1)
        unit = max(one.parts.units, key=lambda u: abs(u.value), default=None)
        rows.append(
            (
                (f"{one.prompt}:" if several else "") + ("-" if one.position is None else str(one.position)),
                cut(words.named(one)),
                SIGNED(one.logit),
                numbers.ABSENT if one.rank is None else str(one.rank),
                f"{_token(one.parts.tokens[lead])} {SIGNED(added[lead])}",
                numbers.ABSENT if unit is None else f"{unit.block} {SIGNED(unit.value)}",
            )
        )
    title = f"{len(report.attribution)} predictions; the leading token and block of each, in full with --json"
    table = page.table()
    for header in ("at", "target", words.called(report.attribution[0]), "rank", "token", "block"):
        text = header in ("at", "target", "token", "block")
        table.add_column(header, justify="left" if text else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return [heading(title), table]


def _token(one: TokenPart | RemovedToken | Source) -> str:
    return f"{one.position} '{cut(one.text)}'"


def _table(
    head: str, rows: Sequence[_Row], name: Callable[[_Row], str], shown: Sequence[Column], page: Page
) -> list[Table]:
    """Table with a row per part. head, name: header and text of the first column."""
    return grids(rows, Labels((head,), name, right=False), shown, page)
