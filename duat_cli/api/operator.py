"""W' of one block under one prompt, as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from duat_cli.analysis.matrix.case import capture
from duat_cli.analysis.plan.task import Task
from duat_cli.analysis.session import Session
from duat_cli.api.settings import whole_numbers
from duat_cli.errors import CheckpointError, InputError
from duat_cli.models.value_path.operator import whole_rows

if TYPE_CHECKING:
    from duat_cli.analysis.matrix.case import Case
    from duat_cli.analysis.progress import Progress
    from duat_cli.api.asking import Asked
    from duat_cli.models.value_path.operator import AttentionOperator


@dataclass(frozen=True, repr=False)
class Operator:
    """The factors of W' (Eq. 5-10), which maps a block's input to the output of its attention, without constants:

        W' = Σ_h (t[:, None] H[h] s[h]) ⊗ (V[h // (heads // kv_heads)] O[h])ᵀ,    contribution = W' vec(x)

    N tokens, M hidden size, d head width; vec is row-major, with a row for each token. float32, or float64 if run so.
    """

    H: Tensor
    """(heads, N, N): attention weights, times the gate of head h at token i, if any; row i is what token i reads."""
    V: Tensor
    """(kv_heads, M, d): value maps, the gain of the norm in front included."""
    O: Tensor  # noqa: E741
    """(heads, d, M): output maps, the gain of a norm behind included."""
    s: Tensor
    """(heads, N): scale of the norm in front, by source token."""
    t: Tensor
    """(N,): scale of a norm behind, by target token; ones where there is none."""
    x: Tensor
    """(N, M): the block's input."""
    contribution: Tensor
    """(N, M): what the model's own attention adds, without its constants."""
    input_ids: Tensor
    """(tokens,) int64."""
    tokens: list[str]
    """Text of each token."""
    certificate_error: float
    """Relative error of the certificate, the largest over the blocks up to this one."""

    def __repr__(self) -> str:
        """One line with the shapes."""
        shapes = [f"{name} {tuple(value.shape)}" for name, value in vars(self).items() if isinstance(value, Tensor)]
        return f"<Operator of {len(self.tokens)} tokens: {', '.join(shapes)}; error {self.certificate_error:.1e}>"


def operator_of(asked: Asked, fingerprint: str, prompt: int, block: int, progress: Progress) -> Operator:
    """W' of one block under one prompt. fingerprint: that of the report, which the model must have."""
    whole_numbers(prompt=prompt, block=block)
    opened = asked.open(Task("verify"), progress)  # the factors alone are made, no matrix entry by entry
    if not 0 <= prompt < len(opened.prompts):
        raise InputError(f"prompt {prompt}: no such prompt; there are prompts 0 to {len(opened.prompts) - 1}")
    chosen = opened.prompts[prompt]
    session = Session(opened.loaded, progress, cache=False)
    depth = len(session.structure.calls)
    if not 0 <= block < depth:
        raise InputError(f"block {block}: no such block; the model has blocks 0 to {depth - 1}")
    if session.fingerprint != fingerprint:
        raise CheckpointError(f"{opened.loaded.name}: its weights changed since the report was made; make it anew")
    taken: list[Tensor] = []

    def take(operator: AttentionOperator, case: Case) -> None:
        rows = whole_rows(operator.rows)
        scale = operator.token_scale.expand(case.tokens)
        taken.extend(tensor.to(case.X.dtype).clone() for tensor in (rows, operator.source_scale, scale))

    case = capture(session, chosen, block, progress, take)
    H, s, t = taken
    ids = chosen.input_ids[0]
    return Operator(
        H=H,
        V=case.operator.factors.value.clone(),  # it may be the model's own memory
        O=case.operator.factors.output.clone(),
        s=s,
        t=t,
        x=case.X,
        contribution=case.contribution,
        input_ids=ids,
        tokens=[opened.text(token) for token in ids.tolist()],
        certificate_error=case.error,
    )
