"""The forms that `duat check` has, by name."""

from __future__ import annotations

from duat_cli.report.check.github import render_github, undecided_github
from duat_cli.report.check.junit import render_junit, undecided_junit
from duat_cli.report.check.markdown import render_markdown, undecided_markdown
from duat_cli.report.check.sarif import render_sarif, undecided_sarif
from duat_cli.report.check.table import render_check, undecided_table
from duat_cli.report.json import to_json
from duat_cli.report.tables.page import Page
from duat_cli.results.check import CheckReport, UndecidedReport


def render(report: CheckReport, form: str, page: Page, every: bool = False) -> str:
    """The report as text in one of the forms. page: of the table; every: table and Markdown leave no finding out."""
    match form:
        case "table":
            return render_check(report, page, every)
        case "json":
            return to_json(report)
        case "junit":
            return render_junit(report)
        case "github":
            return render_github(report)
        case "markdown":
            return render_markdown(report, every)
        case _:
            return render_sarif(report)


def render_undecided(report: UndecidedReport, form: str) -> str:
    """What each form has for a run without a verdict."""
    match form:
        case "table":
            return undecided_table(report)
        case "json":
            return to_json(report)
        case "junit":
            return undecided_junit(report)
        case "github":
            return undecided_github(report)
        case "markdown":
            return undecided_markdown(report)
        case _:
            return undecided_sarif(report)
