"""Maps over layers: blocks across, kinds of parameters upwards."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from markupsafe import Markup

from duat_cli.report.html.drawing.cells import cells, scale_of_cells
from duat_cli.report.html.drawing.plot import Axis, Plot
from duat_cli.report.html.drawing.scales import Band
from duat_cli.report.tables import numbers

_ROWS = 40  # kinds of parameters; those with the largest numbers
_LONGEST = 34  # characters of a kind


def place_of(name: str) -> tuple[str, int | None]:
    """A parameter's kind and the number of its layer: ('mlp.up_proj.weight', 3)."""
    found = re.search(r"(?:^|\.)(\d+)\.", name)
    return (name, None) if found is None else (name[found.end() :], int(found[1]))


def layer_map(
    values: Mapping[tuple[str, int | None], float],
    what: str,
    *,
    signed: bool = False,
    form: Callable[[float | None], str] = numbers.plain,
) -> tuple[Markup, int]:
    """A cell for each (kind, layer), which stands in no layer where that is None; and for how many kinds there was no
    room. what: the number's name."""
    most: dict[str, float] = {}
    for (name, _), value in values.items():
        most[name] = max(most.get(name, 0.0), abs(value))
    names = sorted(sorted(most, key=lambda name: -most[name])[:_ROWS], reverse=True)
    numbered = [layer for _, layer in values if layer is not None]
    across: list[int | None] = [*([None] if any(layer is None for _, layer in values) else [])]
    across += range(max(numbered) + 1 if numbered else 0)
    labels = ["none" if layer is None else str(layer) for layer in across]
    shown = [name if len(name) <= _LONGEST else f"..{name[2 - _LONGEST :]}" for name in names]
    plot = Plot(
        Axis("block", Band(labels)),
        Axis("", Band(shown, most=_ROWS)),
        height=80 + 22 * len(names),
        longest=max(map(len, shown), default=0),
    )
    rows = [[values.get((name, layer)) for layer in across] for name in names]
    drawn = cells(plot, rows, lambda r, c: f"{names[r]}, block {labels[c]}, {what}", form)
    picture = plot.svg(drawn, f"Map of {what}: blocks across, kinds of parameters upwards.")
    largest = max(most.values(), default=0.0)
    return picture + scale_of_cells(largest, signed=signed), len(most) - len(names)
