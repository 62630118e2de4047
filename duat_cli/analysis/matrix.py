"""`duat matrix`: the paper's explicit matrices for one block of a real model, each step checked (Eq. 5-10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor

from duat_cli import __version__
from duat_cli.analysis.matrix_case import Case, Dense, capture, dense_matrices
from duat_cli.analysis.matrix_checks import checks
from duat_cli.analysis.matrix_forms import SHOWN_TOKENS, corner, coupling, forms
from duat_cli.analysis.session import Progress, Session, prompt_facts
from duat_cli.errors import InputError
from duat_cli.loading.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.operators import paper
from duat_cli.results.matrix import MatrixReport
from duat_cli.text import clean


@dataclass(frozen=True)
class Matrices:
    """The report, and what `-o` writes."""

    report: MatrixReport
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def matrix(loaded: LoadedModel, prompt: Prompt, layer: int, token_texts: Sequence[str], progress: Progress) -> Matrices:
    """The explicit matrices of block `layer` under `prompt`; token_texts: what each token says."""
    session = Session(loaded, progress, cache=False)
    count = len(session.structure.calls)
    if not 0 <= layer < count:
        raise InputError(f"--layer {layer}: no such block; the model has blocks 0 to {count - 1}")
    case = capture(session, prompt, layer, progress)
    progress(0, 0, "building and checking the matrices")
    dense = dense_matrices(case)
    report = _report(session, prompt, layer, token_texts, case, dense)
    return Matrices(report, _tensors(case, dense), _metadata(report))


def _report(
    session: Session, prompt: Prompt, layer: int, texts: Sequence[str], case: Case, dense: Dense | None
) -> MatrixReport:
    factors = case.operator.factors
    return MatrixReport(
        duat_version=__version__,
        environment=session.environment(),
        model=session.model_facts(),
        prompt=prompt_facts([prompt])[0],
        certificate=session.certificate(case.error),
        layer=layer,
        name=session.structure.block(layer).parts.name,
        tokens=case.tokens,
        hidden_size=case.width,
        heads=factors.heads,
        kv_heads=factors.value.shape[0],
        head_width=factors.value.shape[2],
        factors=cast(Literal["read", "probed"], case.origin),
        dense=dense is not None,
        matrices=forms(case, dense),
        corner=corner(case).tolist(),
        token_texts=[clean(text) for text in texts[:SHOWN_TOKENS]] if len(texts) == case.tokens else [],
        coupling=coupling(case).tolist(),
        checks=checks(case, dense),
        warnings=list(session.loaded.warnings),
        run=session.run_facts(),
    )


def _tensors(case: Case, dense: Dense | None) -> dict[str, Tensor]:
    """What the file holds: the dense matrices, or the Kronecker factors where those are too large."""
    factors = case.operator.factors
    if dense is None:
        found = {"left": case.left, "value": factors.value, "output": factors.output, "x": case.X}
        return found | {"contribution": case.contribution}
    found = {"W_HVO": dense.W_HVO, "W_HV": dense.W_HV, "W_O": dense.W_O}
    return found | {"x": paper.vectorise(case.X), "contribution": paper.vectorise(case.contribution)}


_CONVENTIONS = (
    "X is N x M, one token a row; vec is row-major, so X[i, a] stands at i M + a of x'. W' maps a block's input to "
    "what attention adds to the residual stream, norm in front included, without constants (biases). "
)
_DENSE_SHAPES = (
    "W_HVO (N M, N M); W_HV (N heads d, N M), rows by token, head, width; W_O (N M, N heads d); x (N M); "
    "contribution (N M)"
)
_DENSE_RULE = "contribution = W_HVO @ x = W_O @ (W_HV @ x), to rounding; contribution is the model's own"
_FACTOR_SHAPES = "left (heads, N, N); value (kv_heads, M, d); output (heads, d, M); x (N, M); contribution (N, M)"
_FACTOR_RULE = (
    "contribution = sum_h left[h] @ (x @ value[h // (heads // kv_heads)]) @ output[h], to rounding; contribution is "
    "the model's own; W_HVO = sum_h left[h] (x) (value[h // (heads // kv_heads)] @ output[h])^T"
)


def _metadata(report: MatrixReport) -> dict[str, str]:
    """What a reader of the file alone needs."""
    return {
        "format": "duat matrix 1",
        "duat_version": report.duat_version,
        "kind": "dense" if report.dense else "kronecker",
        "shapes": _DENSE_SHAPES if report.dense else _FACTOR_SHAPES,
        "conventions": _CONVENTIONS + (_DENSE_RULE if report.dense else _FACTOR_RULE),
        "model_type": report.model.model_type,
        "fingerprint": report.model.fingerprint,
        "prompt_sha256": report.prompt.sha256,
        "layer": str(report.layer),
        "N": str(report.tokens),
        "M": str(report.hidden_size),
        "heads": str(report.heads),
        "kv_heads": str(report.kv_heads),
        "d": str(report.head_width),
    }
