"""What the descriptions of fields leave out: formula, unit, source and exactness, from configs/readings.toml."""

from __future__ import annotations

import functools
import importlib.resources
import tomllib

from pydantic import BaseModel, ConfigDict

FILE = "readings.toml"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Reading(_Table):
    """Of one field of one result model."""

    definition: str | None = None
    """Instead of the field's description."""
    formula: str | None = None
    unit: str | None = None
    source: str | None = None
    exact: str | None = None


class Readings(_Table):
    models: dict[str, dict[str, Reading]]
    """Result model -> field -> its reading; the field '*' is for every field that has none of its own."""
    plain: dict[str, str]
    """Field -> what it is, for fields without a description whose name means the same in every report."""
    words: dict[str, str]
    """Words of the tables and pages that are no field."""

    def of(self, model: str, field: str) -> Reading:
        fields = self.models.get(model, {})
        return fields.get(field) or fields.get("*") or Reading()


@functools.cache
def readings() -> Readings:
    text = (importlib.resources.files("duat_cli.configs") / FILE).read_text(encoding="utf-8")
    return Readings.model_validate(tomllib.loads(text))
