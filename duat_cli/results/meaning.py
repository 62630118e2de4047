"""Metadata of a report's field beyond its description, given beside the field's type.

    entropy_bits: Annotated[Finite | None, Meaning("bits", "exact", drift="number")] = Field(description="...")

It is read by code that treats many fields alike: means over prompts, the metrics of a baseline, their rules and
tolerances, the options that a policy's bound needs, `duat explain` and the JSON Schema.
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
"""How a field is merged over prompts. known: mean over the prompts that have a value; the others are null where one
prompt has none."""


@dataclass(frozen=True)
class Meaning:
    """Metadata of one field. A new field without it is in no baseline, and is never averaged."""

    unit: str = ""
    """The unit, with the range of values where that is fixed: 'share, 0 to 1'."""
    exactness: Exactness | None = None
    """exact: a closed form of this pass, up to rounding. measured: two passes compared, or a value seen in one. given:
    set by an option."""
    _: KW_ONLY
    how: str = ""
    """Details of the exactness: 'relative error at most 1e-3'."""
    formula: str = ""
    source: str = ""
    """Paper and equation, or the method's authors. Equations without authors are Wang & Li's."""
    signed: bool = False
    """Whether the number can be below zero."""
    needs: Option | None = None
    """The command's option without which the field is null."""
    drift: Literal["number", "norm", "group"] | None = None
    """A number is a metric of `duat check --baseline` if this is set for it and for all groups around it. 'number' and
    'norm' name its tolerance: a norm has no natural scale, so only its relative change is compared."""
    rule: str = ""
    """Rule of `duat check` that holds a group's metrics against the baseline; for groups with `drift`."""
    better: Literal["lower", "higher"] | None = None
    over_prompts: OverPrompts = "mean"
    by_name: bool = False
    """Whether wildcards of a policy do not reach into a group; a bound that names such a group has it all computed."""
    checked: bool = True
    """Whether a bound or a baseline may hold the value; False for values that time or the machine sets."""
    keyed_by: type[BaseModel] | None = None
    """Model whose numbers a mapping has as keys, by their paths in groups, as 'coupling.entropy_bits'."""

    @property
    def exact(self) -> str:
        """The exactness with its details."""
        return "; ".join(filter(None, (self.exactness, self.how)))

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        """The field's JSON Schema with its unit, exactness and formula."""
        said = {"unit": self.unit, "exactness": self.exactness, "formula": self.formula}
        return {**handler(core_schema), **{key: value for key, value in said.items() if value}}


UNSAID = Meaning(over_prompts="same")


@functools.cache
def meaning_of(model: type[BaseModel], name: str) -> Meaning:
    """Metadata of a model's field; UNSAID where it has none."""
    found = [item for item in model.model_fields[name].metadata if isinstance(item, Meaning)]
    return found[-1] if found else UNSAID
