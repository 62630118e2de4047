"""The page of coverage, read back."""

from __future__ import annotations

import re
from pathlib import Path

import transformers

PAGE = Path(__file__).parents[1] / "configs" / "docs" / "coverage.md"


def version(page: str) -> str:
    """Of the transformers that it was written on."""
    written = re.search(r"on transformers ([\w.]+);", page)
    assert written is not None
    return written[1]


def statuses(page: str) -> dict[str, str]:
    """Model type -> status; what --stack reads left out."""
    found = {}
    for section in page.split("\n## ")[1:]:
        text = section.partition("With `--stack`")[0]
        for status, body in re.findall(
            r"^(Exact|Partly|Refused|Not tried):(.*?)(?=^\S+(?: tried)?:|\Z)", text, re.M | re.S
        ):
            for names in re.split(r"\n- ", body):
                for name in " ".join(names.split()).rpartition(": ")[2].split(","):
                    if name.strip():
                        found[name.strip()] = status.lower()
    return found


def current() -> dict[str, str] | None:
    """Statuses of the page that is shipped; None where it is of another transformers than the installed one."""
    page = PAGE.read_text(encoding="utf-8")
    return statuses(page) if version(page) == transformers.__version__ else None
