"""The origin of H: scores rebuilt from queries and keys, and the bilinear form W_QK (Eq. 35 of Wang & Li)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from duat_cli.analysis.aggregate import mean_of_all
from duat_cli.errors import UnsupportedModelError, needed
from duat_cli.models.instrument.attention import AttentionCall, ScoreInputs
from duat_cli.models.instrument.functions.scores import ScoreLayer, score_layers
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.operators.bilinear import BilinearNumbers, bilinear_numbers, explained, thin
from duat_cli.results.base import finite
from duat_cli.results.operator import HeadRouting, Routing, RoutingAtDistance

LEADING = 8  # singular values per head in a report
REBUILT = 1e-5  # H counts as softmax(scale s + mask) up to this error, or 4 eps of the queries' dtype if larger
NUMBERS = ("stable_rank", "symmetric_share")
SHARES = ("r2_plain", "r2_centred", "r2_bilinear")
FEW_PAIRS = "scores or the regressor do not vary over the attended pairs"


def routing(run: BlockRun) -> Routing:
    """Routing of one block under one prompt; what is not known is null with the reason."""
    reasons: dict[str, str] = {}
    if len(run.attention) != 1:
        why = f"it calls attention {len(run.attention)} times; W_QK is defined for one call"
        return Routing.absent(why)
    call = run.attention[0]
    if call.scored is None:
        return Routing.absent("its softmax is intercepted, behind the scores: queries and keys are not seen")
    if call.windows is not None:
        return Routing.absent("its scores are of windows of the tokens; W_QK is read where all of them are in one")
    error, why_not = _rebuilt(call)
    if why_not is not None:
        reasons["rebuilt_error"] = why_not
    try:
        layers = score_layers(run)
    except UnsupportedModelError as fault:
        unknown = dict.fromkeys((*NUMBERS, *SHARES, "heads", "distances"))
        return Routing.explained(str(fault), reasons, rebuilt_error=error, **unknown)
    query, key = layers
    forms = query.at(0), key.at(0)
    keys = [thin(one) for one in forms[1]]
    groups = len(forms[0]) // len(keys)

    def numbers(distance: int) -> list[BilinearNumbers]:
        """Numbers by head of W_Q D_i D_j^T W_K^T, for tokens i = distance and j = 0."""
        return [bilinear_numbers(thin(one), keys[head // groups]) for head, one in enumerate(query.at(distance))]

    near = numbers(0)
    heads = _heads(near, _shares(call, call.scored, layers, forms))
    means = {name: mean_of_all([getattr(head, name) for head in heads]) for name in (*NUMBERS, *SHARES)}
    reasons |= {name: why for head in reversed(heads) for name, why in head.reasons.items()}
    distances = _distances(layers, near, numbers)
    return Routing.explained("", reasons, rebuilt_error=error, **means, heads=heads, distances=distances)


# -- H from scores -------------------------------------------------------------------------------------------


def _rebuilt(call: AttentionCall) -> tuple[float | None, str | None]:
    """How far softmax of the rebuilt scores is from the captured H, or why it is not that softmax."""
    given = needed(call.scored)
    rest = sorted(
        name
        for name, value in given.options.items()
        if isinstance(value, Tensor) and value.is_floating_point() and name != "s_aux"
    )
    squares, size = 0.0, 0.0
    for rows, captured in call.rows.chunks():
        again = _softmax(given, rows)
        squares += float((again - captured.double()).square().sum())
        size += float(captured.double().square().sum())
    error = math.sqrt(squares / size) if size else math.inf
    bound = max(REBUILT, 4 * torch.finfo(given.query.dtype).eps)
    if error <= bound:
        return error, None
    more = f"; its attention is also given {', '.join(rest)}" if rest else ""
    return None, f"softmax(scale q k + mask), with softcap and sinks, is {error:.1e} from the captured H{more}"


def _softmax(given: ScoreInputs, rows: slice) -> Tensor:
    """H[:, rows, :] computed from queries and keys, float64."""
    scores = scores_of(given, rows)
    softcap = given.options.get("softcap")
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if given.mask is not None:
        mask = given.mask[0] if given.mask.shape[-2] == 1 else given.mask[0, :, rows]
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    sinks = given.options.get("s_aux")
    if isinstance(sinks, Tensor):
        column = sinks.double().reshape(-1, 1, 1).expand(*scores.shape[:2], 1)
        return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    return scores.softmax(dim=-1)


def scores_of(given: ScoreInputs, rows: slice = slice(None), heads: slice = slice(None)) -> Tensor:
    """The scores scale q_i k_j without softcap and mask, (heads, rows, N) float64."""
    groups = given.query.shape[1] // given.key.shape[1]
    query = given.query[0, heads, rows].double()
    key = given.key[0].repeat_interleave(groups, 0)[heads].double()
    scaling = given.options.get("scaling")
    return (query.shape[-1] ** -0.5 if scaling is None else scaling) * (query @ key.transpose(1, 2))


# -- W_QK ----------------------------------------------------------------------------------------------------


def _heads(near: Sequence[BilinearNumbers], shares: Mapping[str, Tensor]) -> list[HeadRouting]:
    """Results by head. near: numbers of each head at distance 0; shares: (heads,) each."""
    found = []
    for head, numbers in enumerate(near):
        values = {name: finite(float(share[head])) for name, share in shares.items()}
        found.append(
            HeadRouting.explained(
                FEW_PAIRS,
                _absent(numbers),
                index=head,
                singular_values=[float(value) for value in numbers.singular_values[:LEADING]],
                frobenius_norm=numbers.frobenius_norm,
                spectral_norm=float(numbers.singular_values[0]),
                stable_rank=numbers.stable_rank,
                symmetric_share=numbers.symmetric_share,
                **values,
            )
        )
    return found


def _absent(numbers: BilinearNumbers) -> dict[str, str]:
    zero = numbers.frobenius_norm == 0.0
    why = "W_QK is zero" if zero else "queries and keys are made of vectors of other widths"
    return {name: why for name in NUMBERS if getattr(numbers, name) is None}


def _shares(
    call: AttentionCall, given: ScoreInputs, layers: tuple[ScoreLayer, ScoreLayer], forms: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """R² of the scores, (heads,) for each of `SHARES`: on x_i·x_j, plain and centred, and on x_i W_QK x_j, with x the
    input of the query layer.

    forms: W D^T of both layers at token 0, (heads, width, d) and (kv_heads, width, d).
    """
    x, y = (layer.read.double() for layer in layers)
    tokens, groups = len(x), len(forms[0]) // len(forms[1])
    pairs = call.allowed
    if pairs is None:
        pairs = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device)
    centred = x - x.mean(dim=0)
    plain, covariance = x @ x.T, centred @ centred.T
    first, second = x @ forms[0].double(), y @ forms[1].double()
    found: list[tuple[Tensor, ...]] = []
    for head in range(len(first)):  # one by one, since each takes N x N numbers
        scores = scores_of(given, heads=slice(head, head + 1))
        form = first[head] @ second[head // groups].T
        found.append(tuple(explained(scores, by, pairs)[0] for by in (plain, covariance, form)))
    return {name: torch.stack(shares) for name, shares in zip(SHARES, zip(*found, strict=True), strict=True)}


def _distances(
    layers: tuple[ScoreLayer, ScoreLayer], near: list[BilinearNumbers], numbers: Callable[[int], list[BilinearNumbers]]
) -> list[RoutingAtDistance]:
    """Means over heads by distance; one row where positions do not enter queries and keys.

    near: the numbers at distance 0; numbers: gives them at another distance.
    """
    tokens = layers[0].turned.shape[1]
    still = all(torch.equal(layer.turned, layer.turned[:, :1].expand_as(layer.turned)) for layer in layers)
    wanted = [0] if still else [0, *(2**k for k in range(tokens.bit_length()) if 2**k < tokens)]
    found = []
    for distance in wanted:
        each = numbers(distance) if distance else near
        means = {name: mean_of_all([getattr(one, name) for one in each]) for name in NUMBERS}
        reasons = {name: why for one in reversed(each) for name, why in _absent(one).items()}
        found.append(RoutingAtDistance.explained("", reasons, distance=distance, **means))
    return found
