"""How far each tensor moved from the baseline, by block."""

from __future__ import annotations

from duat_cli.report.html.check.findings import outcomes
from duat_cli.report.html.drawing.figure import Figure
from duat_cli.report.html.drawing.layered import layer_map, place_of
from duat_cli.results.check import CheckReport

_RULE = "drift.weights"


def drift(report: CheckReport) -> Figure | None:
    """A map: blocks across, kinds of tensors upwards. None where no tensor moved beyond its tolerance."""
    moved: dict[tuple[str, int | None], float] = {}
    places = []
    for i, one in enumerate(report.outcomes):
        if one.rule == _RULE and one.status in ("failed", "warned") and one.measured is not None and one.where:
            places.append(i)
            moved[place_of(one.where.removeprefix("weights."))] = one.measured
    if not places:
        return None
    picture, left_out = layer_map(moved, "relative change")
    return Figure(
        key="drift",
        wide=True,
        title="How far tensors moved from the baseline, by block",
        says="Change relative to the tensor's norm, estimated from the baseline's sketches. Only tensors beyond their "
        "tolerance are listed; an empty cell is within it.",
        picture=picture,
        tables=[outcomes(report, places)],
        terms=["outcomes[].measured", "outcomes[].source"],
        notes=[f"{left_out} kinds that moved less are in the table."] if left_out else [],
    )
