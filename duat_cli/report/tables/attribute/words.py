"""Words for a prediction, and sums of its parts, that tables and HTML pages share."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from duat_cli.report.tables import numbers
from duat_cli.report.tables.page import TARGET, cut, line
from duat_cli.results.attribute import (
    Attribution,
    AttributionCertificate,
    InnerPart,
    MeasuredParts,
    RemovedPart,
    Spread,
)

NOT_CAUSAL = (
    "Parts are exact shares of this output with attention, norms and gates held as they are. They do not say what "
    "would happen if a part were removed: then these react."
)
BARE = (
    "The logit is held against nothing: what raises all logits alike counts, and makes nothing likelier; "
    "--against mean leaves it out."
)
THROUGH_SCORES = (
    "Heads are taken by the part that went through them; one that matters through where other heads look has none: "
    "--measure with a larger number takes out more."
)
_WORDS = {"component": "value", "norm": "length", "log-probability": "linearised log-prob"}
_UNITS = {"component": "of the vector", "norm": "of the vector", "log-probability": "nats"}


def is_bare(one: Attribution) -> bool:
    """Whether the target is a single logit, with nothing subtracted."""
    return one.target.kind in ("token", "class") and one.target.against is None and not one.target.against_mean


def named(one: Attribution) -> str:
    """The target in words, as in: ' Paris' against ' Rome'."""
    target = one.target
    text = "norm of the pooled vector" if target.token is None else f"'{cut(target.token.text, TARGET)}'"
    if target.against is not None:
        return f"{text} against '{cut(target.against.text, TARGET)}'"
    return f"{text} against the mean of all" if target.against_mean else text


def title(one: Attribution, prompts: int) -> str:
    """Title of a prediction: the target, the position, and the prompt if there are several."""
    where = "" if one.position is None else f" at position {one.position}"
    return f"{named(one)}{where}" + (f" of prompt {one.prompt}" if prompts > 1 else "")


def choice(one: Attribution) -> str:
    """Rank and probability of the target, and the most probable other token."""
    if one.rank is None:
        return ""
    found = f", choice {one.rank} of the model"
    if one.probability is None or one.rival is None:
        return found
    other = "next" if one.rank == 1 else "first"
    rival = f"{other} '{cut(one.rival.text, TARGET)}' {numbers.share(one.rival.probability)}"
    return f"{found} at {numbers.share(one.probability)} ({rival})"


def token(one: Attribution, position: int) -> str:
    texts = one.parts.tokens
    return f"{position} '{texts[position].text}'" if position < len(texts) else str(position)


def place_of(part: InnerPart | RemovedPart | Spread) -> str:
    """Place of a part as block, unit (unless the block's first), expert and number: 3.17, 3.u1.17, 3.e2.17."""
    unit = f".u{part.unit}" if part.unit else ""
    expert = "" if part.expert is None else f".e{part.expert}"
    return f"{part.block}{unit}{expert}.{part.index}"


def verdict(certificate: AttributionCertificate) -> Text:
    """A line on how far the parts are from the model's own output: a logit or, without a head, a pooled value."""
    by = f"{numbers.error(certificate.residual)} of the largest partial sum, tolerance {certificate.tolerance:.0e}"
    text = f"the parts miss the untouched model's own output by {by}"
    if certificate.exact:
        return line(f"exact: {text}", "green")
    return line(f"NOT EXACT: {text}; do not rely on these numbers", "bold red")


def called(one: Attribution) -> str:
    """The word for a prediction's number."""
    return _WORDS.get(one.target.kind, "logit")


def unit(one: Attribution) -> str:
    """Unit of a prediction's number and of its parts."""
    return _UNITS.get(one.target.kind, "logits")


def lost(one: Attribution) -> str:
    """The quantity that a removal takes away, in words."""
    if one.target.kind == "norm":
        return "of the length itself, without it (parts are along the direction that the vector had)"
    return f"of the {called(one)}, without it"


def without_number(found: MeasuredParts) -> list[str]:
    """Why some removals have no number, where the reason is none of those for which parts are left out."""
    known = {one.why for one in found.skipped}
    removals = [
        *(("loss", f"head {place_of(one)}", one.change, one.reasons.get("change")) for one in found.heads),
        *(("loss", f"neuron {place_of(one)}", one.change, one.reasons.get("change")) for one in found.neurons),
        *(("cut", f"token {one.position}", one.cut, one.reasons.get("cut")) for one in found.tokens),
        *(("replacement", f"token {one.position}", one.replaced, one.reasons.get("replaced")) for one in found.tokens),
    ]
    places: dict[tuple[str, str], list[str]] = {}
    for name, place, value, why in removals:
        if value is None and why is not None and why not in known:
            places.setdefault((name, why), []).append(place)
    return [f"No {name} of {', '.join(of)}: {why}." for (name, why), of in places.items()]


def computed(one: Attribution) -> list[float]:
    """UAT terms, summed by the token at which they were computed."""
    found = [0.0] * len(one.parts.tokens)
    for unit in one.parts.units:
        for t, value in enumerate(unit.tokens or ()):
            found[t] += value
    return found


def added(one: Attribution) -> list[float]:
    """Sum of each token's own part and the UAT terms computed at it."""
    return [token.value + here for token, here in zip(one.parts.tokens, computed(one), strict=True)]


def leading(sizes: Iterable[float], most: int) -> list[int]:
    """Places of the numbers with the largest absolute values, the largest first."""
    found = [abs(size) for size in sizes]
    return sorted(range(len(found)), key=lambda place: -found[place])[:most]


def leading_heads(one: Attribution, most: int) -> list[int]:
    """Places of the leading heads, by what they write or what they moved, whichever is more."""
    return leading((max(abs(head.value), abs(head.moved)) for head in one.direct.heads), most)


def by_token(one: Attribution) -> list[list[float]]:
    """Parts with a column per token: a row for the embeddings, then one per block with its UAT terms."""
    tokens = len(one.parts.tokens)
    rows = [[token.value for token in one.parts.tokens], *([0.0] * tokens for _ in one.parts.static.blocks)]
    for unit in one.parts.units:
        for token, value in enumerate(unit.tokens or ()):
            rows[unit.block + 1][token] += value
    return rows


def by_block(one: Attribution) -> list[list[float]]:
    """Four lists by block: UAT terms and biases (total), heads and UAT terms (direct)."""
    count = len(one.parts.static.blocks)
    found = [[0.0] * count, list(one.parts.static.blocks), [0.0] * count, [0.0] * count]
    for unit in one.parts.units:
        found[0][unit.block] += unit.value
    for head in one.direct.heads:
        found[2][head.block] += head.value
    for written in one.direct.units:
        found[3][written.block] += written.value
    return found
