"""Verdicts, errors and their exit codes; every error is one clean line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import Duat, Outcome

from duat_cli.report.schema import REPORTS


def one_error(result: Outcome, *words: str) -> None:
    """The process said exactly one thing, with these words, and no result."""
    text = result.stderr
    assert result.returncode == 2, text
    assert result.stdout == ""
    assert text.startswith("duat: error: ")
    assert text.count("\n") == 1
    assert "\x1b" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "fake", "code"),
    [
        (("inspect", "m"), "", 0),
        (("inspect", "m"), "inexact", 1),
        (("verify", "m", "--json"), "inexact", 1),
        (("support", "m"), "", 0),
        (("support", "m"), "partly", 1),
        (("support", "m"), "refused", 2),
        (("support", "--all"), "", 0),
    ],
)
def test_verdict_is_the_exit_code(duat: Duat, arguments: tuple[str, ...], fake: str, code: int) -> None:
    result = duat(*arguments, fake=fake)
    assert result.returncode == code, result.stderr
    assert result.stderr == ""
    assert result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("inspect", "--tresh", "1"), ("No such option: --tresh", "duat inspect --help")),
        (("plan", "m", "--stack", "text"), ("duat plan takes no --stack; ", " prune-bound and verify (help: ")),
        (("inspect", "--threshold", "high"), ("--threshold", "duat inspect --help")),
        (("inspect", "m", "--threshold", "nan"), ("--threshold nan", "at least 0")),
        (("inspect", "m", "--threshold", "-1"), ("--threshold -1.0",)),
        (("inspect", "m", "--conv-width", "0"), ("--conv-width",)),
        (("inspect", "m", "--max-tokens", "0"), ("--max-tokens",)),
        (("inspect", "m", "--dtype", "float31"), ("--dtype", "float31")),
        (("inspect", "m", "--format", "xml"), ("--format", "xml")),
        (("inspect", "m", "--layers", "3-1"), ("--layers '3-1'",)),
        (("inspect", "m", "--layers", "0-999999999"), ("--layers",)),
        (("inspect", "m", "--layers", ""), ("--layers ''",)),
        (("inspect", "m", "--json", "--format", "table"), ("--json", "--format table")),
        (("verify", "m", "-o", "v.html"), ("--output v.html", "writes no page")),
        (("inspect", "m", "-q", "-v"), ("--quiet", "--verbose")),
        (("inspect", "m", "--matrices", "-"), ("--matrices",)),
        (("attribute", "--token", "w9"), ("--token: gives access to the hub", "--target")),
        (("inspect", "--layers", "0", "--layers", "1"), ("--layers: given 2 times; it takes one value",)),
        (("inspect", "a", "b"), ("unexpected extra argument", "two are compared by duat lora-diff BASE TUNED")),
        (("support", "m", "--all"), ("--all",)),
        (("inspect", "m", "--layers"), ("--layers", "requires an argument", "help: duat inspect --help")),
        (("schema", "nothing"), ("nothing",)),
        (("inspekt",), ("No such command", "inspekt")),
        (("inspect", "./nope\x1b[31m"), ("no such folder", "\\x1b[31m")),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(
    duat: Duat, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    one_error(duat(*arguments, fake="crash"), *words)


def test_a_known_error_is_one_clean_line(duat: Duat) -> None:
    one_error(duat("inspect", "m", fake="refuse"), "mamba: no attention\\x1b[31m was found")


@pytest.mark.parametrize("fake", ["crash", "panic"])
def test_an_unknown_error_says_how_to_see_more(duat: Duat, fake: str) -> None:
    one_error(duat("inspect", "m", fake=fake), "unexpected", "DUAT_DEBUG=1")
    debug = duat("inspect", "m", fake=fake, DUAT_DEBUG="1")
    assert debug.returncode == 2
    assert "Traceback" in debug.stderr


def test_a_refusal_shows_its_cause_when_asked(duat: Duat) -> None:
    one_error(duat("inspect", "m", fake="cause"), "could not be replayed")
    debug = duat("inspect", "m", fake="cause", DUAT_DEBUG="1")
    assert debug.returncode == 2
    assert "KeyError: 'the cause'" in debug.stderr


def test_out_of_memory_says_what_to_do(duat: Duat) -> None:
    one_error(duat("inspect", "m", fake="memory"), "out of memory", "--max-tokens")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect", "--out", ""], "--out '': an empty name; expected a folder"),
        (["inspect", "-o", ""], "--output '': an empty name; expected a file"),
        (["check", "--baseline", ""], "--baseline '': an empty name"),
        (["prune-bound", "--apply", ""], "--apply '': an empty name"),
        (["inspect", "--image", "a.png", "--image", ""], "--image '': an empty name"),
        (["merge", ""], "DIR '': an empty name; expected a folder"),
        (["inspect", "--out", "taken"], "--out taken: a file; expected a folder"),
    ],
    ids=str,
)
def test_an_empty_name_is_not_the_working_directory(
    arguments: list[str], said: str, duat: Duat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    one_error(duat(*arguments), said)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_verbose_names_every_step(duat: Duat) -> None:
    result = duat("inspect", "m", "-v")
    assert result.stderr.splitlines() == [
        "duat: reading the prompts",
        "duat: looking for m",
        "duat: loading torch and transformers",
        "duat: loading m",
        "duat: block \\x1b[31mthree",
    ]


def test_a_token_is_never_printed(duat: Duat) -> None:
    secrets = ("secret-of-mine", "secret-of-yours", "abcdefghijkl")
    for fake in ("leak", "leak-crash"):
        for debug in ("", "1"):
            result = duat("inspect", "m", "--token", secrets[0], fake=fake, HF_TOKEN=secrets[1], DUAT_DEBUG=debug)
            assert result.returncode == 2
            assert "401" in result.stderr
            assert not any(secret in result.stderr + result.stdout for secret in secrets)


def test_demo_is_announced_and_quiet_is_quiet(duat: Duat) -> None:
    assert "bundled demo" in duat("inspect").stderr
    assert duat("inspect", "-q").stderr == ""


def test_json_is_one_document(duat: Duat) -> None:
    for arguments in (("--json",), ("--format", "json"), ("--format=json", "--json")):
        result = duat("inspect", "m", *arguments)
        document = json.loads(result.stdout, parse_constant=pytest.fail)
        assert document["command"] == "inspect"
        assert result.stdout.isascii()
        assert "\x1b" not in result.stdout


def test_underscores_are_dashes(duat: Duat) -> None:
    result = duat("inspect", "m_x", "--trust_remote_code", "--conv_width=4", "--max_tokens", "3")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("m_x at")


def test_options_reach_the_analysis(duat: Duat) -> None:
    plain, full = duat("inspect", "m"), duat("inspect", "m", "--spectrum", "--terms", "--per-prompt")
    assert "spectral" not in plain.stdout.split("skipped")[0]
    for word in ("spectral", "model.layers.3.mlp (dynamic)", "Block 3 by prompt"):
        assert word in full.stdout


def test_matrices_are_written(duat: Duat, tmp_path: Path) -> None:
    file = tmp_path / "c.safetensors"
    result = duat("inspect", "m", "--matrices", str(file))
    assert result.returncode == 0, result.stderr
    assert file.read_bytes() == b"matrices"
    assert list(tmp_path.iterdir()) == [file]


def schema_of(name: str, duat: Duat) -> dict[str, Any]:
    """Of a command's report; a report of every stack is the second that the schema allows."""
    schema = json.loads(duat("schema", *name.split()).stdout)
    first = next(iter(schema.get("anyOf", [])), None)
    return schema if first is None else schema["$defs"][first["$ref"].rpartition("/")[2]]


def test_version_and_schema(duat: Duat) -> None:
    assert duat("--version").stdout.startswith("duat 0.")
    assert schema_of("", duat)["title"] == "InspectReport"


def test_every_report_has_a_schema(duat: Duat) -> None:
    """And the help of the command names it."""
    told = " ".join(duat("schema", "--help").stdout.replace("│", " ").split())
    for name in REPORTS:
        assert json.loads(duat("schema", name).stdout)["$schema"]
        assert name in told


@pytest.mark.parametrize("name", ["inspect", "matrix", "verify", "support"])
def test_a_schema_is_that_of_the_command_s_report(duat: Duat, name: str) -> None:
    schema = schema_of(name, duat)
    assert schema["title"] == f"{name.title()}Report"
    assert schema["properties"]["command"]["const"] == name
