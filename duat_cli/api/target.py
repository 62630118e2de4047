"""Files for results, each written whole or not at all; among them the files of W' by its factors."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.files import plain_mode
from duat_cli.text import clean, expanded

if TYPE_CHECKING:
    from duat_cli.analysis.operator_file import OperatorFile


STANDARD_OUTPUT = "-"
TENSORS = ".safetensors"
_NO_TEXT = frozenset({
    ".safetensors", ".npz", ".npy", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".hdf5", ".pkl", ".pickle", ".onnx", ".gguf",
    ".parquet", ".arrow", ".msgpack", ".zip", ".gz", ".tar", ".png", ".jpg", ".pdf",
})  # fmt: skip


@dataclass(frozen=True)
class FileTarget:
    """The place named by an option or argument for a file to write."""

    option: str
    path: Path | None  # None: standard output, which only the command line has

    @classmethod
    def of(cls, option: str, name: str | None) -> Self:
        """The target of an option's value, checked now rather than after minutes of computing."""
        if name is None or name == STANDARD_OUTPUT:
            return cls(option, None)
        target = cls(option, expanded(name))
        target._check()
        return target

    @classmethod
    def of_text(cls, option: str, name: str | None) -> Self:
        """The target of a report. Refuses a name that belongs to a file format other than text."""
        suffix = Path(name).suffix.lower() if name else ""
        if suffix in _NO_TEXT:
            raise InputError(
                f"{option} '{name}': a report is text, {suffix} is no text file's name; tensors are written by "
                "'duat inspect --matrices FILE' and 'duat matrix -o FILE', to .safetensors"
            )
        return cls.of(option, name)

    def write(self, text: str) -> None:
        """Writes a whole text."""
        with self.replacing() as part:
            part.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")

    @contextlib.contextmanager
    def replacing(self) -> Iterator[Path]:
        """A path to write. On success the file replaces the target in one step; on failure it is deleted.

        This part file is in the target's own folder, because a rename is atomic only within a file system. A device or
        a pipe cannot be replaced and is written directly.
        """
        assert self.path is not None, "standard output is no file"
        try:
            final = self.path.resolve()  # through a symbolic link, so that the link stays
            if _is_special(final):
                yield final
                return
            part = _part_file(final)
            try:
                yield part
                _settle(part, final)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise self._error(f"cannot write: {error.strerror or error}") from error

    def _check(self) -> None:
        assert self.path is not None
        try:
            self._check_place(self.path.resolve())
        except (OSError, RuntimeError, ValueError) as error:
            raise self._error(f"cannot write: {getattr(error, 'strerror', None) or error}") from error

    def _check_place(self, final: Path) -> None:
        if final.is_dir():
            raise self._error("is a folder, expected a file name")
        if not final.parent.is_dir():
            raise self._error(f"there is no folder '{final.parent}'; create it first")
        if _is_special(final):
            if not os.access(final, os.W_OK):  # opening a pipe to check would end its reader's input
                raise self._error("no permission to write")
            return
        _part_file(final).unlink()

    def _error(self, text: str) -> InputError:
        return InputError(f"{self.option} '{self.path}': {text}")


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _part_file(final: Path) -> Path:
    descriptor, name = tempfile.mkstemp(dir=final.parent, prefix=".duat-", suffix=".part")
    os.close(descriptor)
    return Path(name)


def _settle(part: Path, final: Path) -> None:
    """Moves the part file to its place after its bytes are on the disk, with the permissions of a plain write."""
    part.chmod(stat.S_IMODE(final.stat().st_mode) if final.exists() else plain_mode())
    with open(part, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(part, final)


def refuse_overwriting(writes: Iterable[tuple[str, object]], reads: Iterable[tuple[str, object]]) -> None:
    """Raises InputError where a result would overwrite a file that the run reads, or two would go to one file.

    writes, reads: options, each with the path that it was given; values that are no path, or name nothing, are skipped.
    A file within a folder counts if its name is that of a checkpoint's, an adapter's or a stored result's file.
    """
    given = [(option, expanded(name)) for option, name in reads if isinstance(name, (str, os.PathLike))]
    seen: dict[Path, str] = {}
    for option, name in writes:
        if not isinstance(name, (str, os.PathLike)) or name == STANDARD_OUTPUT:
            continue
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # a name that no file can have is refused later
            final = expanded(name).resolve()
            what = f"{option} '{clean(os.fspath(name))}'"
            if final in seen:
                raise InputError(f"{what}: is named twice, by {seen[final]} as well; give each a file of its own")
            seen[final] = option
            reader = next((f"{of} {clean(str(path))}" for of, path in given if _reads(path, final)), None)
            if reader is not None:
                raise InputError(f"{what}: would overwrite a file that is read, of {reader}; give another name")


def _reads(given: Path, final: Path) -> bool:
    """Whether a run that was given a file or a folder reads this file, also through symbolic links."""
    if not final.is_file():
        return False
    if not given.is_dir():
        return _same(given, final)
    from duat_cli.analysis.shards.names import FILES
    from duat_cli.loading.checkpoint.source import READ_FILES

    return any(_same(file, final) for pattern in (*READ_FILES, *FILES) for file in given.glob(pattern))


def _same(one: Path, other: Path) -> bool:
    """Whether two names are of one file, also where the file system ignores letter case."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def tensor_target(option: str, name: str | os.PathLike[str] | None, *, page: bool = False) -> FileTarget | None:
    """The checked target of an option's value for tensors; None without a value. page: whether the option also takes
    the name of a page, which is no target of tensors."""
    if name is None:
        return None
    path = os.fspath(name)
    if not path.endswith(TENSORS):
        ends = f"{TENSORS}, or in .html for a page" if page else TENSORS
        raise InputError(f"{option} '{path}': expected a file name that ends in {ends}; the report is apart from it")
    return FileTarget.of(option, path)


@contextlib.contextmanager
def operator_file(target: FileTarget | None, text: Callable[[int], str] | None) -> Iterator[OperatorFile | None]:
    """The file to fill; it takes its name when the context is left without an error. text: gives a token's text."""
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
