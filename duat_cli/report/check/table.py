"""`duat check` as text for a terminal."""

from __future__ import annotations

from rich.console import RenderableType

from duat_cli.report.check import words
from duat_cli.report.tables import facts, numbers
from duat_cli.report.tables.page import BLANK, Page, indented, item, line, note
from duat_cli.results.behaviour import CLASSES
from duat_cli.results.check import CheckReport, Outcome, UndecidedReport
from duat_cli.text import clean, first_of, indices, plural

_STYLES = {"failed": "bold red", "warned": "yellow", "passed": "green", "skipped": "dim"}
_SHOWN = 6  # how many findings of a cause are shown; --all and the JSON have all
_CHANGES = 20


def render_check(report: CheckReport, page: Page) -> str:
    """The report as text: the verdict, what ran and the model's behaviour; each cause with what to do and how much
    follows from it; what was skipped, how many passed, and the verdict with its counts. With `page.every`, all
    findings, effects and passed rules are listed.
    """
    style = "bold green" if report.verdict == "passed" else "bold red"
    return page.render(
        line(f"{facts.named(report.model)}: {report.verdict.upper()}", style),
        *map(line, words.looked_at(report)),
        *_behaviour(report),
        *_causes(report, page.every),
        *([BLANK, *facts.section("warnings", report.warnings, "yellow")] if report.warnings else []),
        *_baseline(report, page.every),
        *_skipped(report),
        *_passed(report, page.every),
        BLANK,
        line(words.verdict(report), style),
    )


def undecided_table(report: UndecidedReport) -> str:
    """Text for a file on why there is no verdict; on a terminal, standard error has it."""
    return f"COULD NOT TELL: {clean(report.error.message)}\n"


def _causes(report: CheckReport, every: bool) -> list[RenderableType]:
    parts: list[RenderableType] = []
    said: list[str] = []
    for cause in report.causes:
        found = words.own(report, cause)
        parts += [BLANK, line(words.heading(cause), _STYLES[cause.status])]
        if len(found) > 1 and cause.id in ("weights", "forward"):
            parts.append(indented(line(cause.message)))
        parts += _places(found, every)
        parts += [indented(note(text)) for text in words.advice(found) if text not in said]
        said = words.advice(found)
        if cause.folded:
            hint = "" if every else "; --all lists them"
            parts.append(indented(line(f"{cause.folded}{hint}")))
            parts += _places(words.effects(report, cause), every) if every else []
    return parts


def _places(found: list[Outcome], every: bool) -> list[RenderableType]:
    """The first places of a cause, and how many more there are."""
    parts: list[RenderableType] = []
    shown = found if every else found[:_SHOWN]
    for outcome in shown:
        block = f"block {outcome.block}: " if outcome.block is not None else ""
        parts.append(item(f"{block}{outcome.message} {words.limit(outcome)}"))
    rest = found[len(shown) :]
    if rest:
        blocks = sorted({o.block for o in rest if o.block is not None})
        where = f", in {indices('block', blocks)}" if blocks else ""
        parts.append(item(f"and {len(rest)} more{where}; --all lists them"))
    return parts


def _skipped(report: CheckReport) -> list[RenderableType]:
    found = words.unmeasured(report)
    lines = [item(f"{', '.join(rules)}: {why}") for why, rules in found.items()]
    return [BLANK, line("skipped", _STYLES["skipped"]), *lines] if lines else []


def _passed(report: CheckReport, every: bool) -> list[RenderableType]:
    found = [o for o in report.outcomes if o.status == "passed"]
    if not found:
        return []
    if not every:
        return [BLANK, line(f"passed: {plural(len(found), 'rule')}; --all lists them", _STYLES["passed"])]
    clear = [o.rule for o in found if o.measured == 0 and o.high == 0]
    rest = [item(f"{o.rule}: {words.without_findings(o)}") for o in found if o.rule not in clear]
    rest += [item(f"nothing found: {', '.join(words.whole(clear, report, 'passed'))}")] if clear else []
    return [BLANK, line("passed", _STYLES["passed"]), *rest]


def _behaviour(report: CheckReport) -> list[RenderableType]:
    """Lines on the model's predictions."""
    found = report.behaviour
    if found is None:
        return []
    texts = []
    if found.loss_per_token is not None:
        what = "pseudo-loss" if found.predicts == "masked token" else "loss"
        by_byte = f", {found.loss_per_byte:.3g} per byte" if found.loss_per_byte is not None else ""
        nulls = f"uniform {numbers.plain(found.uniform)}, the prompts' own unigram {numbers.plain(found.unigram)}"
        scored = plural(found.scored, "token")
        texts.append(f"{what} on {scored}: {found.loss_per_token:.3g} nats per token{by_byte} ({nulls})")
    unit, what = ("", "classes") if found.predicts in CLASSES else (" per token", "tokens")
    if found.entropy is not None and found.never_predicted is not None:
        texts.append(
            f"logits: entropy {found.entropy:.3g} nats{unit}, range {numbers.plain(found.logit_range)}; "
            f"{found.never_predicted:.0%} of {found.vocabulary:,} {what} never above 1/{found.vocabulary:,}"
        )
    if found.predicts == "embedding":
        why = found.reasons.get("loss_per_token", "no head over its tokens")
        texts.append(f"{why}: its embeddings are what a baseline holds")
    if found.agreement is not None:
        ties = f", counting {plural(found.near_ties, 'near tie')} that turned" if found.near_ties else ""
        apart = "" if found.kl is None else f"; KL of the classes {numbers.plain(found.kl)} nats"
        texts.append(f"{found.agreement:.1%} of the baseline's predictions are the same{ties}{apart}")
    if found.cosine is not None:
        error = f"standard error {found.cosine_error:.1g}"
        texts.append(f"cosine to the baseline's embeddings (means over tokens) {found.cosine:.6g}, {error}")
    if found.tuned is not None and found.tuned.loss_per_token is not None:
        texts.append(f"with the adapter: loss {found.tuned.loss_per_token:.3g} nats per token")
    return [BLANK, line("behaviour"), *map(item, texts)]


def _baseline(report: CheckReport, every: bool) -> list[RenderableType]:
    found = report.baseline
    if found is None:
        return []
    changes = [f"{c.key}: {c.old or 'absent'} -> {c.new or 'gone'}" for c in found.changes]
    shown = changes if every else first_of(changes, _CHANGES, "more; --all lists them")
    why = "; a check failed" if found.status == "not written" else ""
    return [BLANK, line(words.against(found) + why), *map(item, shown)]
