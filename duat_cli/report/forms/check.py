"""The forms of `duat check`, by name."""

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

_Decided = Callable[[CheckReport, Page], str]
_Undecided = Callable[[UndecidedReport], str]
_FORMS: dict[str, tuple[_Decided, _Undecided]] = {
    "table": (render_check, undecided_table),
    "json": (lambda report, page: to_json(report), to_json),
    "junit": (lambda report, page: render_junit(report), undecided_junit),
    "github": (lambda report, page: render_github(report), undecided_github),
    "markdown": (lambda report, page: render_markdown(report, page.every), undecided_markdown),
    "sarif": (lambda report, page: render_sarif(report), undecided_sarif),
    "eval-results": (lambda report, page: render_eval_results(report), undecided_eval_results),
    "model-card": (lambda report, page: model_card(report), undecided_model_card),
}


def render(report: CheckReport, form: str, page: Page) -> str:
    """The report as text in one of the forms. page: for the table; its `every` also applies to Markdown."""
    return _FORMS[form][0](report, page)


def render_undecided(report: UndecidedReport, form: str) -> str:
    """Text in one of the forms for a run without a verdict."""
    return _FORMS[form][1](report)
