"""Files that W' is written to, by its factors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from duat_cli.api.target import FileTarget
from duat_cli.errors import InputError

if TYPE_CHECKING:
    from duat_cli.analysis.operator_file import OperatorFile

SUFFIX = ".safetensors"


def tensor_target(option: str, name: str | None) -> FileTarget | None:
    """The file of an option's value, checked; None without one."""
    if name is None:
        return None
    if not name.endswith(SUFFIX):
        raise InputError(f"{option} '{name}': expected a file name that ends in {SUFFIX}; the report is apart from it")
    return FileTarget.of(option, name)


@contextlib.contextmanager
def operator_file(target: FileTarget | None, text: Callable[[int], str] | None) -> Iterator[OperatorFile | None]:
    """The file to fill; it takes its name when the block is left without an error. text: what a token says."""
    if target is None or text is None:
        yield None
        return
    from duat_cli.analysis.operator_file import OperatorFile

    with target.replacing() as part:
        file = OperatorFile(part, text, f"{target.option} '{target.path}'")
        try:
            yield file
        finally:
            file.close()
