"""Files of texts in every form, read piece by piece: what is in them, and what is said of a broken one."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from duat_cli.errors import InputError
from duat_cli.loading import texts
from duat_cli.loading.texts import pairs_of, texts_of
from duat_cli.text import clean


def refusal(file: Path | str) -> str:
    with pytest.raises(InputError) as caught:
        list(texts_of(str(file), None))
    message = str(caught.value)
    assert message == clean(message)
    return message


def table(file: Path, **columns: list[Any]) -> Path:
    parquet.write_table(pyarrow.table(columns), file)
    return file


def test_every_form_holds_the_same_texts(tmp_path: Path) -> None:
    lines, json = b"one\ntwo \xc3\xa9\n", b'{"text": "one"}\n{"text": "two \\u00e9"}\n'
    for name, raw in {"a.txt": lines, "a.jsonl": json}.items():
        (tmp_path / name).write_bytes(raw)
        (tmp_path / f"{name}.GZ").write_bytes(gzip.compress(raw))
    table(tmp_path / "a.parquet", text=["one", "two é"], prompt=["not", "these"])
    table(tmp_path / "b.parquet", id=[1, 2], prompt=["one", "two é"])
    files = sorted(tmp_path.iterdir())
    assert len(files) == 6
    for file in files:
        found = list(texts_of(str(file), None))
        assert [(t.text, t.line) for t in found] == [("one", 1), ("two é", 2)]
        assert found[1].where == f"{file} {'row' if file.suffix == '.parquet' else 'line'} 2"


def test_line_41207_of_a_compressed_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"text": "fine"}\n' * 41_206 + b'{"text": "br\n' + b'{"text": "fine"}\n' * 9))
    assert refusal(file).startswith(f"{file} line 41207: not JSON: ")


def test_a_gzip_file_that_is_cut_off_or_damaged_or_none(tmp_path: Path) -> None:
    file = tmp_path / "many.txt.gz"
    whole = gzip.compress("\n".join(f"text number {k}" for k in range(20_000)).encode())
    file.write_bytes(whole[: len(whole) // 2])
    assert "the gzip file is cut off here" in refusal(file)
    file.write_bytes(whole[:1000] + bytes(64) + whole[1064:])
    assert "no gzip file, or a damaged one" in refusal(file)
    file.write_bytes(b"plain text\n")
    assert refusal(file).startswith(f"{file} line 1: no gzip file, or a damaged one")
    file.write_bytes(b"")
    assert "empty, no prompts" in refusal(file)


@pytest.mark.parametrize(
    ("columns", "part"),
    [
        ({"txt": ["a"], "id": [1]}, ': no column "text", "prompt", "messages" or "input_ids"; it has txt, id'),
        ({"text": ["a", None]}, ' row 2: expected a string in "text", got NoneType'),
        ({"prompt": [1, 2]}, ' row 1: expected a string in "prompt", got int'),
        ({"text": ["a", " "]}, " row 2: empty prompt"),
        ({"text": []}, ": empty, no prompts"),
    ],
)
def test_a_parquet_file_without_texts(tmp_path: Path, columns: dict[str, list[Any]], part: str) -> None:
    file = table(tmp_path / "a.parquet", **columns)
    assert refusal(file).startswith(f"{file}{part}")


def test_a_row_with_two_of_them_is_refused_as_a_line_is(tmp_path: Path) -> None:
    texts, ids = ["one", None], [None, [5, 6]]
    found = list(texts_of(str(table(tmp_path / "a.parquet", text=texts, input_ids=ids)), None))
    assert [(one.text, one.ids) for one in found] == [("one", None), ("#5 #6", (5, 6))]
    said = 'has a "text" and "input_ids"; leave out what is not to be read'
    row = {"text": "one", "input_ids": [5, 6]}
    (tmp_path / "b.jsonl").write_text(json.dumps(row))
    assert refusal(tmp_path / "b.jsonl").endswith(f"b.jsonl line 1: {said}")
    file = table(tmp_path / "b.parquet", **{name: [value] for name, value in row.items()})
    assert refusal(file).endswith(f"b.parquet row 1: {said}")


def test_a_parquet_file_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    assert "No such file" in refusal(file)
    file.write_bytes(b"PAR1 but no more")
    assert "cannot be read beyond row 0" in refusal(file)


def test_without_pyarrow_the_command_that_installs_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'duat-cli[parquet]'" in refusal(tmp_path / "a.parquet")


def test_what_is_too_long_is_not_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(texts, "MAX_BYTES", 8)
    file = tmp_path / "a.txt"
    file.write_text("four\nnine char\n")
    assert "more than 8 bytes" in refusal(file)
    with pytest.raises(InputError, match="standard input: more than 8 bytes"):
        list(texts_of("-", io.StringIO("four\nfour\n")))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_large_file_takes_no_more_memory(tmp_path: Path, name: str) -> None:
    """What Python holds while 6,000 texts pass, against 2,000; a list of the first would take 1.2 MB."""
    peaks = []
    for count in (2_000, 6_000):
        file = tmp_path / name
        rows = [f"text number {k} of many" for k in range(count)]
        raw = "".join(f'{{"text": "{row}"}}\n' for row in rows).encode()
        if name == "a.parquet":
            table(file, text=rows)
        else:
            file.write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
        del rows, raw
        tracemalloc.start()
        assert sum(1 for _ in texts_of(str(file), None)) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 200_000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": "x"}\n', 'line 1: expected an object with a "b" that is a string'),
        ('{"a": 1, "b": "y"}\n', 'line 1: expected an object with a "a"'),
        ('{"a": {"input_ids": [5]}, "b": "y"}\n', "a string, or a list of token ids or messages"),
        ("[1]\n", 'expected an object with a "a"'),
        ('{"a": "x", "b": " "}\n', "line 1, b: empty prompt"),
        ('{"a": "x", "b"\n', "line 1: not JSON"),
        ("\n", "only blank lines"),
        ("", "empty, no prompts"),
    ],
)
def test_pairs_that_are_none(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=re.escape(words)):
        list(pairs_of(str(file), None))


def test_pairs_compressed_and_from_standard_input(tmp_path: Path) -> None:
    content = b'{"a": "x", "b": "y"}\n'
    file = tmp_path / "pairs.jsonl.gz"
    file.write_bytes(gzip.compress(content))
    for name, stdin in ((str(file), None), ("-", io.BytesIO(content))):
        [(a, b)] = pairs_of(name, stdin)
        assert (a.text, b.text, b.line) == ("x", "y", 1)


SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}]


def test_a_line_or_a_row_may_hold_a_conversation(tmp_path: Path) -> None:
    lines = [{"messages": SAID}, {"messages": SAID, "tools": [{"name": "map"}]}, {"text": "one", "messages": None}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = list(texts_of(str(tmp_path / "a.jsonl"), None))
    assert [(t.line, t.conversation) for t in found] == [(1, True), (2, True), (3, False)]
    assert [t.said for t in found[:2]] == lines[:2]
    table(tmp_path / "a.parquet", id=[1], messages=[SAID])
    [row] = texts_of(str(tmp_path / "a.parquet"), None)
    assert (row.conversation, row.said) == (True, {"messages": SAID})
    assert row.text == found[0].text  # one prompt by its hash
    table(tmp_path / "b.parquet", tools=[[{"name": "map"}]], messages=[SAID])
    table(tmp_path / "c.parquet", tools=['[{"name": "map"}]'], messages=[SAID])
    for name in "bc":
        [row] = texts_of(str(tmp_path / f"{name}.parquet"), None)
        assert row.text == found[1].text
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": None, "messages": SAID}) + "\n")
    assert [t.text for t in texts_of(str(tmp_path / "d.jsonl"), None)] == [found[0].text]


def test_a_line_or_a_row_may_hold_token_ids(tmp_path: Path) -> None:
    lines = [{"input_ids": [1, 5, 6]}, {"input_ids": [7], "text": None}, {"text": "#7"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = list(texts_of(str(tmp_path / "a.jsonl"), None))
    assert [(t.text, t.ids, t.line) for t in found] == [("#1 #5 #6", (1, 5, 6), 1), ("#7", (7,), 2), ("#7", None, 3)]
    assert [t.hashed for t in found] == ["#1 #5 #6", "#7", "text #7"]  # token 7 is another prompt than its text
    table(tmp_path / "a.parquet", input_ids=[[1, 5, 6], [7]])
    assert [t.ids for t in texts_of(str(tmp_path / "a.parquet"), None)] == [(1, 5, 6), (7,)]
    (tmp_path / "p.jsonl").write_text(json.dumps({"a": [1, 5], "b": "one"}) + "\n")
    [(a, b)] = pairs_of(str(tmp_path / "p.jsonl"), None)
    assert (a.ids, b.ids, b.text) == ((1, 5), None, "one")


@pytest.mark.parametrize("ids", [[], "1 5", 5, [1, 2.5], [1, "5"], [1, None], [True], {"a": 1}])
def test_what_are_no_token_ids(ids: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": ids}) + "\n")
    assert 'a.jsonl line 1: expected "input_ids" to be a list of whole numbers' in refusal(tmp_path / "a.jsonl")


def test_a_line_holds_one_prompt(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for line, said in (
        ({"text": "one", "messages": SAID}, 'has a "text" and "messages"; leave out what is not to be read'),
        ({"text": "one", "input_ids": [1]}, 'has a "text" and "input_ids"; leave out what is not to be read'),
        ({"text": 1}, 'expected a string in "text", got int'),
        ({"prompt": "one"}, 'expected an object with a "text" that is a string, with the "messages" of a conv'),
    ):
        file.write_text(json.dumps({"text": "first"}) + "\n" + json.dumps(line) + "\n")
        with pytest.raises(InputError, match=f"a.jsonl line 2: {said}"):
            list(texts_of(str(file), None))


def test_a_conversation_is_another_prompt_than_its_own_line(tmp_path: Path) -> None:
    [said] = map(texts.asked, [texts.checked("Hello", "--prompt 1", 1)])
    line = json.dumps(said.said, ensure_ascii=False)
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text(line + "\n")
    [plain], [talk] = (list(texts_of(str(tmp_path / name), None)) for name in ("a.txt", "a.jsonl"))
    assert talk.text == said.text != plain.text == line


def test_pairs_may_be_conversations(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"a": SAID, "b": "Hello"}) + "\n")
    [(a, b)] = pairs_of(str(file), None)
    assert (a.said, b.text, a.where, b.where) == ({"messages": SAID}, "Hello", f"{file} line 1, a", f"{file} line 1, b")


BROKEN_MESSAGES = {
    "none": ([], 'expected "messages" to be a list of objects'),
    "no list": ("hello", 'expected "messages" to be a list of objects'),
    "no object": (["hello"], "message 1: expected an object"),
    "no role": ([SAID[0], {"content": "x"}], "message 2: expected an object"),
    "a number said": ([{"role": "user", "content": 5}], "message 1: expected an object"),
    "half a surrogate pair": ([{"role": "user", "content": "\ud800"}], "has no UTF-8 form"),
}


@pytest.mark.parametrize(("messages", "said"), BROKEN_MESSAGES.values(), ids=BROKEN_MESSAGES.keys())
def test_what_is_no_conversation(messages: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n' + json.dumps({"messages": messages}) + "\n")
    assert refusal(file).startswith(f"{file} line 2: ")
    assert said in refusal(file)


def test_an_argument_that_the_locale_left_as_bytes() -> None:
    with pytest.raises(
        InputError, match=r"character 1 has no UTF-8 form; expected UTF-8; the locale reads .* PYTHONUTF8=1"
    ):
        texts.checked("\udcc3\udca9", "--prompt 1", 1)
    with pytest.raises(InputError, match=r"expected UTF-8$"):
        texts.checked("\ud800", "--prompt 1", 1)
