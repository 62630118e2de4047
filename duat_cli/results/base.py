"""Base classes of the reports, and the facts that several reports share.

Formatters read these models and nothing else. An undefined value is null, and the `reasons` of the nearest object
state why, keyed by the field's name. NaN and Infinity are refused on construction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from duat_cli.results.meaning import Meaning

SCHEMA_VERSION = "2"
COMMAND = Field(description="the command that wrote the report")
Warnings = Annotated[list[str], Field(description="what a user should know, one line each")]

_positive = AfterValidator(lambda value: value + 0.0)  # -0.0, which reads like a small negative number, becomes 0.0
Finite = Annotated[float, Field(allow_inf_nan=False), _positive]
_MISSED = "the larger of |x_i - rebuilt_i| / |x_i| and, over tokens n, |x_in - rebuilt_in| / max(|x_in|, |x_(i-1)n|, "
_MISSED += "|its parts|)"
REBUILT = Meaning(
    "relative",
    "measured",
    formula=f"max over prompts of {_MISSED}",
    source="Eq. 11/12, 33/34: the sum is rebuilt block by block",
    over_prompts="largest",
    better="lower",
)
Share = Annotated[float, Field(allow_inf_nan=False, ge=0.0, le=1.0), _positive]


def finite(value: float) -> float | None:
    """The value; None for NaN and Infinity, which no result holds."""
    return value if math.isfinite(value) else None


class Result(BaseModel):
    """Base of every result: immutable, strict about names, finite numbers only."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Report(Result):
    """Fields that every report begins with; each report states its own command."""

    schema_version: Literal["2"] = Field(default="2", description="version of the report's schema")
    command: Annotated[str, COMMAND]
    duat_version: str = Field(description="version of duat")


class WithReasons(Result):
    reasons: Annotated[dict[str, str], Meaning(over_prompts="reasons")] = Field(
        default_factory=dict, description="why each field that is null has no value, by the field's name"
    )

    @classmethod
    def absent(cls, reason: str, **known: Any) -> Self:
        """A result in which all fields are null for this reason, except the known ones, which have a value."""
        names = [name for name in cls.model_fields if name not in ("reasons", *known)]
        return cls(**known, **dict.fromkeys(names), reasons=dict.fromkeys(names, reason))

    @classmethod
    def explained(cls, reason: str, others: Mapping[str, str] | None = None, /, **fields: Any) -> Self:
        """A result with these fields. Those that are null are so for this reason, or for the one that `others` has."""
        reasons = {name: (others or {}).get(name, reason) for name, value in fields.items() if value is None}
        return cls(**fields, reasons=reasons)


class Environment(Result):
    """Software, hardware and dtype that the numbers were computed with."""

    python: str = Field(description="version of Python")
    torch: str = Field(description="version of torch")
    transformers: str = Field(description="version of transformers")
    platform: str = Field(description="operating system and processor")
    device: str = Field(description="device that the model ran on, such as cpu or cuda:0")
    dtype: str = Field(description="dtype of weights and arithmetic, e.g. float32")
    attention: str = Field(description="attention arithmetic; always the model's own eager formula")
    batch_size: int = Field(
        description="largest number of prompts in one forward pass; those of one pass have as many tokens, so that "
        "none is padded"
    )


class ModelFacts(Result):
    """The model that was read."""

    name: str = Field(description="the model, as it was named")
    revision: str | None = Field(description="commit of a hub checkpoint; null for a local folder")
    model_type: str = Field(description="transformers' name of the architecture, from config.json")
    architecture: str = Field(description="class of the model that was loaded")
    stack: str | None = Field(
        default=None,
        description="which stack of a model of several the report is of: vision, audio, text, encoder, decoder, or "
        "the name of a list of blocks in the model; null for a model of one stack",
    )
    quantised: str | None = Field(
        default=None,
        description="how the files hold the quantised weights, which are read as the numbers that the format's formula "
        "gives; activations are not quantised. Null where the files hold the weights as they are",
    )
    parameters: int = Field(description="number of parameters")
    blocks: int = Field(description="number of blocks of the model; one that runs several times counts each time")
    hidden_size: int = Field(description="hidden size M of the model; where blocks differ, of the first")
    streams: int = Field(
        default=1,
        description="how many streams a token has between blocks (hyper-connections), which the hidden size counts "
        "together; 1 in most models, and in reports of old versions",
    )
    heads: int = Field(description="number of attention heads of a block; where blocks differ, the most")
    kv_heads: int = Field(description="number of key and value heads")
    fingerprint: str = Field(
        description="content hash of names, shapes, dtypes and bytes of the loaded weights; not cryptographic"
    )


class PromptFacts(Result):
    """A prompt, given by its hash and its length."""

    sha256: str = Field(
        description="SHA-256 of the prompt: of its UTF-8 text ('#5 #6' for token ids), of the JSON of a "
        "conversation's messages, or of the tensors made of pictures and sounds"
    )
    tokens: int = Field(description="number N of tokens of the prompt")


class ModelReport(Report):
    """Fields that a report on one model begins with."""

    environment: Environment
    model: ModelFacts


class Certificate(Result):
    """How far the DUAT form is from the model's own output."""

    relative_error: Annotated[Finite, replace(REBUILT, formula=f"max over blocks i and prompts of {_MISSED}")] = Field(
        description="relative error of the rebuilt outputs of blocks against the model's own, of all tokens together "
        "or of the worst token, largest over blocks and prompts"
    )
    plain_error: Annotated[
        Finite,
        Meaning(
            "relative",
            "measured",
            formula="|output under duat's instruments - output as transformers runs it| / |the latter|",
            better="lower",
        ),
    ] = Field(
        description="relative error of the output of a pass under duat's instruments against the model as transformers "
        "runs it, untouched: the largest over a prompt of random tokens and the report's first prompt (`duat "
        "verify`: each prompt)"
    )
    tolerance: Annotated[
        Finite,
        Meaning("relative", "given", formula="1e-6 in float64, 1e-4 in float32, 1e-2 in float16, 5e-2 in bfloat16"),
    ] = Field(description="largest error that counts as exact, by the dtype of the arithmetic")
    exact: bool = Field(description="whether `relative_error` and `plain_error` are both at most the tolerance")
    capture: Literal["attention interface", "softmax interception", "frozen kernel"] = Field(
        description="how attention was seen: through transformers' attention interface, by intercepting its softmax, "
        "or (mixers without softmax) by running their own kernel with what the input sets held"
    )

    def with_errors(self, error: float, plain_error: float) -> Self:
        """The certificate for all prompts, given their largest errors."""
        exact = max(error, plain_error) <= self.tolerance
        return self.model_copy(update={"relative_error": error, "plain_error": plain_error, "exact": exact})


class Skipped(Result):
    """A part that was left out, and why."""

    what: str = Field(description="part that was left out")
    why: str = Field(description="reason why the part was left out")


class Run(WithReasons):
    """Facts that differ between two runs on the same input."""

    started: str = Field(description="time at which the run started, UTC, ISO 8601")
    seconds: Annotated[Finite, Meaning("seconds", "measured")] = Field(description="duration of the run")
    peak_memory_bytes: Annotated[int | None, Meaning("bytes", "measured")] = Field(
        description="most memory that this process had, or all processes of the run together; null in reports of old "
        "versions, on Windows"
    )
    gpu_memory_bytes: Annotated[int | None, Meaning("bytes", "measured")] = Field(
        default=None,
        description="most memory of the GPU that this process reserved, the driver's share apart; null where no GPU "
        "computed",
    )
    planned_memory_bytes: Annotated[int | None, Meaning("bytes", "estimate")] = Field(
        default=None,
        description="peak memory that was planned before the weights were read, of the GPU where one computed; null "
        "where nothing was planned",
    )
