"""What each module changes by: size, spectrum, intruders; and two adapters' changes compared."""

from __future__ import annotations

from collections.abc import Sequence

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.layered import layer_map, place_of
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Linear, Log
from duat_cli.report.html.drawing.series import dotted
from duat_cli.report.html.drawing.table import Head, Table, table_at, table_of
from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column
from duat_cli.results.lora import LoraReport
from duat_cli.results.weight_change import ModuleChange, ModuleComparison

_NORMS = (
    Column(("norm of the change", "of dW"), "frobenius_norm", numbers.plain),
    Column(("relative to the weight", "%"), "relative_frobenius", numbers.percent),
    Column(("spectral norm", "of dW"), "spectral_norm", numbers.plain),
    Column(("largest effect", "at one token"), "sup_local", numbers.plain),
)
_RANKS = (
    Column(("stated rank", "directions"), "rank", numbers.whole),
    Column(("numerical rank", "directions"), "numerical_rank", numbers.whole),
    Column(("stable rank", "directions"), "stable_rank", numbers.plain),
    Column(("entropy rank", "directions"), "entropy_rank", numbers.plain),
    Column(("90 % of the energy", "directions"), "energy_rank_90", numbers.whole),
    Column(("spectral norm", "of dW"), "spectral_norm", numbers.plain),
    Column(("rounding alone", "of dW"), "rounding.floor", numbers.plain),
    Column(("above rounding", "directions"), "rounding.rank_above_floor", numbers.whole),
)
_INTRUDERS = (
    Column(("intruders, output side", "vectors"), "intruders.output", numbers.whole),
    Column(("intruders, input side", "vectors"), "intruders.input", numbers.whole),
    Column(("looked at", "vectors"), "intruders.k", numbers.whole),
    Column(("alignment, output", "%"), "alignment.output", numbers.percent),
    Column(("null: random", "%"), "alignment.output_random", numbers.percent),
    Column(("alignment, input", "%"), "alignment.input", numbers.percent),
    Column(("null: random", "%"), "alignment.input_random", numbers.percent),
)
_COMPARISON = (
    Column(("cosine", "-1 to 1"), "cosine", numbers.signed(numbers.plain)),
    Column(("distance", "of dW"), "distance", numbers.plain),
    Column(("relative distance", "0-1"), "relative_distance", numbers.plain),
)
_LINES = 80  # modules of a plot; those with the largest relative change


def norms(modules: Sequence[ModuleChange], place: str, whose: str) -> Figure | None:
    """A map of |dW| / |W|. place: where the modules stand in the report; whose: of which adapter, '' for the only."""
    values = {place_of(m.whole_name): m.relative_frobenius for m in modules if m.relative_frobenius is not None}
    if not values:
        return None
    picture, left_out = layer_map({key: 100 * value for key, value in values.items()}, "change of the weight in %")
    return Figure(
        key=f"norms{place}",
        wide=True,
        title=f"How much each weight changes, by block{whose}",
        says="|dW|_F / |W|_F in per cent. An empty cell is not in the change.",
        picture=picture,
        tables=[_table(modules, _NORMS, place)],
        terms=[f"{place}[].relative_frobenius", f"{place}[].frobenius_norm", f"{place}[].sup_local"],
        notes=[f"{left_out} kinds that change less are in the table."] if left_out else [],
    )


def spectra(modules: Sequence[ModuleChange], place: str, whose: str) -> Figure | None:
    """Singular values in falling order, a line a module, by kind of module."""
    known = [i for i, m in enumerate(modules) if m.singular_values and m.singular_values[0] > 0]
    if not known:
        return None
    known.sort(key=lambda i: -(modules[i].relative_frobenius or 0.0))
    kept = known[:_LINES]
    kinds = list(dict.fromkeys(place_of(modules[i].whole_name)[0] for i in kept))
    series = {kind: marks.SERIES[min(n, len(marks.SERIES) - 1)] for n, kind in enumerate(kinds)}
    ratios = {i: _ratios(modules[i]) for i in kept}
    longest = max(map(len, ratios.values()))
    plot = Plot(
        Axis("number of the singular value", Linear(1, max(longest, 2), count=min(8, max(1, longest - 1)))),
        Axis("share of the largest", Log.over(v for values in ratios.values() for v in values)),
        height=320,
    )
    drawn = []
    for i in reversed(kept):
        kind = place_of(modules[i].whole_name)[0]
        said = f"{modules[i].whole_name}, value"
        points = [(k, v, f"{said} {k}: {v:.3g} of the largest") for k, v in enumerate(ratios[i], 1)]
        drawn += dotted(plot, points, series[kind], size=2.5)
    named = [("line", series[kind], kind) for kind in kinds[: len(marks.SERIES) - 1]]
    if len(kinds) >= len(marks.SERIES):
        named.append(("line", marks.SERIES[-1], f"{len(kinds) - len(named)} further kinds"))
    left = len(known) - len(kept)
    return Figure(
        key=f"spectra{place}",
        wide=True,
        title=f"How fast the singular values of each change fall{whose}",
        says="Each over the largest of its module: a line that falls at once is a change of one direction.",
        picture=plot.svg(drawn, "Falling lines of singular values, one for each module."),
        tables=[_table(modules, _RANKS, place), _values(modules, kept, place)],
        terms=[f"{place}[].singular_values", f"{place}[].stable_rank", f"{place}[].numerical_rank"],
        legend=named,
        notes=[f"{left} modules that change less are in the tables."] if left else [],
    )


def _table(modules: Sequence[ModuleChange | ModuleComparison], columns: Sequence[Column], place: str) -> Table:
    return table_of(modules, Head("parameter", number=False), lambda m: m.whole_name, columns, f"{place}[]")


def _ratios(module: ModuleChange) -> list[float]:
    values = module.singular_values or []
    return [value / values[0] for value in values if value > 0]


def _values(modules: Sequence[ModuleChange], kept: Sequence[int], place: str) -> Table:
    longest = max(len(modules[i].singular_values or []) for i in kept)
    return table_at(
        f"{place}[]",
        heads=[
            Head("parameter", number=False),
            *(Head(f"value {k + 1}", "of dW", f"singular_values.{k}") for k in range(longest)),
        ],
        rows=[
            [modules[i].whole_name, *(numbers.plain(v) for v in modules[i].singular_values or []),
             *([""] * (longest - len(modules[i].singular_values or [])))]
            for i in kept
        ],
        numbers=kept,
    )  # fmt: skip


def intruders(modules: Sequence[ModuleChange], place: str, whose: str) -> Figure | None:
    """A map of the intruders on the output side; both sides in the table."""
    values = {
        place_of(m.whole_name): float(m.intruders.output)
        for m in modules
        if m.intruders is not None and m.intruders.output is not None
    }
    if not values:
        return None
    picture, _ = layer_map(values, "intruders on the output side", form=numbers.whole)
    epsilon = next(m.intruders.epsilon for m in modules if m.intruders is not None)
    return Figure(
        key=f"intruders{place}",
        wide=True,
        title=f"Intruder dimensions, by block{whose}",
        says="How many leading singular vectors of the tuned weight, on the output side, resemble none of the base "
        f"weight (|cosine| below {epsilon:g}). An empty cell is not in the change, or was not settled.",
        picture=picture,
        tables=[_table(modules, _INTRUDERS, place)],
        terms=[f"{place}[].intruders.output", f"{place}[].alignment.output", f"{place}[].alignment"],
    )


def compared(report: LoraReport) -> Figure | None:
    """Two adapters: the cosine of their changes, module by module."""
    if report.comparison is None:
        return None
    rows = report.comparison.modules
    values = {place_of(m.whole_name): m.cosine for m in rows if m.cosine is not None}
    picture, _ = layer_map(values, "cosine", signed=True)
    only = [
        f"Only the {word} changes: {', '.join(names)}."
        for word, names in (("first", report.comparison.only_first), ("second", report.comparison.only_second))
        if names
    ]
    return Figure(
        key="compared",
        wide=True,
        title="Whether the two adapters change weights in the same direction",
        says=f"Cosine of the two changes of each weight, the first being {report.tuned}, the second "
        f"{report.comparison.other}; all together {numbers.plain(report.comparison.cosine)}. A dash: opposed.",
        picture=picture,
        tables=[_table(rows, _COMPARISON, "comparison.modules")],
        terms=["comparison.modules[].cosine", "comparison.modules[].distance", "comparison.cosine"],
        notes=only,
    )
