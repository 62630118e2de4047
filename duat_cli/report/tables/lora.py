"""`duat lora-diff` as text for a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from duat_cli.grouping import by_key
from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.grid import BLOCK, PROMPT, Column, Labels, filled, fits, of_cross, spaced, unshown
from duat_cli.report.tables.page import BLANK, Page, cut, heading, item, line, note
from duat_cli.results.base import Result
from duat_cli.results.lora import Eq18, LoraReport
from duat_cli.results.prompts import all_prompts
from duat_cli.text import plural, some

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
_METHODS = {
    "LORA": "LoRA",
    "ADALORA": "AdaLoRA",
    "LOHA": "LoHa",
    "LOKR": "LoKr",
    "TRAINABLE_TOKENS": "trainable tokens",
}
_FEW = 8  # up to so many changed parameters are listed one by one
_NAMED = 4  # how many parameters a list names
_LINT_SHOWN = 3


_MODULE = Labels(("module",), lambda row: row.name if row.parameter == "weight" else row.whole_name, False)
_MODULE_COLUMNS = [
    Column(("rank", "stated"), "rank", numbers.whole, ("stated rank", "directions")),
    Column(("norm", "|dW|"), "frobenius_norm", numbers.plain, ("norm of the change", "of dW")),
    Column(("relative", "% of |W|"), "relative_frobenius", numbers.percent, ("relative to the weight", "%")),
    Column(("spectral", "norm", "of dW"), "spectral_norm", numbers.plain),
    Column(("stable", "rank", "dims"), "stable_rank", numbers.plain, ("stable rank", "directions")),
]
_MORE_COLUMNS = [  # optional groups, each shown as a whole or not at all, in this order as far as they fit
    [
        Column(
            ("rank over", "rounding", "dims"),
            "rounding.rank_above_floor",
            numbers.whole,
            ("above rounding", "directions"),
        )
    ],
    [Column(("largest", "effect", "norm"), "sup_local", numbers.plain, ("largest effect", "at one token"))],
    [Column(("entropy", "rank", "dims"), "entropy_rank", numbers.plain, ("entropy rank", "directions"))],
    [
        Column(("intruders", "out", "/10"), "intruders.output", numbers.whole, ("intruders, output side", "vectors")),
        Column(("intruders", "in", "/10"), "intruders.input", numbers.whole, ("intruders, input side", "vectors")),
    ],
    [
        Column(("align.", "out", "%"), "alignment.output", numbers.percent, ("alignment, output", "%")),
        Column(("(random)", "%"), "alignment.output_random", numbers.percent, ("null: random", "%")),
    ],
]
MODULE_COLUMNS = [*_MODULE_COLUMNS, *itertools.chain(*_MORE_COLUMNS)]
_KIND = Labels(("kind",), lambda row: row.name, False)
_KIND_COLUMNS = [
    Column(("param\N{SOFT HYPHEN}", "eters"), "parameters", numbers.whole, ("parameters", "")),
    Column(("share", "of dW", "%"), "share", numbers.percent, ("share of the change", "%")),
    Column(("all", "% of |W|"), "relative", numbers.percent, ("all, relative to the weights", "%")),
    Column(("least", "%"), "relative_least", numbers.percent),
    Column(("most", "%"), "relative_most", numbers.percent),
    Column(("in", "block"), "most_in", numbers.whole, ("most, in block", "")),
]
_MORE_KIND_COLUMNS = [
    [Column(("90 %", "within", "dims"), "energy_rank_90_most", numbers.whole, ("90 % within", "directions"))],
    [Column(("of", "rank", "dims"), "rank_limit", numbers.whole, ("rank, at most", "directions"))],
    [Column(("with", "intruders", "out"), "with_intruders", numbers.whole, ("with intruders", "parameters"))],
]
KIND_COLUMNS = [*_KIND_COLUMNS, *itertools.chain(*_MORE_KIND_COLUMNS)]
_COMPARED_COLUMNS = [
    Column(("cosine", "-1 to 1"), "cosine", numbers.plain),
    Column(("distance", "norm"), "distance", numbers.plain),
    Column(("distance", "0-1"), "relative_distance", numbers.plain),
]
COMPARED_KIND_COLUMNS = [
    Column(("param\N{SOFT HYPHEN}", "eters"), "parameters", numbers.whole, ("parameters", "")),
    Column(("cosine", "of all"), "cosine", numbers.plain, ("cosine of all", "-1 to 1")),
    Column(("least", "of one"), "cosine_least", numbers.plain, ("cosine, least", "-1 to 1")),
    Column(("most", "of one"), "cosine_most", numbers.plain, ("cosine, most", "-1 to 1")),
    Column(("distance", "0-1"), "relative_distance", numbers.plain),
]
BLOCK_COLUMNS = [
    Column(("W'", "%"), "operator.relative_change", numbers.percent, ("change of W'", "%")),
    Column(("routing", "%"), "operator.routing", numbers.percent),
    Column(("weights", "%"), "operator.weights", numbers.percent),
    Column(("inter\N{SOFT HYPHEN}", "action", "%"), "operator.interaction", numbers.percent),
    Column(("FFN", "%"), "terms.ffn", numbers.percent),
    Column(("dynamic", "bias", "%"), "terms.dynamic_bias", numbers.percent),
    Column(("output", "%"), "terms.output", numbers.percent),
    Column(("typical", "token", "%"), "terms.output_token_median", numbers.percent, ("output at a typical token", "%")),
]
CROSS_COLUMNS = [
    Column(("W'_c", "%"), "cross.relative_change", numbers.percent, ("change of W'_c", "%")),
    *of_cross(BLOCK_COLUMNS[1:4]),
]
_SHOWN = 40  # how many prompts are shown at most; the others are in the JSON
_PREDICTED_COLUMNS = [
    Column(("output", "%"), "output", numbers.percent),
    Column(("KL", "nats"), "kl", numbers.plain),
    Column(("loss", "base"), "loss_base", numbers.plain, ("loss, base", "nats")),
    Column(("loss", "tuned"), "loss_tuned", numbers.plain, ("loss, tuned", "nats")),
]
PROMPT_COLUMNS = [
    *_PREDICTED_COLUMNS,
    Column(("tokens of", "answer", ""), "answer.tokens", numbers.whole),
    Column(("answer", "KL", "nats"), "answer.kl", numbers.plain, ("answer, KL", "nats")),
    Column(("answer", "loss", "base"), "answer.loss_base", numbers.plain, ("answer, loss, base", "nats")),
    Column(("answer", "loss", "tuned"), "answer.loss_tuned", numbers.plain, ("answer, loss, tuned", "nats")),
]

_INTRUDERS = (
    "intruders: of 10 leading singular vectors of the tuned weight, those unlike (cosine < 0.5) every one of the base."
)
_DISTANCE = (
    "cosine: of the two changes as vectors. distance: |dW1 - dW2|, and over |dW1| + |dW2|: 0 the same, 1 opposite; two "
    "of one norm that have nothing in common have cosine 0 and distance 0.71."
)

TABLES = {
    "kinds[].": KIND_COLUMNS,
    "modules[].": MODULE_COLUMNS,
    "comparison.modules[].": _COMPARED_COLUMNS,
    "comparison.kinds[].": COMPARED_KIND_COLUMNS,
    "blocks[].": [*BLOCK_COLUMNS, *CROSS_COLUMNS],
    "by_prompt[].": PROMPT_COLUMNS,
}


def render_lora(report: LoraReport, page: Page) -> str:
    """The report as text: what was compared, a row per changed parameter, the linter's findings; and with prompts, a
    row per block and per prompt."""
    return page.render(
        *_head(report),
        *_modules(report, page),
        *_comparison(report, page),
        *_blocks(report, page),
        *_prompts(report, page),
        *_verdict(report),
        *facts.section("notable", [*report.summary.notable, *_next(report)]),
        *_lists(report),
        *_lint(report),
        *facts.remarks(report.skipped, report.warnings),
    )


def _head(report: LoraReport) -> list[RenderableType]:
    second = f" and {report.comparison.other}" if report.comparison else ""
    parts: list[RenderableType] = [heading(f"{report.base} and {report.tuned}{second}")]
    if report.level == "lint":
        return [*parts, line(f"{method(report)} adapter, checked only")]
    summary = report.summary
    what = "fully tuned checkpoint" if report.mode == "checkpoint" else f"{method(report)} adapter"
    size = _norm(summary.frobenius_norm)
    share = "" if summary.relative_frobenius is None else f", {numbers.percent(summary.relative_frobenius)} % of theirs"
    what += facts.quantised(report.tuned_quantised)
    base = f"{report.dtype} weights{facts.quantised(report.base_quantised)}"
    text = f"{what}, on {base}: " if report.tuned_quantised else f"{what} on {base}: "
    text += f"{changed(report)}{size}{share}"
    if report.comparison is not None and report.other_modules is not None:
        norms = [module.frobenius_norm for module in report.other_modules]
        known = [norm for norm in norms if norm is not None]
        whole = math.hypot(*known) if len(known) == len(norms) > 0 else None
        text += f", by {report.tuned}; {plural(len(norms), 'parameter')} changed{_norm(whole)}, by "
        text += report.comparison.other
    text += f"; {len(report.reshaped)} of another shape, not compared" if report.reshaped else ""
    parts.append(line(text))
    if report.prompts is not None and report.environment is not None:
        parts.append(line(facts.ran(all_prompts(report), report.environment)))
    return parts


def method(report: LoraReport) -> str:
    """Name of the method as papers write it, from PEFT's name."""
    return _METHODS.get(report.method, report.method)


def changed(report: LoraReport) -> str:
    """How much changed, as in: 2 parameters changed."""
    count = report.summary.changed or 0
    if count == 0 and report.unchanged:
        return f"none of {plural(len(report.unchanged), 'parameter')} changed"
    return f"{plural(count, 'parameter')} changed"


def _norm(value: float | None) -> str:
    return "" if value is None else f", norm {numbers.plain(value)}"


def _modules(report: LoraReport, page: Page) -> list[RenderableType]:
    """Tables with a row per kind, or per changed parameter if asked for or hardly longer."""
    parts: list[RenderableType] = []
    shown: list[str] = []
    other = report.comparison.other if report.comparison else ""
    sides = ((report.tuned, report.modules, report.kinds), (other, report.other_modules, report.other_kinds))
    for title, modules, kinds in sides:
        if not modules:
            continue
        parts += [BLANK, heading(title)] if report.other_modules else []
        if kinds and _sum_up(modules, kinds, page):
            table, columns = _fitting(kinds, _KIND, _KIND_COLUMNS, _MORE_KIND_COLUMNS, page)
            parts += [*table, note(_for_each(modules, kinds))]
        else:
            table, columns = _fitting(modules, _MODULE, _MODULE_COLUMNS, _MORE_COLUMNS, page)
            parts += table
        shown += [column.path for column in columns]
    if parts:
        parts += [BLANK, *(note(text) for text in _legend(shown))]
    return parts


def _sum_up(each: Sequence[Result], kinds: Sequence[Result], page: Page) -> bool:
    """Whether rows are for kinds instead of parameters."""
    return bool(kinds) and not page.every and len(each) > max(_FEW, len(kinds))


def _for_each(each: Sequence[Result], kinds: Sequence[Result]) -> str:
    return f"{len(each)} parameters in {plural(len(kinds), 'kind')}; --all shows a row for each parameter."


def _fitting(
    rows: Sequence[Result], labels: Labels, columns: Sequence[Column], more: Sequence[Sequence[Column]], page: Page
) -> tuple[list[RenderableType], list[Column]]:
    """A table of the columns and of those optional groups that fit, with notes on columns without room and on empty
    cells; and the columns shown."""
    wanted = filled(rows, columns)
    for group in more:
        known = any(getattr(row, group[0].path.partition(".")[0]) is not None for row in rows)
        if known and fits(rows, labels, [*wanted, *group], page):
            wanted += group
    rest = unshown(rows, [*columns, *itertools.chain(*more)], wanted)
    return [*spaced(rows, labels, wanted, page), *rest, *facts.without_value(rows, labels, wanted)], wanted


def _legend(shown: Sequence[str]) -> list[str]:
    """Texts on what the shown columns mean. shown: their paths."""
    ranks = [
        text
        for path, text in (
            ("rank", "rank: as stated"),
            ("stable_rank", "stable: sum of sigma^2 over the largest"),
            ("entropy_rank", "entropy: exp of the entropy of sigma^2"),
            ("share", "share: of the sum of |dW|^2"),
            ("relative", "all: |dW| of the kind over |W| of what changed in it; least and most: of one parameter"),
            ("energy_rank_90_most", "90 % within: so many directions hold 90 % of the sum of sigma^2 of each"),
        )
        if path in shown
    ]
    meanings = {
        "intruders.output": _INTRUDERS,
        "with_intruders": _INTRUDERS,
        "alignment.output": "align.: share of the change's leading directions inside the base's 10, beside it that of "
        "a random change.",
        "rounding.rank_above_floor": "rank over rounding: singular values above what rounding, of the weights and of"
        " the change, may make (an estimate).",
        "sup_local": "largest effect: the most that the change can add to the module's output, for any input.",
    }
    said = dict.fromkeys(text for path, text in meanings.items() if path in shown)
    return [f"dW: the change. {'; '.join(ranks)}." if ranks else "dW: the change.", *said]


def _comparison(report: LoraReport, page: Page) -> list[RenderableType]:
    found = report.comparison
    if found is None:
        return []
    title = "The two changes, whatever the gauge of their factors"
    shared: list[RenderableType] = [BLANK, heading(title), line("no parameter is changed by both")]
    if _sum_up(found.modules, found.kinds, page):
        said = _for_each(found.modules, found.kinds)
        shared = facts.whole(title, found.kinds, _KIND, COMPARED_KIND_COLUMNS, page, said, _DISTANCE)
    elif found.modules:
        shared = facts.whole(title, found.modules, _MODULE, _COMPARED_COLUMNS, page, _DISTANCE)
    sides = ((report.tuned, found.only_first), (found.other, found.only_second))
    return [*shared, *facts.section("only one", [f"only {name}: {some(only, _NAMED)}" for name, only in sides if only])]


def _blocks(report: LoraReport, page: Page) -> list[RenderableType]:
    if not report.blocks:
        return []
    title = "Blocks: relative changes, means over the prompts"
    legend = (
        "routing (what attention looks at) + weights (what it carries) + interaction add up to the change of W' as "
        "matrices; their norms need not. typical token: change of its output, the median over tokens; one token with "
        "massive activations may make the change of all together."
    )
    table = facts.whole(title, report.blocks, BLOCK, BLOCK_COLUMNS, page, legend)
    reading = [block for block in report.blocks if block.cross is not None]
    title = "Cross-attention: relative changes of W'_c, from the encoder's tokens to the decoder's"
    return [*table, *(facts.whole(title, reading, BLOCK, CROSS_COLUMNS, page) if reading else [])]


def _prompts(report: LoraReport, page: Page) -> list[RenderableType]:
    if report.by_prompt is None:
        return []
    rows = report.by_prompt[:_SHOWN]
    answered = any(row.answer is not None for row in rows)
    columns = PROMPT_COLUMNS if answered else _PREDICTED_COLUMNS
    moved = [
        f"prompt {row.prompt}: "
        + ", ".join(f"{t.position} '{cut(t.text)}' {numbers.plain(t.kl)}" for t in row.moved_tokens)
        for row in rows[:5]
        if any(token.kl for token in row.moved_tokens)
    ]
    return [
        *facts.whole(_prompts_title(report), rows, PROMPT, columns, page),
        *facts.section("tokens whose prediction moved most (KL, nats)", moved),
    ]


def _prompts_title(report: LoraReport) -> str:
    listed = len(report.by_prompt or [])
    shown, count = min(listed, _SHOWN), report.prompt_set.count if report.prompt_set else listed
    more = f" (--json has {listed:,})" if shown < listed else ""
    return f"The {shown:,} of {count:,} prompts that moved most{more}" if shown < count else "Prompts, most moved first"


def _verdict(report: LoraReport) -> list[RenderableType]:
    parts: list[RenderableType] = [BLANK] if report.level != "lint" else []
    for model, certificate in (("base", report.certificate), ("tuned", report.tuned_certificate)):
        if certificate is not None:
            parts.append(Text(f"{model} model: ").append_text(facts.verdict(certificate)))
    return [*parts, *(_eq18(report.eq18) if report.eq18 is not None else [])]


def _eq18(found: Eq18) -> list[RenderableType]:
    """Lines on Eq. 18: whether it holds where it applies, the errors of the test, and changes that act elsewhere."""
    parts: list[RenderableType] = []
    if found.holds is None or found.relative_error is None or found.change_error is None:
        parts.append(line(f"{found.statement}: not tested, {found.reasons['holds']}"))
    else:
        layers = len({name.rpartition(".")[0] for name in (*found.on_second, *found.on_third)})
        errors = f"error {numbers.error(found.relative_error)} of the sum, {numbers.error(found.change_error)} of dW x"
        limits = f"tolerances {found.tolerance:.0e} and {found.change_tolerance:.0e}"
        state = "holds" if found.holds else f"DOES NOT HOLD in {some(found.failed, _NAMED)}"
        text = f"{found.statement}: {state}; {plural(layers, 'layer')}, {errors}, {limits}"
        parts.append(line(text, "green" if found.holds else "bold red"))
    if found.through_attention:
        many = plural(len(found.through_attention), "attention parameter")
        parts.append(note(f"dW of {many} acts through H (queries, keys) and A (values, outputs) instead, see routing "
                          "and weights"))  # fmt: skip
    by_reason = by_key((entry.why, entry.what) for entry in found.not_covered)
    untested = [f"{some(names, _NAMED)}: {why}" for why, names in by_reason.items()]
    return [*parts, *facts.section("Eq. 18 not tested", untested)]


def _next(report: LoraReport) -> list[str]:
    """The command to run next, if only weights were compared."""
    if report.level != "weights" or report.comparison is not None or not report.modules:
        return []
    if report.summary.relative_frobenius is None:
        return []  # the base was not read, or some change has no meaning
    given = "--default-prompts, or --prompts FILE (--image, --audio),"
    return [f"Next: the same command with {given} measures what it does to routing, to FFNs and to the loss."]


def _lists(report: LoraReport) -> list[RenderableType]:
    named = (("unchanged", report.unchanged), ("added", report.added), ("removed", report.removed))
    return [
        part
        for title, names in named
        if names
        for part in facts.section(f"{title}: {plural(len(names), 'parameter')}", [some(names, _NAMED)])
    ]


def _lint(report: LoraReport) -> list[RenderableType]:
    """A few findings for every rule, as a fault in one module is usually in all."""
    if not report.lint:
        return [line("lint: nothing found", "green")] if report.level == "lint" else []
    parts: list[RenderableType] = [heading("lint")]
    for entries in by_key((entry.rule, entry) for entry in report.lint).values():
        style = _STYLES[entries[0].level]
        several = report.mode == "two adapters"
        said = [f"{e.level} {e.rule}: {e.where + ': ' if several else ''}{e.message}" for e in entries[:_LINT_SHOWN]]
        parts += [item(text, style) for text in said]
        more = len(entries) - _LINT_SHOWN
        parts += [item(f"{entries[0].rule}: {more} more", style)] if more > 0 else []
    return parts
