"""Warnings about the values of a checkpoint."""

from __future__ import annotations

from duat_cli.text import listed, plural


def weight_notes(nonfinite: dict[str, int], zero: list[str], matrices: int) -> list[str]:
    """Warnings about non-finite values and zero matrices. nonfinite: tensor -> its number of non-finite values; zero:
    matrices that are all zero; matrices: how many matrices there are."""
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
