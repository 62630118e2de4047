"""Many prompts in a folder, by one process or several, whole or killed: always the report of a plain run."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from children import hear_signals

from duat_cli.analysis.plan import run as plan_module
from duat_cli.analysis.shards import inspect as inspect_module
from duat_cli.analysis.shards import run as module
from duat_cli.analysis.shards import shard as shard_module
from duat_cli.analysis.shards.folder import Folder
from duat_cli.analysis.shards.ranks import Ranks
from duat_cli.analysis.shards.shard import shard
from duat_cli.cli.main import main
from duat_cli.errors import InputError
from duat_cli.models import budgets

Into = Callable[..., Any]
COUNT = 32


class Children:
    """Processes of duat that start at once: they are forked from this one, which has imported all that they need."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._out: dict[int, Path] = {}
        self._codes: dict[int, int] = {}  # of those that are known to have ended; negative: the signal

    def start(self, *arguments: str, **env: str) -> int:
        out = self._folder / f"said-{len(self._out)}"
        number = os.fork()
        if not number:
            _become(arguments, env, out)
        self._out[number] = out
        return number

    def wait(self, number: int) -> tuple[int, str, str]:
        """How it ended, and what it wrote to both streams."""
        self._look(number, 0)
        out = self._out[number]
        return self._codes[number], Path(f"{out}.1").read_text(), Path(f"{out}.2").read_text()

    def ended(self, number: int) -> bool:
        self._look(number, os.WNOHANG)
        return number in self._codes

    def run(self, *arguments: str, **env: str) -> tuple[int, str, str]:
        return self.wait(self.start(*arguments, **env))

    def _look(self, number: int, how: int) -> None:
        if number not in self._codes:
            ended, status = os.waitpid(number, how)
            self._codes |= {number: os.waitstatus_to_exitcode(status)} if ended else {}


def _become(arguments: tuple[str, ...], env: dict[str, str], out: Path) -> NoReturn:
    """The child's life: both streams go to files, `out`.1 and `out`.2."""
    code = 70
    try:
        hear_signals()
        os.environ.update(env)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{out}.{number}", os.O_WRONLY | os.O_CREAT, 0o600), number)
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 (as long as the process lives)
        main(list(arguments))
    except SystemExit as leave:
        code = int(leave.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Children:
    return Children(tmp_path_factory.mktemp("said"))


@pytest.fixture(scope="module")
def command(two_layers: Path, many: Path) -> list[str]:
    return ["inspect", str(two_layers), "--prompts", str(many), "--terms", "--json", "-q", "--device", "cpu"]


def without_run(text: str) -> str:
    report = json.loads(text)
    del report["run"]
    return json.dumps(report)


@pytest.fixture(scope="module")
def plain(children: Children, command: list[str]) -> str:
    """The report without --out."""
    code, said, _ = children.run(*command)
    assert code == 0
    return without_run(said)


def ranks_of(world: int) -> list[dict[str, str]]:
    return [{"RANK": str(rank), "WORLD_SIZE": str(world)} for rank in range(world)]


def lines(folder: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("shard-*"))


def until(children: Children, started: list[int], reached: Callable[[], bool]) -> None:
    """Wait for it as long as one of the processes is there to bring it about."""
    while not reached():
        over = all(map(children.ended, started))
        assert not over or reached()
        time.sleep(0.002)


# -- any number of processes -------------------------------------------------------------------------------------


def test_several_processes_give_the_plain_report(
    children: Children, command: list[str], plain: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    started = [children.start(*command, "--out", str(out), **env) for env in ranks_of(3)]
    ended = [children.wait(number) for number in started]
    assert [code for code, _, _ in ended] == [0, 0, 0]
    assert without_run(ended[0][1]) == plain
    assert [said for _, *both in ended[1:] for said in both] == [""] * 4  # the first alone talks
    assert lines(out) == COUNT
    assert len(list(out.glob("shard-*"))) == 3
    code, said, _ = children.run("merge", str(out), "--json")
    assert (code, without_run(said)) == (0, plain)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_goes_on_with_others(
    children: Children, command: list[str], plain: str, tmp_path: Path
) -> None:
    out, drawn = tmp_path / "out", random.Random(0)
    ended = []
    for world in drawn.sample([1, 2, 3], 3):
        goal = min(COUNT, lines(out) + drawn.randint(1, 6))
        started = [children.start(*command, "--out", str(out), **env) for env in ranks_of(world)]
        until(children, started, lambda goal=goal: lines(out) >= goal)  # type: ignore[misc]
        for number in started:
            os.kill(number, signal.SIGKILL)
        ended += [children.wait(number)[0] for number in started]
        with next(out.glob("shard-*")).open("ab") as torn:
            torn.write(b'{"check":"')
    assert -signal.SIGKILL in ended
    code, said, error = children.run("merge", str(out), "--json")
    if code:  # it was killed before it had all
        assert (code, said) == (2, "")
        assert "prompts: run the same command again" in error
    started = [children.start(*command, "--out", str(out), **env) for env in ranks_of(2)]
    said, nothing = (children.wait(number)[1] for number in started)
    assert (without_run(said), nothing) == (plain, "")
    assert without_run(children.run("merge", str(out), "--json")[1]) == plain


@pytest.mark.slow
def test_another_command_goes_on_after_a_kill(children: Children, two_layers: Path, few: Path, tmp_path: Path) -> None:
    words = ["prune-bound", str(two_layers), "--prompts", str(few), "--granularity", "neuron", "--probes", "2"]
    words += ["--measure", "2", "--json", "-q", "--device", "cpu"]
    out = tmp_path / "out"
    number = children.start(*words, "--out", str(out))
    until(children, [number], lambda: lines(out) >= 2)
    os.kill(number, signal.SIGKILL)
    assert children.wait(number)[0] == -signal.SIGKILL
    assert without_run(children.run(*words, "--out", str(out))[1]) == without_run(children.run(*words)[1])


def test_an_interrupt_leaves_whole_lines(children: Children, command: list[str], plain: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    number = children.start(*command, "--out", str(out))
    until(children, [number], lambda: lines(out) >= 2)
    os.kill(number, signal.SIGINT)
    code, said, error = children.wait(number)
    assert (code, said, error) == (130, "", "duat: interrupted\n")
    assert Folder.read(out).index().found == lines(out) < COUNT
    assert all(file.read_bytes().endswith(b"\n") for file in out.glob("shard-*"))
    assert list(out.glob("*.part")) == []
    assert without_run(children.run(*command, "--out", str(out))[1]) == plain


def test_batches_are_the_same_whoever_runs_them(
    children: Children, two_layers: Path, lots: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed once, taken up with another number of processes: byte for byte the report of a plain run."""
    monkeypatch.setattr(budgets, "FEWEST_BATCHES", 32)
    command = ["inspect", str(two_layers), "--prompts", str(lots), "--null", "uniform"]
    command += ["--json", "-q", "--device", "cpu"]
    plain, out = without_run(children.run(*command)[1]), tmp_path / "out"
    assert json.loads(plain)["environment"]["batch_size"] == 2
    started = [children.start(*command, "--out", str(out), **env) for env in ranks_of(2)]
    until(children, started, lambda: lines(out) >= 10)
    for number in started:
        os.kill(number, signal.SIGKILL)
        children.wait(number)
    longest = max(out.glob("shard-*"), key=lambda one: one.stat().st_size)  # the other may have nothing yet
    with longest.open("r+b") as shard:  # the last batch loses a prompt, and has to run as a whole
        shard.truncate(len(shard.read()) - 10)
    before = lines(out)
    assert before < 66
    started = [children.start(*command, "--out", str(out), **env) for env in ranks_of(3)]
    ended = [children.wait(number) for number in started]
    assert without_run(ended[0][1]) == plain
    assert lines(out) == 66  # of a batch that was cut off, what was missing alone
    assert without_run(children.run("merge", str(out), "--json")[1]) == plain


def test_a_complete_folder_is_not_computed_again(into: Into, tmp_path: Path) -> None:
    first = into(tmp_path / "out")
    before = (tmp_path / "out" / "shard-0-of-1.jsonl").read_bytes()
    again = into(tmp_path / "out")
    assert (tmp_path / "out" / "shard-0-of-1.jsonl").read_bytes() == before
    assert again.model_dump(exclude={"run"}) == first.model_dump(exclude={"run"})


def test_values_per_prompt_are_those_of_a_plain_run(ask: Any, two_layers: Path, few: Path, tmp_path: Path) -> None:
    arguments = ["inspect", str(two_layers), "--prompts", str(few), "--terms", "--device", "cpu"]
    arguments += ["--per-prompt", "--layers", "1", "--null", "uniform"]
    assert ask(*arguments, "--out", str(tmp_path / "out")) == ask(*arguments)


def test_the_bundled_prompts_are_those_of_a_plain_run(ask: Any, two_layers: Path, tmp_path: Path) -> None:
    """Cut where the model's positions end."""
    arguments = ["inspect", str(two_layers), "--null", "uniform", "--device", "cpu"]
    assert ask(*arguments, "--out", str(tmp_path / "out")) == ask(*arguments)


def test_weights_that_are_read_block_by_block(
    into: Into, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then prompts go side by side, and a folder of the other kind is refused."""
    monkeypatch.setattr(module, "SIDE_BY_SIDE", 2)
    with monkeypatch.context() as streaming:
        streaming.setattr(plan_module, "way_of", lambda made: made.ways[1])
        for rank in (1, 0):
            parted = into(tmp_path / "parted", Ranks(rank, 2), prompts=few, null="all")
    whole = into(tmp_path / "whole", prompts=few, null="all")
    assert parted.certificate.exact
    assert parted.prompts == whole.prompts
    for mine, other in zip(parted.blocks, whole.blocks, strict=True):
        assert mine.operator == other.operator
        assert mine.terms == other.terms
        assert mine.null == other.null
        assert mine.null.reinitialised is not None
    with pytest.raises(InputError, match="another way to read weights, block by block there, in memory here"):
        into(tmp_path / "parted", prompts=few, null="all")


@pytest.mark.parametrize("way", [0, 1], ids=["in memory", "block by block"])
def test_every_prompt_is_measured_once(
    into: Into, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: int
) -> None:
    """The set's first one by the first process; the others compare their model with the untouched one on it."""
    seen, sweep = list[int](), inspect_module.sweep_together

    def counted(session: Any, prompts: Any, *rest: Any, **more: Any) -> Any:
        seen.append(len(prompts))
        return sweep(session, prompts, *rest, **more)

    monkeypatch.setattr(inspect_module, "sweep_together", counted)
    monkeypatch.setattr(module, "SIDE_BY_SIDE", 2)
    monkeypatch.setattr(plan_module, "way_of", lambda made: made.ways[way])
    assert into(tmp_path / "out", Ranks(1, 2), prompts=few) is None
    assert sum(seen) == 3
    report = into(tmp_path / "out", Ranks(0, 2), prompts=few)
    assert sum(seen) == 6
    assert report is not None
    assert report.certificate.exact


# -- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_rank_that_died_is_named(into: Into, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.0)
    out = tmp_path / "out"
    assert into(out, Ranks(2, 3)) is None
    file = out / "shard-2-of-3.jsonl"
    whole = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(whole[:3]) + whole[3][:-20])
    assert into(out, Ranks(1, 3)) is None
    missing = len(whole) - 3
    said = f"rank 2 of 3's shard ends after 3 of its {len(whole)} prompts; missing {missing} prompts: run the same"
    with pytest.raises(InputError, match=said):
        into(out, Ranks(0, 3))
    report = into(out, Ranks(0, 1))
    assert len(report.prompts) == 15
    assert len((out / "shard-0-of-1.jsonl").read_bytes().splitlines()) == missing


def test_a_rank_that_lives_is_waited_for(into: Into, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.0)
    out = tmp_path / "out"
    assert into(out, Ranks(1, 2)) is None
    file = out / "shard-1-of-2.jsonl"
    kept = file.read_bytes()
    file.write_bytes(b"")
    holding = shard(file, Ranks(1, 2))
    mine = holding.__enter__()

    def progress(done: int, total: int, what: str) -> None:
        if what == "waiting for rank 1 of 2":
            for line in kept.splitlines(keepends=True):
                mine.append(line)
            holding.__exit__(None, None, None)

    report = into(out, Ranks(0, 2), progress=progress)
    assert len(report.prompts) == 15


def test_two_processes_with_one_rank_are_refused(into: Into, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "PATIENCE", 0.0)
    out = tmp_path / "out"
    out.mkdir()
    said = "shard-1-of-2.jsonl: another process is writing it as rank 1 of 2"
    with shard(out / "shard-1-of-2.jsonl", Ranks(1, 2)), pytest.raises(InputError, match=said):
        into(out, Ranks(1, 2))


def test_a_prompt_that_cannot_be_run_is_said_before_the_others_are(into: Into, tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("fine\n" * 5 + "x" * 65)
    with pytest.raises(InputError, match=r"long\.txt line 6: too long, 65 tokens"):
        into(tmp_path / "out", prompts=file)
    assert lines(tmp_path / "out") == 0


@pytest.mark.parametrize(
    ("arguments", "rank", "said"),
    [
        (["--matrices", "m.safetensors"], None, "--out and --matrices contradict each other"),
        (["--prompt", "-"], 1, "standard input is read by one process"),
        (["--layers", "9"], 1, "rank 1 of 2: --layers: no block 9"),
        ([], 2, "RANK=2, WORLD_SIZE=2: expected a rank of 0 to 1"),
    ],
)
def test_options_that_exclude_each_other_are_one_line(
    ask: Any, command: list[str], tmp_path: Path, arguments: list[str], rank: int | None, said: str
) -> None:
    error = ask(*command, *arguments, "--out", str(tmp_path / "out"), rank=rank, code=2)
    assert error.count("\n") == 1
    assert error.startswith(f"duat: error: {said}")


# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_prompts(children: Children, two_layers: Path, tmp_path: Path) -> None:
    """From 200 prompts on, the merge at the end included, by at most 12 MB."""
    file, out = tmp_path / "many.txt", tmp_path / "out"
    drawn = random.Random(0)
    texts = ("".join(drawn.choice("abcdefgh ") for _ in range(drawn.randint(4, 24))) + f"{k}\n" for k in range(600))
    file.write_text("".join(texts))
    arguments = ["inspect", str(two_layers), "--prompts", str(file), "--null", "uniform", "--no-cache", "--json", "-q"]
    number = children.start(*arguments, "--device", "cpu", "--out", str(out))
    until(children, [number], lambda: lines(out) >= 200)
    sizes = [resident(number)]
    while size := resident(number):
        sizes.append(size)
        time.sleep(0.005)
    code, said, error = children.wait(number)
    assert (code, error) == (0, "")
    assert len(json.loads(said)["prompts"]) == 600
    assert len(sizes) > 50
    assert max(sizes) < sizes[0] + 12_000


def resident(number: int) -> int:
    """kB of a process; 0 once it has ended."""
    status = Path(f"/proc/{number}/status").read_text()
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)
