"""Messages of duat on standard error: one line each, with control characters escaped and without secrets."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from duat_cli.cli.terminal import streams
from duat_cli.text import clean, one_line

_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACEHUB_API_TOKEN")
_TOKEN_SHAPE = re.compile(r"\bhf_[A-Za-z0-9]{6,}")
_SHORTEST_SECRET = 6  # a shorter "token" is a typing error, and hiding it would damage ordinary words
_given_tokens: set[str] = set()


def hide(token: str | None) -> None:
    """Keeps this token out of all messages from here on."""
    if token:
        _given_tokens.add(token)


def redact(text: str) -> str:
    """The text without access tokens: those that duat was given, and all that look like one."""
    tokens = _given_tokens | {os.environ.get(name, "") for name in _TOKEN_VARIABLES}
    for token in tokens:
        if len(token) >= _SHORTEST_SECRET:
            text = text.replace(token, "***")
    return _TOKEN_SHAPE.sub("hf_***", text)


def error(text: str) -> None:
    """Writes the error because of which duat stops."""
    streams.say(redact(f"duat: error: {one_line(text)}"))


@dataclass(frozen=True)
class Talk:
    """How much to say beside the result."""

    quiet: bool = False
    verbose: bool = False
    color: bool = False

    def note(self, text: str) -> None:
        """Writes a note for the user, except with -q."""
        if not self.quiet:
            streams.say(redact(f"duat: {clean(text)}"))

    def detail(self, text: str) -> None:
        """Writes a note that only -v shows."""
        if self.verbose:
            self.note(text)
