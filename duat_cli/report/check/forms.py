"""The forms that `duat check` has, by name."""

from __future__ import annotations

from duat_cli.report.check.github import render_github
from duat_cli.report.check.junit import render_junit
from duat_cli.report.check.markdown import render_markdown
from duat_cli.report.check.sarif import render_sarif
from duat_cli.report.check.table import render_check
from duat_cli.report.json import to_json
from duat_cli.report.tables.page import Page
from duat_cli.results.check import CheckReport


def render(report: CheckReport, form: str, page: Page) -> str:
    """The report as text in one of the forms; the page matters to the table alone."""
    match form:
        case "table":
            return render_check(report, page)
        case "json":
            return to_json(report)
        case "junit":
            return render_junit(report)
        case "github":
            return render_github(report)
        case "markdown":
            return render_markdown(report)
        case _:
            return render_sarif(report)
