"""A section for a model's README: certificate, sizes, gates, and how to reproduce it. A pure function of a report."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from duat_cli.errors import InputError
from duat_cli.report.check.markdown import escaped
from duat_cli.report.check.words import limit, own, policies, verdict
from duat_cli.report.tables import facts, numbers
from duat_cli.results.base import Certificate, Environment, Result
from duat_cli.results.behaviour import Behaviour
from duat_cli.results.check import CheckReport, UndecidedReport
from duat_cli.results.inspect import InspectReport, InspectStacks
from duat_cli.results.prompts import Prompts, all_prompts, set_of
from duat_cli.text import clean, first_of, plural

COMMANDS = ("check", "inspect")
"""Commands whose reports have a section."""
_SHIPPED = "policy "  # prefix in a report for a policy that comes with duat
_DEMO = "demo"  # name in a report for the bundled model; it may also be a folder
_SHOWN = 10  # how many findings are shown; the others are counted

Row = tuple[str, str]


def model_card(report: Result) -> str:
    """Markdown with a second-level heading for a report of `check` or `inspect`. Raises InputError for others."""
    if isinstance(report, CheckReport):
        return _checked(report)
    if isinstance(report, InspectReport):
        return _inspected(report)
    if isinstance(report, InspectStacks):
        names = " or ".join(str(one.model.stack) for one in report.stacks)
        raise InputError(f"model-card: a section is of one report; give --stack {names}")
    raise InputError("model-card: only of a report of 'duat check' or 'duat inspect'")


def undecided_model_card(report: UndecidedReport) -> str:
    """A section with the reason why there is no verdict."""
    return f"## duat check\n\nCould not tell: {escaped(report.error.message)}\n"


def _checked(report: CheckReport) -> str:
    model = report.model
    size = sum(file.bytes for file in model.files)
    stored = ", ".join(map(escaped, model.stored))
    rows: list[Row] = [("Verdict", f"**{escaped(verdict(report))}**")]
    rows += [("Policy", escaped(policies(report)))]
    if report.baseline is not None:
        name = "Base" if report.baseline.base else "Baseline"
        rows += [(name, f"{escaped(report.baseline.file)}, {report.baseline.status}")]
    rows += [] if model.stack is None else [("Stack", escaped(model.stack))]
    rows += [("Weights", f"{plural(model.tensors, 'tensor')} ({stored})")]
    if model.files:
        rows += [("Size", f"{size:,} bytes in {plural(len(model.files), 'file')}")]
    rows += [("Names, shapes and dtypes, SHA-256", _code(model.header_sha256))]
    rows += _identity(model.fingerprint, model.revision)
    rows += _certificate(report.certificate)
    rows += _loss(report.behaviour)
    rows += _made(all_prompts(report), report.environment, report.duat_version)
    lines = ["## Checked with duat", "", *_table(rows), ""]
    found = [cause for cause in report.causes if cause.findings]
    if found:
        lines += ["Findings, what came first in front:", ""]
        firsts = [(cause, own(report, cause)[0]) for cause in found]
        texts = [f"{c.status}: {_code(one.rule)}: {escaped(f'{c.message} {limit(one)}')}" for c, one in firsts]
        lines += [*(f"- {text}" for text in first_of(texts, _SHOWN)), ""]
    words = ["duat", "check", model.name, *_policy(report.policy), *_option("--revision", model.revision)]
    words += _option("--stack", model.stack)
    if report.baseline is not None:
        words += ["--base" if report.baseline.base else "--baseline", report.baseline.file]
    words += ["--adapter", "ADAPTER"] if report.behaviour and report.behaviour.tuned else []
    words += ["--weights-only"] if report.environment is None else _option("--dtype", report.environment.dtype)
    return "\n".join([*lines, *_reproduce(report.duat_version, words, all_prompts(report))])


def _inspected(report: InspectReport) -> str:
    model, summary = report.model, report.summary
    heads = plural(model.heads, "head")
    shape = f"{plural(model.blocks, 'block')}, {facts.width(model)}, {heads} ({model.kv_heads} key/value)"
    rows: list[Row] = [
        ("Model", f"{escaped(facts.architecture(model))}, {model.parameters:,} parameters"),
        ("Shape", shape),
        *_identity(model.fingerprint, model.revision),
        *_certificate(report.certificate),
    ]
    chosen = [block.index for block in report.blocks]  # fewer than all with --layers
    layers = None if len(chosen) == model.blocks else ",".join(map(str, chosen))
    rows += [] if layers is None else [("Blocks of this report", layers)]
    shares = [("linear", summary.linear_share), ("static", summary.static_share), ("UAT terms", summary.dynamic_share)]
    shares += [("encoder", summary.encoder_share)]
    known = [f"{name} {share:.3f}" for name, share in shares if share is not None]
    last = "the last block" if layers is None or chosen[-1] == model.blocks - 1 else f"block {chosen[-1]}"
    rows += [(f"What {last}'s output is made of", ", ".join(known))] if known else []
    if summary.effective_context is not None:
        rows += [("Tokens that a token reads, mean", f"{summary.effective_context:.2f}")]
    rows += _made(all_prompts(report), report.environment, report.duat_version)
    lines = ["## What it computes, read with duat", "", *_table(rows), ""]
    if summary.notable:
        lines += [*(f"- {escaped(sentence)}" for sentence in summary.notable), ""]
    words = ["duat", "inspect", model.name, *_option("--revision", model.revision)]
    words += [*_option("--stack", model.stack), *_option("--layers", layers)]
    words += _option("--dtype", report.environment.dtype)
    return "\n".join([*lines, *_reproduce(report.duat_version, words, all_prompts(report))])


# -- rows -------------------------------------------------------------------------------------------------------


def _identity(fingerprint: str | None, revision: str | None) -> list[Row]:
    rows: list[Row] = [("Commit", _code(revision))] if revision else []
    return [*rows, ("Fingerprint of the loaded weights", _code(fingerprint))] if fingerprint else rows


def _certificate(found: Certificate | None) -> list[Row]:
    if found is None:
        return [("Certificate", "none: no forward pass")]
    word = "exact" if found.exact else "**not exact**"
    text = (
        f"{word}: the DUAT sum is {numbers.error(found.relative_error)} from the model's own output, and the model "
        f"under duat's instruments {numbers.error(found.plain_error)} from the untouched one; tolerance "
        f"{found.tolerance:.0e}"
    )
    return [("Certificate", text)]


def _loss(found: Behaviour | None) -> list[Row]:
    if found is None or found.loss_per_token is None or found.uniform is None:
        return []
    name = "Pseudo-loss" if found.predicts == "masked token" else "Loss"
    unigram = "" if found.unigram is None else f"; the prompts' own unigram {found.unigram:.3f}"
    text = f"{found.loss_per_token:.3f} nats per token, of {plural(found.scored, 'token')}; "
    rows: list[Row] = [(f"{name} on the prompts", f"{text}uniform {found.uniform:.3f}{unigram}")]
    if found.tuned is not None and found.tuned.loss_per_token is not None:
        rows += [("The same with the adapter", f"{found.tuned.loss_per_token:.3f} nats per token")]
    return rows


def _made(prompts: Prompts, made: Environment | None, version: str) -> list[Row]:
    rows: list[Row] = (
        [("Prompts", f"{facts.counted(prompts)}; SHA-256 `{set_of(prompts).sha256[:16]}`")] if prompts else []
    )
    libraries = "" if made is None else f", torch {made.torch}, transformers {made.transformers}, {made.dtype}"
    return [*rows, ("Made with", escaped(f"duat {version}{libraries}"))]


def _code(text: str) -> str:
    """The text as code; backticks, which would end it, are removed."""
    return f"`{clean(text).replace('`', '').replace('|', '')}`"


def _table(rows: Iterable[Row]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


# -- how to get it again ----------------------------------------------------------------------------------------


def _policy(sources: Sequence[str]) -> list[str]:
    """The option that selects the same policies again; for a pyproject.toml, its path."""
    last = sources[-1] if sources else ""
    if last.startswith(_SHIPPED):
        name = last.removeprefix(_SHIPPED)
        return [] if name == "default" else ["--policy", name]
    return ["--policy", last.removesuffix(" [tool.duat]")] if last else []


def _option(name: str, value: str | None) -> list[str]:
    return [] if value is None else [name, value]


def _reproduce(version: str, words: Sequence[str], prompts: Prompts) -> list[str]:
    line = clean(shlex.join(words)).replace("`", "\\x60")
    line += "  # of the bundled model: without its name" if words[2] == _DEMO else ""
    lines = ["To reproduce:", "", "```bash", f"pip install duat-cli=={clean(version)}", line, "```", ""]
    if prompts:
        lines += ["Without inputs the bundled set runs; the hash above says whether this report is of it.", ""]
    return lines
