"""The reports in Python: the models of results/, which can also be shown and turned into tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from pydantic import PrivateAttr

from duat_cli.api.settings import whole
from duat_cli.errors import InputError
from duat_cli.report.forms.eval_results import render_eval_results
from duat_cli.report.forms.model_card import model_card
from duat_cli.report.json import to_json
from duat_cli.report.notebook import to_html
from duat_cli.report.tables.numbers import error
from duat_cli.report.tables.page import Page
from duat_cli.report.text import to_text
from duat_cli.results.attribute import AttributeReport
from duat_cli.results.base import Report, Result
from duat_cli.results.check import CheckReport
from duat_cli.results.compare.report import CompareReport
from duat_cli.results.explained.report import ExplainReport
from duat_cli.results.inspect import InspectReport, VerifyReport
from duat_cli.results.lora import LoraReport
from duat_cli.results.matrix import MatrixReport
from duat_cli.results.plan import PlanReport
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.support import SupportReport
from duat_cli.text import clean, one_line, plural

if TYPE_CHECKING:
    from duat_cli.api.operator import Operator

    Pick = Callable[[int, int], Operator]

_NAMED = 6  # most tables that a report's one line names


class Shown(Report):
    """A report that can be shown. Fields are those of the command's JSON; `duat explain NAME` explains each."""

    @classmethod
    def of(cls, report: Any) -> Self:
        """The report in this class; nothing is copied or checked again."""
        return cls.model_construct(**{name: getattr(report, name) for name in type(report).model_fields})

    def render(self, page: Page) -> str:
        """The command's table on this page."""
        return to_text(self, page)

    def to_text(self, width: int = 100, *, wide: bool = False, every: bool = False) -> str:
        """The table that the command prints, `width` characters wide. wide, every: as with --wide, and with --all.

        InputError for a width that is no whole number of at least 1.
        """
        columns = whole(width)
        if columns is None or columns < 1:
            raise InputError(f"width {one_line(repr(width), 60)}: expected a whole number of at least 1")
        return self.render(Page(width=columns, wide=wide, every=every))

    def to_json(self) -> str:
        """The JSON that the command writes with --json."""
        return to_json(self)

    def to_html(self) -> str:
        """The page with pictures that the command writes with --format html: one file that loads nothing.

        InputError for a report that has none, such as that of `support`.
        """
        from duat_cli.api.words import page_of
        from duat_cli.report.html.sheets import SHEETS

        if self.command not in SHEETS:
            raise InputError(f"to_html: a report of {self.command} has no page; pages: {', '.join(sorted(SHEETS))}")
        return page_of([(None, self)])

    @property
    def tables(self) -> list[str]:
        """Names of the tables that `to_pandas` makes: paths of the lists of objects, such as 'comparison.blocks'."""
        return list(dict.fromkeys(path for path, _, _ in _entries(self)))

    def to_pandas(self, table: str) -> Any:
        """A DataFrame of one of `tables`: a row for each entry, columns by path, such as 'operator.effective_heads'.

        A list inside another list has one more column for the place in that, from 0, such as 'in comparison.blocks' of
        'comparison.blocks.heads'. InputError for another name, or where pandas (the extra `pandas`) is missing.
        """
        rows = [
            {f"in {name}": place for name, place in around.items()} | row.model_dump(mode="json")
            for path, around, row in _entries(self)
            if path == table
        ]
        if not rows:
            raise InputError(f"'{table}': no table of this report; it has {', '.join(self.tables)}")
        try:
            import pandas
        except ImportError as error:
            raise InputError("to_pandas: pandas is missing: pip install 'duat-cli[pandas]'") from error
        return pandas.json_normalize(rows)

    def __repr__(self) -> str:
        """Summary in one line; the fields and `to_text` have everything."""
        model, certificate = getattr(self, "model", None), getattr(self, "certificate", None)
        name = getattr(model, "name", None) or getattr(self, "name", None)
        facts = [
            plural(len(found), noun)
            for noun in ("block", "prompt", "module")
            if isinstance(found := getattr(self, f"{noun}s", None), list) and found
        ]
        if (verdict := getattr(self, "verdict", None)) is not None:
            facts.append(verdict)
        if certificate is not None:
            size = getattr(certificate, "relative_error", getattr(certificate, "residual", 0.0))
            facts.append(f"{'exact' if certificate.exact else 'NOT EXACT'} {error(size)}")
        tables = [*self.tables[:_NAMED], *(["..."] if len(self.tables) > _NAMED else [])]
        facts = [", ".join(facts), f"tables {', '.join(tables)}" if tables else ""]
        about = f" {clean(str(name).rpartition('/')[2])}" if name else ""
        return f"<{type(self).__name__}{about}: {'; '.join(filter(None, facts))}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """HTML that a notebook shows."""
        return to_html(self.render)


class _WithOperators(Shown):
    """A report on blocks under prompts, which can return their operators."""

    _pick: Pick | None = PrivateAttr(default=None)

    def with_operators(self, pick: Pick) -> Self:
        """The report itself, now able to return operators."""
        self._pick = pick
        return self

    def __eq__(self, other: object) -> bool:
        """Compares the fields; the source of operators is no part of the report."""
        fields = type(self).model_fields
        return type(self) is type(other) and all(getattr(self, name) == getattr(other, name) for name in fields)

    def __hash__(self) -> int:
        return super().__hash__()

    def operator(self, prompt: int = 0, block: int = 0) -> Operator:
        """W' of one block under one prompt, by its factors as tensors; block and prompt are counted from 0.

        The prompt runs once more. A model in memory is used again, and a checkpoint is loaded again; CheckpointError
        where its weights are no longer those of this report.
        """
        if self._pick is None:
            raise InputError("operator: this report was not made by a call of the API, so its model is not known")
        return self._pick(prompt, block)


class InspectResult(_WithOperators, InspectReport):
    """The report of `inspect`."""

    def to_model_card(self) -> str:
        """The section for a model's README that the command writes with --format model-card."""
        return model_card(self)


class VerifyResult(_WithOperators, VerifyReport):
    """The report of `verify`."""


class MatrixResult(Shown, MatrixReport):
    """The report of `matrix`."""


class CompareResult(Shown, CompareReport):
    """The report of `compare`."""


class AttributeResult(Shown, AttributeReport):
    """The report of `attribute`."""


class PruneResult(Shown, PruneReport):
    """The report of `prune_bound`."""


class LoraResult(Shown, LoraReport):
    """The report of `lora_diff`."""


class CheckResult(Shown, CheckReport):
    """The report of `check`."""

    def to_model_card(self) -> str:
        """The section for a model's README that the command writes with --format model-card."""
        return model_card(self)

    def to_eval_results(self) -> str:
        """The YAML for a model card's metadata that the command writes with --format eval-results."""
        return render_eval_results(self)


class SupportResult(Shown, SupportReport):
    """The report of `support`."""


class ExplainResult(Shown, ExplainReport):
    """The report of `explain`."""


class PlanResult(Shown, PlanReport):
    """The report of `plan`."""


def _entries(
    result: Result, path: str = "", around: Mapping[str, int] | None = None
) -> Iterator[tuple[str, Mapping[str, int], Result]]:
    """Every entry of every list of objects: the list's path, the places in the lists around it, and the entry."""
    for name in type(result).model_fields:
        value, here = getattr(result, name), f"{path}.{name}".lstrip(".")
        if isinstance(value, Result):
            yield from _entries(value, here, around)
        for place, entry in enumerate(value if isinstance(value, list) else ()):
            if isinstance(entry, Result):
                yield here, around or {}, entry
                yield from _entries(entry, here, {**(around or {}), here: place})
