"""`duat` with the analysis replaced by a hand-made report: the command line's own behaviour, quickly.

Run as a script. DUAT_FAKE, a comma-separated list of the words below, says what goes on inside.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))

from duat_cli.errors import CheckpointError, UnsupportedModelError
from duat_cli.loading.texts import checked


def samples() -> ModuleType:
    """Imported where a report is made: most of what a process of this takes."""
    import sample_reports

    return sample_reports


def modes() -> frozenset[str]:
    return frozenset(os.environ.get("DUAT_FAKE", "").split(","))


class PanicException(BaseException):
    """As pyo3 raises for a Rust panic in a tokenizer."""


def resolve(source: str | None, **options: Any) -> SimpleNamespace:
    if "leak" in modes():
        raise CheckpointError(f"401 for {options['token']}, {os.environ.get('HF_TOKEN')}, hf_abcdefghijkl")
    if "leak-crash" in modes():
        raise RuntimeError(f"401 for {options['token']}")
    return SimpleNamespace(path=Path("."), name=source or "demo")


def load_files(place: Any, files: Any, **options: Any) -> SimpleNamespace:
    if "refuse" in modes():
        raise UnsupportedModelError("mamba: no attention\x1b[31m\nwas found")
    return SimpleNamespace(name=place.name, files=files, model=None, like=None, reads_tokens=True)


def act() -> None:
    if "slow" in modes():
        print("computing", file=sys.stderr, flush=True)
        time.sleep(3600)
    if "pause" in modes():
        _wait_for(Path(os.environ["DUAT_FAKE_UNTIL"]))
    if "crash" in modes():
        raise KeyError("no such\nthing")
    if "memory" in modes():
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")
    if "cause" in modes():
        raise UnsupportedModelError("its own code could not be replayed") from KeyError("the cause")
    if "panic" in modes():
        raise PanicException("range end index 7 out of range")


def _wait_for(file: Path) -> None:
    """Until the test has seen what it waits for and makes the file; a minute is for one that never does."""
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def inspect(loaded: Any, prompts: Any, options: Any, progress: Any, filled: Any) -> Any:
    progress(3, 30, "block \x1b[31mthree")
    act()
    if filled.matrices is not None:
        filled.matrices.path.write_bytes(b"matrices")
    warnings = ("a \x1b[31mred\x1b[0m [bold]warning[/bold]",) * (4000 if "big" in modes() else 1)
    return samples().inspect_report(
        exact="inexact" not in modes(),
        spectrum=options.spectrum,
        with_terms=options.terms,
        per_prompt=options.per_prompt,
        name=loaded.name,
        warnings=warnings,
    )


class OperatorFile:
    def __init__(self, path: Path, decode: Any, option: str) -> None:
        self.path = path

    def close(self) -> None:
        pass


def verify(loaded: Any, prompts: Any, progress: Any) -> Any:
    act()
    return samples().verify_report(exact="inexact" not in modes())


def support_of(loaded: Any) -> Any:
    place = {"partly": 1, "refused": 2}
    return samples().support_report().entries[next((place[mode] for mode in modes() if mode in place), 0)]


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(contents)
    return made


FAKES = {
    fake.__name__: fake
    for fake in (
        module("duat_cli.loading.checkpoint.source", resolve=resolve),
        module(
            "duat_cli.loading.checkpoint.preflight", inspect_folder=lambda path: SimpleNamespace(path=path, config={})
        ),
        module(
            "duat_cli.models.discovery.modality", class_reads_ids=lambda cls: True, require_token_ids=lambda model: None
        ),
        module("duat_cli.loading.model.memory", fits=lambda *_: True, peak_memory=lambda: 0),
        module(
            "duat_cli.loading.model.tokenizer",
            templated_tokenizer=lambda *a, **k: None,
            tokenizer_if_any=lambda *a, **k: None,
            token_texts=lambda *a: lambda token: "",
        ),
        module("duat_cli.loading.model.lengths", token_counter=lambda *a, **k: lambda texts: [1]),
        module(
            "duat_cli.analysis.plan.run",
            plan=lambda *a, **k: SimpleNamespace(may_be_long=lambda way: False),
            on_device=lambda device, task, memory: (task, memory),
            way_of=lambda made: None,
        ),
        module(
            "duat_cli.loading.model.load",
            class_of=lambda *a: object,
            load_files=load_files,
            skeleton=lambda *a: object(),
            parse_device=lambda name: SimpleNamespace(type="cpu"),
        ),
        module(
            "duat_cli.loading.prompts",
            said=lambda *a: "",
            Prompt=object,
            read_prompts=lambda *a, **k: [checked("x", "--prompt 1", 1)],
            encode=lambda *a, **k: [[1]],
            limits=lambda model: SimpleNamespace(max_positions=None, vocab_size=1),
        ),
        module("duat_cli.analysis.prepared", open_prepared=lambda *a, **k: None),
        module("duat_cli.analysis.stacks", part_of=lambda loaded, *a, **k: loaded),
        module("duat_cli.analysis.operator_file", OperatorFile=OperatorFile),
        module("duat_cli.analysis.inspect.maps", Maps=object),  # it imports torch, which a process pays for
        module("duat_cli.analysis.inspect.save.states", saving=None),
        module("duat_cli.analysis.inspect.run", inspect=inspect),
        module("duat_cli.analysis.inspect.verify", verify=verify),
        module(
            "duat_cli.analysis.support",
            support_of=support_of,
            support_report=lambda entries, run: (
                samples().support_report().model_copy(update={"entries": entries, "run": run})
            ),
            support_all=lambda progress: samples().support_report().entries,
        ),
    )
}

if __name__ == "__main__":
    from duat_cli.cli.main import main
    from duat_cli.cli.terminal import progress

    progress.PATIENCE, progress.PAUSES = (0.1, (0.1,)) if "pause" in modes() else (3600.0, progress.PAUSES)
    sys.modules.update(FAKES)
    main()
