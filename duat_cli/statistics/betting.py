"""A test that a mean is small, from few independent values that are bounded above; nothing else is assumed of them.

A bettor starts with 1. Before each value is seen, the bettor bets a part of the wealth on its being below the limit. If
the true mean were at the limit or above, the wealth would be a supermartingale, and would end at 1 / (1 - confidence)
or more with probability at most 1 - confidence (Waudby-Smith & Ramdas, Estimating means of bounded random variables by
betting, 2023). The size of the bets only changes the power, never the error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from duat_cli.errors import InputError

_LARGEST_BET = 0.75  # fraction of the bet at which one value could take everything


def mean_is_below(values: Sequence[float], limit: float, most: float, confidence: float) -> bool:
    """Whether the mean of min(value, most) in the population is shown to be below `limit`.

    values: independent draws, in an order that was fixed before they were seen; they may be negative without bound.
    most: above the limit. The sample mean of min(value, most) must not exceed the limit either; this only refuses more.
    """
    if not (0.0 < confidence < 1.0 and 0.0 < limit < most):
        raise InputError(
            f"limit {limit!r}, most {most!r}, confidence {confidence!r}: expected 0 < limit < most and a confidence "
            "between 0 and 1"
        )
    seen = [min(value, most) / most for value in values]
    aim = limit / most
    if not seen or math.fsum(seen) > aim * len(seen):
        return False
    level = -math.log1p(-confidence)
    wealth, total, spread = 0.0, 0.5, 0.25  # log of the wealth; sums for a mean and a variance, each with a prior value
    for count, value in enumerate(seen, 1):
        bet = min(math.sqrt(2 * level * count / (len(seen) * spread)), _LARGEST_BET / (1 - aim))
        wealth += math.log1p(bet * (aim - value))
        total += value
        spread += (value - total / (count + 1)) ** 2
    return wealth >= level
