"""Lines that all reports share: what was loaded, how exact it is, what was left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.text import Text

from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column, Labels, missing, titled
from duat_cli.report.tables.page import Page, heading, item, line
from duat_cli.results.base import Certificate, Environment, ModelFacts, Result, Skipped
from duat_cli.results.check import CheckedModel
from duat_cli.results.matrix import MatrixReport
from duat_cli.results.prompts import Prompts, set_of
from duat_cli.text import in_one, indices, plural


def loaded(model: ModelFacts, prompts: Prompts, environment: Environment) -> list[RenderableType]:
    """Lines on the model and the prompts that ran through it."""
    return [heading(named(model)), line(shape(model, "kv")), line(ran(prompts, environment))]


def named(model: ModelFacts | CheckedModel) -> str:
    """Name of the model, with the commit that was read."""
    return f"{model.name} at {model.revision}" if model.revision else model.name


def shape(model: ModelFacts, kv: str) -> str:
    """Architecture and sizes. kv: the word for key and value heads."""
    return (
        f"{model.model_type} ({architecture(model)}), {numbers.count(model.parameters)} parameters, "
        f"{plural(model.blocks, 'block')}, {width(model)}, {heads(model, kv)}{quantised(model.quantised)}"
    )


def width(model: ModelFacts) -> str:
    """Width of the residual stream, or of the streams of a token, as in: width 576, or: 4 streams of width 144."""
    if model.streams == 1:
        return f"width {model.hidden_size}"
    return f"{model.streams} streams of width {model.hidden_size // model.streams}"


def heads(model: ModelFacts | MatrixReport, kv: str) -> str:
    """Number of heads, as in: 6 heads (3 kv)."""
    return plural(model.heads, "head") + ("" if model.kv_heads == model.heads else f" ({model.kv_heads} {kv})")


def files(model: CheckedModel) -> str:
    """Type of the model, and what its files hold."""
    size = numbers.size(sum(file.bytes for file in model.files))
    stack = "" if model.stack is None else f"{model.stack} stack, "
    return (
        f"{model.model_type or 'unknown type'}, {stack}{plural(model.tensors, 'tensor')}, {', '.join(model.stored)}, "
        f"{size} in {plural(len(model.files), 'file')}"
    )


def ran(prompts: Prompts, environment: Environment) -> str:
    """Prompts and arithmetic, as in: 12 prompts, 214 tokens (5 to 31 each); float32 on cpu; transformers 5.23.0."""
    arithmetic = f"{environment.dtype} on {environment.device}; transformers {environment.transformers}"
    return f"{tokens(prompts)}; {arithmetic}"


def architecture(model: ModelFacts) -> str:
    """The model's class, and the stack of it that was read."""
    return model.architecture if model.stack is None else f"{model.architecture}, {model.stack} stack"


def quantised(how: str | None) -> str:
    """How the files quantise the weights; empty if they do not."""
    return "" if how is None else f"; quantised: {how}, read as numbers"


def counted(prompts: Prompts) -> str:
    """Counts, as in: 12 prompts, 214 tokens."""
    found = set_of(prompts)
    return f"{plural(found.count, 'prompt')}, {plural(found.tokens, 'token')}"


def tokens(prompts: Prompts) -> str:
    """Counts with lengths, as in: 12 prompts, 214 tokens (5 to 31 each)."""
    found = set_of(prompts)
    if found.shortest == found.longest:
        return counted(found)
    return f"{counted(found)} ({found.shortest} to {found.longest} each)"


def verdict(certificate: Certificate) -> Text:
    """The certificate in one sentence, with the cause if duat's instruments change the model."""
    error, plain = numbers.error(certificate.relative_error), numbers.error(certificate.plain_error)
    rest = f"tolerance {certificate.tolerance:.0e}, {certificate.capture}"
    text = f"largest relative error {error}, against the untouched model {plain}, {rest}"
    if certificate.exact:
        return line(f"exact: {text}", "green")
    if certificate.plain_error > certificate.tolerance:
        text += (
            f"; duat's instruments change this model: under them its output is {plain} off the model as it runs alone"
        )
    return line(f"NOT EXACT: {text}; do not rely on these numbers", "bold red")


def held(check: str, holds: bool) -> Text:
    """A line on a check beside the certificate, and whether it holds."""
    return line(check, "green") if holds else line(f"DOES NOT HOLD: {check}", "bold red")


def remarks(skipped: list[Skipped], warnings: list[str]) -> list[RenderableType]:
    """Sections on what was skipped, with reasons, and on warnings."""
    return [*section("skipped", left_out(skipped)), *section("warnings", warnings, "yellow")]


def left_out(skipped: Iterable[Skipped]) -> list[str]:
    """Texts of skipped parts with their reasons; one text for several blocks with the same reason."""
    found = list[tuple[str, str, list[int]]]()
    for entry in skipped:
        what, _, block = entry.what.rpartition(" of block ")
        found.append((what, entry.why, [int(block)]) if what and block.isdecimal() else (entry.what, entry.why, []))
    return [f"{what} of {indices('block', at)}: {why}" if at else f"{what}: {why}" for what, why, at in _joined(found)]


def absences(found: list[tuple[str, str, list[int]]], word: str) -> list[RenderableType]:
    """Section on why cells show no number. found: names, reason and numbers of rows; word: the name of a row."""
    texts = [f"{names}: {reason} ({indices(word, at)})" for names, reason, at in _joined(found)]
    return section(f"no value ({numbers.ABSENT})", texts)


def without_value(rows: Sequence[Result], labels: Labels, columns: Sequence[Column]) -> list[RenderableType]:
    """Section on why cells of a table show no number. Rows are counted from 1 if their labels are no numbers."""
    if not labels.right:
        return absences(missing(rows, columns, range(1, len(rows) + 1)), "row")
    return absences(missing(rows, columns, [labels.of(row) for row in rows]), labels.title[0])


def whole(
    title: str, rows: Sequence[Result], labels: Labels, columns: Sequence[Column], page: Page, *legend: str
) -> list[RenderableType]:
    """A titled table with its legend, and the reasons why cells show no number."""
    return [*titled(title, rows, labels, columns, page, *legend), *without_value(rows, labels, columns)]


def _joined(found: Iterable[tuple[str, str, list[int]]]) -> list[tuple[str, str, list[int]]]:
    """(what, reason, places) of missing values, with one entry for reasons that differ only in a measured number."""
    groups = list[tuple[str, list[str], list[int]]]()
    for what, why, at in found:
        for name, reasons, places in groups:
            if name == what and in_one([*reasons, why]) is not None:
                reasons.append(why)
                places.extend(at)
                break
        else:
            groups.append((what, [why], [*at]))
    return [(what, in_one(reasons) or reasons[0], places) for what, reasons, places in groups]


def section(title: str, texts: list[str], style: str = "") -> list[RenderableType]:
    """A titled list; nothing without texts."""
    return [heading(title), *(item(text, style) for text in texts)] if texts else []
