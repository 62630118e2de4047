"""How source tokens reach the last block's output through the whole network, dynamic parameters frozen."""

from __future__ import annotations

from torch import Tensor

from duat_cli.analysis.decomposition import Carried
from duat_cli.analysis.inspect.assemble import coupling
from duat_cli.models.arrays import relative_error
from duat_cli.operators.coupling import CouplingSums
from duat_cli.results.inspect import EndToEnd, EndToEndNulls
from duat_cli.results.operator import Coupling

NOT_RUN = "blocks of the re-initialised model are measured one by one; nothing is carried through all of them"


def end_to_end(carried: Carried) -> EndToEnd:
    """Of one prompt, behind its last block: the coupling numbers of c_ij = ‖(T_L…T_1)(e_j ⊗ x_0[j])_i‖."""
    assert carried.sources is not None
    assert carried.uniform is not None
    return EndToEnd(
        coupling=_numbers(carried.sources),
        null=EndToEndNulls(uniform=_numbers(carried.uniform), reinitialised=None, reasons={"reinitialised": NOT_RUN}),
        certificate_error=relative_error(carried.sources.sum(dim=0), carried.linear),
    )


def _numbers(sources: Tensor) -> Coupling:
    """Of the images of every source token, (N, N, M)."""
    squares = sources.double().square().sum(dim=-1).T  # (i, j)
    sums = CouplingSums(kinds=1)
    sums.add(squares[None], 0)
    return coupling(sums.numbers(0), len(squares))
