"""`duat check` as Markdown, for a job's summary or a comment."""

from __future__ import annotations

import re

from duat_cli.report.check import words
from duat_cli.results.check import Cause, CheckReport, UndecidedReport
from duat_cli.text import clean, first_of

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "://": "&#58;//", "www.": "www&#46;"}
_SHOWN = 50  # most causes, or findings of one; GitHub cuts a summary at 1 MB


def render_markdown(report: CheckReport, every: bool) -> str:
    """The report as Markdown: a table of the causes, with the rest folded. every: whether no list is cut."""
    model = report.model
    kind, policy = escaped(model.model_type or "unknown type"), escaped(words.policies(report))
    about = f"{kind}, {model.tensors} tensors; policy: {policy}"
    lines = [f"## duat check: {escaped(model.name)}", "", f"**{escaped(words.verdict(report))}**", "", about, ""]
    if report.causes:
        lines += ["| | rule | where | found | behind it | what to do |", "|---|---|---|---|---|---|"]
        lines += [_row(cause, report) for cause in report.causes[: None if every else _SHOWN]]
        more = 0 if every else len(report.causes) - _SHOWN
        lines += ["", *([f"And {more} more.", ""] if more > 0 else [])]
    if report.warnings:
        lines += ["Warnings:", "", *(f"- {escaped(warning)}" for warning in report.warnings), ""]
    for cause in report.causes:
        lines += _details(cause, report, every)
    rest = [o for o in report.outcomes if o.status in ("passed", "skipped")]
    lines += [f"<details><summary>{len(rest)} without findings</summary>", ""]
    lines += [f"- {o.rule}: passed, {escaped(words.without_findings(o))}" for o in rest if o.status == "passed"]
    lines += [
        f"- {escaped(', '.join(rules))}: skipped, {escaped(why)}" for why, rules in words.unmeasured(report).items()
    ]
    return "\n".join([*lines, "", "</details>"]) + "\n"


def undecided_markdown(report: UndecidedReport) -> str:
    """A heading and a paragraph with the reason why there is no verdict."""
    name, error = escaped(report.model or "the bundled demo"), report.error
    return f"## duat check: {name}\n\n**COULD NOT TELL** (exit code {error.exit_code})\n\n{escaped(error.message)}\n"


def _row(cause: Cause, report: CheckReport) -> str:
    found = words.own(report, cause)
    cells = (
        cause.status,
        ", ".join(cause.rules),
        escaped(words.where(cause) or ""),
        escaped(words.summary(cause.model_copy(update={"folded": None}), found)),
        escaped((cause.folded or "").removeprefix("behind it: ")),
        escaped(" ".join(words.advice(found))),
    )
    return f"| {' | '.join(cells)} |"


def _details(cause: Cause, report: CheckReport, every: bool) -> list[str]:
    """A folded list of a cause's findings, if there are several, and of its effects."""
    listed = words.own(report, cause) if len(cause.findings) > 1 else []
    listed += words.effects(report, cause)
    if not listed:
        return []
    title = f"<details><summary>{', '.join(cause.rules)}: {len(listed)} findings in full</summary>"
    texts = [
        f"{o.rule}{' (behind it)' if o.behind else ''}: {escaped(f'{o.message} {words.limit(o)}')}" for o in listed
    ]
    return [title, "", *(f"- {text}" for text in (texts if every else first_of(texts, _SHOWN))), "", "</details>", ""]


def escaped(text: str) -> str:
    """The text escaped, so that no foreign string makes a link, an image, HTML or a table cell."""
    plain = re.sub(r"([\\`*_{}\[\]()#+!|~])", r"\\\1", clean(text))
    for raw, entity in _ENTITIES.items():
        plain = plain.replace(raw, entity)
    return plain
