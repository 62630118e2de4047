"""The README.md of a written checkpoint: what was removed and at what cost, followed by the original's own card."""

from __future__ import annotations

import os
from pathlib import Path

from duat_cli.kinds import names_of
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.sets import Plan
from duat_cli.results.prune.written import Written
from duat_cli.text import clean, indices, one_line, plural

CARD = "README.md"
ORIGINAL = "## The card of the original"
ROUNDED_MEANS = (
    "these weights hold the means of removed terms in biases, rounded to the stored dtype; what is guaranteed of the "
    "set, whose means are not rounded, is not of these weights: look at their own damage"
)


def write_card(directory: Path, source: Path, report: PruneReport, written: Written) -> None:
    """Writes the card into the folder of the checkpoint. source: the folder of the original. Its card is kept below,
    and its front matter, from which hubs read licence and tags, on top."""
    original = source / CARD
    front, below = _split(original.read_text(encoding="utf-8", errors="replace") if original.is_file() else "")
    text = front + card_of(report, written)
    if below.strip():
        text += f"\n{ORIGINAL}\n\nIts numbers are of the original, not of these weights.\n\n{below.lstrip()}"
    part = directory / f".{CARD}"
    part.write_text(text, encoding="utf-8")
    os.replace(part, directory / CARD)


def card_of(report: PruneReport, written: Written) -> str:
    """The card of the written checkpoint itself, as Markdown."""
    plan, name = report.plans[0], _name(report)
    numbers = [
        ("parameters", f"{written.parameters_before:,}", f"{written.parameters_after:,}"),
        ("bytes", f"{written.bytes_before:,}", f"{written.bytes_after:,}"),
    ]
    if written.perplexity_before is not None and written.perplexity_after is not None:
        numbers.append(("perplexity", f"{written.perplexity_before:.4g}", f"{written.perplexity_after:.4g}"))
    ran = report.environment
    versions = f"duat {report.duat_version}, torch {ran.torch}, transformers {ran.transformers}"
    said = [_removed(written), _damage(report, written), _guaranteed(plan, written)]
    lines = [
        f"# {name}, pruned",
        "",
        f"These weights were written by a command such as `{_command(plan, report, name, written.terms)}`, with "
        f"{versions}.",
        "",
        "| | original | these weights |",
        "|---|---|---|",
        *(f"| {what} | {before} | {after} |" for what, before, after in numbers),
        "",
        *(f"- {text}" for text in said),
    ]
    return "\n".join(lines) + "\n"


def _split(card: str) -> tuple[str, str]:
    """The front matter with the lines around it, and the text below it."""
    front, end, below = card.partition("\n---\n")
    return (f"{front}{end}\n", below) if end and card.startswith("---\n") else ("", card)


def _name(report: PruneReport) -> str:
    """Name of the model; for a local folder only its last part, so that the card shows no local path."""
    name = report.model.name if report.model.revision else Path(report.model.name).name
    return one_line(clean(name).replace("`", "'") or "model", 120)


def _command(plan: Plan, report: PruneReport, name: str, terms: int) -> str:
    options = [
        *(["--stack decoder"] if report.model.stack == "decoder" else []),
        f"--granularity {plan.granularity}",
        f"--metric {report.protocol.metric}",
        f"--budget {plan.budget:g}",
        *([plan.remove_option] if plan.remove_option else []),
        *(["--uniform"] if plan.uniform else []),
        *(["--ablate mean"] if report.protocol.ablate == "mean" else []),
        *(["--repair"] if plan.repair else []),
    ]
    return f"duat prune-bound {name} {' '.join(options)} --set {terms} --apply DIR"


def _removed(written: Written) -> str:
    names, repaired = names_of(written.granularity), "; other layers were refitted" if written.repaired else ""
    terms = f"{written.terms} {names}" if written.terms != 1 else f"one of the {names}"
    if written.removed_blocks:
        terms = indices("block", written.removed_blocks)
    return f"Removed: {terms}: {written.gone}{repaired}."


def _damage(report: PruneReport, written: Written) -> str:
    on = f"{written.prompts} held-out prompts"
    if written.measured_on != "held out":
        on = f"the {plural(written.prompts, 'prompt')} that chose the set, on which it looks better than it is"
    if written.damage is None:
        return f"Damage on {on}: none; {written.reasons['damage']}."
    return (
        f"Damage on {on}: {written.damage:.4g} {report.protocol.unit} ({report.protocol.meaning}); above the budget of "
        f"{report.plans[0].budget:g}: {written.exceeded} of them."
    )


def _guaranteed(plan: Plan, written: Written) -> str:
    given = plan.guarantee
    if given is None:
        return "Nothing is guaranteed: no prompts were held out."
    if given.removed != written.terms:
        return "Not guaranteed to keep to the budget."
    if ROUNDED_MEANS in written.notes:
        return f"Not guaranteed to keep to the budget: {ROUNDED_MEANS}."
    did = f"{given.exceeded} of {given.holdout_prompts} did"
    return f"Guaranteed {given.share_exceeding} drawn as the held-out ones exceed the budget ({did})."
