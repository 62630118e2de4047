"""`duat matrix`: the paper's explicit matrices for one block of a real model, each step checked (Eq. 5-10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

from torch import Tensor

from duat_cli import __version__
from duat_cli.analysis.matrix.case import DENSE_SIDE, Case, Dense, capture, dense_matrices
from duat_cli.analysis.matrix.checks import checks
from duat_cli.analysis.matrix.convolution import convolution
from duat_cli.analysis.matrix.forms import SHOWN_TOKENS, corner, coupling, forms
from duat_cli.analysis.operator_file import OperatorFile
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Session, prompt_facts
from duat_cli.errors import InputError
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.results.matrix import MatrixReport
from duat_cli.text import clean


def matrix(
    loaded: LoadedModel,
    prompt: Prompt,
    layer: int,
    decode: Callable[[int], str],
    progress: Progress,
    file: OperatorFile | None = None,
    *,
    dense: bool = False,
) -> MatrixReport:
    """The report on the explicit matrices of block `layer` under `prompt`. decode: gives the text of a token; file: the
    file to write, if any; dense: whether to write the matrices themselves, too."""
    session = Session(loaded, progress, cache=False)
    count = len(session.structure.calls)
    if not 0 <= layer < count:
        raise InputError(f"--layer {layer}: no such block; the model has blocks 0 to {count - 1}")
    if file is not None:
        file.open(session, [prompt], [layer])

    def write(operator: AttentionOperator, case: Case) -> None:
        if file is not None:
            file.block(0, layer, operator, case.X, coupling(case, case.tokens))
            file.add(0, layer, contribution=case.contribution)

    case = capture(session, prompt, layer, progress, write)
    progress(0, 0, "building and checking the matrices")
    built = dense_matrices(case)
    if file is not None:
        if dense:
            file.add(0, layer, **_written_out(case, built))
        file.finish()
    texts = [decode(i) for i in prompt.input_ids[0].tolist()]
    return _report(session, prompt, layer, texts, case, built)


CROSS = "the matrices are of the block's self-attention; inspect and compare read W'_c of its cross-attention"
BY_CHANNEL = "a gate inside attention scales its channels, so every channel is one head here, with the gate in its H"


def _written_out(case: Case, built: Dense | None) -> dict[str, Tensor]:
    """The matrices that --dense writes, by their names in the file. Raises InputError where they are too large."""
    if built is None:
        raise InputError(
            f"--dense: the longest side of W', N max(M, heads d) = {case.side}, is over {DENSE_SIDE}; take fewer "
            "tokens (--max-tokens), or the factors alone, from which W' can be rebuilt"
        )
    return {"W_HVO": built.W_HVO, "W_HV": built.W_HV, "W_O": built.W_O}


def _report(
    session: Session, prompt: Prompt, layer: int, texts: Sequence[str], case: Case, dense: Dense | None
) -> MatrixReport:
    factors = case.operator.factors
    crosses = session.structure.block(layer).parts.cross is not None
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
        coupling=coupling(case, SHOWN_TOKENS).tolist(),
        convolution=convolution(case, SHOWN_TOKENS),
        checks=checks(case, dense),
        warnings=[*session.warnings(), *([BY_CHANNEL] if case.by_channel else []), *([CROSS] if crosses else [])],
        run=session.run_facts(),
    )
