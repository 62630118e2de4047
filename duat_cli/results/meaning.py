"""What a field of a report means beyond its description: metadata that stands beside the field's type.

    entropy_bits: Annotated[Finite | None, Meaning("bits", "exact", drift="number")] = Field(description="...")

Code that treats many fields alike reads it: means over prompts, the metrics of a baseline, their rules and tolerances,
the options that a policy's bound asks for, `duat explain` and the JSON Schema.
"""

from __future__ import annotations

import functools
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from pydantic import BaseModel

Exactness = Literal["exact", "estimate", "bound", "measured", "given"]
Option = Literal[
    "spectrum", "terms", "end_to_end", "routing", "heads", "per_prompt", "maps", "null", "prompts", "baseline"
]  # fmt: skip
OverPrompts = Literal["mean", "known", "largest", "sum", "same", "reasons"]
"""Known: the mean over the prompts that have a value; the others are null where one prompt has none."""


@dataclass(frozen=True)
class Meaning:
    """Metadata of one field. A new field without it is in no baseline, and is never averaged."""

    unit: str = ""
    """And the range of values, where that is fixed: 'share, 0 to 1'."""
    exactness: Exactness | None = None
    """Exact: a closed form of this pass, up to rounding. Measured: two passes compared, or a value seen in one. Given:
    set by an option."""
    _: KW_ONLY
    how: str = ""
    """What the exactness means here: 'relative error at most 1e-3'."""
    formula: str = ""
    source: str = ""
    """Paper and equation, or the method's authors. Equations without authors are Wang & Li's."""
    signed: bool = False
    """Whether the number can be below zero."""
    needs: Option | None = None
    """The command's option without which the field is null."""
    drift: Literal["number", "norm", "group"] | None = None
    """A number is a metric of `duat check --baseline` if it and all groups around it say so. 'number' and 'norm' are
    its tolerance: a norm has no natural scale, so only its relative change is looked at."""
    rule: str = ""
    """Of a group that is opted in: the rule of `duat check` that holds its metrics against the baseline."""
    better: Literal["lower", "higher"] | None = None
    over_prompts: OverPrompts = "mean"
    by_name: bool = False
    """Of a group: wildcards of a policy do not reach into it, and a bound that names it has all of it computed."""
    checked: bool = True
    """False for what time or the machine sets: no bound and no baseline holds it."""
    keyed_by: type[BaseModel] | None = None
    """Of a mapping: its keys are the paths of this model's numbers in groups, as 'coupling.entropy_bits'."""

    @property
    def exact(self) -> str:
        """The exactness, and what it means here."""
        return "; ".join(filter(None, (self.exactness, self.how)))

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        """The field's JSON Schema with its unit, exactness and formula."""
        said = {"unit": self.unit, "exactness": self.exactness, "formula": self.formula}
        return {**handler(core_schema), **{key: value for key, value in said.items() if value}}


UNSAID = Meaning(over_prompts="same")


@functools.cache
def meaning_of(model: type[BaseModel], name: str) -> Meaning:
    """Of a model's field; UNSAID where the field has no metadata."""
    found = [item for item in model.model_fields[name].metadata if isinstance(item, Meaning)]
    return found[-1] if found else UNSAID
