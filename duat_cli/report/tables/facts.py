"""The lines that all reports share: what was loaded, how exact it is, what was left out."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from duat_cli.report.tables import numbers
from duat_cli.report.tables.page import item, line
from duat_cli.results.base import Certificate, Environment, ModelFacts, Skipped
from duat_cli.results.prompts import Prompts, set_of
from duat_cli.text import indices, plural


def loaded(model: ModelFacts, prompts: Prompts, environment: Environment) -> list[RenderableType]:
    """What was loaded and what ran through it."""
    kv = "" if model.kv_heads == model.heads else f" ({model.kv_heads} kv)"
    shape = (
        f"{model.model_type} ({architecture(model)}), {numbers.count(model.parameters)} parameters, "
        f"{plural(model.blocks, 'block')}, width {model.hidden_size}, "
        f"{plural(model.heads, 'head')}{kv}{quantised(model.quantised)}"
    )
    name = f"{model.name} at {model.revision}" if model.revision else model.name
    return [line(name, "bold"), line(shape), line(f"{tokens(prompts)}; {arithmetic(environment)}")]


def architecture(model: ModelFacts) -> str:
    """The class, and which of its stacks was read."""
    return model.architecture if model.stack is None else f"{model.architecture}, {model.stack} stack"


def quantised(how: str | None) -> str:
    """How the files hold the weights."""
    return "" if how is None else f"; quantised: {how}, read as numbers"


def counted(prompts: Prompts) -> str:
    """12 prompts, 214 tokens."""
    found = set_of(prompts)
    return f"{plural(found.count, 'prompt')}, {plural(found.tokens, 'token')}"


def tokens(prompts: Prompts) -> str:
    """12 prompts, 214 tokens (5 to 31 each)."""
    found = set_of(prompts)
    if found.shortest == found.longest:
        return counted(found)
    return f"{counted(found)} ({found.shortest} to {found.longest} each)"


def arithmetic(environment: Environment) -> str:
    """float32 on cpu; transformers 5.23.0."""
    return f"{environment.dtype} on {environment.device}; transformers {environment.transformers}"


def verdict(certificate: Certificate) -> Text:
    """The certificate in one sentence, and what is to blame where it is not exact."""
    error, plain = numbers.error(certificate.relative_error), numbers.error(certificate.plain_error)
    rest = f"tolerance {certificate.tolerance:.0e}, {certificate.capture}"
    text = f"largest relative error {error}, against the untouched model {plain}, {rest}"
    if certificate.exact:
        return line(f"exact: {text}", "green")
    if certificate.plain_error > certificate.tolerance:
        text += (
            f"; duat's instruments change this model: under them its output is {plain} off the model as it runs alone"
        )
    return line(f"NOT EXACT: {text}; do not rely on the numbers above", "bold red")


def remarks(skipped: list[Skipped], warnings: list[str]) -> list[RenderableType]:
    """What was skipped, with the reason, and the warnings."""
    left_out = [f"{entry.what}: {entry.why}" for entry in skipped]
    return [*section("skipped", left_out), *section("warnings", warnings, "yellow")]


def absences(found: list[tuple[str, str, list[int]]], word: str) -> list[RenderableType]:
    """Why cells show no number."""
    texts = [f"{names}: {reason} ({indices(word, at)})" for names, reason, at in found]
    return section(f"no value ({numbers.ABSENT})", texts)


def section(title: str, texts: list[str], style: str = "") -> list[RenderableType]:
    """A titled list, or nothing."""
    return [line(title, "bold"), *(item(text, style) for text in texts)] if texts else []
