"""A checkpoint of two layers, a file of prompts, and what one process makes of them in a folder."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paging import llama_with_tokenizer

from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.opening import ModelRequest, PromptRequest, open_set
from duat_cli.analysis.plan import run as plan_module
from duat_cli.analysis.plan.task import Task
from duat_cli.analysis.shards import run as run_module
from duat_cli.analysis.shards.folder import Folder
from duat_cli.analysis.shards.inspect import inspect_into
from duat_cli.analysis.shards.ranks import Ranks
from duat_cli.cli.main import run as run_command
from duat_cli.cli.terminal import libraries
from duat_cli.results.inspect import InspectReport

Into = Callable[..., InspectReport | None]
TakenUp = Callable[..., tuple[str, Path]]
RunOnce = Callable[..., None]


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_with_tokenizer(
        tmp_path_factory.mktemp("two-layers"), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 short prompts of 5 lengths, three of them the same text."""
    drawn = random.Random(0)
    texts = ["".join(drawn.choice("abcdefgh ") for _ in range(drawn.randint(4, 8))) + "." for _ in range(32)]
    texts[20] = texts[30] = texts[7]
    file = tmp_path_factory.mktemp("prompts") / "many.txt"
    file.write_text("\n".join(texts))
    return file


@pytest.fixture(scope="session")
def some(many: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 15 of 5 to 7 tokens, two of them the same text."""
    file = tmp_path_factory.mktemp("prompts") / "some.txt"
    file.write_text("\n".join([text for text in many.read_text().splitlines() if len(text) < 8][:15]))
    return file


@pytest.fixture(scope="session")
def lots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """66 short prompts of 5 lengths."""
    drawn = random.Random(2)
    texts = ("".join(drawn.choice("abcdefgh ") for _ in range(drawn.randint(4, 8))) + "." for _ in range(66))
    file = tmp_path_factory.mktemp("prompts") / "lots.txt"
    file.write_text("\n".join(texts))
    return file


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six short prompts, two of them the same text."""
    drawn, file = random.Random(1), tmp_path_factory.mktemp("prompts") / "few.txt"
    texts = ["".join(drawn.choice("abcdefgh ") for _ in range(drawn.randint(3, 6))) + "." for _ in range(6)]
    texts[4] = texts[1]
    file.write_text("\n".join(texts))
    return file


@pytest.fixture(scope="session")
def answers() -> dict[tuple[str, ...], str]:
    """What commands of these words said that were asked with `known`."""
    return {}


@pytest.fixture
def ask(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answers: dict[tuple[str, ...], str]
) -> Callable[..., str]:
    """Run a command in this process, as one of several: its JSON without `run`, or what it says on standard error.
    known: a plain run that nothing is patched for, which is the same in every test and is made once."""
    monkeypatch.setattr(libraries, "calm", lambda talk: None)
    monkeypatch.setattr(run_module, "GRACE", 0.0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def asked(*words: str, rank: int | None = None, world: int = 2, code: int = 0, known: bool = False) -> str:
        if known:
            return answers[words] if words in answers else answers.setdefault(words, asked(*words))
        with monkeypatch.context() as patch:
            if rank is not None:
                patch.setenv("RANK", str(rank))
                patch.setenv("WORLD_SIZE", str(world))
            capsys.readouterr()
            assert run_command([*words, "--json", "-q"]) == code
        out, err = capsys.readouterr()
        if not out:
            return err
        report = json.loads(out, parse_constant=pytest.fail)
        del report["run"]
        return json.dumps(report)

    return asked


@pytest.fixture
def taken_up(ask: Callable[..., str], tmp_path: Path) -> TakenUp:
    """Of six prompts, one of three processes leaves a line and a torn one; one process computes the others. say: as
    `ask`, of one command. The plain report, which is that of the folder `out`, and the folder."""

    def resume(say: Callable[..., str], *words: str) -> tuple[str, Path]:
        plain, out = say(*words, known=True), tmp_path / "out"
        say(*words, "--out", str(out), rank=2, world=3)
        [shard] = out.glob("shard-*")
        whole = shard.read_bytes().splitlines(keepends=True)
        assert len(whole) == 2
        torn = whole[0] + whole[1][:-30]
        shard.write_bytes(torn)
        assert Folder.read(out).index().found == 1
        assert "missing 5 prompts: run the same command again" in ask("merge", str(out), code=2)
        assert say(*words, "--out", str(out)) == plain
        assert shard.read_bytes() == torn  # nobody else writes to it
        assert len((out / "shard-0-of-1.jsonl").read_bytes().splitlines()) == 5
        return plain, out

    return resume


@pytest.fixture(params=[0, 1], ids=["in memory", "block by block"])
def run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> RunOnce:
    """Of six prompts, two processes run each one once, but the set's first once each, and give the plain report; its
    results are written once, by the first process. runs: the class that runs them. say: as `ask`, of one command."""

    def check(runs: Any, say: Callable[..., str], *words: str) -> None:
        seen, call, out = list[int](), runs.__call__, tmp_path / "out"

        def counted(self: Any, chunk: Any, *more: Any) -> Any:
            seen.extend(position for position, _ in chunk)
            return call(self, chunk, *more)

        plain = say(*words, known=True)
        monkeypatch.setattr(run_module, "SIDE_BY_SIDE", 4)
        monkeypatch.setattr(plan_module, "way_of", lambda made: made.ways[request.param])
        monkeypatch.setattr(runs, "__call__", counted)
        say(*words, "--out", str(out), rank=1)
        theirs = seen.copy()
        assert (theirs[0], len(theirs), Folder.read(out).index().found) == (0, 4, 3)
        assert say(*words, "--out", str(out), rank=0) == plain
        assert Folder.read(out).manifest.in_parts == bool(request.param)
        assert sorted(seen[4:] + theirs[1:]) == list(range(6))
        assert say(*words, "--out", str(out)) == plain  # complete: its facts alone are found again
        assert seen[7:] == [0]
        shards = [file.read_bytes().splitlines() for file in sorted(out.glob("shard-*"))]
        assert [len(lines) for lines in shards] == [0, 3, 3]

    return check


@pytest.fixture(scope="session")
def into(two_layers: Path, some: Path) -> Into:
    """Run inspect --out in this process; `prompts` names another file, `max_tokens` cuts, others are options."""

    def run(
        folder: Path,
        ranks: Ranks = Ranks(),  # noqa: B008 (it is frozen)
        progress: Any = lambda *_: None,
        prompts: Path = some,
        max_tokens: int | None = None,
        dtype: str = "float32",
        **options: Any,
    ) -> InspectReport | None:
        model = ModelRequest(str(two_layers), None, None, None, False, dtype, "cpu", None, Task("inspect"))
        loaded, texts = open_set(model, PromptRequest(None, str(prompts), max_tokens), progress, gpu=0)
        settings = InspectOptions(**{"null": "uniform", "cache": False, **options})
        return inspect_into(folder, loaded, texts, settings, max_tokens, ranks, progress)

    return run
