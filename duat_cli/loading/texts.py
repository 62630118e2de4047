"""Texts one after the other: lines of a file, JSON lines, either compressed by gzip, or rows of a .parquet. In the
place of a text there may be a conversation (its messages) or token ids.

A file is read piece by piece, so its size costs no memory. Every error names the line or the row.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from duat_cli.errors import InputError
from duat_cli.text import clean, expanded

JSON_LINES = ".jsonl"
GZIP = ".gz"
PARQUET = ".parquet"
TEXT, MESSAGES, TOOLS, IDS = "text", "messages", "tools", "input_ids"
_CONVERSATION = "conversation "  # put in front of its JSON, so that the same line as a text is another prompt
_AS_TEXT = "text "  # put in front of a text such as '#5 #6', for its hash
_NUMBERED = re.compile(r"#[0-9]+( #[0-9]+)*")
FIELDS = (TEXT, MESSAGES, IDS)  # one of them in each JSON line
COLUMNS = (TEXT, "prompt", MESSAGES, IDS)  # the first that a .parquet has is read, if it has no other of FIELDS
MAX_BYTES = 64 << 20  # of a line, of standard input, and of all texts held in memory
_MAX_CHARACTERS = 4 << 20  # of one prompt; longer ones take long to encode
_ROWS = 256  # rows of a .parquet at a time
BOM = b"\xef\xbb\xbf"  # byte order mark of some editors


@dataclass(frozen=True)
class PromptText:
    """A text to run."""

    text: str
    where: str
    """The source, for messages: 'prompts.txt line 3', '--prompt 1'."""
    line: int
    """Number of its line or row in the file, from 1; for --prompt, the number of the option."""
    ids: tuple[int, ...] | None = None
    """Token ids that were given in place of a text; `text` then names them."""
    conversation: bool = False
    """Whether the text comes from `conversation`, and the checkpoint's chat template is to write it out."""

    @property
    def hashed(self) -> str:
        """The text whose hash identifies the prompt. A text that looks like token ids gets a prefix, because token ids
        are another prompt."""
        return _AS_TEXT + self.text if self.ids is None and _NUMBERED.fullmatch(self.text) else self.text

    @property
    def sha256(self) -> str:
        """Hash of `hashed`, as UTF-8."""
        return hashlib.sha256(self.hashed.encode()).hexdigest()

    @property
    def said(self) -> dict[str, Any]:
        """The messages, and the tools, of a conversation."""
        found: dict[str, Any] = json.loads(self.text.removeprefix(_CONVERSATION))
        return found


def numbered(tokens: Iterable[int]) -> str:
    """Tokens by their ids, or positions by their numbers, where they have no text."""
    return " ".join(f"#{token}" for token in tokens)


def texts_of(name: str, stdin: IO[Any] | None, option: str = "--prompts") -> Iterator[PromptText]:
    """The texts of a file, in the format that its name's ending states; '-' is standard input, one text a line.

    option: the option that named the file, for messages.
    """
    shown = "standard input" if name == "-" else clean(name)
    kind = name.lower().removesuffix(GZIP)
    if kind.endswith((".json", ".ndjson")):  # its lines would run as texts, braces and all
        raise InputError(f"{shown}: JSON lines are read from a name that ends in {JSON_LINES}; rename it")
    if name.lower().endswith(PARQUET):
        yield from _rows(name, shown, option)
    elif name == "-":
        yield from lines(io.BytesIO(read_stdin(stdin)), shown, json_lines=False)
    else:
        with _opened(name, shown, option) as file:
            yield from lines(file, shown, json_lines=kind.endswith(JSON_LINES))


def lines(file: gzip.GzipFile | IO[bytes], name: str, json_lines: bool) -> Iterator[PromptText]:
    """One prompt a line, without blank lines. With `json_lines`, each line is an object with a "text", with the
    "messages" of a conversation, or with "input_ids"."""
    for where, number, text in _filled(file, name):
        if not json_lines:
            yield checked(text, where, number)
            continue
        value = _object(text, where, TEXT)
        filled = _filled_field(value, where)
        if filled is None:
            each = f'a "{TEXT}" that is a string, with the "{MESSAGES}" of a conversation, or with "{IDS}"'
            raise InputError(f"{where}: expected an object with {each}")
        yield _of_record(value, filled, where, number)


def pairs_of(name: str, stdin: IO[Any] | None) -> Iterator[tuple[PromptText, PromptText]]:
    """Pairs of texts in JSON lines, {"a": ..., "b": ...} a line; '-' is standard input."""
    shown = "standard input" if name == "-" else clean(name)
    if name != "-" and not name.lower().removesuffix(GZIP).endswith(JSON_LINES):
        raise InputError(f'{shown}: pairs of prompts are read from JSON lines {{"a": ..., "b": ...}} in {JSON_LINES}')
    with io.BytesIO(read_stdin(stdin)) if name == "-" else _opened(name, shown) as file:
        for where, number, line in _filled(file, shown):
            value = _object(line, where, "a", "b")
            a, b = (_either(value, name, where, number) for name in ("a", "b"))
            yield a, b


def _filled(file: gzip.GzipFile | IO[bytes], name: str) -> Iterator[tuple[str, int, str]]:
    """(where, number, text) of every line that is not blank; InputError where there is none."""
    number = found = 0
    for number, line in _numbered(file, name):
        where = f"{name} line {number}"
        text = decode(line.removesuffix(b"\n").removesuffix(b"\r"), where, 0)
        if text.strip():
            found += 1
            yield where, number, text
    if not number:
        raise InputError(f"{name}: empty, no prompts; expected one a line")
    if not found:
        raise InputError(f"{name}: only blank lines, no prompts; expected one a line")


def _numbered(file: gzip.GzipFile | IO[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, from 1; a byte order mark at the beginning is left out."""
    number = 1
    while line := _line(file, f"{name} line {number}"):
        if len(line) > MAX_BYTES:
            raise InputError(f"{name}: more than {MAX_BYTES} bytes; expected one prompt a line")
        yield number, line.removeprefix(BOM) if number == 1 else line
        number += 1


def _line(file: gzip.GzipFile | IO[bytes], where: str) -> bytes:
    try:
        return file.readline(MAX_BYTES + 1)
    except EOFError as error:
        raise InputError(f"{where}: the gzip file is cut off here; copy it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{where}: no gzip file, or a damaged one: {clean(str(error))}") from error
    except OSError as error:
        raise InputError(f"{where}: cannot be read: {clean(error.strerror or str(error))}") from error


def _path(name: str, shown: str, option: str) -> Path:
    path = expanded(name)
    # opening a named pipe waits for a writer; a shell's <(command) is one that has it
    if path.is_fifo() and not name.startswith(("/dev/fd/", "/proc/self/fd/", "/dev/stdin")):
        raise InputError(f"{option} {shown}: is a named pipe, no regular file; use {option} - and pipe into duat")
    return path


def _opened(name: str, shown: str, option: str = "--prompts") -> gzip.GzipFile | IO[bytes]:
    try:
        path = _path(name, shown, option)
        return gzip.open(path) if name.lower().endswith(GZIP) else path.open("rb")
    except (OSError, ValueError) as error:
        reason = clean(getattr(error, "strerror", None) or str(error))
        raise InputError(f"{option} {shown}: cannot be read: {reason}") from error


def _rows(name: str, shown: str, option: str) -> Iterator[PromptText]:
    """The prompts in a .parquet, from the first of `COLUMNS` that it has. Of `FIELDS` a row may hold one."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(f"{shown}: needs pyarrow to be read: pip install 'duat-cli[{PARQUET[1:]}]'") from error
    number = 0
    try:
        with parquet.ParquetFile(_path(name, shown, option)) as file:
            columns = file.schema_arrow.names
            column = next((c for c in COLUMNS if c in columns), None)
            if column is None:
                *most, last = (f'"{name}"' for name in COLUMNS)
                names = f"{', '.join(most)} or {last}"
                raise InputError(f"{shown}: no column {names}; it has {clean(', '.join(columns))}")
            read = [c for c in (*FIELDS, TOOLS) if c in columns] if column in FIELDS else [column]
            for batch in file.iter_batches(batch_size=_ROWS, columns=read):
                for row in batch.to_pylist():
                    number += 1
                    where = f"{shown} row {number}"
                    yield _of_record(row, _filled_field(row, where) or column, where, number)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = clean(getattr(error, "strerror", None) or str(error))
        raise InputError(f"{option} {shown}: cannot be read beyond row {number}: {reason}") from error
    if not number:
        raise InputError(f"{shown}: empty, no prompts; expected one a row")


def read_stdin(stdin: IO[Any] | None) -> bytes:
    """The content of standard input."""
    try:
        if stdin is None:
            raise ValueError("it is closed")
        read: bytes | str = getattr(stdin, "buffer", stdin).read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"standard input: cannot be read: {clean(str(error))}") from error
    raw = read.encode("utf-8", "surrogateescape") if isinstance(read, str) else read
    if len(raw) > MAX_BYTES:
        raise InputError(f"standard input: more than {MAX_BYTES} bytes; give a file, one prompt a line")
    return raw


def decode(raw: bytes, where: str, line: int) -> str:
    """The bytes as UTF-8 text. line: number of the first line, for a text of several lines; 0 where `where` names the
    line."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f" line {line + raw[: error.start].count(10)}" if line else ""
        byte = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise InputError(f"{where}{place}: not UTF-8 ({byte}); save it as UTF-8") from error


def _object(line: str, where: str, *names: str) -> dict[str, Any]:
    """The JSON object in a line; {} where it is another value. names: fields that it should have, for messages."""
    shown = ", ".join(f'"{name}": ...' for name in names)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {clean(str(error))}; expected {{{shown}}}") from error
    return value if isinstance(value, dict) else {}


def _filled_field(value: Mapping[str, Any], where: str) -> str | None:
    """The one of `FIELDS` that is not null; None where all are. Raises InputError for several."""
    filled = [name for name in FIELDS if value.get(name) is not None]
    if len(filled) > 1:
        raise InputError(f'{where}: has a "{filled[0]}" and "{filled[1]}"; leave out what is not to be read')
    return next(iter(filled), None)


def _of_record(value: Mapping[str, Any], name: str, where: str, number: int) -> PromptText:
    """The prompt that an object or a row has under one of `FIELDS` or `COLUMNS`."""
    held = value.get(name)
    if name == MESSAGES:
        return conversation(held, where, number, value.get(TOOLS))
    if name == IDS:
        return token_ids(held, where, number)
    if not isinstance(held, str):
        raise InputError(f'{where}: expected a string in "{name}", got {type(held).__name__}')
    return checked(held, where, number)


def _either(value: dict[str, Any], name: str, where: str, number: int) -> PromptText:
    """A text, token ids, or the messages of a conversation."""
    held = value.get(name)
    if isinstance(held, list) and any(type(one) is int for one in held):
        return token_ids(held, f"{where}, {name}", number)
    if isinstance(held, list):
        return conversation(held, f"{where}, {name}", number)
    if not isinstance(held, str):
        raise InputError(
            f'{where}: expected an object with a "{name}" that is a string, or a list of token ids or messages'
        )
    return checked(held, f"{where}, {name}", number)


def token_ids(given: Any, where: str, line: int) -> PromptText:
    """Token ids as the model reads them; no special tokens are added. `text` names them."""
    if not isinstance(given, Sequence) or not given or not all(type(one) is int for one in given):
        raise InputError(f'{where}: expected "{IDS}" to be a list of whole numbers, one at least')
    return replace(checked(numbered(given), where, line), ids=tuple(given))


def asked(text: PromptText) -> PromptText:
    """The text as a user's message in a conversation; a conversation unchanged. InputError for token ids."""
    if text.ids is not None:
        raise InputError(f"{text.where}: token ids; a chat template writes out texts, give the prompt as a text")
    if text.conversation:
        return text
    return conversation([{"role": "user", "content": text.text}], text.where, text.line)


def all_asked(texts: list[PromptText], chat: bool) -> list[PromptText]:
    """The texts; with `chat`, each through `asked`."""
    return list(map(asked, texts)) if chat else texts


def conversation(messages: Any, where: str, line: int, tools: Any = None) -> PromptText:
    """A conversation of messages in the form of transformers' `apply_chat_template`. The text holds their JSON, which
    identifies the prompt under any template. tools: a list, or JSON of one."""
    if not isinstance(messages, list) or not messages:
        raise InputError(f'{where}: expected "{MESSAGES}" to be a list of objects with a "role" and a "content"')
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or not isinstance(message.get("content") or "", (str, list)):
            raise InputError(f'{where}: message {number}: expected an object with a "role" and a "content"')
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
        said = {MESSAGES: messages} | ({} if tools is None else {TOOLS: tools})
        text = _CONVERSATION + json.dumps(said, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: messages that JSON cannot hold: {clean(str(error))}") from error
    return replace(checked(text, where, line), conversation=True)


@dataclass(frozen=True)
class Field:
    """The strings under one name in the objects of a JSON lines file, beside the prompts."""

    option: str
    """The option that names the field, for messages."""
    name: str
    by_line: Mapping[int, str]

    def of(self, line: int) -> tuple[str, str]:
        """Name of a line's string in errors, and the string."""
        return f"{self.option} {clean(self.name)}, line {line}:", self.by_line[line]

    def __str__(self) -> str:
        """The name, and a hash of all strings."""
        return f"{self.name} ({hashlib.sha256(repr(sorted(self.by_line.items())).encode()).hexdigest()[:16]})"


def field_beside(option: str, text: str | None, field: str | None, name: str | None) -> Field | None:
    """The field that an option's --...-field names, as --target-field for --target; None where it is not given. At most
    one of the two options may be given."""
    if field is None:
        return None
    if text is not None:
        raise InputError(f"{option} and {option}-field: give one of them")
    return field_of(name, field, f"{option}-field")


def field_of(name: str | None, field: str, option: str) -> Field:
    """The field of that name in the file of prompts. name: the one file of prompts, if there is one. InputError where
    it holds no JSON lines, or a line has no such string."""
    if name is None:
        raise InputError(f"{option}: is of a file of JSON lines; give --prompts FILE, and no --prompt")
    shown = clean(name)
    if not name.lower().removesuffix(GZIP).endswith(JSON_LINES):
        raise InputError(f"{option}: {shown} holds no JSON lines; expected a name that ends in {JSON_LINES}")
    found: dict[int, str] = {}
    with _opened(name, shown) as file:
        for number, line in _numbered(file, shown):
            if line.strip():
                value = _object(decode(line, f"{shown} line {number}", 0), f"{shown} line {number}", field)
                if not isinstance(value.get(field), str):
                    raise InputError(f"{shown} line {number}: no string under '{clean(field)}', which {option} names")
                _require_utf8(value[field], f"{shown} line {number}, '{clean(field)}'")
                found[number] = value[field]
    return Field(option, field, found)


def checked(text: str, where: str, line: int) -> PromptText:
    """A prompt of this text; InputError where it is empty, too long, or not UTF-8."""
    if len(text) > _MAX_CHARACTERS:
        raise InputError(f"{where}: too long, {len(text)} characters; expected at most {_MAX_CHARACTERS}")
    if not text.strip():
        raise InputError(f"{where}: empty prompt; expected a text")
    _require_utf8(text, where)
    return PromptText(text, where, line)


def _require_utf8(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # half a surrogate pair, from JSON or from a raw argument
        raw = "\udc80" <= text[error.start] <= "\udcff"
        why = "; the locale reads arguments as bytes, set PYTHONUTF8=1" if raw and not sys.flags.utf8_mode else ""
        raise InputError(f"{where}: character {error.start + 1} has no UTF-8 form; expected UTF-8{why}") from error
