"""The sheet of `duat plan`."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.figure import Figure, Sheet, Tile, Verdict
from duat_cli.report.html.drawing.plot import Axis, Plot, level, stack
from duat_cli.report.html.drawing.scales import Band, Linear
from duat_cli.report.html.drawing.table import Head, Table, table_by
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column
from duat_cli.results.plan import PlanReport, Way
from duat_cli.text import about, plural

_NAMED = len(marks.SERIES) - 1  # how many terms have a series of their own; the last series is for all others
_ROOM = 3.0  # the limit is drawn if it is below this many times the higher bar


def plan_sheet(report: PlanReport, beside: Sequence[PlanReport]) -> Sheet:
    """The sheet of a plan. beside: all plans on the page, including this one, which share their axis and unit."""
    unit = numbers.unit_of(max(way.peak_memory_bytes for one in beside for way in one.ways))
    figures = [_peaks(report, beside, unit), _weights(report)]
    return Sheet(
        command=report.command,
        name=f"{report.name}, {report.planned_command}",
        facts=_facts(report),
        verdict=_verdict(report),
        tiles=_tiles(report),
        lists=[("Warnings", report.warnings)],
        figures=figures,
    )


def _in(unit: str, size: float) -> float:
    return size / numbers.UNITS[unit]


def _facts(report: PlanReport) -> list[str]:
    counts, blocks = report.prompt_tokens, plural(report.weights.blocks, "block")
    return [
        f"{report.planned_command} of {plural(len(counts), 'prompt')}, {plural(sum(counts), 'token')}, "
        f"as {report.dtype}",
        f"{blocks}; {numbers.count(report.operations)} operations in the blocks, statistics of W' on top",
    ]


def _verdict(report: PlanReport) -> Verdict:
    if report.chosen is None:
        return Verdict("bad", "cannot run", report.reason or "")
    limit = numbers.size(report.limit_bytes)
    return Verdict("good", "fits", f"{report.planned_command} runs {report.chosen}; {limit} may be taken")


def _tiles(report: PlanReport) -> list[Tile]:
    found = [
        _tile(f"peak, {way.weights}", way.peak_memory_bytes, f"ways.{number}.peak_memory_bytes")
        for number, way in enumerate(report.ways)
    ]
    return [
        *found,
        _tile("limit", report.limit_bytes, "limit_bytes"),
        _tile("weights in the files", report.weights.stored_bytes, "weights.stored_bytes"),
    ]


def _tile(name: str, size: int, path: str) -> Tile:
    unit = numbers.unit_of(size)
    return Tile(name, numbers.plain(_in(unit, size)), unit, path)


def _peaks(report: PlanReport, beside: Sequence[PlanReport], unit: str) -> Figure:
    highest = max(way.peak_memory_bytes for one in beside for way in one.ways)
    limits = [one.limit_bytes for one in beside if one.limit_bytes <= _ROOM * highest]
    plot = Plot(
        Axis("where the weights are", Band([way.weights for way in report.ways])),
        Axis(f"memory at the peak ({unit})", Linear.over([_in(unit, size) for size in (highest, *limits)])),
        width=700,
        height=330,
    )
    named = _largest_terms(report.ways)
    series = dict(zip(named, marks.SERIES, strict=False))
    other = marks.SERIES[_NAMED]
    drawn = []
    for place, way in enumerate(report.ways):
        sizes = {term.what: term.bytes for term in way.terms}
        parts = [(name, sizes[name], series[name]) for name in named if name in sizes]
        rest = sum(size for name, size in sizes.items() if name not in series)
        parts += [("all other terms", rest, other)] if rest else []
        drawn += stack(
            plot,
            place,
            [(_in(unit, size), s, f"{way.weights}, {name}: {numbers.size(size)}") for name, size, s in parts],
        )
    entries = [("bar", series[name], name) for name in named]
    if any(term.what not in series for way in report.ways for term in way.terms):
        entries.append(("bar", other, "all other terms"))
    notes, limit = [], report.limit_bytes
    if limit in limits:
        drawn.append(level(plot, _in(unit, limit), f"limit: {numbers.size(limit)}"))
        entries.append(("rule", "s1", f"limit, {numbers.size(limit)}"))
    else:
        notes = [f"The limit, {numbers.size(limit)}, lies far above the bars."]
    return Figure(
        key="peaks",
        title="What the command takes at its peak, with all weights in memory and block by block",
        says="Estimates from the files' headers alone. The first way that ends below the limit is taken.",
        picture=plot.svg(drawn, "A stacked bar for each way to hold the weights, and the limit."),
        tables=[_ways(report, unit), *(_terms(way, number, unit) for number, way in enumerate(report.ways))],
        terms=["ways[].peak_memory_bytes", "ways[].terms", "ways[].weights", "limit_bytes", "ways[].weight_reads"],
        legend=entries,
        notes=notes,
    )


def _largest_terms(ways: Sequence[Way]) -> list[str]:
    """The terms with the most bytes in any way, largest first, as many as get a series."""
    most: dict[str, int] = {}
    for way in ways:
        for term in way.terms:
            most[term.what] = max(most.get(term.what, 0), term.bytes)
    return sorted(most, key=lambda what: -most[what])[:_NAMED]


def _ways(report: PlanReport, unit: str) -> Table:
    def took(way: Way) -> str:
        return numbers.ABSENT if way.seconds is None else about(way.seconds)

    timed = any(way.seconds is not None for way in report.ways)
    return table_by(
        "ways[]",
        report.ways,
        (Head("weights", number=False), lambda way: way.weights),
        _size("peak", unit, "peak_memory_bytes"),
        Column(("the weights are read", "times"), "weight_reads", numbers.plain),
        (Head("fits", number=False), lambda way: "yes" if way.fits else "no"),
        *([(Head("time", number=False), took)] if timed else []),
    )


def _terms(way: Way, number: int, unit: str) -> Table:
    head = Head(f"{way.weights}: what takes it", number=False)
    return table_by(f"ways.{number}.terms[]", way.terms, (head, lambda term: term.what), _size("memory", unit, "bytes"))


def _size(name: str, unit: str, path: str) -> Column:
    """A column of bytes in a unit."""
    return Column((name, unit), path, lambda size: numbers.plain(size and _in(unit, size)))


def _weights(report: PlanReport) -> Figure:
    """Tables on all weights, and on the largest block and large layers, with a row each."""
    weights, unit = report.weights, numbers.unit_of(report.weights.bytes)
    parts = [("largest_block", weights.largest_block)] if weights.largest_block is not None else []
    parts += [(f"layers.{number}", layer) for number, layer in enumerate(weights.layers)]
    sizes = [_size("stored", unit, "stored_bytes"), _size(f"as {report.dtype}", unit, "bytes")]
    whole = table_by(
        "weights",
        [weights],
        (Head("all weights", number=False), lambda _: "all"),
        *sizes,
        _size("outside of blocks and large layers", unit, "frame_bytes"),
    )
    single = Table(
        heads=[Head("module", path="name", number=False), *(Head(c.name, unit, c.path) for c in sizes)],
        rows=[[part.name, *(column.cell(part) for column in sizes)] for _, part in parts],
        place="weights.layers[].",
        at=[f"weights.{at}" for at, _ in parts],
    )
    return Figure(
        key="weights",
        title="How large the weights are: all, the largest block, large layers outside of the blocks",
        says="From the headers of the files. Streamed, one block is in memory, and the next one as it is stored.",
        tables=[whole, single],
        terms=["weights.largest_block", "weights.layers"],
    )
