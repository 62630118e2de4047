"""W' in a file, as factors, written by `duat inspect --matrices` and `duat matrix -o`.

The file is .safetensors. Prompts p and blocks b count from 0; N tokens, M hidden size, d head size; floats are float32,
or float64 where the run is.

    prompt.p.input_ids               (tokens,)         int64; the text of each: metadata prompt.p.tokens, a JSON list
    block.b.V                        (kv_heads, M, d)  gain of the norm in front included
    block.b.O                        (heads, d, M)     gain of a norm behind included
    prompt.p.block.b.H               (heads, N, N)     attention weights; row i: what token i reads
    prompt.p.block.b.s               (heads, N)        scale of the norm in front, by source token
    prompt.p.block.b.t               (N,)              scale of a norm behind, by target token
    prompt.p.block.b.C               (N, N)            |B_ij|_F, from token j to token i
    prompt.p.block.b.x               (N, M)            the block's input
    prompt.p.block.b.contribution    (N, M)            what the model's own attention adds, without its constants
    prompt.p.block.b.W_HVO, W_HV, W_O                  the matrices of Eq. 5-10 written out

    W' = W_HVO = Σ_h (t[:, None] H[h] s[h]) ⊗ (V[h // (heads // kv_heads)] O[h])ᵀ,    contribution = W' vec(x)

The last four are written by `duat matrix` only: `contribution` always, the matrices with --dense. A block without
factors has no tensors; metadata `missing`, a JSON object, says why. N differs from the number of ids where a model
puts further vectors beside the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from duat_cli import __version__
from duat_cli.analysis.session import Session
from duat_cli.analysis.tensor_file import TensorFile, require_disk
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.prompts import Prompt
from duat_cli.models.value_path.operator import AttentionOperator, one_stream
from duat_cli.models.value_path.streams import WEIGHED
from duat_cli.text import one_line

FORMAT = "duat operators 1"
_OF_PROMPT = ("H", "s", "t", "C", "x", "contribution", "W_HVO", "W_HV", "W_O")
_REASON = 300  # most characters of the reason why a block is missing
_CONVENTIONS = (
    "X is N x M, one token a row; vec is row-major, so X[i, a] stands at i M + a. W' maps a block's input to what its "
    "attention adds to the residual stream, norm in front included, without constants (biases). W' = sum_h "
    "(t[:, None] * H[h] * s[h]) (x) (V[h // (heads // kv_heads)] @ O[h])^T; C[i, j] is the Frobenius norm of its block "
    "from token j to token i. W_HV: rows by token, head, width; W_HVO = W_O @ W_HV; contribution = W_HVO @ vec(x)."
)


class OperatorFile:
    """The file, which a run fills one block under one prompt at a time; H goes in pieces of rows, as the run has it."""

    def __init__(self, path: Path, decode: Callable[[int], str], option: str) -> None:
        """decode: gives the text of a token id; option: names the file in errors."""
        self._path, self._decode, self._option = path, decode, option
        self._missing: dict[int, str] = {}
        self._written: set[int] = set()

    def open(self, session: Session, prompts: Sequence[Prompt], blocks: Sequence[int]) -> None:
        """Creates the file with room for its header, and writes the ids. Raises InputError where the disk is too
        full."""
        self._dtype = torch.promote_types(session.loaded.model.dtype, torch.float32)
        self._require_room(session, prompts, blocks)
        names = [f"block.{b}.{name}" for b in blocks for name in "VO"]
        names += [f"prompt.{p}.block.{b}.{name}" for p in range(len(prompts)) for b in blocks for name in _OF_PROMPT]
        names += [f"prompt.{p}.input_ids" for p in range(len(prompts))]
        reasons = 12 * (_REASON + 8) * len(blocks)  # a character takes up to 12 bytes
        self._file = TensorFile(self._path, names, _facts(session) | self._tokens(prompts), reasons, self._dtype)
        for number, prompt in enumerate(prompts):
            self._file.add(f"prompt.{number}.input_ids", prompt.input_ids[0])

    def block(self, prompt: int, block: int, operator: AttentionOperator, x: Tensor, C: Tensor) -> None:
        """Writes one block under one prompt. x: its input, (N, M); C: its coupling, (N, N).

        Gated attention is written as one head per channel, with the gate in H.
        """
        try:
            if operator.own:
                raise UnsupportedModelError("its W' reads values (a mixer's own, or shared), no vectors of the stream")
            operator = one_stream(operator, WEIGHED).by_channel()
        except UnsupportedModelError as fault:
            self.missing(block, str(fault))
            return
        if block not in self._written:
            self._written.add(block)
            self._file.add(f"block.{block}.V", operator.factors.value)
            self._file.add(f"block.{block}.O", operator.factors.output)
        self._file.add_rows(f"prompt.{prompt}.block.{block}.H", operator.rows)
        self.add(prompt, block, s=operator.source_scale, t=operator.token_scale.expand(len(x)), C=C, x=x)

    def add(self, prompt: int, block: int, **tensors: Tensor) -> None:
        """Writes further tensors of one block under one prompt, by their names in the schema."""
        for name, tensor in tensors.items():
            self._file.add(f"prompt.{prompt}.block.{block}.{name}", tensor)

    def missing(self, block: int, reason: str) -> None:
        self._missing.setdefault(block, one_line(reason, _REASON))

    def finish(self) -> None:
        self._file.finish(missing=self._missing)

    def close(self) -> None:
        """Closes an unfinished file."""
        if hasattr(self, "_file"):
            self._file.close()

    def _tokens(self, prompts: Sequence[Prompt]) -> dict[str, str]:
        found: dict[str, str] = {}
        for number, prompt in enumerate(prompts):
            texts = [self._decode(i) for i in prompt.input_ids[0].tolist()]
            found |= {f"prompt.{number}.tokens": json.dumps(texts), f"prompt.{number}.sha256": prompt.sha256}
        return found

    def _require_room(self, session: Session, prompts: Sequence[Prompt], blocks: Sequence[int]) -> None:
        need = sum(_elements(session, b, [p.input_ids.shape[1] for p in prompts]) for b in blocks)
        advice = "take fewer or shorter prompts (--max-tokens), or fewer blocks"
        what = f"{self._option}: the file would take"
        require_disk(self._path.parent, need * self._dtype.itemsize, what, advice)


def _elements(session: Session, block: int, lengths: Sequence[int]) -> int:
    """How many numbers the factors of a block, and its tensors for prompts of these lengths, take."""
    known = session.structure.block(block).factors
    if known is None:
        return 0
    heads, width = known.heads.heads, known.heads.hidden_size
    own = known.heads.value.numel() + known.heads.output.numel()
    return own + sum((heads + 1) * n * n + (heads + 1) * n + width * n for n in lengths)


def _facts(session: Session) -> dict[str, str]:
    return {
        "format": FORMAT,
        "duat_version": __version__,
        "conventions": _CONVENTIONS,
        "model_type": session.loaded.model.config.model_type,
        "fingerprint": session.fingerprint,
        "dtype": session.loaded.dtype,
    }
