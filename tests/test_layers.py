"""Imports go one way: errors, grouping, kinds, text, results ← operators, statistics ← cache ← models ← zoo ←
analysis ← api ← cli; loading beside models, checks on loading and below analysis; report reads results, explain what
report and checks declare. Folders inside these go one way as well. Found by ast,
so that imports inside functions and under TYPE_CHECKING count too."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import duat_cli

ROOT = Path(duat_cli.__file__).parent
BASE = {"errors", "grouping", "kinds", "results", "text"}
MAY = {
    "statistics": {"statistics", *BASE},
    "operators": {"operators", "statistics", *BASE},
    "cache": {"cache", "compat", *BASE},
    "loading": {"loading", "compat", *BASE},
    "models": {"models", "operators", "statistics", "cache", "compat", *BASE},
    "zoo": {"zoo", "models", "compat", *BASE},
    "analysis": {"analysis", "checks", "zoo", "models", "loading", "operators", "statistics", "cache", "compat", *BASE},
    "checks": {"checks", "loading", "compat", *BASE},
    "report": {"report", *BASE},
    "callbacks": {"api", "analysis", "checks", "loading", *BASE},
    "api": {"api", "explain", "report", "analysis", "models", "loading", "checks", *BASE},
    "cli": {"cli", "api", "explain", "report", "analysis", "models", "loading", "checks", "compat", *BASE},
    "compat": {"compat"},
    "explain": {"explain", "report", "checks", "loading", *BASE},
    "errors": set(),
    "grouping": set(),
    "kinds": set(),
    "text": set(),
    "results": {"results", "errors", "kinds", "text"},
}
FREE = {"__init__", "__main__", "demo", "configs"}
MATHEMATICS = {"torch", "duat_cli", "__future__"}
LIGHT = {"pydantic", "rich", "yaml", "duat_cli", "__future__"}
MARKUP = {"jinja2", "markupsafe"}  # of report alone: pages
TRANSFORMERS = {"transformers", "safetensors", "accelerate", "peft", "tokenizers", "huggingface_hub"}


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import anywhere in a file; `from a import b` counts as a and as a.b."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def faults(layer: str, source: str) -> list[str]:
    """What a file of this layer must not import."""
    found = []
    for line, name in imports(source):
        top, _, rest = name.partition(".")
        inner = rest.partition(".")[0]
        if top == "duat_cli" and inner not in MAY[layer] and inner != "__version__":
            found.append(f"line {line}: {layer} imports {name}")
        elif top not in sys.stdlib_module_names and not _allowed(layer, top):
            found.append(f"line {line}: {layer} imports {top}")
    return found


def _allowed(layer: str, top: str) -> bool:
    if layer in ("operators", "statistics"):
        return top in MATHEMATICS
    if layer in ("report", "errors", "results", "text"):
        return top in LIGHT | (MARKUP if layer == "report" else set())
    if layer == "explain":
        return top in {"pydantic", "duat_cli", "__future__"}
    if layer == "checks":  # weights are checked without waiting for torch
        return top in {"numpy", "pydantic"} | {"duat_cli", "__future__"}
    if layer == "analysis":  # it may name the versions of what it ran on, and read no checkpoint itself
        return top not in TRANSFORMERS - {"transformers"}
    return True


FILES = sorted(p for p in ROOT.rglob("*.py") if layer_of(p) not in FREE)


def test_a_file_imports_only_what_its_layer_may() -> None:
    found = {str(p.relative_to(ROOT)): faults(layer_of(p), p.read_text(encoding="utf-8")) for p in FILES}
    assert {name: some for name, some in found.items() if some} == {}


# -- folders -------------------------------------------------------------------------------------------------

Folder = tuple[str, ...]


def folders() -> dict[Folder, set[Folder]]:
    """Which folder of the package imports from which other; the files beside __init__ at the top are left out."""
    files = {".".join(("duat_cli", *p.relative_to(ROOT).with_suffix("").parts)) for p in ROOT.rglob("*.py")}
    found: dict[Folder, set[Folder]] = {}
    for path in ROOT.rglob("*.py"):
        here = path.relative_to(ROOT).parts[:-1]
        for _, name in imports(path.read_text(encoding="utf-8")):
            module = next((m for m in (name, name.rpartition(".")[0]) if m in files), None)
            there = tuple(module.split(".")[1:-1]) if module else ()
            if here and there and here != there:
                found.setdefault(here, set()).add(there)
    return found


def circle(graph: dict[Folder, set[Folder]]) -> list[Folder]:
    """Folders that import each other in a circle, if there are any."""
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as fault:
        return list(fault.args[1])
    return []


def test_folders_import_one_way() -> None:
    graph = folders()
    assert len(graph) > 20
    assert circle(graph) == []


def test_a_circle_of_folders_is_found() -> None:
    assert circle({("models", "terms"): {("models", "sweep")}, ("models", "sweep"): {("models", "terms")}})


# -- what runs inside a model --------------------------------------------------------------------------------

INSTRUMENT = ROOT / "models" / "instrument"
BESIDE = {
    ROOT / "loading" / "paged" / "pager.py",  # of a model whose weights are elsewhere; they are part of it
    ROOT / "compat" / "torch.py",  # while a model is built, not run
}


def interventions(source: str) -> list[str]:
    """Where a file registers a hook, replaces a forward or stands between a model and torch's functions."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Attribute):
            written = node.attr in {"forward", "__call__"} and not isinstance(node.ctx, ast.Load)
            if written or re.fullmatch(r"register_\w*hook", node.attr):
                found.append(f"line {node.lineno}: {node.attr}")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"setattr", "delattr"}:
            if any(isinstance(value, ast.Constant) and value.value == "forward" for value in node.args):
                found.append(f"line {node.lineno}: forward")
        elif isinstance(node, ast.FunctionDef) and node.name in {"__torch_function__", "__torch_dispatch__"}:
            found.append(f"line {node.lineno}: {node.name}")
    return found


def test_only_the_instruments_reach_into_a_model() -> None:
    others = [p for p in ROOT.rglob("*.py") if not p.is_relative_to(INSTRUMENT) and p not in BESIDE]
    found = {str(p.relative_to(ROOT)): interventions(p.read_text(encoding="utf-8")) for p in others}
    assert {name: some for name, some in found.items() if some} == {}


def test_the_instruments_are_seen_to_reach_into_a_model() -> None:
    found = {path.stem for path in INSTRUMENT.rglob("*.py") if interventions(path.read_text(encoding="utf-8"))}
    assert found == {"activations", "calls", "hooks", "interception", "tape"}


@pytest.mark.parametrize(
    "source",
    [
        "stack.callback(module.register_forward_hook(see).remove)",
        "layer.register_full_backward_hook(see)",
        "tensor.register_hook(see)",
        "block.module.forward = other",
        "del block.forward",
        "setattr(block, 'forward', other)",
        "class Mode:\n    def __torch_function__(self, *call): ...",
    ],
)
def test_an_intervention_is_found(source: str) -> None:
    assert len(interventions(source)) == 1


def test_no_file_and_no_folder_is_too_large() -> None:
    sizes = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in ROOT.rglob("*.py")}
    assert {p.name: n for p, n in sizes.items() if n > 400} == {}
    counts = Counter(p.parent for p in sizes if p.name != "__init__.py")
    assert {str(folder): n for folder, n in counts.items() if n > 15} == {}


def test_every_file_has_a_layer() -> None:
    assert {layer_of(p) for p in ROOT.rglob("*.py")} <= set(MAY) | FREE
    assert len(FILES) > 40


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("operators", "from duat_cli.models.instrument.rig import Rig"),
        ("operators", "import transformers"),
        ("operators", "import numpy as np"),
        ("operators", "def f():\n    from duat_cli.analysis import inspect"),
        ("models", "from duat_cli.analysis.inspect.run import inspect"),
        ("models", "from duat_cli import analysis"),
        ("models", "from duat_cli.report.tables.inspect import page"),
        ("analysis", "import duat_cli.cli.main"),
        ("analysis", "from safetensors.torch import load_file"),
        ("report", "import torch"),
        ("report", "from duat_cli.explain.find import explain"),
        ("explain", "from duat_cli.analysis.lora.weights.lint import LEVELS"),
        ("explain", "import torch"),
        ("checks", "import torch"),
        ("checks", "from duat_cli.analysis.inspect.run import inspect"),
        ("report", "from duat_cli.operators.kronecker import gram"),
        ("report", "from duat_cli.analysis.inspect.run import inspect"),
        ("results", "from duat_cli.operators import kronecker"),
        ("errors", "import duat_cli.results"),
        ("compat", "from duat_cli.errors import DuatError"),
        ("operators", "from duat_cli.compat import torch"),
        ("text", "if TYPE_CHECKING:\n    import torch"),
    ],
)
def test_the_check_can_fail(layer: str, source: str) -> None:
    assert len(faults(layer, source)) == 1


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("operators", "import math\nimport torch\nfrom torch import Tensor\nfrom duat_cli.errors import InputError"),
        ("analysis", "from duat_cli import __version__\nfrom duat_cli.models.instrument.rig import Rig"),
        ("report", "from duat_cli.results.inspect import InspectReport\nfrom rich.text import Text"),
        ("cli", "from duat_cli.analysis.inspect.run import inspect\nimport typer"),
    ],
)
def test_and_it_does_not_cry_wolf(layer: str, source: str) -> None:
    assert faults(layer, source) == []


def test_relative_imports_do_not_escape_it() -> None:
    with pytest.raises(AssertionError, match="relative"):
        faults("operators", "from ..models import rig")
