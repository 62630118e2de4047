"""`duat inspect` as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from duat_cli.report.tables import columns, facts, heads, nulls, numbers
from duat_cli.report.tables.grid import BLOCK, PROMPT, Column, Labels, missing, spaced, titled, titled_named, unshown
from duat_cli.report.tables.nulls import null_tables
from duat_cli.report.tables.page import BLANK, Page, heading, note
from duat_cli.results.base import Result
from duat_cli.results.inspect import Block, InspectReport
from duat_cli.results.operator import OperatorStats
from duat_cli.results.prompts import all_prompts, set_of

_TERM = Labels(("term",), lambda row: f"{row.name} ({row.kind})", False)
TERM_COLUMNS = [
    Column(("share", "%"), "share", numbers.percent),
    Column(("norm", "/ |x|"), "norm", numbers.plain, ("norm", "of the output's")),
    Column(("typical", "token", "%"), "token_median", numbers.percent, ("share at a typical token", "%")),
]

END_COLUMNS = [
    Column(("off-diag.", "%"), "coupling.off_diagonal_share", numbers.percent, ("off-diagonal", "%")),
    Column(("entropy", "bits"), "coupling.entropy_bits", numbers.plain),
    Column(("context", "tokens"), "coupling.effective_context", numbers.plain),
    Column(("distance", "tokens"), "coupling.mean_distance", numbers.plain, ("mean distance", "tokens")),
    Column(("first", "token", "%"), "coupling.first_token_share", numbers.percent),
    Column(("error", "relative"), "certificate_error", numbers.error, ("certificate error", "relative")),
]

ROUTING_COLUMNS = [
    Column(("stable", "rank", "dims"), "routing.stable_rank", numbers.plain, ("stable rank of W_QK", "dimensions")),
    Column(("symmetric", "0-1"), "routing.symmetric_share", numbers.plain, ("symmetric share", "0-1")),
    Column(("by x.x", "%"), "routing.r2_plain", numbers.percent),
    Column(("centred", "%"), "routing.r2_centred", numbers.percent, ("by the covariance", "%")),
    Column(("by W_QK", "%"), "routing.r2_bilinear", numbers.percent),
    Column(("H rebuilt", "error"), "routing.rebuilt_error", numbers.error, ("H rebuilt, error", "relative")),
]

_CROSS = [
    Column(("eff.", "heads"), "cross.stats.effective_heads", numbers.plain),
    Column(("null", "uniform"), "cross.uniform.effective_heads", numbers.plain),
    Column(("corr.", "0-1"), "cross.stats.block_correlation", numbers.plain),
    Column(("null", "uniform"), "cross.uniform.block_correlation", numbers.plain),
    Column(("context", "tokens"), "cross.stats.effective_context", numbers.plain),
    Column(("null", "uniform"), "cross.uniform.effective_context", numbers.plain),
    Column(("Frob.", "norm"), "cross.frobenius_norm", numbers.plain),
    Column(("error", "rel."), "cross.certificate_error", numbers.error),
]
_CROSSED = (
    "Cross-attention: W'_c, from the encoder's tokens to the decoder's",
    "context: how many encoder tokens reach a decoder token. null: H uniform over the encoder's tokens, same weights. "
    "It is rectangular, so off-diagonal share and distances are not defined.",
)
_STREAMS = (
    "Streams: attention reads and reaches those of a token with weights of this input. W' is taken with weights of "
    "length one, which leaves its norms and singular values as they are."
)
_BESIDE = (
    "The token mixer beside attention: W'_c, of its own values, a UAT term",
    "eff. heads: at most its channels, each of which has a gate of its own. context: how many tokens reach a token. "
    "null: H uniform over the tokens that a token may read, same weights and gates.",
)

TABLES = {
    "end_to_end.": END_COLUMNS,
    "blocks[].": [
        *columns.COLUMNS,
        *nulls.NAMED,
        *columns.for_pre_activation(),
        *columns.for_tokens(),
        *_CROSS,
        *ROUTING_COLUMNS,
    ],
    "blocks[].heads.each[].": heads.COLUMNS,
    "terms[].": TERM_COLUMNS,
}


def render_inspect(report: InspectReport, page: Page) -> str:
    """The report as text: what was loaded, a row per block, the certificate, what is notable, what was skipped."""
    tables, absent = _statistics(report.blocks, BLOCK, report, page)
    return page.render(
        *facts.loaded(report.model, all_prompts(report), report.environment),
        *tables,
        BLANK,
        *_legend(report),
        *absent,
        *_by_token(report, page),
        *null_tables(report.blocks, columns.heads_of(report), page),
        *_crossing(report, page),
        *_term_tables(report, page),
        *_routing(report, page),
        *heads.head_tables(report, page),
        *_end_to_end(report, page),
        *(part for block in report.blocks for part in _prompts_of(block, report, page)),
        BLANK,
        facts.verdict(report.certificate),
        *facts.section("notable", report.summary.notable),
        *facts.remarks(report.skipped, report.warnings),
    )


def _statistics(
    rows: Sequence[Result], labels: Labels, report: InspectReport, page: Page
) -> tuple[list[RenderableType], list[RenderableType]]:
    """Tables with the statistics of W' in each row; and a section on why cells show no number."""
    groups = columns.for_blocks(rows, labels, report, page)
    shown = [column for group in groups for column in group]
    tables = [part for group in groups for part in spaced(rows, labels, group, page)]
    return [*tables, *unshown(rows, columns.every(report), shown)], facts.without_value(rows, labels, shown)


def _legend(report: InspectReport) -> list[RenderableType]:
    """Notes on what the headers mean, and the references for density."""
    if not report.blocks:
        return []
    density = report.blocks[0].density
    apart = any(o.rows != o.columns for o in _operators(report))
    own = ", of a mixer from its own values, of layers that share values from these," if apart else ""
    softmax = report.certificate.capture != "frozen kernel"
    alike = "Softmax rows are positive, so heads look" if softmax else "Heads may look"
    encoder, path, states = "", "input path", ""
    if columns.has_encoder(report):
        encoder, path = "enc., ", "the stack's own tokens"
        states = "the encoder's states through cross-attention, or features of pictures that are added between blocks, "
    texts = [
        f"eff. heads to context: of W', the attention operator from a block's input{own} to what attention adds; "
        f"dense it would be {_dense(report)}. {alike} alike untrained as well: compare the null below.",
        f"dens.: entries of W' above {density.threshold:g} rms; compare a linear layer with "
        f"{numbers.percent(density.linear_reference)} %, a 1-D convolution (width {density.conv_width}) "
        f"with {numbers.percent(density.conv1d_reference)} %.{_half(report.blocks)}",
        f"linear, static, {encoder}dyn.: of all up to here, shares of the block's output: {path}, biases (carried by "
        f"T, which the input sets), {states}UAT terms; sum 100. own: this block's own UAT term.",
    ]
    if report.model.streams > 1:
        texts.insert(1, _STREAMS)
    return [note(text) for text in texts]


def _operators(report: InspectReport) -> list[OperatorStats]:
    return [block.operator for block in report.blocks]


def _dense(report: InspectReport) -> str:
    """Size of a dense W': its sides, if all blocks and prompts have the same, and bytes."""
    ran = set_of(all_prompts(report))
    sizes = sorted({(o.dense_bytes, o.rows, o.columns) for o in _operators(report)})
    said = " to ".join(numbers.size(size) for size in sorted({sizes[0][0], sizes[-1][0]}))
    if ran.shortest != ran.longest:
        return f"{said}, mean over prompts"
    _, rows, columns = sizes[0]
    return said if len(sizes) > 1 else f"{numbers.count(rows)} x {numbers.count(columns)}, {said}"


def _half(blocks: list[Block]) -> str:
    """A sentence on the share of W' that a causal mask leaves, if no block fills more."""
    known = [(block.density.structural, block.density.linear_reference) for block in blocks]
    if not any(filled is not None for filled, _ in known):
        return ""
    # the reference is 1/N, so its mean with 1 is (N+1)/2N; both are means over prompts
    if any(filled is not None and filled > (1 + one) / 2 + 1e-9 for filled, one in known):
        return ""
    return " Where no token reads a later one, as in a causal model, at most (N+1)/2N of W' is filled."


def _by_token(report: InspectReport, page: Page) -> list[RenderableType]:
    """Table on the shares at a typical token, where those in the blocks' table are of one token."""
    if not columns.of_one_token(report):
        return []
    title = "Shares of the block's output at a typical token: the median over tokens of those in each token's vector"
    legend = (
        "largest token: share of the squared norm of the block's output that the token with the largest norm has. "
        "Above half, the shares in the blocks' table are mostly that token's. Medians need not sum to 100."
    )
    return facts.whole(title, report.blocks, BLOCK, columns.for_tokens(report), page, legend)


def _crossing(report: InspectReport, page: Page) -> list[RenderableType]:
    """Table on the operator of a decoder's cross-attention, or of a mixer beside attention."""
    blocks = [block for block in report.blocks if block.cross is not None]
    if not blocks:
        return []
    title, says = _CROSSED if columns.has_encoder(report) else _BESIDE
    return facts.whole(title, blocks, BLOCK, _CROSS, page, says)


def _term_tables(report: InspectReport, page: Page) -> list[RenderableType]:
    """Tables on every term of the sum at the last block's output, and on the parts of each FFN's input."""
    if report.terms is None:
        return []
    parts = columns.for_pre_activation(report)
    title = "Parts of the input of each FFN's activation, of all up to here; dynamic: what UAT terms add to its bias"
    return [
        *titled("Terms of the last block's output", report.terms, _TERM, TERM_COLUMNS, page),
        *facts.whole(title, report.blocks, BLOCK, parts, page),
    ]


def _routing(report: InspectReport, page: Page) -> list[RenderableType]:
    """Table on the origin of the attention matrices; single heads and distances are in the JSON."""
    if all(block.routing is None for block in report.blocks):
        return []
    title = "Where H comes from: W_QK, means over heads, and the share of the scores' variance explained"
    legend = (
        "symmetric: 1 as x.x is, 0.71 a random matrix. by x.x, centred (the covariance of tokens), by W_QK: R^2 of "
        "the scores; what W_QK leaves is positions and biases. Heads and distances are in the JSON."
    )
    return facts.whole(title, report.blocks, BLOCK, ROUTING_COLUMNS, page, legend)


def _end_to_end(report: InspectReport, page: Page) -> list[RenderableType]:
    """Table on the coupling through all blocks together; that of each block alone is in the block's row."""
    found = report.end_to_end
    if found is None:
        return []
    rows = [("all", found)]
    if found.null.uniform is not None:
        rows.append(("null", found.model_copy(update={"coupling": found.null.uniform, "certificate_error": None})))
    title = "End to end: tokens of x_0 into the last block's output, by |(T_L...T_1)(e_j (x) x_0[j])_i|"
    legend = (
        "The linear path, residual path included; every block's own W' is in its row above. null: every H uniform "
        "over the tokens that its rows may see, weights and norm scales the same."
    )
    return [
        *titled_named(title, rows, END_COLUMNS, page, legend, head="blocks"),
        *facts.absences(missing([found], END_COLUMNS, [0]), "row"),
    ]


def _prompts_of(block: Block, report: InspectReport, page: Page) -> list[RenderableType]:
    """The table of a block with a row per prompt, with --per-prompt."""
    if not block.prompts:
        return []
    tables, absent = _statistics(block.prompts, PROMPT, report, page)
    return [BLANK, heading(f"Block {block.index} by prompt"), *tables, *absent]
