"""What every report is made of, and the facts that several share.

Formatters read these models and nothing else. An undefined value is null, and the reason stands in the
`reasons` of the nearest object, keyed by the field's name; NaN and Infinity are refused on construction.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from duat_cli.results.meaning import Meaning

SCHEMA_VERSION = "2"

Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(allow_inf_nan=False, ge=0.0, le=1.0)]


class Result(BaseModel):
    """Base of every result: immutable, strict about names, finite numbers only."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class WithReasons(Result):
    reasons: Annotated[dict[str, str], Meaning(over_prompts="reasons")] = Field(
        default_factory=dict, description="for every field that is null: why it has no value"
    )


class Environment(Result):
    """What the numbers were computed with."""

    python: str
    torch: str
    transformers: str
    platform: str
    device: str
    dtype: str = Field(description="dtype of weights and arithmetic, e.g. float32")
    attention: str = Field(description="attention arithmetic; always the model's own eager formula")
    batch_size: int = Field(description="prompts per forward pass; always 1, so that padding cannot move a number")


class ModelFacts(Result):
    name: str
    revision: str | None = Field(description="commit of a hub checkpoint; null for a local folder")
    model_type: str
    architecture: str = Field(description="the class that was loaded")
    parameters: int
    blocks: int
    hidden_size: int
    heads: int
    kv_heads: int
    fingerprint: str = Field(
        description="content hash of names, shapes, dtypes and bytes of the loaded weights; not cryptographic"
    )


class PromptFacts(Result):
    sha256: str = Field(description="of the prompt's UTF-8 text")
    tokens: int


class Certificate(Result):
    """How far the DUAT form is from the model's own output."""

    relative_error: Annotated[Finite, Meaning("relative", "measured", better="lower")] = Field(
        description="largest over blocks and prompts of |x - rebuilt| / |x|"
    )
    plain_error: Annotated[Finite, Meaning("relative", "measured", better="lower")] = Field(
        description="relative error of the output of a pass under duat's instruments against the model as transformers "
        "runs it, untouched: the largest over a probe prompt and the report's first prompt (`duat verify`: each prompt)"
    )
    tolerance: Annotated[Finite, Meaning("relative", "given")] = Field(description="by the dtype of the arithmetic")
    exact: bool = Field(description="relative_error and plain_error are both at most the tolerance")
    capture: Literal["attention interface", "softmax interception"]


class Skipped(Result):
    what: str
    why: str


class Run(Result):
    """What differs between two runs of the same input."""

    started: str = Field(description="UTC, ISO 8601")
    seconds: Finite
    peak_memory_bytes: int | None
