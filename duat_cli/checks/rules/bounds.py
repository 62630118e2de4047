"""The rule behind a policy's [bounds]: fields of the inspect report, by pattern."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from duat_cli.checks.paths import asks_for, block_index, flatten, matches, place_of
from duat_cli.checks.policy import BoundTable, Layer
from duat_cli.checks.rule import Evidence, Measurement, Rule, Settings
from duat_cli.errors import InputError, needed
from duat_cli.text import shown


def _bounds(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    report = needed(evidence.report)
    values, reasons = flatten(report)
    for pattern, (layer, bound) in needed(evidence.policy).bounds().items():
        if bound.level == "off":
            continue
        found = list(_matching(pattern, layer, bound, values, reasons))
        if not found:
            last = report.model.blocks - 1
            raise InputError(
                f"{layer.source}: bounds.{shown(pattern)} matches nothing in this model's report, whose blocks are 0 "
                f'to {last}; correct the path, or set its level to "off"'
            )
        yield from found


def _matching(
    pattern: str, layer: Layer, bound: BoundTable, values: dict[str, float], reasons: dict[str, str]
) -> Iterator[Measurement]:
    """A measurement for each field of the pattern, without fields that need an option the pattern does not ask for."""
    asked = asks_for(pattern)
    empty = Measurement(
        0.0,
        "",
        low=bound.min,
        high=bound.max,
        level=bound.level,
        source=layer.source,
        key=(str(layer.file), pattern) if layer.file else None,
    )
    for path in (*values, *reasons):
        if not (matches(pattern, path) and place_of(path).needs <= asked):
            continue
        place = replace(empty, block=block_index(path), where=path)
        if path in values:
            yield replace(place, value=values[path], text=f"{path} is {values[path]:.6g}")
        else:
            yield replace(place, text=f"{path} has no value: {reasons[path]}", undefined=bound.undefined)


RULES = [
    Rule(
        "bounds",
        "fields of the inspect report that the policy bounds",
        "Compare with `duat inspect`; change the checkpoint, or the bound in the policy.",
        _bounds,
        ("report",),
        max=None,
    ),
]
