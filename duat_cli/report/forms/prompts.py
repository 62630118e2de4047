"""The prompts of a report in a line: how many, and a hash by which the same set is known again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from duat_cli.report.tables import numbers
from duat_cli.results.base import PromptFacts


def digest(prompts: Sequence[PromptFacts]) -> str:
    """SHA-256 of the texts' own hashes, one a line, in the order of the run."""
    return hashlib.sha256("".join(f"{prompt.sha256}\n" for prompt in prompts).encode()).hexdigest()


def said(prompts: Sequence[PromptFacts]) -> str:
    """15 prompts, 255 tokens."""
    tokens = sum(prompt.tokens for prompt in prompts)
    return f"{numbers.plural(len(prompts), 'prompt')}, {numbers.plural(tokens, 'token')}"
