"""The prompts of a report: one by one, or as a set where there are too many to list."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Protocol

from pydantic import Field

from duat_cli.results.base import PromptFacts, Result
from duat_cli.results.meaning import Meaning

LISTED, FIRST = 1000, 10
"""A report lists every prompt of a set of at most LISTED prompts, and the FIRST of a larger set."""

_TOKENS = Meaning("tokens", "exact")
WHICH = Field(description=f"all prompts; of a set of more than {LISTED:,} the first {FIRST}")
AS_SET = Field(
    description="all prompts as one set, listed or not; null where none ran, and in a report of an earlier version"
)


class PromptSetFacts(Result):
    """A set of prompts, whether or not a report lists them."""

    count: Annotated[int, Meaning("prompts", "exact")] = Field(description="number of prompts in the set")
    tokens: Annotated[int, _TOKENS] = Field(description="number of tokens of all prompts together")
    shortest: Annotated[int, _TOKENS] = Field(description="number of tokens of the shortest prompt")
    longest: Annotated[int, _TOKENS] = Field(description="number of tokens of the longest prompt")
    sha256: str = Field(description="SHA-256 of the prompts' own SHA-256 in hexadecimal, one a line, in their order")
    tokens_sha256: str = Field(
        description="SHA-256 of the prompts' own SHA-256, one a line, each with the prompt's number of tokens behind "
        "it: what a baseline compares"
    )


Prompts = PromptSetFacts | Sequence[PromptFacts]


class Listing(Protocol):
    """A report that states its prompts as a set."""

    @property
    def prompts(self) -> list[PromptFacts] | None: ...

    @property
    def prompt_set(self) -> PromptSetFacts | None: ...


def all_prompts(report: Listing) -> Prompts:
    """All prompts that ran; a report of an earlier version lists them, and has no set."""
    return report.prompt_set or report.prompts or ()


class Roll:
    """Collects prompts one after another, in constant memory."""

    def __init__(self, *, every: bool = False) -> None:
        """every: whether to list all prompts, however many."""
        self._every = every
        self.listed: list[PromptFacts] = []
        self._count = self._tokens = self._longest = 0
        self._shortest: int | None = None
        self._texts, self._lengths = hashlib.sha256(), hashlib.sha256()

    def add(self, prompt: PromptFacts) -> None:
        """Takes the next prompt."""
        self._texts.update(f"{prompt.sha256}\n".encode())
        self._lengths.update(f"{chr(10) if self._count else ''}{prompt.sha256} {prompt.tokens}".encode())
        self._count += 1
        self._tokens += prompt.tokens
        self._longest = max(self._longest, prompt.tokens)
        self._shortest = prompt.tokens if self._shortest is None else min(self._shortest, prompt.tokens)
        if self._every or self._count <= LISTED:
            self.listed.append(prompt)
        else:
            del self.listed[FIRST:]

    def __len__(self) -> int:
        return self._count

    @property
    def facts(self) -> PromptSetFacts:
        return PromptSetFacts(
            count=self._count,
            tokens=self._tokens,
            shortest=self._shortest or 0,
            longest=self._longest,
            sha256=self._texts.hexdigest(),
            tokens_sha256=self._lengths.hexdigest(),
        )


def roll_of(prompts: Sequence[PromptFacts]) -> Roll:
    """The roll of prompts in memory."""
    roll = Roll()
    for prompt in prompts:
        roll.add(prompt)
    return roll


def set_of(prompts: Prompts) -> PromptSetFacts:
    """All prompts as a set."""
    return prompts if isinstance(prompts, PromptSetFacts) else roll_of(prompts).facts
