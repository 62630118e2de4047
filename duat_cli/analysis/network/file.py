"""The file of the whole network, written by `duat matrix --network -o FILE`.

The file is .safetensors. Layers j count from 1 as in the paper, so layer j is block j - 1; N tokens, hidden size M,
side N M; x' is row-major vec, one token per row. n: neurons per token, with routed experts the k n of the token's own k
experts; a gated FFN has 2 n pre-activations per token, gates before ups. Floats are float32, or float64 where the run
is.

    input_ids             (tokens,)      int64; the text of each: metadata `tokens`, a JSON list
    x'_{0}, x'_{j}        (side,)        input of the first layer; output of the equations behind layer j
    H_{j}                 (heads, N, N)  attention weights of layer j; row i is what token i reads
    S_{j}.NORM            (N,)           scale of the norm with that module name, and its gain:
    gain_{j}.NORM         (M,)           NORM(x) = S (P x) gain + offset, P the identity or the removal of the mean
    W'_{j,1}              (side, side)   first j layers: the map from x'_0 to x'_j
    b'_{j,3}              (side,)        first j layers: the constants in x'_j
    W'_{j,2}              (N n, side)    (N 2n, side) if gated: the map from x'_0 to the input of σ in layer j
    b'_{j,2}              (N n,)         the rest of that input: constants, and the UAT of earlier layers (Eq. 34)
    W'_{j,3}              (side, N n)    all L layers: the map from the neurons of layer j to x'_L
    original.…            W'_{j,1}, W'_{j,2}, W'_{j,3}, b'_{j,2}, b'_{j,3} of layer j alone: the right sides in Fig. 2

    x'_L = W'_{L,1} x'_0 + b'_{L,3} + Σ_j W'_{j,3} σ(W'_{j,2} x'_0 + b'_{j,2})                                (Eq. 33)

Metadata `layers`, a JSON list, has for every layer its module, σ, whether it is gated, and neurons and experts per
token. A layer without an FFN has no W'_{j,2}, b'_{j,2}, W'_{j,3}.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duat_cli.analysis.dynamic import attention_weights, dynamic_names, norm_scales
from duat_cli.analysis.network.layer import Layer, Sigma
from duat_cli.analysis.tensor_file import TensorFile, require_disk
from duat_cli.models.block.parts import BlockParts
from duat_cli.models.instrument.rig import BlockRun

FORMAT = "duat network 1"
_NAMES = {"W1": "W'_{%d,1}", "W2": "W'_{%d,2}", "W3": "W'_{%d,3}", "b2": "b'_{%d,2}", "b3": "b'_{%d,3}", "x": "x'_{%d}"}


class NetworkFile:
    """The file, to which layers are added; tensors can be read back."""

    def __init__(self, path: Path, blocks: Sequence[BlockParts], metadata: dict[str, str], dtype: torch.dtype) -> None:
        """blocks: of every layer; dtype: of the floats."""
        self._layers: list[dict[str, Any]] = []
        self._file = TensorFile(path, _all_names(blocks), metadata, 600 * len(blocks) + 200, dtype)

    def start(self, input_ids: Tensor, x0: Tensor) -> None:
        """Writes the prompt."""
        self._file.add("input_ids", input_ids)
        self._file.add(_NAMES["x"] % 0, x0.reshape(-1))

    def dynamic(self, number: int, run: BlockRun) -> None:
        """Writes H and scales of layer `number`."""
        for name, rows in attention_weights(run):
            self._file.add_rows(_at(name, number), rows)
        for name, tensor in norm_scales(run):
            self._file.add(_at(name, number), tensor)

    def originals(self, number: int, layer: Layer) -> None:
        """Writes the parameters of the layer alone."""
        for name in ("W1", "W2", "W3", "b2", "b3"):
            if (tensor := getattr(layer, name)) is not None:
                self._file.add("original." + _NAMES[name] % number, tensor)

    def add(self, number: int, **tensors: Tensor) -> None:
        """Writes tensors of the layers together, by the keys of `_NAMES`."""
        for name, tensor in tensors.items():
            self._file.add(_NAMES[name] % number, tensor)

    def original(self, number: int, name: str) -> Tensor:
        """A tensor written by `originals`, read back."""
        return self._file.read("original." + _NAMES[name] % number)

    def said(self, module: str, sigma: Sigma | None) -> None:
        """Adds the next layer to the metadata."""
        entry: dict[str, Any] = {"module": module}
        if sigma is not None:
            entry |= {"sigma": sigma.activation.name, "gated": sigma.gated, "neurons": sigma.neurons}
            entry |= {} if sigma.experts is None else {"experts": sigma.experts}
        self._layers.append(entry)

    def finish(self) -> None:
        self._file.finish(layers=self._layers)

    def close(self) -> None:
        """Closes an unfinished file."""
        self._file.close()


def require_room(folder: Path, side: int, hidden: Iterable[tuple[int, int]], size: int) -> None:
    """Raises InputError where the disk has no room. hidden: (pre-activations, neurons) of all tokens, by layer; size:
    bytes of a number."""
    need = size * sum(2 * side * (side + rows + neurons) for rows, neurons in hidden)
    require_disk(folder, need, "--network: the matrices take", "fewer tokens (--max-tokens) make them smaller")


def _at(name: str, number: int) -> str:
    """Name of H, H.k or S.norm for layer `number`, which goes behind the letter."""
    letter, dot, rest = name.partition(".")
    return f"{letter}_{{{number}}}{dot}{rest}"


def _all_names(blocks: Sequence[BlockParts]) -> list[str]:
    names = ["input_ids", _NAMES["x"] % 0]
    for number, parts in enumerate(blocks, 1):
        own = [name % number for name in _NAMES.values()]
        names += [*own, *(f"original.{name}" for name in own), *(_at(name, number) for name in dynamic_names(parts))]
    return names
