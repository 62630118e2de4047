"""Reports as JSON: exactly one document, ASCII, without NaN or Infinity."""

from __future__ import annotations

import json

from duat_cli.results.base import Result


def to_json(report: Result) -> str:
    """The report's own names, indented; every character beyond ASCII, and every control, is escaped."""
    return json.dumps(report.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"
