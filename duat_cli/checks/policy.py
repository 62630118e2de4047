"""Policies: TOML files that state which rules apply, their thresholds, and what counts as drift.

Every layer is strict: an unknown key is an error that names the nearest known one. A policy file, or the [tool.duat] of
a pyproject.toml, overrides the shipped policy that it extends, which overrides the rules' own settings.
"""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from duat_cli.checks.nearest import suggestion
from duat_cli.checks.paths import is_known, known_paths, may_be_negative
from duat_cli.errors import InputError
from duat_cli.results.base import Finite
from duat_cli.text import clean, expanded, shown

PYPROJECT = "pyproject.toml"
SHIPPED = ("default", "strict", "release", "adapter", "fine-tune")
_MAX_BYTES = 1 << 20
SLACK_BUDGET = 0.1  # in the unit of the model's metric, as `duat prune-bound` has it
SLACK_PROBES = 16

Positive = Annotated[float, Field(allow_inf_nan=False, ge=0.0)]
Level = Literal["error", "warn", "off"]
DtypeName = Literal["float64", "float32", "float16", "bfloat16"]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RuleTable(_Table):
    """[rules] "id" = { ... }; instead of the table there may be only a level."""

    level: Level | None = None
    max: Positive | None = None
    allowed: list[str] | None = None


class BoundTable(_Table):
    """[bounds] "path" = { ... }"""

    min: Finite | None = None
    max: Finite | None = None
    level: Level = "error"
    undefined: Literal["fail", "skip"] = "fail"


class ToleranceTable(_Table):
    """[drift.tolerance] "path" = { ... }"""

    rtol: Positive | None = None
    atol: Positive | None = None
    better: Literal["lower", "higher"] | None = None


class PruningTable(_Table):
    """[pruning]: for the rules pruning.*"""

    budget: Annotated[float, Field(allow_inf_nan=False, gt=0.0)] | None = None
    probes: Annotated[int, Field(ge=2, le=4096)] | None = None


class DriftTable(_Table):
    dtype: DtypeName | None = None
    tolerance: dict[str, ToleranceTable] = {}


class PolicyFile(_Table):
    extends: Literal["default", "strict", "release", "adapter", "fine-tune"] | None = None
    rules: dict[str, RuleTable] = {}
    bounds: dict[str, BoundTable] = {}
    drift: DriftTable = DriftTable()
    pruning: PruningTable = PruningTable()

    @field_validator("rules", mode="before")
    @classmethod
    def _levels(cls, rules: object) -> object:
        if not isinstance(rules, dict):
            return rules
        return {key: {"level": value} if isinstance(value, str) else value for key, value in rules.items()}


@dataclass(frozen=True)
class Layer:
    """One policy of the chain."""

    source: str
    """Its name in the report: 'policy strict', or that of the file."""
    file: Path | None
    """The user's file; None for a shipped policy."""
    content: PolicyFile


@dataclass(frozen=True)
class Policy:
    """The chain of policies; later ones override earlier ones."""

    layers: tuple[Layer, ...]

    def rules(self) -> Iterator[tuple[Layer, str, RuleTable]]:
        for layer in self.layers:
            # patterns come first, so that a rule named in full overrides them
            for key, table in sorted(layer.content.rules.items(), key=lambda pair: "*" not in pair[0]):
                yield layer, key, table

    def bounds(self) -> dict[str, tuple[Layer, BoundTable]]:
        return {key: (layer, table) for layer in self.layers for key, table in layer.content.bounds.items()}

    def tolerances(self) -> dict[str, tuple[Layer, ToleranceTable]]:
        return {key: (la, table) for la in self.layers for key, table in la.content.drift.tolerance.items()}

    def pruning(self) -> tuple[float, int]:
        """Budget and probes of the rules pruning.*"""
        tables = [layer.content.pruning for layer in reversed(self.layers)]
        budget = next((t.budget for t in tables if t.budget is not None), SLACK_BUDGET)
        return budget, next((t.probes for t in tables if t.probes is not None), SLACK_PROBES)

    @property
    def drift_dtype(self) -> str | None:
        return next((la.content.drift.dtype for la in reversed(self.layers) if la.content.drift.dtype), None)


def read_policy(name: str | None, otherwise: str = "default") -> Policy:
    """The chain for --policy: a shipped name or a file; without it ./pyproject.toml's [tool.duat], or `otherwise`.

    Raises InputError, which names file, key and the nearest known key.
    """
    if name is None:
        found = _own_project()
        return _chain(found or _shipped(otherwise))
    if name in SHIPPED:
        return _chain(_shipped(name))
    return _chain(_file(expanded(name)))


def _chain(top: Layer) -> Policy:
    layers = [top]
    while layers[0].content.extends is not None:
        layers.insert(0, _shipped(layers[0].content.extends))
    if all(layer.source != "policy default" for layer in layers):
        layers.insert(0, _shipped("default"))
    return Policy(tuple(layers))


@functools.cache
def _shipped(name: str) -> Layer:
    raw = (importlib.resources.files("duat_cli.configs") / "policies" / f"{name}.toml").read_bytes()
    source = f"policy {name}"
    return Layer(source, None, _validated(_parsed(raw, source), source))


def _own_project() -> Layer | None:
    """[tool.duat] of the working directory's pyproject.toml; None where the file lacks it or is no TOML."""
    path = Path(PYPROJECT)
    try:
        raw = path.read_bytes()
        content = tomllib.loads(raw.decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    tool = content.get("tool")
    if not (isinstance(tool, dict) and "duat" in tool):
        return None
    source = f"{PYPROJECT} [tool.duat]"
    return Layer(source, path, _validated(tool["duat"], source))


def _file(path: Path) -> Layer:
    where = clean(str(path))
    try:
        if path.is_dir() or not path.is_file():
            reason = "is no regular file" if path.exists() else "no such file"
            raise InputError(f"--policy {where}: {reason}; expected a TOML file, or one of {', '.join(SHIPPED)}")
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = clean(getattr(error, "strerror", None) or str(error))
        raise InputError(f"--policy {where}: cannot be read: {reason}") from error
    if len(raw) > _MAX_BYTES:
        raise InputError(f"--policy {where}: more than {_MAX_BYTES} bytes; expected a TOML file")
    content: Any = _parsed(raw, f"--policy {where}")
    if path.name != PYPROJECT:
        return Layer(where, path, _validated(content, where))
    tool = content.get("tool")
    if not (isinstance(tool, dict) and "duat" in tool):
        raise InputError(f"--policy {where}: has no [tool.duat]; add it, or give another file")
    return Layer(f"{where} [tool.duat]", path, _validated(tool["duat"], f"{where} [tool.duat]"))


def _parsed(raw: bytes, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}") from error
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise InputError(f"{where}: not TOML: {clean(str(error))}") from error


# --- validation ------------------------------------------------------------------------------------------


def _validated(content: object, where: str) -> PolicyFile:
    try:
        policy = PolicyFile.model_validate(content)
    except ValidationError as error:
        _refuse(where, error.errors()[0])
    for key, rule in policy.rules.items():
        _check_rule(where, key, rule)
    for path, bound in policy.bounds.items():
        _check_bound(where, path, bound)
    return policy


def _refuse(where: str, fault: Any) -> NoReturn:
    """Raises InputError for pydantic's first fault, with the key as in the file and the nearest known one."""
    parts = [str(part) for part in fault["loc"]]
    key = ".".join(shown(p) if "." in p or clean(p) != p else p for p in parts)
    got = shown(fault["input"], 60)
    if fault["type"] == "extra_forbidden":
        hint = suggestion(parts[-1], _known_keys(parts)) or suggestion(parts[-1], PolicyFile.model_fields)
        if len(parts) == 1 and isinstance(fault["input"], dict):
            hint = _rule_in_parts(parts[0], fault["input"]) or hint
        if len(parts) == 3 and parts[0] == "rules":  # integrity.files = ..., a table within a table for TOML
            hint = _rule_in_parts(parts[1], {parts[2]: None}) or hint
        raise InputError(f"{where}: unknown key {key}{hint}")
    expected = fault["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if fault["type"] in ("model_type", "dict_type"):
        expected = "a level or a table" if parts[0] == "rules" and len(parts) == 2 else "a table"
    raise InputError(f"{where}: {key or 'the policy'}: expected {expected}, got {got}")


def _rule_in_parts(key: str, held: dict[str, Any]) -> str:
    """The hint for a rule that is written as a table, [behaviour.loss], outside [rules]; empty where it is no rule."""
    from duat_cli.checks.registry import all_rules

    found = next((rule for name in held if (rule := f"{key}.{name}") in all_rules()), None)
    return f'; rules stand under rules, their names in quotes: [rules."{found}"]' if found else ""


def _known_keys(parts: list[str]) -> list[str]:
    tables: dict[str, type[_Table]] = {"rules": RuleTable, "bounds": BoundTable, "pruning": PruningTable}
    if len(parts) == 1:
        from duat_cli.checks.registry import all_rules

        return [*PolicyFile.model_fields, *all_rules(), *known_paths()]
    if parts[0] == "drift":
        return list((DriftTable if len(parts) == 2 else ToleranceTable).model_fields)
    return list(tables[parts[0]].model_fields)


def _check_rule(where: str, key: str, table: RuleTable) -> None:
    from duat_cli.checks.registry import all_rules

    selected = select(key, all_rules())
    if not selected:
        raise InputError(f"{where}: rules: no rule is named {shown(key)}{suggestion(key, all_rules())}")
    for name in selected:
        if table.allowed is not None and all_rules()[name].allowed is None:
            raise InputError(f"{where}: rules.{shown(key)}: allowed: the rule {name} has no list of allowed values")
        known = all_rules()[name].allowed or ()
        if unknown := [value for value in table.allowed or () if value not in known]:
            raise InputError(f"{where}: rules.{shown(key)}: allowed: {shown(unknown[0])}: expected {', '.join(known)}")


def _check_bound(where: str, path: str, bound: BoundTable) -> None:
    place = f"{where}: bounds.{shown(path)}"
    if not is_known(path):
        known = [p.replace("#", "*") for p in known_paths()]
        raise InputError(f"{place}: no report has such a field{suggestion(path, known)}")
    if bound.min is None and bound.max is None and bound.level != "off":
        raise InputError(f"{place}: expected min, max or both")
    if bound.min is not None and bound.max is not None and bound.min > bound.max:
        raise InputError(f"{place}: min {bound.min:g} is above max {bound.max:g}, so nothing could pass")
    if bound.max is not None and bound.max < 0 and not may_be_negative(path):
        raise InputError(f"{place}: max {bound.max:g}: the field is never negative, so nothing could pass")
    if bound.min is not None and bound.min < 0 and not may_be_negative(path):
        raise InputError(f"{place}: min {bound.min:g}: the field is never negative, so everything would pass")


def select(pattern: str, names: Any) -> list[str]:
    """The names that a pattern, which may have `*`, matches."""
    from fnmatch import fnmatchcase

    if not set(pattern) & set("*?["):
        return [pattern] if pattern in names else []
    return [name for name in names if fnmatchcase(name, pattern)] if len(pattern) < 200 else []
