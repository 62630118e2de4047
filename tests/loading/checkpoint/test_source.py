"""From a name to a folder: a path never asks the network, a hub id is found in the cache."""

from __future__ import annotations

import fnmatch
import shutil
import socket
from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import huggingface_hub
import pytest
from refusals import refusal_of_load

from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.source import demo_path, is_local, resolve
from duat_cli.loading.model.fingerprint import fingerprint
from duat_cli.loading.model.load import load
from duat_cli.loading.model.tokenizer import load_tokenizer


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE=1, which is read when huggingface_hub is imported."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("source", ["./nope", "../nope", "/nope", "~/nope", "a/b/c"])
def test_a_path_never_touches_the_network(source: str) -> None:
    assert is_local(source)
    assert refusal_of_load(source).endswith("no such folder")


@pytest.mark.parametrize("source", ["nope", "nope/x", "a b/c", "x" * 300])
def test_a_hub_id_that_is_not_there(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    assert "no such folder" in refusal_of_load(source, cache_dir=str(tmp_path))


@pytest.mark.usefixtures("offline")
def test_a_folder_of_a_near_name_is_named_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path)
    said = refusal_of_load("my_model", cache_dir=str(tmp_path))
    assert "'my_model': no such folder; near it is 'my-model'; as a hub id: " in said
    assert "near it" not in refusal_of_load("another", cache_dir=str(tmp_path))


@pytest.mark.parametrize("source", ["", " ", "a\0b"])
def test_no_name_at_all(source: str) -> None:
    with pytest.raises(InputError, match="expected a folder or a hub id"):
        resolve(source)


NEEDED = (
    "config.json", "generation_config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
    "tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja", "preprocessor_config.json", "processor_config.json",
    "1_Pooling/config.json", "adapter_config.json",
)  # fmt: skip
LEFT = ("pytorch_model.bin", "modeling_own.py", "model.onnx", "README.md", "original/consolidated.00.pth")


def test_a_revision_of_a_folder(sound: Path) -> None:
    assert "is a local folder" in refusal_of_load(str(sound), revision="main")


def test_a_revision_of_the_demo() -> None:
    with pytest.raises(InputError, match="--revision 'main': the bundled demo has none; give MODEL"):
        resolve(None, revision="main")


def test_a_folder_that_is_called_as_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "~").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("./~").path.resolve() == tmp_path / "~"
    assert resolve("~").path == Path.home()


def test_the_demo_is_the_default() -> None:
    assert resolve(None).path == demo_path()
    assert resolve(None).name == "demo"


def hub_cache(cache: Path, repo: str, folder: Path) -> str:
    """A folder as the hub's cache keeps it: a commit's files as links to blobs."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot, blobs = root / "snapshots" / commit, root / "blobs"
    for new in (snapshot, blobs, root / "refs"):
        new.mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    return commit


def test_what_is_fetched_of_a_hub_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").touch()
    asked: list[str] = []

    def fetch(repo: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve("org/name").path == tmp_path

    def fetched(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in asked)

    assert [name for name in NEEDED if not fetched(name)] == []
    assert [name for name in LEFT if fetched(name)] == []


@pytest.mark.usefixtures("offline")
def test_a_cached_hub_id_is_loaded_offline(sound: Path, tmp_path: Path) -> None:
    commit = hub_cache(tmp_path / "cache", "org/name", sound)
    loaded = load("org/name", cache_dir=str(tmp_path / "cache"))
    assert (loaded.name, loaded.revision) == ("org/name", commit)
    assert fingerprint(loaded.model) == fingerprint(load(str(sound)).model)
    load_tokenizer(loaded.files.path)


@pytest.mark.usefixtures("offline")
def test_offline_and_not_cached(tmp_path: Path) -> None:
    message = refusal_of_load("org/name", cache_dir=str(tmp_path), token="hf_secret")
    assert "not in the cache" in message
    assert str(tmp_path) in message
    assert "hf_secret" not in message


@pytest.mark.usefixtures("offline")
def test_a_cached_hub_id_with_pickle_only(sound: Path, tmp_path: Path) -> None:
    (sound / bad.W).rename(sound / "pytorch_model.bin")
    hub_cache(tmp_path / "cache", "org/name", sound)
    assert "pickle is never read" in refusal_of_load("org/name", cache_dir=str(tmp_path / "cache"))


def test_a_token_is_never_in_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError(f"bad header: {kwargs['token']}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    message = refusal_of_load("org/name", token="hf_secret")
    assert "bad header: ***" in message
    assert "hf_secret" not in message
