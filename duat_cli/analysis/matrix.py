"""`duat matrix`: the paper's explicit matrices for one block of a real model, each step checked (Eq. 5-10).

What the steps are checked against comes from the model's own code, not from the factors of W': the captured H V of
its forward pass, and what that H V moves where attention meets the residual stream. For the second the frozen
block is replayed twice on a zero stream, once with the captured H V of x in place of attention's result and once
with H V of a zero input, and the two are subtracted at the tap. With the stream at zero nothing large cancels; H V of
a zero input holds the constants (biases of V, offsets of norms), which stand outside W'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal, cast

import torch
from torch import Tensor

from duat_cli import __version__
from duat_cli.analysis.decomposition import Decomposition, Step
from duat_cli.analysis.geometry import geometry
from duat_cli.analysis.session import Progress, Session, prompt_facts
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.loading.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import relative_error, tolerance_for
from duat_cli.models.cache import TensorCache
from duat_cli.models.factors import Tap
from duat_cli.models.rig import BlockRun, zero_given
from duat_cli.operators import paper
from duat_cli.operators.kronecker import HeadFactors, KroneckerSum
from duat_cli.results.matrix import MatrixCheck, MatrixForm, MatrixReport
from duat_cli.text import clean

DENSE_SIDE = 4096  # longest side of a matrix that is built: 64 MiB in float32
CORNER = 6  # entries of B_00 shown, a side
SHOWN_TOKENS = 8


@dataclass(frozen=True)
class Matrices:
    """The report, and what `-o` writes."""

    report: MatrixReport
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


@dataclass(frozen=True)
class Dense:
    """The matrices written out."""

    W_HV: Tensor  # (N·heads·d, N·M)
    W_O: Tensor  # (N·M, N·heads·d)
    W_HVO: Tensor  # (N·M, N·M)


@dataclass(frozen=True)
class Case:
    """W' of one block under one prompt, and what the model itself does; at least float32."""

    operator: KroneckerSum  # left (heads, N, N), value (kv_heads, M, d), output (heads, d, M)
    origin: str  # of V and O: "read" or "probed"
    gram: Tensor  # G, (heads, heads)
    nonzero_share: float  # of the entries of the maps V_h O_h
    X: Tensor  # (N, M)
    mixed: Tensor  # the model's own concatenated heads, without their constant, times t: (N, heads, d)
    contribution: Tensor  # what the model's own attention adds, without its constant: (N, M)
    error: float  # certificate of the blocks up to this one
    dtype: torch.dtype  # of the model's arithmetic

    @property
    def left(self) -> Tensor:
        """Ĥ, (heads, N, N)."""
        return self.operator.left

    @property
    def value(self) -> Tensor:
        """W_V with shared heads repeated, (heads, M, d)."""
        factors = self.operator.factors
        return factors.value.repeat_interleave(factors.groups, 0)

    @property
    def output(self) -> Tensor:
        """W_O, (heads, d, M)."""
        return self.operator.factors.output

    @property
    def projection(self) -> Tensor:
        """The output projection as torch writes a linear layer, W = W_Oᵀ: (M, heads·d)."""
        return self.output.flatten(0, 1).mT

    @property
    def tokens(self) -> int:
        return self.X.shape[0]

    @property
    def width(self) -> int:
        return self.X.shape[1]

    @property
    def inner(self) -> int:
        """heads·d."""
        return self.output.shape[0] * self.output.shape[1]

    @property
    def side(self) -> int:
        """The longest side of W'_HV, W'_O and W'_HVO."""
        return self.tokens * max(self.width, self.inner)


def matrix(loaded: LoadedModel, prompt: Prompt, layer: int, token_texts: Sequence[str], progress: Progress) -> Matrices:
    """The explicit matrices of block `layer` under `prompt`; token_texts: what each token says."""
    session = Session(loaded, progress, cache=False)
    count = len(session.structure.calls)
    if not 0 <= layer < count:
        raise InputError(f"--layer {layer}: no such block; the model has blocks 0 to {count - 1}")
    case = _capture(session, prompt, layer, progress)
    progress(0, 0, "building and checking the matrices")
    dense = _dense(case) if case.side <= DENSE_SIDE else None
    report = _report(session, prompt, layer, token_texts, case, dense)
    return Matrices(report, _tensors(case, dense), _metadata(report))


# -- capture -------------------------------------------------------------------------------------------------


def _capture(session: Session, prompt: Prompt, layer: int, progress: Progress) -> Case:
    """Run the prompt; blocks behind `layer` are only passed through."""
    decomposition = Decomposition()
    errors: list[float] = []
    cases: list[Case] = []

    def listen(run: BlockRun) -> None:
        if run.index > layer:
            return
        step = decomposition.advance(run)
        errors.append(step.terms.error)
        if run.index == layer:
            cases.append(_case(session, run, step, max(errors)))
        progress(run.index + 1, layer + 1, f"running the prompt up to block {layer}")

    session.sweep(prompt, listen)
    return cases[0]


def _case(session: Session, run: BlockRun, step: Step, error: float) -> Case:
    """Everything of this block that the matrices need, copied out of the run."""
    block = session.structure.block(run.index)
    try:
        operator = step.operator(run, block)
    except UnsupportedModelError as fault:
        reason = f"block {run.index} ({run.parts.name}) has no explicit matrices: {fault}"
        raise UnsupportedModelError(reason) from fault
    known = block.factors
    assert known is not None
    mixed, contribution = _own_attention(run, known.tap)
    work = torch.promote_types(run.input.dtype, torch.float32)
    factors = HeadFactors(operator.factors.value.to(work), operator.factors.output.to(work))
    sharp = geometry(replace(known, heads=factors), run.parts.name, TensorCache("", enabled=False))
    return Case(
        operator=KroneckerSum(operator.matrix().left.to(work), factors),
        origin=known.origin,
        gram=sharp.gram,
        nonzero_share=sharp.nonzero_share,
        X=run.input[0].to(work).clone(),
        mixed=mixed.to(work) * operator.token_scale.to(work)[:, None, None],
        contribution=contribution.to(work),
        error=error,
        dtype=run.input.dtype,
    )


def _own_attention(run: BlockRun, tap: Tap) -> tuple[Tensor, Tensor]:
    """H V(x) - H V(0), (N, heads, d), and what it moves at the tap, (N, M): the model's own, without factors."""
    zero = torch.zeros_like(run.input)
    constant = run.replay(zero, zero_given(run, 1)).mixed[0]  # (1, N, heads, d)
    own = run.attention[0].output
    replay = run.replay(torch.cat([zero, zero]), zero_given(run, 2), attention=torch.cat([own, constant]))
    seen = tap.read(replay)
    return (own - constant)[0], seen[0] - seen[1]


# -- the paper's matrices ------------------------------------------------------------------------------------


def _dense(case: Case) -> Dense:
    """W'_HV, W'_O and W'_HVO entry by entry, W'_HVO not by way of the other two."""
    return Dense(
        W_HV=paper.attention_value_matrix(case.left, case.value),
        W_O=paper.attention_output_matrix(case.output, case.tokens),
        W_HVO=paper.attention_matrix(case.left, case.value, case.output),
    )


def _forms(case: Case, dense: Dense | None) -> list[MatrixForm]:
    """T_D(x) = x', then W' of attention and its two parts, then a linear layer in the paper's orientation."""
    rows, hidden = case.tokens * case.width, case.tokens * case.inner
    value, whole = _value_form(case, dense), _operator_form(case, dense)
    filled = paper.density(case.projection)
    output = MatrixForm(
        name="W'_O",
        formula="I_N (x) W, W the output projection",
        shape=[rows, hidden],
        built=dense is not None,
        density=paper.density(dense.W_O) if dense else filled / case.tokens,
        paper_density=1 / case.tokens,
        paper_formula="1/N",
    )
    left = MatrixForm(
        name="W (x) I_M",
        formula="W from the left, the paper's orientation",
        shape=[case.width**2, case.inner * case.width],
        built=False,
        density=filled / case.width,
        paper_density=1 / case.width,
        paper_formula="1/M",
    )
    return [_input_form(rows), value, output, whole, left]


def _input_form(length: int) -> MatrixForm:
    return MatrixForm(
        name="x'",
        formula="T_D(X) = vec(X)",
        shape=[length],
        built=True,
        density=None,
        paper_density=None,
        paper_formula=None,
        reasons=dict.fromkeys(("density", "paper_density", "paper_formula"), "x' is a vector"),
    )


def _value_form(case: Case, dense: Dense | None) -> MatrixForm:
    expected, formula = _mask_density(case)
    return MatrixForm(
        name="W'_HV",
        formula="H_h (x) W_V,h^T, token before head",
        shape=[case.tokens * case.inner, case.tokens * case.width],
        built=dense is not None,
        density=paper.density(dense.W_HV) if dense else _value_density(case),
        paper_density=expected,
        paper_formula=formula,
    )


def _operator_form(case: Case, dense: Dense | None) -> MatrixForm:
    expected, formula = _mask_density(case)
    return MatrixForm(
        name="W'_HVO",
        formula="sum_h H_h (x) (W_V,h W_O,h)^T",
        shape=[case.tokens * case.width] * 2,
        built=dense is not None,
        density=paper.density(dense.W_HVO) if dense else _operator_density(case),
        paper_density=expected,
        paper_formula=formula,
    )


def _mask_density(case: Case) -> tuple[float, str]:
    """What the mask alone leaves of attention: the upper triangle of Ĥ is zero, or it is not."""
    N = case.tokens
    return ((N + 1) / (2 * N), "(N+1)/2N, causal") if _is_causal(case.left) else (1.0, "1, no causal mask")


def _is_causal(left: Tensor) -> bool:
    """Whether no token reaches an earlier one; one token is not enough to tell.  left (heads, N, N)."""
    return left.shape[-1] > 1 and not bool(left.triu(1).any())


def _value_density(case: Case) -> float:
    """Σ_h nonzeros(Ĥ_h) nonzeros(W_V,h) over the entries of W'_HV: no entry is a sum."""
    filled = (case.left != 0).sum((1, 2)).double() @ (case.value != 0).sum((1, 2)).double()
    return float(filled) / (case.tokens * case.inner * case.tokens * case.width)


def _operator_density(case: Case) -> float:
    """(nonzero blocks / N²) × (nonzero share of V O)."""
    return float((case.left != 0).any(0).double().mean()) * case.nonzero_share


def _corner(case: Case) -> Tensor:
    """The first entries of B_00 = (Σ_h Ĥ_h[0, 0] V_h O_h)ᵀ: (<= CORNER, <= CORNER)."""
    first = case.left[:, 0, 0]
    return torch.einsum("h,had,hdb->ba", first, case.value[:, :CORNER], case.output[:, :, :CORNER])


def _coupling(case: Case) -> Tensor:
    """C[i, j] = sqrt(ĥ_ijᵀ G ĥ_ij) between the first tokens: (<= SHOWN_TOKENS, <= SHOWN_TOKENS)."""
    h = case.left[:, :SHOWN_TOKENS, :SHOWN_TOKENS].double()
    return torch.einsum("hij,hk,kij->ij", h, case.gram, h).clamp_min(0).sqrt()


# -- checks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sides:
    """What a statement says is equal."""

    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class _Statement:
    name: str
    text: str
    sides: Callable[[Case, Dense | None], _Sides | str]  # a string says why it cannot be checked
    against_model: bool  # whether one side is the model's own arithmetic, with its rounding


def _checks(case: Case, dense: Dense | None) -> list[MatrixCheck]:
    return [_check(statement, case, dense) for statement in _STATEMENTS]


def _check(statement: _Statement, case: Case, dense: Dense | None) -> MatrixCheck:
    sides = statement.sides(case, dense)
    tolerance = tolerance_for(case.dtype if statement.against_model else case.X.dtype)
    name, text = statement.name, statement.text
    if isinstance(sides, str):
        reasons = {"relative_error": sides, "holds": sides}
        return MatrixCheck(
            name=name, statement=text, relative_error=None, tolerance=tolerance, holds=None, reasons=reasons
        )
    error = relative_error(sides.left, sides.right)
    if not isfinite(error):
        reasons = {"relative_error": "the right side is zero and the left is not, or a value is not finite"}
        return MatrixCheck(
            name=name, statement=text, relative_error=None, tolerance=tolerance, holds=False, reasons=reasons
        )
    return MatrixCheck(name=name, statement=text, relative_error=error, tolerance=tolerance, holds=error <= tolerance)


def _contribution_sides(case: Case, dense: Dense | None) -> _Sides:
    """W'_HVO x' and what the model's own attention adds."""
    if dense is None:
        return _Sides(case.operator.apply(case.X), case.contribution)
    return _Sides(dense.W_HVO @ paper.vectorise(case.X), paper.vectorise(case.contribution))


def _heads_sides(case: Case, dense: Dense | None) -> _Sides:
    """W'_HV x' and the model's own concatenated heads."""
    if dense is None:
        return _Sides((case.left @ (case.X @ case.value)).transpose(0, 1), case.mixed)
    return _Sides(dense.W_HV @ paper.vectorise(case.X), paper.vectorise(case.mixed))


def _projection_sides(case: Case, dense: Dense | None) -> _Sides:
    """W'_O times the model's own heads, and what its attention adds: I_N ⊗ W is the linear layer."""
    heads = paper.vectorise(case.mixed)  # (N·heads·d,)
    if dense is None:
        return _Sides(heads.reshape(case.tokens, -1) @ case.projection.mT, case.contribution)
    return _Sides(dense.W_O @ heads, paper.vectorise(case.contribution))


def _product_sides(case: Case, dense: Dense | None) -> _Sides | str:
    if dense is None:
        return _too_large(case)
    return _Sides(dense.W_O @ dense.W_HV, dense.W_HVO)


def _coupling_sides(case: Case, dense: Dense | None) -> _Sides | str:
    """The closed form of C against the norms of the blocks of the dense matrix."""
    if dense is None:
        return _too_large(case)
    blocks = dense.W_HVO.reshape(case.tokens, case.width, case.tokens, case.width)
    norms = torch.linalg.vector_norm(blocks, dim=(1, 3), dtype=torch.float64)
    return _Sides(_coupling(case), norms[:SHOWN_TOKENS, :SHOWN_TOKENS])


def _orientation_sides(case: Case, dense: Dense | None) -> _Sides | str:
    """(W ⊗ I_c) vec(Z) and vec(W Z), where Z is c columns of the model's W_V, one head under another.

    W ⊗ I_M is the same matrix with M columns; c is as many of them as can be built. Z (heads·d, c).
    """
    columns = min(case.width, DENSE_SIDE // max(case.width, case.inner))
    if columns == 0:
        return f"W (x) I_c has {max(case.width, case.inner)} rows for each column; built up to {DENSE_SIDE}"
    W = case.projection
    Z = case.value.mT.flatten(0, 1)[:, :columns]
    return _Sides(paper.linear_matrix_left(W, columns) @ paper.vectorise(Z), paper.vectorise(W @ Z))


def _diamond_left_sides(case: Case, dense: Dense | None) -> _Sides:
    """W1 ⋄ [x ⋄ W2] = (W2 W1) ⋄ x with W2 = W_V,0, W1 = W_O,0 and the tokens as columns of x (M, N)."""
    W2, W1, x = case.value[0], case.output[0], case.X.mT
    return _Sides(paper.diamond(W1, paper.diamond_right(x, W2)), paper.diamond(W2 @ W1, x))


def _diamond_right_sides(case: Case, dense: Dense | None) -> _Sides:
    """[W1 ⋄ x] ⋄ W2 = (W1 W2) ⋄ x with W1 = W_V,0, W2 = W_O,0 and the tokens as columns of x (M, N)."""
    W1, W2, x = case.value[0], case.output[0], case.X.mT
    return _Sides(paper.diamond_right(paper.diamond(W1, x), W2), paper.diamond(W1 @ W2, x))


def _too_large(case: Case) -> str:
    return (
        f"W' is not built: its longest side N max(M, heads d) = {case.side} is over {DENSE_SIDE}; "
        "fewer tokens (--max-tokens) make it smaller"
    )


_STATEMENTS = (
    _Statement("contribution", "W'_HVO x' = what the model's attention adds", _contribution_sides, True),
    _Statement("heads", "W'_HV x' = the model's concatenated heads", _heads_sides, True),
    _Statement("projection", "W'_O heads = what the model's attention adds", _projection_sides, True),
    _Statement("product", "W'_O W'_HV = W'_HVO", _product_sides, False),
    _Statement("coupling", "C_ij = |B_ij|_F of W'_HVO", _coupling_sides, False),
    _Statement("orientation", "(W (x) I_c) vec(Z) = vec(W Z), Z from W_V", _orientation_sides, False),
    _Statement("diamond_left", "W1 <> [x <> W2] = (W2 W1) <> x", _diamond_left_sides, False),
    _Statement("diamond_right", "[W1 <> x] <> W2 = (W1 W2) <> x", _diamond_right_sides, False),
)


# -- results -------------------------------------------------------------------------------------------------


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
        matrices=_forms(case, dense),
        corner=_corner(case).tolist(),
        token_texts=[clean(text) for text in texts[:SHOWN_TOKENS]] if len(texts) == case.tokens else [],
        coupling=_coupling(case).tolist(),
        checks=_checks(case, dense),
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
