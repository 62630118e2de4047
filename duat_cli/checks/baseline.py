"""A baseline: the measurements of a checkpoint that somebody found to be good, in a file that is committed.

Keys are stable (they are paths in the inspect report) and sorted, numbers are rounded, and there is one entry per line,
so that a change is easy to review. A baseline is only written on demand, and refused where it belongs to another model.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from duat_cli import __version__
from duat_cli.checks.answers import Answers
from duat_cli.checks.paths import block_index, place_of
from duat_cli.checks.places import block_number, config_of_blocks, hidden_size
from duat_cli.checks.sketch import SIZE
from duat_cli.checks.weights import WeightFacts
from duat_cli.errors import CheckpointError, InputError, needed
from duat_cli.loading.checkpoint.dtypes import RUN_IN
from duat_cli.loading.checkpoint.files import read_json
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.declared.facts import Declared
from duat_cli.results.base import Finite
from duat_cli.results.inspect import InspectReport
from duat_cli.results.prompts import PromptSetFacts
from duat_cli.text import clean, expanded, natural, shown

SCHEMA = 3
SCHEMAS = (1, 2, 3)  # schema versions that are read
_TENSORS, _COUNTS = "weights", "integrity"  # first parts of keys that are no field of the report
BEHAVIOUR = "behaviour"  # first part of keys that are fields of the behaviour result
FIRST_SCHEMA = 1  # has sketches of another kind; read, and no longer written
ANSWERS_SCHEMA = 3  # the first with the model's answers, and with what a checkpoint declares beside its weights


def _with_norm(found: list[float]) -> list[float]:
    """The list, if its norm is not negative: a distance in units of a negative norm would be within every tolerance."""
    if found[0] < 0:
        raise ValueError("a norm is never negative")
    return found


NormAndSketch = Annotated[list[Finite], Field(min_length=1 + SIZE, max_length=1 + SIZE), AfterValidator(_with_norm)]
Value = float | list[float]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class BaselineModel(_Part):
    """The model that a baseline belongs to, by facts that training and rounding do not change."""

    model_type: str | None
    hidden_size: int | None


class BaselinePrompts(_Part):
    sha256: str
    """Hash of texts and numbers of tokens."""
    count: int
    tokens: int
    texts: str | None = None
    """Hash of the texts that were given, independent of the tokenizer."""
    ids: str | None = None
    """Hash of the tokens that the texts became."""


class Baseline(_Part):
    schema_version: int
    duat_version: str
    model: BaselineModel
    stored: list[str]
    """Floating dtypes of the stored tensors."""
    dtype: str | None
    """Dtype of the arithmetic; None for --weights-only."""
    prompts: BaselinePrompts | None
    answers: Answers | None = None
    """The model's answers to the prompts."""
    metrics: dict[str, Finite | NormAndSketch]
    """Path -> value; of a tensor its norm and sketch."""
    declared: dict[str, Any] | None = None
    """The checkpoint's declarations beside its weights: config, generation config, tokenizer."""
    shapes: dict[str, list[int]] | None = None
    """Shape of each tensor, by name; None in older baselines."""


@dataclass(frozen=True)
class BaselineFile:
    """A baseline with the file that it was read from."""

    path: Path
    content: Baseline
    option: str = "--baseline"
    """The option that named it: --baseline, or --base, from whose checkpoint it was made in this run."""

    @property
    def where(self) -> str:
        """The option and the path, for errors."""
        return f"{self.option} {clean(str(self.path))}"


# --- its keys ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """The metric that a key of a baseline names."""

    kind: Literal["tensor", "count", "field", "unknown"]
    """A tensor's norm and sketch; a count of faults; a number of a report; a key of no known version."""
    name: str
    """The name of the tensor, or the whole key."""
    rule: str
    """The rule that compares it with the baseline; empty where no report has such a number."""
    block: int | None


@functools.cache
def metric_of(key: str) -> Metric:
    """The metric of a key: 'weights.TENSOR', 'integrity.RULE', 'behaviour.FIELD', or a path in the inspect report."""
    head, _, rest = key.partition(".")
    if head == _TENSORS:
        return Metric("tensor", rest, "drift.weights", block_number(rest))
    if head == _COUNTS:
        return Metric("count", key, "drift.integrity", None)
    if head == BEHAVIOUR:
        return Metric("field", key, "drift.behaviour", None)
    kind: Literal["field", "unknown"] = "field" if head in InspectReport.model_fields else "unknown"
    return Metric(kind, key, place_of(key).rule, block_index(key))


def tensor_key(name: str) -> str:
    return f"{_TENSORS}.{name}"


# --- from a run ---------------------------------------------------------------------------------------------


def weight_metrics(weights: WeightFacts, schema: int) -> dict[str, Value]:
    """'weights.NAME' -> [norm, *sketch of that schema]; a tensor with a norm that is not finite has no metric."""
    found: dict[str, Value] = {}
    for name, tensor in weights.tensors.items():
        if tensor.floating and math.isfinite(tensor.norm):
            sketch = tensor.first_sketch if schema == FIRST_SCHEMA else tensor.sketch
            found[tensor_key(name)] = [tensor.norm, *needed(sketch)]
    return found


def shapes_of(weights: WeightFacts) -> dict[str, list[int]]:
    """Tensor -> its shape. Sketches of tensors of different shapes cannot be compared."""
    return {name: list(tensor.entry.shape) for name, tensor in weights.tensors.items() if tensor.floating}


def prompt_set(prompts: PromptSetFacts, declared: Declared | None) -> BaselinePrompts:
    return BaselinePrompts(
        sha256=prompts.tokens_sha256,
        count=prompts.count,
        tokens=prompts.tokens,
        texts=declared.texts if declared else None,
        ids=declared.tokens if declared else None,
    )


def new_baseline(
    files: CheckpointFiles,
    metrics: dict[str, Value],
    dtype: str | None,
    prompts: BaselinePrompts | None,
    answers: Answers | None,
    declared: Declared | None,
    shapes: dict[str, list[int]] | None,
) -> Baseline:
    return Baseline(
        schema_version=SCHEMA,
        duat_version=__version__,
        model=identity(files),
        stored=stored_floats(files),
        dtype=dtype,
        prompts=prompts,
        answers=answers,
        metrics={key: rounded(metrics[key]) for key in sorted(metrics, key=natural)},
        declared=None if declared is None else dict(sorted(declared.entries().items(), key=lambda e: natural(e[0]))),
        shapes=None if shapes is None else dict(sorted(shapes.items(), key=lambda e: natural(e[0]))),
    )


def identity(files: CheckpointFiles) -> BaselineModel:
    model_type = config_of_blocks(files.config).get("model_type")
    return BaselineModel(
        model_type=model_type if isinstance(model_type, str) else None, hidden_size=hidden_size(files.config)
    )


def may_be_of(old: BaselineModel, files: CheckpointFiles) -> bool:
    """Whether a baseline's model can be this one. For a config of several models, older baselines hold the type of the
    whole if they did not find its text model, and no width if they did not know its name."""
    here = identity(files)
    return old.model_type in (here.model_type, files.config.get("model_type")) and (
        old.hidden_size in (here.hidden_size, None)
    )


def stored_floats(files: CheckpointFiles) -> list[str]:
    return sorted({t.dtype for t in files.tensors.values()} & RUN_IN.keys())


def rounded(value: Value) -> Value:
    """A value rounded to six digits; a norm to eight, and a sketch, with numbers of the order of 1, to six decimals."""
    if isinstance(value, list):
        return [_digits(value[0], 8), *(round(v, 6) + 0.0 for v in value[1:])]
    return _digits(value, 6)


def _digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}") + 0.0  # and no -0.0


# --- the file -----------------------------------------------------------------------------------------------


def to_text(baseline: Baseline) -> str:
    """The baseline as JSON in ASCII, with one entry per line."""
    tables = {"declared": baseline.declared, "shapes": baseline.shapes, "metrics": baseline.metrics}
    head = baseline.model_dump(mode="json", exclude={*tables})
    lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    found = [_table(name, table) for name, table in tables.items() if table is not None]
    return "\n".join(["{", *lines, ",\n".join(found), "}"]) + "\n"


def _table(name: str, table: Mapping[str, object]) -> str:
    entries = [f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in table.items()]
    return f"{json.dumps(name)}: {{\n" + ",\n".join(entries) + "\n}"


def of_base(name: str, text: str) -> BaselineFile:
    """The baseline of the checkpoint of --base, from its text, which was never in a file."""
    return BaselineFile(Path(name), Baseline.model_validate(json.loads(text)), "--base")


def read_baseline(name: str) -> BaselineFile | None:
    """The baseline in this file, or None without such a file. Raises InputError saying what is wrong with it."""
    path = expanded(name)
    where = f"--baseline {clean(name)}"
    try:
        if not (path.exists() or path.is_symlink()):
            return None
        content: dict[str, Any] = read_json(path)
    except CheckpointError as error:  # though the file is no part of the checkpoint
        raise InputError(f"--baseline {error}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: cannot be read: {clean(str(error))}") from error
    schema = content.get("schema_version")
    if type(schema) is int and schema > SCHEMA:
        raise InputError(f"{where}: schema_version {schema} is newer than {SCHEMA}, the one of duat {__version__}")
    try:
        baseline = Baseline.model_validate(content)
    except ValidationError as error:
        fault = error.errors()[0]
        place = fault["loc"]
        if place[:1] == ("metrics",):
            place = place[:2]  # the rest names the types that its value was tried as
        key = ".".join(clean(str(part)) for part in place)[:200]
        expected = fault["msg"].removeprefix("Input should be ")
        if place[:1] == ("metrics",) and isinstance(fault["input"], list):
            expected = f"a norm, which is never negative, and {SIZE} sums"
        raise InputError(
            f"{where}: {key}: {expected}, got {shown(fault['input'], 60)}; restore it, or delete it and run with "
            "--update-baseline"
        ) from error
    if baseline.schema_version not in SCHEMAS:
        raise InputError(f"{where}: schema_version {baseline.schema_version} is unknown; expected {SCHEMA}")
    return BaselineFile(path, baseline)


def lines_of(path: Path) -> dict[str, int]:
    """Key -> number of the line on which a baseline has its entry."""
    found: dict[str, int] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return found
    for number, line in enumerate(text.split("\n"), 1):
        entry = re.match(r'\s*("(?:[^"\\]|\\.)*"):', line)
        if entry:
            found.setdefault(json.loads(entry[1], strict=False), number)
    return found
