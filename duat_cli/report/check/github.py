"""`duat check` as annotations of GitHub Actions: one workflow command per cause, on standard output.

GitHub shows ten errors and ten warnings of a step, and drops the others silently. So there are at most ten, beginning
with the first causes; the others follow in the log, in a folded group.
"""

from __future__ import annotations

from duat_cli.report.check.words import heading, own, told, verdict, where
from duat_cli.results.check import Cause, CheckReport, UndecidedReport
from duat_cli.text import clean

MOST = 10
_TITLE = "title=duat check"


def render_github(report: CheckReport) -> str:
    """The report as annotations. The verdict is the last, a notice, so that a run without findings has output, too."""
    found = [
        (_annotation(cause, report), f"{heading(cause)}: {told(cause, own(report, cause))}") for cause in report.causes
    ]
    found += [(f"::warning {_TITLE}::{_data(text)}", f"warning: {text}") for text in report.warnings]
    lines = [annotation for annotation, _ in found[:MOST]]
    rest = [text for _, text in found[MOST:]]
    if rest:
        lines += [f"::group::duat check: {len(rest)} more", *map(_logged, rest), "::endgroup::"]
    more = f"; {len(rest)} more in the log of this step" if rest else ""
    return "\n".join([*lines, f"::notice {_TITLE}::{_data(f'{report.model.name}: {verdict(report)}{more}')}"]) + "\n"


def undecided_github(report: UndecidedReport) -> str:
    """An error annotation with the reason why there is no verdict."""
    return f"::error {_TITLE}::{_data(f'could not tell: {report.error.message}')}\n"


def _annotation(cause: Cause, report: CheckReport) -> str:
    kind = "error" if cause.status == "failed" else "warning"
    found = own(report, cause)
    title = ", ".join(filter(None, (*cause.rules, where(cause))))
    at = f"file={_property(found[0].location.file)},line={found[0].location.line},title={_property(title)}"
    return f"::{kind} {at}::{_data(told(cause, found))}"


def _logged(text: str) -> str:
    """A line for the log that is no workflow command; the older form of these may be anywhere in a line."""
    return f"- {clean(text).replace('##[', '## [')}"


def _data(text: str) -> str:
    """The text with GitHub's escapes; line breaks in foreign strings are escaped before."""
    return clean(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
