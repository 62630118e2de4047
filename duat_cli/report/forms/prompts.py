"""The prompts of a report in a line: how many, and a hash by which the same set is known again."""

from __future__ import annotations

from duat_cli.report.tables import numbers
from duat_cli.results.prompts import Prompts, set_of


def digest(prompts: Prompts) -> str:
    """SHA-256 of the texts' own hashes, one a line, in the order of the run."""
    return set_of(prompts).sha256


def said(prompts: Prompts) -> str:
    """15 prompts, 255 tokens."""
    found = set_of(prompts)
    return f"{numbers.plural(found.count, 'prompt')}, {numbers.plural(found.tokens, 'token')}"
