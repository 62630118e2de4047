"""Hundreds of damaged inputs through the command: a result or one clean error, soon, and never a traceback."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import time
from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from duat_cli.cli.commands.check import check
from duat_cli.cli.main import run
from duat_cli.cli.terminal import libraries
from duat_cli.errors import DuatError
from duat_cli.text import one_line

FUZZ = settings(suppress_health_check=list(HealthCheck), max_examples=60)
LONGEST = 1.0  # seconds of this process; the machine may be busy with others

odd_texts = st.sampled_from(
    ["", " ", "..", "/", "\0", "\x1b[2J", "\ud800", "é" * 300, "a" * 5000, "[/x]", "F32", "model"]
)
odd_numbers = st.sampled_from([0, -1, 1, 7, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan")])
leaves = st.none() | st.booleans() | odd_numbers | odd_texts | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    leaves,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5) | odd_texts, v, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged(draw: st.DrawFn, sound: Any) -> Any:
    """A JSON value with one to three places replaced, removed, renamed or added."""
    value = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, 3))):
        owner, key = value, None
        for _ in range(draw(st.integers(1, 4))):
            inner = owner if key is None else owner[key]
            if not isinstance(inner, (dict, list)) or not inner:
                break
            owner = inner
            key = draw(st.sampled_from(sorted(owner) if isinstance(owner, dict) else range(len(owner))))
        if key is None:
            return draw(values)
        match draw(st.sampled_from(["replace", "remove", "rename", "add", "swap"])):
            case "replace":
                owner[key] = draw(values)
            case "remove":
                del owner[key]
            case "rename" if isinstance(owner, dict):
                owner[draw(odd_texts | st.text(max_size=6))] = owner.pop(key)
            case "add" if isinstance(owner, dict):
                owner[draw(odd_texts | st.text(max_size=6))] = draw(values)
            case _:
                other = draw(st.sampled_from(sorted(owner) if isinstance(owner, dict) else range(len(owner))))
                owner[key], owner[other] = owner[other], owner[key]
    return value


@st.composite
def cut_up(draw: st.DrawFn, raw: bytes) -> bytes:
    """Bytes with some changed, cut out or put in."""
    data = bytearray(raw)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["flip", "cut", "insert", "end"])):
            case "flip" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at : at + draw(st.integers(1, 40))]
            case "insert":
                data[at:at] = draw(
                    st.binary(min_size=1, max_size=12) | st.sampled_from([b"{", b"[" * 2000, b'"', b"9" * 400])
                )
            case _:
                del data[at:]
    return bytes(data)


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def survives(model: Path, **options: Any) -> None:
    """The command's own function on an input: what Typer does in front of it is the same for all."""
    out, err = io.StringIO(), io.StringIO()
    started = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            assert check(str(model), weights_only=True, quiet=True, **options) in (0, 1)
        except DuatError as error:
            err.write(one_line(str(error)))
    if err.getvalue():  # which JSON says too, and the table leaves to standard error
        said = json.loads(out.getvalue())["error"]["message"] if options.get("json") else out.getvalue()
        assert said == (err.getvalue() if options.get("json") else "")
    text = out.getvalue() + err.getvalue()
    assert not any(c in text for c in "\x1b\0"), text
    assert time.process_time() - started < LONGEST, text


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small checkpoint in two shards, with its parts as JSON; logs stay as they are."""
    folder = tmp_path_factory.mktemp("fuzz")
    small = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 16, "bos_token_id": 1, "eos_token_id": 2}
    bad.llama(folder / "m", tok=False, num_hidden_layers=1, pad_token_id=3, **small)
    bad.llama(folder / "s", tok=False, num_hidden_layers=1, shards=True)
    bad.llama(folder / "base", tok=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "calm", lambda talk: None)
        baseline = folder / "b.json"
        assert (
            run(["check", str(folder / "m"), "-q", "--weights-only", "--baseline", str(baseline), "--update-baseline"])
            == 0
        )
        yield folder


def parts(folder: Path) -> tuple[Any, bytes]:
    return bad.split(folder / bad.W)


@FUZZ
@given(data=st.data())
def test_headers(here: Path, data: st.DataObject) -> None:
    header, rest = parts(here / "m")
    folder = here / "header"
    folder.mkdir(exist_ok=True)
    (folder / bad.CFG).write_bytes((here / "m" / bad.CFG).read_bytes())
    bad.join(folder / bad.W, dumped(data.draw(damaged(header))), rest)
    survives(folder)


@FUZZ
@given(data=st.data())
def test_bytes_of_a_weight_file(here: Path, data: st.DataObject) -> None:
    folder = here / "bytes"
    folder.mkdir(exist_ok=True)
    (folder / bad.CFG).write_bytes((here / "m" / bad.CFG).read_bytes())
    (folder / bad.W).write_bytes(data.draw(cut_up((here / "m" / bad.W).read_bytes())))
    survives(folder)


@FUZZ
@given(data=st.data())
def test_an_index(here: Path, data: st.DataObject) -> None:
    folder = here / "s"
    index = folder / bad.IDX
    whole = here / "index.json"
    if not whole.exists():
        whole.write_bytes(index.read_bytes())
    raw = whole.read_bytes()
    index.write_bytes(
        data.draw(cut_up(raw)) if data.draw(st.booleans()) else dumped(data.draw(damaged(json.loads(raw))))
    )
    survives(folder)


@FUZZ
@given(data=st.data())
def test_a_config_before_the_load(here: Path, data: st.DataObject) -> None:
    folder, raw = here / "config", (here / "m" / bad.CFG).read_bytes()
    folder.mkdir(exist_ok=True)
    (folder / bad.W).write_bytes((here / "m" / bad.W).read_bytes())
    (folder / bad.CFG).write_bytes(
        data.draw(cut_up(raw)) if data.draw(st.booleans()) else dumped(data.draw(damaged(json.loads(raw))))
    )
    survives(folder)


@FUZZ
@given(data=st.data())
def test_a_config_at_the_load(here: Path, data: st.DataObject) -> None:
    """As far as a model in memory; what transformers makes of a field is only seen there."""
    from duat_cli.loading.model.load import load

    folder, raw = here / "load", (here / "m" / bad.CFG).read_bytes()
    folder.mkdir(exist_ok=True)
    (folder / bad.W).write_bytes((here / "m" / bad.W).read_bytes())
    (folder / bad.CFG).write_bytes(dumped(data.draw(damaged(json.loads(raw)))))
    started = time.process_time()
    with contextlib.suppress(DuatError):
        load(str(folder))
    assert time.process_time() - started < 2 * LONGEST


@FUZZ
@given(data=st.data())
def test_an_adapter(here: Path, data: st.DataObject) -> None:
    """Its config and its header, beside the base that it is of."""
    whole = here / "a" / "adapter"
    if not whole.exists():
        (here / "a").mkdir()
        bad.lora(here / "a")
    folder = here / "adapter"
    folder.mkdir(exist_ok=True)
    config, raw = (whole / "adapter_config.json").read_bytes(), (whole / "adapter_model.safetensors").read_bytes()
    header, rest = bad.split(whole / "adapter_model.safetensors")
    if data.draw(st.booleans()):
        config = dumped(data.draw(damaged(json.loads(config))))
    else:
        raw = b""
        bad.join(folder / "adapter_model.safetensors", dumped(data.draw(damaged(header))), rest)
    (folder / "adapter_config.json").write_bytes(config)
    if raw:
        (folder / "adapter_model.safetensors").write_bytes(raw)
    survives(here / "base", adapter=str(folder))


POLICY = """extends = "strict"
[rules]
"integrity.dead_neurons" = { level = "warn", max = 0.5 }
"integrity.dtype" = { allowed = ["F32"] }
[bounds]
"blocks.*.density.structural" = { min = 0.1, max = 0.9 }
[drift]
dtype = "bfloat16"
[drift.tolerance]
"weights.**" = { rtol = 0.1, atol = 0.01, better = "lower" }
"""


@FUZZ
@given(data=st.data())
def test_a_policy(here: Path, data: st.DataObject) -> None:
    path = here / "policy.toml"
    path.write_bytes(data.draw(cut_up(POLICY.encode())))
    survives(here / "m", policy=str(path), baseline=str(here / "b.json"))


def toml(value: Any) -> str:
    """A TOML value, as far as JSON has it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps("" if value is None else value)


@FUZZ
@given(data=st.data())
def test_a_policy_by_its_tables(here: Path, data: st.DataObject) -> None:
    import tomllib

    content = data.draw(damaged(tomllib.loads(POLICY)))
    assume(isinstance(content, dict))
    path = here / "tables.toml"
    path.write_bytes(
        "".join(f"{json.dumps(k)} = {toml(v)}\n" for k, v in content.items()).encode("utf-8", "surrogatepass")
    )
    survives(here / "m", policy=str(path), baseline=str(here / "b.json"))


@FUZZ
@given(data=st.data())
def test_a_baseline(here: Path, data: st.DataObject) -> None:
    raw = (here / "b.json").read_bytes()
    path = here / "damaged.json"
    path.write_bytes(
        data.draw(cut_up(raw)) if data.draw(st.booleans()) else dumped(data.draw(damaged(json.loads(raw))))
    )
    survives(here / "m", baseline=str(path), json=data.draw(st.booleans()))
