"""Turns computed numbers into result models; every null gets its reason here."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from duat_cli.analysis.decomposition import BlockTerms, Carried, ThreeParts
from duat_cli.analysis.inspect.measured.numbers import NullNumbers, OperatorNumbers
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.errors import needed
from duat_cli.models.arrays import relative_error
from duat_cli.models.shares import PartNumbers
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.operators.coupling import CouplingNumbers, CouplingSums
from duat_cli.results.inspect import EndToEnd, EndToEndNulls, PromptBlock
from duat_cli.results.operator import Coupling, Density, NullDensity, NullOperator, Nulls, NullStats, OperatorStats
from duat_cli.results.terms import Part, Parts, Terms

NOT_ASKED = "computed with --null all"
ZERO_OPERATOR = "W' is zero"
NOT_COUNTED = "W' is zero, or no drawn pair of tokens met a nonzero block"
ZERO_STREAM = "the vector to share is zero"
ONE_TOKEN = "needs a second token"
NO_SPECTRUM = "computed with --spectrum"
NOT_CARRIED = "blocks of the re-initialised model are measured one by one; nothing is carried through all of them"
NO_ENCODER = "no encoder is read, and no features of pictures are added up to here"


def measured_block(
    numbers: OperatorNumbers,
    terms: BlockTerms,
    options: InspectOptions,
    like: Tensor,
    *,
    operator: AttentionOperator,
    error: float,
    **beside: Any,
) -> PromptBlock:
    """Result of a block whose W' was measured; its null of uniform attention is added once all blocks are through.

    like: the stream, (…, M); operator: the measured one, which may be of several prompts; error: of this prompt's W';
    beside: further fields of the result.
    """
    tokens, width = len(numbers.seen), like.shape[-1]
    factors = operator.factors  # of another width where V reads own values, or O reaches one of several streams
    widths = (
        factors.hidden_size if operator.reached is None else width,
        factors.width if operator.read is None else width,
    )
    return PromptBlock(
        prompt=0,  # the report numbers the prompts
        operator=_operator_stats(numbers, widths, like.element_size(), operator.products, error, options.spectrum),
        density=Density(structural=numbers.structural, **_interval(numbers), **_references(tokens, width, options)),
        coupling=coupling(numbers.coupling, tokens),
        coupling_weighted=coupling(numbers.weighted, tokens),
        null=nulls("computed for all blocks together", NOT_ASKED),
        terms=_terms(terms),
        certificate_error=terms.error,
        **beside,
    )


def unmeasured_block(
    reason: str, terms: BlockTerms, options: InspectOptions, like: Tensor, **beside: Any
) -> PromptBlock:
    """Result of a block without W'. reason: why; like: the stream, (1, N, M); beside: as for `measured_block`."""
    tokens, width = like.shape[1:]
    side = tokens * width
    return PromptBlock(
        prompt=0,  # the report numbers the prompts
        operator=OperatorStats.absent(reason, rows=side, columns=side, dense_bytes=side * side * like.element_size()),
        density=Density.absent(reason, **_references(tokens, width, options)),
        coupling=Coupling.absent(reason),
        coupling_weighted=Coupling.absent(reason),
        null=nulls(reason, reason),
        terms=_terms(terms),
        certificate_error=terms.error,
        **beside,
    )


def _operator_stats(
    numbers: OperatorNumbers, widths: tuple[int, int], element_size: int, products: int, error: float, spectrum: bool
) -> OperatorStats:
    rows, columns = (len(numbers.seen) * width for width in widths)
    norm, largest = numbers.frobenius_norm, numbers.spectral_norm
    return OperatorStats.explained(
        ZERO_OPERATOR,
        {**numbers.reasons, **({} if spectrum else dict.fromkeys(("spectral_norm", "stable_rank"), NO_SPECTRUM))},
        rows=rows,
        columns=columns,
        dense_bytes=rows * columns * element_size,
        frobenius_norm=norm,
        spectral_norm=largest,
        stable_rank=None if largest is None else (norm / largest) ** 2,
        effective_heads=numbers.effective_heads,
        block_correlation=numbers.block_correlation,
        kronecker_products=products,
        certificate_error=error,
    )


def _interval(numbers: NullNumbers) -> dict[str, Any]:
    """The fields of a numerical density, with the reasons if they are null."""
    names, estimate = ("numerical", "numerical_low", "numerical_high"), numbers.numerical
    if estimate is None:
        why = numbers.reasons.get("numerical", NOT_COUNTED)
        return {**dict.fromkeys(names), "reasons": dict.fromkeys(names, why)}
    return dict(zip(names, (estimate.share, estimate.low, estimate.high), strict=True))


def _references(tokens: int, width: int, options: InspectOptions) -> dict[str, Any]:
    """Densities of a linear layer (1/N, and the papers' 1/M) and of a 1-D convolution (about k/N), for comparison."""
    return {
        "threshold": options.threshold,
        "linear_reference": 1 / tokens,
        "linear_reference_paper": 1 / width,
        "conv1d_reference": _conv_pairs(tokens, options.conv_width) / tokens**2,
        "conv_width": options.conv_width,
    }


@functools.lru_cache(maxsize=16)
def _conv_pairs(tokens: int, kernel: int) -> int:
    """How many token pairs a zero-padded convolution of width `kernel` connects."""
    left = (kernel - 1) // 2
    right = kernel - 1 - left
    return sum(min(tokens - 1, i + right) - max(0, i - left) + 1 for i in range(tokens))


def coupling(numbers: CouplingNumbers, tokens: int) -> Coupling:
    alone = numbers.entropy_bits is not None and tokens == 1
    return Coupling.explained(ZERO_OPERATOR, {"first_token_share": ONE_TOKEN} if alone else {}, **vars(numbers))


def null_stats(numbers: NullNumbers, tokens: int) -> NullStats:
    heads, correlation = numbers.effective_heads, numbers.block_correlation
    return NullStats(
        operator=NullOperator.explained(
            ZERO_OPERATOR, numbers.reasons, effective_heads=heads, block_correlation=correlation
        ),
        density=NullDensity(structural=numbers.structural, **_interval(numbers)),
        coupling=coupling(numbers.coupling, tokens),
        coupling_weighted=coupling(numbers.weighted, tokens),
    )


def nulls(uniform: NullStats | str, reinitialised: NullStats | str) -> Nulls:
    """The two nulls of a block. uniform, reinitialised: the null, or the reason why there is none."""
    both = {"uniform": uniform, "reinitialised": reinitialised}
    why = {name: null for name, null in both.items() if isinstance(null, str)}
    return Nulls.explained("", why, **{name: None if name in why else null for name, null in both.items()})


def _terms(terms: BlockTerms) -> Terms:
    output = _parts(terms.output)
    pre = _parts(terms.pre_activation) if terms.pre_activation is not None else None
    reasons = {} if terms.pre_activation_reason is None else {"pre_activation": terms.pre_activation_reason}
    if output.encoder is None:
        reasons["encoder"] = NO_ENCODER
    if terms.output.largest_token is None:
        reasons["largest_token"] = ZERO_STREAM
    return Terms(
        linear=output.linear,
        static=output.static,
        dynamic=output.dynamic,
        encoder=output.encoder,
        own=_part(needed(terms.own)),
        largest_token=terms.output.largest_token,
        pre_activation=pre,
        reasons=reasons,
    )


def _parts(three: ThreeParts) -> Parts:
    encoder = None if three.encoder is None else _part(three.encoder)
    return Parts(linear=_part(three.linear), static=_part(three.static), dynamic=_part(three.dynamic), encoder=encoder)


def _part(numbers: PartNumbers) -> Part:
    return Part.explained(ZERO_STREAM, **vars(numbers))


def end_to_end(carried: Carried) -> EndToEnd:
    """How source tokens reach the last block's output through the whole network, dynamic parameters frozen: of one
    prompt the coupling numbers of c_ij = ‖(T_L…T_1)(e_j ⊗ x_0[j])_i‖."""
    sources, reasons = needed(carried.sources), {"reinitialised": NOT_CARRIED}
    uniform = _by_source(needed(carried.uniform))
    return EndToEnd(
        coupling=_by_source(sources),
        null=EndToEndNulls(uniform=uniform, reinitialised=None, reasons=reasons),
        certificate_error=relative_error(sources.sum(dim=0), carried.linear),
    )


def _by_source(sources: Tensor) -> Coupling:
    """Coupling numbers from the images of every source token, (N, N, M)."""
    squares = sources.double().square().sum(dim=-1).T  # (i, j)
    sums = CouplingSums(kinds=1)
    sums.add(squares[None], 0)
    return coupling(sums.numbers(0), len(squares))
