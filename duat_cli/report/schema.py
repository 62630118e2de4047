"""The JSON Schema of the reports."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from duat_cli.results.attribute import AttributeReport
from duat_cli.results.base import Report
from duat_cli.results.check import CheckReport, UndecidedReport
from duat_cli.results.compare.report import CompareReport
from duat_cli.results.explained.report import ExplainReport
from duat_cli.results.inspect import InspectReport, InspectStacks, VerifyReport, VerifyStacks
from duat_cli.results.lora import LoraReport
from duat_cli.results.matrix import MatrixReport, NetworkReport
from duat_cli.results.plan import PlanReport
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.support import SupportReport

_KINDS = (
    AttributeReport, CheckReport, CompareReport, InspectReport, LoraReport, MatrixReport, NetworkReport, PlanReport,
    PruneReport, VerifyReport, SupportReport, ExplainReport,
)  # fmt: skip
REPORTS: dict[str, type[Report]] = {kind.model_fields["command"].default: kind for kind in _KINDS}
STACKS: dict[str, type[Report]] = {"inspect": InspectStacks, "verify": VerifyStacks}
"""Reports with --stack all."""
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema_of(command: str) -> dict[str, Any]:
    """The schema that every JSON report of a command satisfies. For check, `verdict` tells reports from errors. Reports
    on every stack of a model (--stack all) have `stacks`."""
    reports: Any = REPORTS[command]
    if command == "check":
        reports = Annotated[CheckReport | UndecidedReport, Field(discriminator="verdict")]
    elif command in STACKS:
        reports |= STACKS[command]
    return {"$schema": _DIALECT, **TypeAdapter(reports).json_schema(mode="serialization")}


def to_schema(command: str) -> str:
    return json.dumps(schema_of(command), indent=2, allow_nan=False) + "\n"
