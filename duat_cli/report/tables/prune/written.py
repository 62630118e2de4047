"""A written checkpoint beside the model that it was made of, as text."""

from __future__ import annotations

from rich.console import RenderableType

from duat_cli.report.tables import numbers
from duat_cli.report.tables.page import BLANK, item, line
from duat_cli.results.prune.written import Written
from duat_cli.text import plural


def written(found: Written | None) -> list[RenderableType]:
    """Size, perplexity and time, before and after; nothing without --apply."""
    if found is None:
        return []
    kind = "term" if "," in found.granularity else found.granularity
    title = f"Written: a checkpoint without {plural(found.terms, kind)}"
    parts = [_size(found), _perplexity(found)]
    if found.parameters_after < found.parameters_before:  # else the same work was timed twice
        parts.append(_time(found))
    return [BLANK, line(title + (", repaired" if found.repaired else ""), "bold"), *map(item, parts)]


def _size(found: Written) -> str:
    parts = [plural(len(found.removed_blocks), "block") + " removed"] if found.removed_blocks else []
    parts += [plural(found.removed_neurons, "neuron") + " a block removed"] if found.removed_neurons else []
    parts += [plural(found.removed_groups, "key and value head") + " a block removed"] if found.removed_groups else []
    parts += [plural(found.zeroed, "term") + " zeroed and still stored"] if found.zeroed else []
    return (
        f"{', '.join(parts)}: {found.parameters_before:,} -> {found.parameters_after:,} parameters, "
        f"{numbers.plain(found.bytes_before / 1e6)} -> {numbers.plain(found.bytes_after / 1e6)} MB in {found.dtype}"
    )


def _perplexity(found: Written) -> str:
    on = "held-out prompts" if found.measured_on == "held out" else "of the prompts that chose the set"
    before, after = found.perplexity_before, found.perplexity_after
    if before is None or after is None:
        return f"perplexity: none; {found.reasons.get('perplexity_before') or found.reasons['perplexity_after']}"
    return (
        f"perplexity: {numbers.plain(before)} -> {numbers.plain(after)} ({found.prompts} {on}, {found.tokens} tokens)"
    )


def _time(found: Written) -> str:
    times = [numbers.plain(1e3 * seconds) for seconds in (found.seconds_before, found.seconds_after)]
    return (
        f"time: {times[0]} -> {times[1]} ms a token, measured: median of {found.timed_runs} alternating runs over "
        f"{found.timed_tokens} tokens"
    )
