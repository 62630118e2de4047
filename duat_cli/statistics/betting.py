"""Whether a mean is small, from few independent values that are bounded above and otherwise unlike any model.

A bettor starts with 1 and bets, before each value is seen, a part of the wealth on its being below the limit. Were the
true mean at the limit or above, the wealth would be a supermartingale and end at 1 / (1 - confidence) or more with
probability at most 1 - confidence (Waudby-Smith & Ramdas, Estimating means of bounded random variables by betting,
2023). How much is bet only moves the power, never the error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from duat_cli.errors import InputError

_LARGEST_BET = 0.75  # of the bet at which one value could take everything


def mean_is_below(values: Sequence[float], limit: float, most: float, confidence: float) -> bool:
    """Whether the mean of min(value, most) in the population is shown to be below `limit`.

    values: independent draws, in an order that was fixed before they were seen; they may be negative without bound.
    most: above the limit. The mean of the values themselves must be below the limit as well: this only refuses more.
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
    wealth, total, spread = 0.0, 0.5, 0.25  # the logarithm; sums behind a mean and a variance, with a prior value each
    for count, value in enumerate(seen, 1):
        bet = min(math.sqrt(2 * level * count / (len(seen) * spread)), _LARGEST_BET / (1 - aim))
        wealth += math.log1p(bet * (aim - value))
        total += value
        spread += (value - total / (count + 1)) ** 2
    return wealth >= level
