"""The forms that `duat check` has, by name."""

from __future__ import annotations

from collections.abc import Callable

from duat_cli.report.check.github import render_github, undecided_github
from duat_cli.report.check.junit import render_junit, undecided_junit
from duat_cli.report.check.markdown import render_markdown, undecided_markdown
from duat_cli.report.check.sarif import render_sarif, undecided_sarif
from duat_cli.report.check.table import render_check, undecided_table
from duat_cli.report.forms.eval_results import render_eval_results, undecided_eval_results
from duat_cli.report.forms.model_card import model_card, undecided_model_card
from duat_cli.report.json import to_json
from duat_cli.report.tables.page import Page
from duat_cli.results.check import CheckReport, UndecidedReport


def render(report: CheckReport, form: str, page: Page, every: bool = False) -> str:
    """The report as text in one of the forms. page: of the table; every: table and Markdown leave no finding out."""
    forms: dict[str, Callable[[], str]] = {
        "table": lambda: render_check(report, page, every),
        "json": lambda: to_json(report),
        "junit": lambda: render_junit(report),
        "github": lambda: render_github(report),
        "markdown": lambda: render_markdown(report, every),
        "sarif": lambda: render_sarif(report),
        "eval-results": lambda: render_eval_results(report),
        "model-card": lambda: model_card(report),
    }
    return forms[form]()


_UNDECIDED: dict[str, Callable[[UndecidedReport], str]] = {
    "table": undecided_table,
    "json": to_json,
    "junit": undecided_junit,
    "github": undecided_github,
    "markdown": undecided_markdown,
    "sarif": undecided_sarif,
    "eval-results": undecided_eval_results,
    "model-card": undecided_model_card,
}


def render_undecided(report: UndecidedReport, form: str) -> str:
    """What each form has for a run without a verdict."""
    return _UNDECIDED[form](report)
