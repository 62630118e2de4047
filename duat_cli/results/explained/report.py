"""The report of `duat explain`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field

from duat_cli.results.base import COMMAND, Report, Result

Kind = Literal["field", "rule", "lint rule", "word", "topic"]


class Explanation(Result):
    """One name with its definition and facts. A field that does not apply, or that the definition covers, is empty."""

    name: str = Field(description="the name explained")
    kind: Kind = Field(description="kind of thing that the explained name is a name of")
    where: list[str] = Field(description="where the name stands: 'report: path' of a field; the command of a rule")
    columns: list[str] = Field(description="columns of tables that show a field, as 'report: header'")
    definition: str = Field(description="what the name means, in a sentence")
    formula: str | None = Field(description="formula by which a number is computed; null where it is no single formula")
    unit: str | None = Field(description="unit or range of a number")
    source: str | None = Field(
        description="where a definition comes from: paper and equation, or the method's authors; equations are Wang & "
        "Li's"
    )
    exact: str | None = Field(
        description="how exact a number is: exact, estimate, bound, measured or given, and what that means here"
    )
    nulls: list[str] = Field(description="fields that hold the same statistic where nothing was learned")
    facts: dict[str, str] = Field(
        description="whatever else is declared of the name: a rule's level, limit and advice, ..."
    )
    page: str | None = Field(description="page of a topic, Markdown; null for other names")

    @classmethod
    def of(cls, name: str, kind: Kind, definition: str, where: str = "", **known: Any) -> Self:
        """Explanation of a name that is no field of a report."""
        nothing = dict.fromkeys(("formula", "unit", "source", "exact", "page"))
        empty = {"where": [where] if where else [], "columns": [], "nulls": [], "facts": {}}
        return cls(name=name, kind=kind, definition=definition, **{**nothing, **empty, **known})

    @property
    def sentence(self) -> str:
        """The definition as a sentence."""
        text = self.definition[:1].upper() + self.definition[1:]
        return text if text.endswith(".") or not text else f"{text}."


class ExplainReport(Report):
    """`duat explain`."""

    command: Annotated[Literal["explain"], COMMAND] = "explain"
    asked: str | None = Field(description="the name to explain; null for the list of all")
    entries: list[Explanation]
