"""Functions that need no model: explanations, schemas, pages of reports, and reports from a folder of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from duat_cli.analysis.progress import Progress
from duat_cli.api.asking import File
from duat_cli.api.ground import heard, load_libraries, undisturbed
from duat_cli.api.results import AttributeResult, ExplainResult, InspectResult, LoraResult, PruneResult
from duat_cli.api.settings import one_of
from duat_cli.results.base import Report
from duat_cli.text import expanded

Merged = InspectResult | AttributeResult | LoraResult | PruneResult


def explanation(name: str | None = None) -> ExplainResult:
    """`duat explain`: what a name in duat's output means, or all of them. InputError names the nearest known one."""
    from duat_cli.explain.find import explain as look_up

    return ExplainResult.of(look_up(name))


def schema(report: str = "inspect") -> dict[str, Any]:
    """`duat schema`: the JSON Schema of a command's report, such as 'lora-diff'."""
    from duat_cli.report.schema import REPORTS, schema_of

    one_of("report", report, sorted(REPORTS))
    return schema_of(report)


def merge(folder: File, *, progress: Progress | None = None) -> Merged:
    """`duat merge`: the report of all prompts whose results a command with --out kept in a folder.

    InputError says what is missing there. The report cannot return operators, as there is no model.
    """
    load_libraries()
    with undisturbed():
        from duat_cli.analysis.clock import Clock
        from duat_cli.analysis.shards.folder import Folder
        from duat_cli.analysis.shards.merge import merge as compute

        report = compute(Folder.read(expanded(folder)), Clock().run, heard(progress))
        return next(result for result in get_args(Merged) if issubclass(result, type(report))).of(report)


def page_of(reports: Sequence[tuple[str | None, Report]]) -> str:
    """The HTML page of some reports, each with the name of the file that it comes from, if any. Reports on the stacks
    of one model are shown side by side."""
    from duat_cli.explain.find import everything
    from duat_cli.report.html.document import document

    known = {}
    for entry in everything():
        if entry.kind == "field":
            for place in entry.where:
                command, _, path = place.partition(": ")
                known[command, path] = entry
    return document([(source, one) for source, report in reports for one in getattr(report, "stacks", [report])], known)
