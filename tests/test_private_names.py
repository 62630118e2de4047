"""What other libraries do not promise stands in duat_cli/compat alone. Found by ast: imports, attributes, strings."""

from __future__ import annotations

import ast
import functools
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import PATIENCE

import duat_cli

ROOT = Path(duat_cli.__file__).parent
LIBRARIES = ("transformers", "torch", "typer", "click", "peft", "safetensors", "huggingface_hub", "tokenizers")
# Documented modules below a library's first level; of torch every module without an underscore is.
DOCUMENTED = {"safetensors.torch", "huggingface_hub.errors"}
# Names without an underscore that no library promises, as strings or attributes.
UNPROMISED = {
    "eager_attention_forward", "cu_seq_lens_q", "fusion_config", "megatron.core", "PanicException",
    "format_message", "ALL_MASK_ATTENTION_FUNCTIONS", "MODEL_MAPPING", "LOAD REPORT",
}  # fmt: skip
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


def faults(source: str) -> list[str]:
    """Uses of private or unstable names of other libraries."""
    nodes = list(ast.walk(ast.parse(source)))
    own, foreign = _own_names(nodes), _imported(nodes)
    return [f"line {line}: {name}" for node in nodes for line, name in _found(node, own, foreign) if name is not None]


def _found(node: ast.AST, own: set[str], foreign: dict[str, str]) -> Iterator[tuple[int, str | None]]:
    if isinstance(node, ast.Import):
        yield from ((node.lineno, _unpromised_module(alias.name)) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = str(node.module)
        inner = (_unpromised_module(f"{module}.{a.name}", is_module=False) for a in node.names)
        yield node.lineno, _unpromised_module(module) or next((name for name in inner if name), None)
    elif isinstance(node, ast.Attribute):
        dotted = _dotted(node, foreign)
        yield node.lineno, _unpromised_module(dotted, is_module=False) if dotted else None
        stdlib = isinstance(node.value, ast.Name) and foreign.get(node.value.id, "") in sys.stdlib_module_names
        private = _is_private(node.attr) and node.attr not in own and not stdlib
        yield node.lineno, node.attr if private or node.attr in UNPROMISED else None
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
        yield node.lineno, str(name) if _is_private(str(name)) and name not in own else None
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value if node.value in UNPROMISED else None


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own_names(nodes: list[ast.AST]) -> set[str]:
    """Names that the file itself defines: functions, classes, variables, fields, attributes of self and cls."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id in ("self", "cls") else set()
    return found


def _imported(nodes: list[ast.AST]) -> dict[str, str]:
    """Name in the file -> the module it stands for."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname}
            found |= {top: top for a in node.names if not a.asname for top in [a.name.partition(".")[0]]}
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def _dotted(node: ast.Attribute, foreign: dict[str, str]) -> str | None:
    """'torch.nn.functional' of an attribute of an imported module."""
    value = node.value
    if isinstance(value, ast.Name):
        return f"{foreign[value.id]}.{node.attr}" if value.id in foreign else None
    inner = _dotted(value, foreign) if isinstance(value, ast.Attribute) else None
    return f"{inner}.{node.attr}" if inner else None


def _unpromised_module(name: str, *, is_module: bool = True) -> str | None:
    """The name if it is private, or a module of a watched library that its documentation does not have."""
    parts = name.split(".")
    if parts[0] not in LIBRARIES:
        return None
    if parts[0] == "click" or any(map(_is_private, parts)):
        return name
    if parts[0] == "torch" or len(parts) == 1 or name in DOCUMENTED or not (is_module or _is_module(name)):
        return None
    return name


@functools.cache
def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what it stands in is no package
        return False


FILES = sorted(p for p in ROOT.rglob("*.py") if "compat" not in p.relative_to(ROOT).parts)


def test_private_names_stand_in_compat_alone() -> None:
    found = {str(p.relative_to(ROOT)): faults(p.read_text(encoding="utf-8")) for p in FILES}
    assert {name: some for name, some in found.items() if some} == {}


def test_compat_has_them() -> None:
    """What is looked for is there to be found."""
    found = [fault for path in (ROOT / "compat").glob("*.py") for fault in faults(path.read_text(encoding="utf-8"))]
    for name in ("_parameters", "_attn_implementation", "_from_config", "torch._C", "typer.core", "MODEL_MAPPING"):
        assert any(name in fault for fault in found), name


@pytest.mark.parametrize(
    "source",
    [
        "from transformers.models.auto import modeling_auto",
        "from transformers import masking_utils",
        "import transformers.masking_utils",
        "def f():\n    from transformers.masking_utils import AttentionMaskInterface",
        "import transformers\nx = transformers.models",
        "import click",
        "from typer.core import TyperGroup",
        "import typer\nx = typer.core",
        "import huggingface_hub\nx = huggingface_hub.constants",
        "from torch import _C",
        "from torch.nn.modules.conv import _ConvNd",
        "def f(module):\n    return module._parameters",
        "def f(model):\n    return getattr(model, '_experts_implementation', None)",
        "def f(config):\n    config.fusion_config = None",
        "name = 'eager_attention_forward'",
        "def f(other):\n    own = other._non_persistent_buffers_set",
    ],
)  # fmt: skip
def test_the_check_can_fail(source: str) -> None:
    assert len(faults(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import transformers\nx = transformers.CONFIG_MAPPING",
        "from transformers import Cache, PreTrainedModel, logging",
        "from torch.nn import functional\nimport torch\nx = torch.nn.functional.softmax",
        "from huggingface_hub import errors\nx = errors.GatedRepoError",
        "import os\nos._exit(0)",
        "class A:\n    def __init__(self):\n        self._x = 1\n\ndef f(a):\n    return a._x",
        "x = {'_name_or_path': 1}",
        "def f(x):\n    return x.__dict__, type(x).__name__",
    ],
)  # fmt: skip
def test_and_it_does_not_cry_wolf(source: str) -> None:
    assert faults(source) == []


def test_compat_loads_no_library_before_it_is_used() -> None:
    """Typer's file aside, which only the command line needs."""
    names = [f"duat_cli.compat.{p.stem}" for p in (ROOT / "compat").glob("*.py") if p.stem not in ("__init__", "typer")]
    watched = [name for name in LIBRARIES if name != "typer"]
    script = f"import sys\nfor n in {names!r}: __import__(n)\nprint([n for n in {watched!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert len(names) >= 6
    assert done.stdout.strip() == "[]"
