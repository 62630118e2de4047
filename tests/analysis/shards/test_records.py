"""One line a prompt: it comes back as it was, or is seen not to be whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.sweep import sweep_prompts
from duat_cli.analysis.session import Session
from duat_cli.analysis.shards.inspect import InspectRecord
from duat_cli.analysis.shards.records import of_prompt, read, written
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt

SEAL = b"seal"


def quiet(done: int, total: int, doing: str) -> None:
    pass


@pytest.fixture
def record(loaded: LoadedModel, prompts: Callable[..., list[Prompt]]) -> tuple[Prompt, InspectRecord]:
    [prompt] = prompts(loaded, 'two\nlines and a "quote" é\u2028')
    session = Session(loaded, quiet, cache=False)
    options = InspectOptions(layers=frozenset({0, 2}), terms=True, cache=False)
    [sweep] = sweep_prompts(session, [prompt], options, quiet)
    sweep.largest[2] = (float("inf"), "ffn")
    sweep.faults[0] = "refuted"
    return prompt, InspectRecord(**of_prompt(prompt), found=sweep, plain_error=1e-7)


def test_a_record_comes_back_to_the_bit(record: tuple[Prompt, InspectRecord]) -> None:
    prompt, found = record
    line = read(SEAL, written(SEAL, 7, prompt, found))
    assert line is not None
    assert (line.position, line.sha256, line.tokens) == (7, prompt.sha256, prompt.input_ids.shape[1])
    again = InspectRecord.model_validate_json(line.record)
    assert again == found
    assert repr(again) == repr(found)  # -0.0 == 0.0
    assert hashlib.sha256(again.text.encode()).hexdigest() == line.sha256
    assert again.tokens == prompt.input_ids[0].tolist()


def test_a_line_that_is_not_whole_is_none(record: tuple[Prompt, InspectRecord]) -> None:
    line = written(SEAL, 7, *record)
    assert line.count(b"\n") == 1
    assert read(SEAL, line) is not None
    for end in (0, 1, 50, len(line) // 2, len(line) - 3, len(line) - 2):
        assert read(SEAL, line[:end]) is None
        assert read(SEAL, line[:end] + b"\n") is None
    assert read(SEAL, line[:-1]) is None
    for place in (12, 60, len(line) // 2):
        assert read(SEAL, line[:place] + bytes([line[place] ^ 1]) + line[place + 1 :]) is None
    assert read(b"other", line) is None
    assert read(SEAL, line[:300] + line) is None
