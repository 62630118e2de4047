"""Where a result goes: standard output, or a file that is whole or untouched."""

from __future__ import annotations

from duat_cli.api.target import FileTarget
from duat_cli.cli.terminal import streams
from duat_cli.cli.terminal.talk import redact


class Target(FileTarget):
    """The place named by -o/--output, or by another option that takes a file to write."""

    def write(self, text: str) -> None:
        """Write a whole text, without the tokens that the command line was given."""
        text = redact(text)
        if self.path is None:
            streams.write_result(text)
        else:
            super().write(text)
