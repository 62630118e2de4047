"""The parameters of the sum: those that the checkpoint fixes, and those that the input sets (Eq. 4 of Wang & Li)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from duat_cli.analysis.compare.alignment import Aligned
from duat_cli.analysis.compare.blocks import relative_change
from duat_cli.analysis.compare.states import BlockState, OperatorState
from duat_cli.operators.input_change import Routed
from duat_cli.results.compare.report import BlockComparison, ParameterChange

FIXED = [
    ("A_h", "W_V,h W_O,h of every head: what attention carries"),
    ("W_Q,h, W_K,h", "what attention weights are made with"),
    ("W_{j,2}, W_{j,3}", "the FFN's layers in front of its nonlinearity and behind it"),
    ("b_{j,2}, b_{j,3}", "the biases of the layers themselves"),
]
DYNAMIC = {
    "H_h": "attention weights of every head",
    "S": "scales of the norms in front of attention and behind it, and output gates",
    "norm scales": "scales of all norms of a block: W_{j,2} acts through the one in front of it",
    "router weights": "of all experts, zero for those not chosen",
    "output gates": "what attention's output is multiplied by",
    "W'": "attention as one matrix, sum_h (H_h S) (x) A_h^T",
    "e": "the encoder's states, which a decoder's blocks read",
    "H_c,h": "weights of every head of cross-attention",
    "S_c": "scales of the norms behind cross-attention",
    "W'_c": "cross-attention as one matrix, sum_h (H_c,h S_c) (x) A_c,h^T",
    "b'_{j,2}": "what the FFN's nonlinearity reads beside the linear path from x_0",
    "f_j": "the FFN's output, without the bias of its last layer",
    "b'_{j,3}": "the constants in the block's output: all biases so far, carried by what the input sets",
}


@dataclass
class Moves:
    """The largest relative change of every dynamic parameter so far. rounding: of a scale that is fitted, the largest
    change that counts as none."""

    rounding: float
    largest: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        before: BlockState,
        after: BlockState,
        aligned: Aligned,
        block: BlockComparison,
        sources: Aligned | str | None,
    ) -> None:
        """Takes one block under one pair of prompts. sources: as in `compare_block`."""
        found = {
            "W'": block.operator.relative,
            "b'_{j,2}": block.bias,
            "f_j": block.ffn,
            "b'_{j,3}": _change(before.carried_bias, after.carried_bias, aligned),
            "norm scales": _change(before.scales, after.scales, aligned),
            "router weights": _change(before.routers, after.routers, aligned),
            "output gates": _change(before.gates, after.gates, aligned),
        }
        if isinstance(before.operator, OperatorState) and isinstance(after.operator, OperatorState):
            both = before.operator.routed, after.operator.routed
            found["H_h"] = _attention(*both, aligned, aligned)
            found["S"] = change_of_scales(*both, aligned, aligned)
        if (
            isinstance(before.cross, OperatorState)
            and isinstance(after.cross, OperatorState)
            and isinstance(sources, Aligned)
        ):
            both = before.cross.routed, after.cross.routed
            found["H_c,h"] = _attention(*both, aligned, sources)
            scales = change_of_scales(*both, aligned, sources) or 0.0
            found["S_c"] = scales if scales > self.rounding else 0.0
            found["W'_c"] = None if block.cross is None else block.cross.relative
        self.take(found)

    def take(self, found: Mapping[str, float | None]) -> None:
        """Takes changes of parameters, by name; None where a parameter is not there."""
        for name, change in found.items():
            if change is not None:
                self.largest[name] = max(self.largest.get(name, 0.0), change)

    def parameters(self) -> list[ParameterChange]:
        """All parameters, fixed ones first; dynamic ones that the model lacks are left out."""
        fixed = [
            ParameterChange(name=name, what=what, set_by="checkpoint", moved=False, change=0.0) for name, what in FIXED
        ]
        moved = [
            ParameterChange(
                name=name, what=what, set_by="input", moved=self.largest[name] > 0, change=self.largest[name]
            )
            for name, what in DYNAMIC.items()
            if name in self.largest
        ]
        return [*fixed, *moved]


def _change(before: Tensor | None, after: Tensor | None, aligned: Aligned) -> float | None:
    if before is None or after is None or before.shape[1:] != after.shape[1:]:
        return None
    return relative_change(before, after, aligned)


def _attention(before: Routed, after: Routed, rows: Aligned, columns: Aligned) -> float | None:
    """|H_b - H_a| / |H_a| of all heads, on aligned rows and columns; summed head by head, as H may be large."""
    device = before.attention.device
    a, b, read_a, read_b = (places.to(device) for places in (rows.a, rows.b, columns.a, columns.b))
    size = moved = 0.0
    for one, two in zip(before.attention, after.attention, strict=True):
        first, second = one[a[:, None], read_a].double(), two[b[:, None], read_b].double()
        size += float(first.square().sum())
        moved += float((second - first).square().sum())
    return (moved / size) ** 0.5 if size else None


def _by_token(routed: Routed) -> Tensor:
    """The token scale t, (N, 1), or (N, heads) with a gate."""
    return routed.token.reshape(-1, routed.tokens).T


def change_of_scales(before: Routed, after: Routed, rows: Aligned, columns: Aligned) -> float | None:
    """Larger of the relative changes of the source scale s and of the token scale t."""
    found = [relative_change(before.source.T, after.source.T, columns)]
    if before.token.numel() > 1:
        found.append(relative_change(_by_token(before), _by_token(after), rows))
    return max((change for change in found if change is not None), default=None)
