"""What a user should know of the values of a checkpoint, as warnings."""

from __future__ import annotations

from duat_cli.text import listed, plural


def weight_notes(nonfinite: dict[str, int], zero: list[str], matrices: int) -> list[str]:
    """What a user should know of the values: tensor -> non-finite values, zero matrices, and how many there are."""
    notes = []
    if nonfinite:
        total = sum(nonfinite.values())
        where = f"{plural(len(nonfinite), 'tensor')}: {listed(list(nonfinite))}"
        notes.append(f"{plural(total, 'non-finite weight')} (NaN or Inf) in {where}")
    if zero and len(zero) == matrices:
        notes.append(f"all {matrices} weight matrices are zero: shares and densities are undefined")
    elif zero:
        notes.append(f"{len(zero)} of {matrices} weight matrices are all zero: {listed(zero)}")
    return notes
