"""Exact statements about a share from counted cases: Clopper-Pearson limits, and nested choices tested in order.

Of n prompts drawn independently from the population that the statement is about, k exceeded a limit. Nothing else is
assumed about how damage is distributed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from duat_cli.errors import InputError


def log_tail(k: int, n: int, share: float) -> float:
    """log P(Bin(n, share) ≤ k), summed from its largest term so that nothing underflows; 0 ≤ k ≤ n."""
    if k == n or share <= 0.0:
        return 0.0
    if share >= 1.0:
        return -math.inf
    hit, miss = math.log(share), math.log1p(-share)
    whole = math.lgamma(n + 1)
    terms = [whole - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * hit + (n - i) * miss for i in range(k + 1)]
    largest = max(terms)
    return min(largest + math.log(math.fsum(math.exp(t - largest) for t in terms)), 0.0)


def allowed(n: int, share: float, confidence: float) -> int | None:
    """The most of n that may exceed so that the one-sided Clopper-Pearson limit of the true share is still at most
    `share`; None if not even 0 is few enough.

    The limit is the share at which so many or fewer of n have probability 1 - confidence. Whatever the true share is,
    the limit lies below it with probability at most 1 - confidence (Clopper & Pearson 1934).
    """
    _check(share, "share of prompts")
    _check(confidence, "confidence")
    level = math.log1p(-confidence)
    if n < 1 or log_tail(0, n, share) > level:
        return None
    low, high = 0, n  # the tail at `low` is small enough, at `high` it is 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if log_tail(middle, n, share) <= level else (low, middle)
    return low


def prompts_needed(share: float, confidence: float, exceeding: int = 0) -> int:
    """The fewest prompts that can show a share of at most `share` if `exceeding` of them exceed.

    With none: (1 - share)^n ≤ 1 - confidence.
    """
    if exceeding:
        n = prompts_needed(share, confidence, exceeding - 1) + 1
        while (allowed(n, share, confidence) or 0) < exceeding:
            n += 1
        return n
    _check(share, "share of prompts")
    _check(confidence, "confidence")
    n = max(1, math.ceil(math.log1p(-confidence) / math.log1p(-share)))
    # The quotient is rounded: settle on the exact smallest n by the test itself.
    while n > 1 and log_tail(0, n - 1, share) <= math.log1p(-confidence):
        n -= 1
    while log_tail(0, n, share) > math.log1p(-confidence):
        n += 1
    return n


def choose_nested(exceeded: Sequence[int], n: int, share: float, confidence: float) -> int | None:
    """Number of the last of nested sets for which "at most `share` of prompts exceed" holds with the confidence; None
    if not even the first passed.

    exceeded: for each set, how many prompts exceeded; the order of the sets was fixed before these n prompts were
    looked at. Each set is tested at the full level, and the first that fails ends the test. A false statement needs the
    first set whose true share is above `share` to pass, which has probability at most 1 - confidence (Maurer, Hothorn &
    Lehmacher 1995; Angelopoulos et al., Learn then Test, 2021). `share` and `confidence` must be chosen in advance as
    well.
    """
    most = allowed(n, share, confidence)
    if most is None:
        need = prompts_needed(share, confidence)
        raise InputError(
            f"{n} held-out prompts cannot show a share of at most {share:g} with confidence {confidence:g}: "
            f"it takes {need} or more; add prompts, or ask for less"
        )
    passed = 0
    while passed < len(exceeded) and exceeded[passed] <= most:
        passed += 1
    return passed - 1 if passed else None


def _check(value: float, name: str) -> None:
    if not 0.0 < value < 1.0:
        raise InputError(f"{name} {value!r}: expected a number between 0 and 1, both excluded")
