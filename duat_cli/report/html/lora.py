"""The page of `duat lora-diff`: how much each module changes, and the effects on prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from duat_cli.report.html.drawing import marks
from duat_cli.report.html.drawing.blocks import meanings, parts_of_cross, stacked, table_of_blocks
from duat_cli.report.html.drawing.cells import layer_map, place_of
from duat_cli.report.html.drawing.figure import Figure, Sheet, Verdict, loaded, noted, skipped, tiles_of
from duat_cli.report.html.drawing.plot import Axis, Plot, diagonal, dotted
from duat_cli.report.html.drawing.scales import Linear, Log
from duat_cli.report.html.drawing.table import Head, Table, table_by, table_of
from duat_cli.report.tables import lora, numbers
from duat_cli.report.tables.grid import Column, on_page, value_at
from duat_cli.report.tables.lora import (
    BLOCK_COLUMNS,
    COMPARED_KIND_COLUMNS,
    CROSS_COLUMNS,
    KIND_COLUMNS,
    MODULE_COLUMNS,
    PROMPT_COLUMNS,
)
from duat_cli.results.lora import LoraReport
from duat_cli.results.prompts import all_prompts
from duat_cli.results.weight_change import KindChange, KindComparison, ModuleChange, ModuleComparison
from duat_cli.text import plural

_TILES = (
    Column(("change of the weights", "%"), "summary.relative_frobenius", numbers.percent),
    Column(("its norm", "of dW"), "summary.frobenius_norm", numbers.plain),
    Column(("KL of the prediction", "nats"), "summary.kl", numbers.plain),
    Column(("loss", "nats a token"), "summary.loss_change", numbers.SIGNED),
)
_PARTS = (
    ("operator.routing", "s1", "routing: what attention looks at"),
    ("operator.weights", "s2", "weights: what it carries"),
    ("operator.interaction", "s3", "interaction of both"),
)
_WHOLE = (("operator.relative_change", "s4", "the whole change"),)
_BLOCK = (
    *on_page(BLOCK_COLUMNS),
    Column(("certificate, base", "relative"), "base_certificate", numbers.error),
    Column(("certificate, tuned", "relative"), "tuned_certificate", numbers.error),
)
_MODULE = (
    *MODULE_COLUMNS,
    Column(("numerical rank", "directions"), "numerical_rank", numbers.whole),
    Column(("90 % of the energy", "directions"), "energy_rank_90", numbers.whole),
    Column(("rounding alone", "of dW"), "rounding.floor", numbers.plain),
    Column(("looked at", "vectors"), "intruders.k", numbers.whole),
    Column(("alignment, input", "%"), "alignment.input", numbers.percent),
    Column(("null: random", "%"), "alignment.input_random", numbers.percent),
)
_NORMS = on_page(_MODULE, "frobenius_norm", "relative_frobenius", "spectral_norm", "sup_local")
_RANKS = on_page(
    _MODULE, "rank", "numerical_rank", "stable_rank", "entropy_rank", "energy_rank_90", "spectral_norm",
    "rounding.floor", "rounding.rank_above_floor",
)  # fmt: skip
_INTRUDERS = on_page(
    _MODULE, "intruders.output", "intruders.input", "intruders.k", "alignment.output", "alignment.output_random",
    "alignment.input", "alignment.input_random",
)  # fmt: skip
_COMPARISON = (
    Column(("cosine", "-1 to 1"), "cosine", numbers.SIGNED),
    Column(("distance", "of dW"), "distance", numbers.plain),
    Column(("relative distance", "0-1"), "relative_distance", numbers.plain),
)
_LINES = 80  # most modules in a plot, those with the largest relative change


def lora_sheet(report: LoraReport, beside: Sequence[LoraReport]) -> Sheet:
    both = report.comparison
    first, second = ("", "") if both is None else (f": {report.tuned}", f": {both.other}")
    figures = [
        _kinds(report.kinds, "kinds", first),
        _operator(report, beside),
        _cross(report, beside),
        _prompts(report, beside),
        _eq18(report),
        *_changes(report.modules, "modules", first),
        _compared(report),
        _kinds(report.other_kinds or [], "other_kinds", second),
        *_changes(report.other_modules or [], "other_modules", second),
        _lint(report),
    ]
    return Sheet(
        command=report.command,
        name=f"{report.base} and {report.tuned}",
        facts=_facts(report),
        verdict=_verdict(report),
        tiles=tiles_of(report, _TILES),
        lists=[
            ("Notable", report.summary.notable),
            skipped(report.skipped),
            ("Warnings", report.warnings),
            ("Held and not changed", report.unchanged),
            ("Not in the base", report.added),
            ("Only in the base", report.removed),
        ],
        figures=[figure for figure in figures if figure is not None],
    )


def _facts(report: LoraReport) -> list[str]:
    what = "checked only" if report.summary.changed is None else lora.changed(report)
    what += f", {len(report.reshaped)} of another shape, not compared" if report.reshaped else ""
    found = [f"{report.mode}: {lora.method(report)} on {report.dtype} weights, {what}"]
    if report.model is not None and report.environment is not None and report.prompts is not None:
        found += loaded(report.model, report.environment, all_prompts(report))
    return found


def _verdict(report: LoraReport) -> Verdict | None:
    """The verdict from the certificates of both models and the errors of the linter."""
    errors = [finding for finding in report.lint if finding.level == "error"]
    lint = f"; {plural(len(errors), 'error')} of the linter" if errors else ""
    both = [c for c in (report.certificate, report.tuned_certificate) if c is not None]
    if not both:
        return Verdict("bad", "ERRORS", lint.removeprefix("; ")) if errors else None
    worst = max(max(c.relative_error, c.plain_error) for c in both)
    text = f"largest relative error {numbers.error(worst)}, of the base and of the tuned model{lint}"
    if all(c.exact for c in both) and not errors:
        return Verdict("good", "exact", text)
    return Verdict("bad", "ERRORS" if all(c.exact for c in both) else "NOT EXACT", text)


def _operator(report: LoraReport, beside: Sequence[LoraReport]) -> Figure | None:
    if not report.blocks or all(block.operator.relative_change is None for block in report.blocks):
        return None
    every = [block for other in beside for block in other.blocks or []]
    about = "Stacked bars over blocks: routing, weights, interaction."
    return Figure(
        key="operator",
        title="What changed W' of each block: routing, weights, and both together",
        says="The three add up to the change as matrices. Their norms, stacked here, need not: the point is the norm "
        "of the whole change, and it lies below the bar where parts cancel.",
        picture=stacked(report.blocks, every, _PARTS, "change (% of W' of the base)", about, _WHOLE),
        tables=[table_of_blocks(report.blocks, _BLOCK)],
        terms=["blocks[].operator.relative_change", *(f"blocks[].{path}" for path, _, _ in _PARTS)],
        legend=[*meanings("bar", _PARTS), *meanings("dot", _WHOLE)],
    )


def _cross(report: LoraReport, beside: Sequence[LoraReport]) -> Figure | None:
    known = [block for block in report.blocks or [] if block.cross and block.cross.relative_change is not None]
    if not known:
        return None
    parts, whole = parts_of_cross(_PARTS), parts_of_cross(_WHOLE)
    every = [block for other in beside for block in other.blocks or [] if block.cross is not None]
    about = "Stacked bars over blocks: routing, weights, interaction of cross-attention."
    return Figure(
        key="cross",
        title="What changed W'_c of each block: what the decoder reads of the encoder",
        says="As for W', of cross-attention. A change of the encoder's states themselves is no part of it.",
        picture=stacked(known, every, parts, "change (% of W'_c of the base)", about, whole),
        tables=[table_of_blocks(known, on_page(CROSS_COLUMNS))],
        terms=["blocks[].cross.relative_change"],
        legend=[*meanings("bar", parts), *meanings("dot", whole)],
    )


def _prompts(report: LoraReport, beside: Sequence[LoraReport]) -> Figure | None:
    if not report.by_prompt:
        return None
    rows = report.by_prompt
    losses = [v for other in beside for p in other.by_prompt or [] for v in (p.loss_base, p.loss_tuned)]
    scale = Linear.over(losses, zero=False)
    plot = Plot(Axis("loss of the base (nats a token)", scale), Axis("loss, tuned (nats a token)", scale), 500, 330)
    drawn = [diagonal(plot, "the same loss")]
    for row in rows:
        if row.loss_base is not None and row.loss_tuned is not None:
            said = f"prompt {row.prompt}: {numbers.plain(row.loss_base)}, tuned {numbers.plain(row.loss_tuned)}"
            drawn.append(marks.dot(plot.x(row.loss_base), plot.y(row.loss_tuned), "s1", said))
    return Figure(
        key="prompts",
        half=True,
        title="What it does to the loss, prompt by prompt",
        says="Below the dashed line the tuned model is better.",
        picture=plot.svg(drawn, "A point for each prompt: loss of the base and of the tuned model."),
        tables=[table_of(rows, Head("prompt"), lambda one: str(one.prompt), on_page(PROMPT_COLUMNS), "by_prompt[]")],
        terms=["by_prompt[].kl", "by_prompt[].loss_base", "by_prompt[].loss_tuned", "by_prompt[].output"],
    )


def _eq18(report: LoraReport) -> Figure | None:
    found = report.eq18
    if found is None:
        return None
    word = {True: "holds", False: "does NOT hold", None: "was not tested"}[found.holds]
    rows = [
        ["the sum", numbers.error(found.relative_error), numbers.error(found.tolerance)],
        ["the change alone", numbers.error(found.change_error), numbers.error(found.change_tolerance)],
    ]
    return Figure(
        key="eq18",
        half=True,
        title=f"Eq. 18, in the FFNs' linear layers: {word}",
        says=f"{found.statement}. Tested on up to {plural(found.inputs, 'input')} a layer.",
        tables=[Table([Head("what", number=False), Head("error", "relative"), Head("tolerance", "relative")], rows)],
        terms=["eq18", "eq18.relative_error", "eq18.change_error"],
        notes=[
            *([f"It fails of {', '.join(found.failed)}."] if found.failed else []),
            *(f"{one.what} was not tested: {one.why}." for one in found.not_covered),
        ],
    )


def _changes(modules: Sequence[ModuleChange], place: str, whose: str) -> list[Figure | None]:
    """Figures on the changes. place: path of the modules in the report; whose: words for the adapter; '' if alone."""
    return [figure(modules, place, whose) for figure in (_norms, _spectra, _intruders)]


def _kinds(kinds: Sequence[KindChange], place: str, whose: str) -> Figure | None:
    """A table of the kinds of weights. place, whose: as for `_changes`."""
    if not kinds:
        return None
    return Figure(
        key=f"by{place}",
        title=f"How much each kind of weight changes{whose}",
        says="All parameters of one kind together, and of single ones the least and the most.",
        tables=[_table_of_kinds(kinds, KIND_COLUMNS, place)],
        terms=[f"{place}[].share", f"{place}[].relative", f"{place}[].rank_limit"],
    )


def _norms(modules: Sequence[ModuleChange], place: str, whose: str) -> Figure | None:
    """A map of |dW| / |W|."""
    values = _by_place(modules, "relative_frobenius")
    if not values:
        return None
    picture, left_out = layer_map({key: 100 * value for key, value in values.items()}, "change of the weight in %")
    return Figure(
        key=f"norms{place}",
        title=f"How much each weight changes, by block{whose}",
        says="|dW|_F / |W|_F in per cent. An empty cell is not in the change.",
        picture=picture,
        tables=[_table(modules, _NORMS, place)],
        terms=[f"{place}[].relative_frobenius", f"{place}[].frobenius_norm", f"{place}[].sup_local"],
        notes=noted(left_out, "kinds that change less are in the table."),
    )


def _spectra(modules: Sequence[ModuleChange], place: str, whose: str) -> Figure | None:
    values = {i: m.singular_values for i, m in enumerate(modules) if m.singular_values and m.singular_values[0] > 0}
    if not values:
        return None
    kept = sorted(values, key=lambda i: -(modules[i].relative_frobenius or 0.0))[:_LINES]
    kind_of = {i: place_of(modules[i].whole_name)[0] for i in kept}
    kinds = list(dict.fromkeys(kind_of.values()))
    series = {kind: marks.SERIES[min(n, len(marks.SERIES) - 1)] for n, kind in enumerate(kinds)}
    ratios = {i: [value / values[i][0] for value in values[i] if value > 0] for i in kept}
    longest = max(map(len, ratios.values()))
    plot = Plot(
        Axis("number of the singular value", Linear(1, max(longest, 2), count=min(8, max(1, longest - 1)))),
        Axis("share of the largest", Log.over(v for values in ratios.values() for v in values)),
        height=320,
    )
    drawn = []
    for i in reversed(kept):
        said = f"{modules[i].whole_name}, value"
        points = [(k, v, f"{said} {k}: {v:.3g} of the largest") for k, v in enumerate(ratios[i], 1)]
        drawn += dotted(plot, points, series[kind_of[i]], size=2.5)
    named = [("line", series[kind], kind) for kind in kinds[: len(marks.SERIES) - 1]]
    if len(kinds) >= len(marks.SERIES):
        named.append(("line", marks.SERIES[-1], f"{len(kinds) - len(named)} further kinds"))
    return Figure(
        key=f"spectra{place}",
        title=f"How fast the singular values of each change fall{whose}",
        says="Each over the largest of its module: a line that falls at once is a change of one direction.",
        picture=plot.svg(drawn, "Falling lines of singular values, one for each module."),
        tables=[_table(modules, _RANKS, place), _values({i: values[i] for i in kept}, modules, place)],
        terms=[f"{place}[].singular_values", f"{place}[].stable_rank", f"{place}[].numerical_rank"],
        legend=named,
        notes=noted(len(values) - len(kept), "modules that change less are in the tables."),
    )


def _values(values: Mapping[int, Sequence[float]], modules: Sequence[ModuleChange], place: str) -> Table:
    """A table of singular values. values: of each module, by the module's number."""
    longest = max(map(len, values.values()))
    heads = [Head(f"value {k + 1}", "of dW", f"singular_values.{k}") for k in range(longest)]
    return Table(
        heads=[Head("parameter", number=False), *heads],
        rows=[
            [modules[i].whole_name, *map(numbers.plain, found), *[""] * (longest - len(found))]
            for i, found in values.items()
        ],
        place=f"{place}[].",
        at=[f"{place}.{i}" for i in values],
    )


def _intruders(modules: Sequence[ModuleChange], place: str, whose: str) -> Figure | None:
    values = _by_place(modules, "intruders.output")
    if not values:
        return None
    picture, _ = layer_map(values, "intruders on the output side", form=numbers.whole)
    epsilon = next(m.intruders.epsilon for m in modules if m.intruders is not None)
    return Figure(
        key=f"intruders{place}",
        title=f"Intruder dimensions, by block{whose}",
        says="How many leading singular vectors of the tuned weight, on the output side, resemble none of the base "
        f"weight (|cosine| below {epsilon:g}). An empty cell is not in the change, or was not settled.",
        picture=picture,
        tables=[_table(modules, _INTRUDERS, place)],
        terms=[f"{place}[].intruders.output", f"{place}[].alignment.output", f"{place}[].alignment"],
    )


def _by_place(rows: Sequence[ModuleChange | ModuleComparison], path: str) -> dict[tuple[str, int | None], float]:
    """A number of each parameter that has one, by kind and layer."""
    return {place_of(row.whole_name): value for row in rows if (value := value_at(row, path)) is not None}


def _table(rows: Sequence[ModuleChange | ModuleComparison], columns: Sequence[Column], place: str) -> Table:
    return table_of(rows, Head("parameter", number=False), lambda one: one.whole_name, columns, f"{place}[]")


def _table_of_kinds(kinds: Sequence[KindChange | KindComparison], columns: Sequence[Column], place: str) -> Table:
    return table_of(kinds, Head("kind", number=False), lambda one: one.name, on_page(columns), f"{place}[]")


def _compared(report: LoraReport) -> Figure | None:
    if report.comparison is None:
        return None
    rows, kinds = report.comparison.modules, report.comparison.kinds
    picture, _ = layer_map(_by_place(rows, "cosine"), "cosine", signed=True)
    only = [
        f"Only the {word} changes: {', '.join(names)}."
        for word, names in (("first", report.comparison.only_first), ("second", report.comparison.only_second))
        if names
    ]
    return Figure(
        key="compared",
        title="Whether the two adapters change weights in the same direction",
        says=f"Cosine of the two changes of each weight, the first being {report.tuned}, the second "
        f"{report.comparison.other}; all together {numbers.plain(report.comparison.cosine)}. A dash: opposed.",
        picture=picture,
        tables=[
            *([_table_of_kinds(kinds, COMPARED_KIND_COLUMNS, "comparison.kinds")] if kinds else []),
            _table(rows, _COMPARISON, "comparison.modules"),
        ],
        terms=["comparison.modules[].cosine", "comparison.modules[].distance", "comparison.cosine"],
        notes=only,
    )


def _lint(report: LoraReport) -> Figure | None:
    if not report.lint:
        return None
    return Figure(
        key="lint",
        title="What the linter found",
        says="Faults that go wrong in practice.",
        tables=[
            table_by(
                "lint[]",
                report.lint,
                (Head("level", path="level", number=False), lambda one: one.level),
                (Head("rule", path="rule", number=False), lambda one: one.rule),
                (Head("where", path="where", number=False), lambda one: one.where),
                (Head("what", path="message", number=False, long=True), lambda one: one.message),
            )
        ],
        terms=["lint"],
    )
