"""The comparison as a part of scripts/bench.py, and as a section of the page on pruning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import Row
from benchmarks.criteria.comparison import OURS, REPAIRED, SHARES, Comparison, compare
from benchmarks.criteria.table import contests, label, lost, markdown
from benchmarks.criteria.texts import CALIBRATION, HELD_OUT, WINDOW

PAGE = Path(__file__).parents[3] / "configs" / "docs" / "pruning.md"
TITLE = "## Against other criteria"
MODELS = ("demo", "MiniLM")
WANTED = {OURS: "<= 1, or its interval reaches 1", REPAIRED: "<= 0.7 at 30 %"}


def criteria(_runs: int, *, peer: bool = False, rounds: int = 1, write: bool = False) -> list[Row]:
    """Damage of duat's sets over that of the best other method, neurons and heads jointly, at each share.

    peer: also torch-pruning, which is installed. write: the tables go into the page, and no row is left out.
    """
    found = [compare(name, rounds=rounds, peer=peer) for name in MODELS]
    if write:
        PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), TITLE, section(found)), encoding="utf-8")
    return [row for one in found for row in _rows(one)]


def _rows(found: Comparison) -> list[Row]:
    rows = []
    for what, ratios in contests(found).items():
        wanted = WANTED[REPAIRED if what.startswith("repaired") else OURS]
        for share, one in zip(SHARES, ratios, strict=True):
            head = f"{found.name}, {100 * share:g} % removed: duat, {what}, {one.between}"
            rows.append(Row(head, one.value, f"x the damage of {label(one.other)}, {one.other.variant}", wanted))
    return rows


def section(found: Sequence[Comparison]) -> str:
    """The section of the page, from its title on."""
    tables = (f"{NOTES[one.name]}\n\n{markdown(one)}" for one in found)
    return f"{TITLE}\n\n{INTRODUCTION}\n\n" + "\n\n".join(tables) + f"\n\n{lost(found)}\n"


def with_section(page: str, title: str, text: str) -> str:
    """The page with this section in place of the one of this title, or at its end."""
    pattern = re.compile(rf"^{re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if pattern.search(page):
        return pattern.sub(lambda _: text + "\n", page).rstrip("\n") + "\n"
    return page.rstrip("\n") + "\n\n" + text


INTRODUCTION = f"""\
Made by `python scripts/bench.py criteria --peer --write`. FFN neurons and heads are removed together, the same share of
the blocks' parameters by every method. All methods see the same {CALIBRATION} windows of {WINDOW} tokens and are
judged on {HELD_OUT} windows of other files, by which duat chooses nothing. Bold: the best without repair, and every
method that it does not beat (95 % paired bootstrap over the windows).

FLAP puts the mean of what it removes into biases, which is a repair in itself. So there are two comparisons: every set
with zeros, and every set with its means. In the second, duat's set is the one that `--ablate mean` orders.
`duat, repaired` is `--repair` of the set with zeros; it is listed with the means, but is not compared there. A
criterion made for one layer is used in two ways: as published, with the same share of every layer, and with all terms
of the model in one order by score a parameter. The table has the better of the two on the held-out windows. HFPrune
removes only neurons as published, and here also heads where that was better. torch-pruning really removes neurons, and
also heads where attention has no rotary positions. It removes the same share of every layer, by magnitude or Taylor
importance, whichever was better."""
NOTES = {
    "demo": "The windows of the demo are from source files of the standard library that its training held out.",
    "MiniLM": "The windows of MiniLM are from topics of the language reference. It has no loss, which Taylor criteria "
    "need.",
}
