"""Adapters and tuned checkpoints by hub id, against a stand-in of the hub on this machine."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub_server
import pytest
from children import PATIENCE
from huggingface_hub import constants

import duat_cli as duat
from duat_cli.cli.main import run
from duat_cli.errors import CheckpointError, InputError
from duat_cli.loading.adapter.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from duat_cli.loading.adapter.source import find_adapter, find_tuned
from duat_cli.loading.checkpoint.source import demo_adapter_path, demo_path

ADAPTER, TUNED, OLD = "org/adapter", "org/tuned", "refs/pr/1"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the refusal of every connection: this machine may be asked."""
    connect = socket.socket.connect

    def local(self: socket.socket, address: Any) -> None:
        assert address[0] == "127.0.0.1", "a network attempt"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Hub]:
    """An adapter with files that nobody needs, another one at a revision, and a checkpoint."""
    for name in ("adapter", "old"):
        shutil.copytree(demo_adapter_path(), tmp_path / name)
    config = json.loads((tmp_path / "old" / ADAPTER_CONFIG).read_text())
    (tmp_path / "old" / ADAPTER_CONFIG).write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))
    (tmp_path / "adapter" / "optimizer.pt").write_bytes(b"pickle")
    (tmp_path / "adapter" / "model.safetensors").write_bytes(b"a whole model, beside its adapter")
    shutil.copytree(demo_path(), tmp_path / "tuned")
    with hub_server.serving() as hub:
        hub_server.turned_to(hub, monkeypatch)
        hub.repositories = {
            ADAPTER: {"main": tmp_path / "adapter", OLD: tmp_path / "old"},
            TUNED: {"main": tmp_path / "tuned"},
        }
        yield hub


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def test_an_adapter_is_fetched_and_nothing_else(hub: hub_server.Hub, cache: str) -> None:
    place = find_tuned(ADAPTER, cache_dir=cache)
    assert (place.name, place.revision) == (ADAPTER, hub.commit(ADAPTER, "main"))
    assert (place.path / ADAPTER_WEIGHTS).read_bytes() == (demo_adapter_path() / ADAPTER_WEIGHTS).read_bytes()
    assert sorted(hub.fetched) == [f"{ADAPTER}/{ADAPTER_CONFIG}", f"{ADAPTER}/{ADAPTER_WEIGHTS}"]
    assert find_adapter(ADAPTER, cache_dir=cache) == place
    assert len(hub.fetched) == 2


def test_a_revision_stands_behind_the_id(hub: hub_server.Hub, cache: str) -> None:
    now, before = (find_adapter(name, cache_dir=cache) for name in (ADAPTER, f"{ADAPTER}@{OLD}"))
    first, second = (json.loads((p.path / ADAPTER_CONFIG).read_text())["lora_alpha"] for p in (now, before))
    assert second == 2 * first
    assert before.revision == hub.commit(ADAPTER, OLD)
    assert find_adapter(f"{ADAPTER}@{before.revision}", cache_dir=cache).path == before.path


def test_a_tuned_checkpoint_is_fetched_whole(hub: hub_server.Hub, cache: str) -> None:
    place = find_tuned(TUNED, cache_dir=cache)
    assert (place.name, place.revision) == (TUNED, hub.commit(TUNED, "main"))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in place.path.iterdir()}


def test_a_path_never_asks_the_hub(hub: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tmp_path / "adapter", tmp_path / "org" / "adapter")
    for name in (ADAPTER, f"./{ADAPTER}", str(tmp_path / "adapter")):
        assert find_tuned(name).revision is None
    for name in ("./nope", "nope/a/b", "~/nope", "./nope@main"):
        with pytest.raises(CheckpointError, match=r"no such folder$"):
            find_tuned(name)
    assert find_tuned(None).path == demo_adapter_path()
    assert hub.fetched == []


REFUSED = {
    "org/nothing": "'org/nothing': no such folder, and no such repository on the hub",
    f"{ADAPTER}@nope": "has no revision 'nope'",
    "org/private": "a private one needs --token",
    "org/gated": "is gated: accept its terms",
    "org/pickle": "pickle is never read",
    "a b/c": "not a hub id",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_one_line(name: str, hub: hub_server.Hub, cache: str, tmp_path: Path) -> None:
    for repository in ("org/private", "org/gated"):
        hub.repositories[repository] = {"main": tmp_path / "adapter"}
    hub.private, hub.gated = {"org/private"}, {"org/gated"}
    hub.repositories["org/pickle"] = {"main": tmp_path / "pickle"}
    shutil.copytree(tmp_path / "adapter", tmp_path / "pickle")
    (tmp_path / "pickle" / ADAPTER_WEIGHTS).rename(tmp_path / "pickle" / "adapter_model.bin")
    with pytest.raises(CheckpointError) as refusal:
        find_tuned(name, cache_dir=cache)
    assert REFUSED[name] in str(refusal.value)
    assert "\n" not in str(refusal.value)
    if name in ("org/private", "org/gated"):
        assert find_tuned(name, token=hub_server.TOKEN, cache_dir=cache).revision


def test_a_checkpoint_is_no_adapter(hub: hub_server.Hub, cache: str) -> None:
    with pytest.raises(CheckpointError, match=f"neither the hub nor the cache has its {ADAPTER_CONFIG}"):
        find_adapter(TUNED, cache_dir=cache)


@pytest.mark.parametrize("name", ["", " ", "a\0b"])
def test_no_name_at_all(name: str) -> None:
    with pytest.raises(InputError, match="a folder or a hub id"):
        find_tuned(name)


def test_offline_takes_what_is_cached(hub: hub_server.Hub, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = find_adapter(ADAPTER, cache_dir=cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.fetched)
    assert find_adapter(ADAPTER, cache_dir=cache) == before
    assert len(hub.fetched) == asked
    with pytest.raises(CheckpointError, match="the hub is off or out of reach"):
        find_adapter(f"{ADAPTER}@{OLD}", cache_dir=cache)
    with pytest.raises(CheckpointError, match="the hub is off or out of reach"):
        find_tuned(TUNED, cache_dir=cache)


# -- the commands ------------------------------------------------------------------------------------------------


def report_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert run([*arguments, "--json", "-q"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def test_lora_diff_gives_what_the_folders_give(
    hub: hub_server.Hub, cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [ADAPTER, f"{ADAPTER}@{OLD}"]
    ours = report_of(["lora-diff", str(demo_path()), *names, "--cache-dir", cache], capsys)
    theirs = report_of(["lora-diff", str(demo_path()), str(tmp_path / "adapter"), str(tmp_path / "old")], capsys)
    assert (ours["tuned"], ours["comparison"]["other"]) == (ADAPTER, names[1])
    assert (ours["modules"], ours["other_modules"]) == (theirs["modules"], theirs["other_modules"])
    assert len(ours["modules"]) == 24


def test_lora_diff_takes_a_tuned_checkpoint_of_the_hub(
    hub: hub_server.Hub, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report_of(["lora-diff", str(demo_path()), TUNED, "--cache-dir", cache], capsys)
    assert (found["tuned"], found["mode"], found["modules"]) == (TUNED, "checkpoint", [])


def test_check_takes_an_adapter_of_the_hub(hub: hub_server.Hub, cache: str) -> None:
    by_id = duat.check(demo_path(), adapter=ADAPTER, cache_dir=cache, prompts=["def main(argv):"])
    by_folder = duat.check(demo_path(), adapter=demo_adapter_path(), prompts=["def main(argv):"])
    assert by_id.outcomes == by_folder.outcomes
    assert by_id.behaviour is not None
    assert by_id.behaviour.tuned is not None


def test_plan_takes_one_too(hub: hub_server.Hub, cache: str) -> None:
    by_id = duat.plan(demo_path(), command="lora-diff", tuned=ADAPTER, cache_dir=cache)
    assert by_id.ways == duat.plan(demo_path(), command="lora-diff", tuned=demo_adapter_path()).ways


def test_a_process_asks_where_hf_endpoint_says(hub: hub_server.Hub, cache: str) -> None:
    find = f"print(source.find_tuned({TUNED!r}, cache_dir={cache!r}).path)"
    environment = {"HF_ENDPOINT": hub.url, "PATH": "/usr/bin:/bin", "HOME": cache, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", f"from duat_cli.loading.adapter import source; {find}"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    fetched = (Path(done.stdout.strip()) / "model.safetensors").read_bytes()
    assert fetched == (demo_path() / "model.safetensors").read_bytes()
