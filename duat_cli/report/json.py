"""Reports as JSON: exactly one document, ASCII, without NaN or Infinity."""

from __future__ import annotations

import io
import json

from duat_cli.results.base import Result


def to_json(report: Result) -> str:
    """The report as indented JSON; characters beyond ASCII, and control characters, are escaped."""
    text = io.StringIO()  # json.dumps would keep all pieces in a list
    json.dump(report.model_dump(mode="json"), text, indent=2, allow_nan=False)
    text.write("\n")
    return text.getvalue()
