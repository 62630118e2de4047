"""The report of `duat support`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from duat_cli.results.base import Finite, Result, Run


class SupportEntry(Result):
    """How far duat understands one model."""

    model_type: str
    status: Literal["exact", "partly", "refused"]
    path: Literal["attention interface", "softmax interception"] | None
    parts: list[str] = Field(description="for 'partly': what is not covered")
    reason: str | None
    relative_error: Finite | None


class SupportReport(Result):
    """`duat support`."""

    schema_version: Literal["2"] = "2"
    command: Literal["support"] = "support"
    duat_version: str
    transformers: str
    entries: list[SupportEntry]
    run: Run
