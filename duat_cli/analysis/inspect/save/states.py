"""Files of `duat inspect --save`: what the input sets in every block, one .safetensors file per prompt.

Blocks b count from 0; N tokens, hidden size M; floats are float32, or float64 where the run is.

    input_ids               (tokens,)       int64; the text of each: metadata `tokens`, a JSON list
    block.b.H               (heads, N, N)   H: attention weights; further names as in analysis/dynamic.py
    block.b.S.NORM          (N,)            S: scale of every norm of the block
    block.b.gain.NORM       (M,)            S: gain of the norm, by which the scale is multiplied
    block.b.b2              (N, width)      bias: b'_{j,2} of Eq. 12/34, the output of the FFN's first layer minus the
                                            linear path from x_0
    block.b.b3              (N, M)          bias: b'_{j,3} of Eq. 33, the static part of the block's output

Metadata `first`, a JSON object, names the first layer of every block's FFN; `missing` says why a block has no b2. Only
one block's tensors are in memory at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from duat_cli import __version__
from duat_cli.analysis.decomposition import Decomposition, Step
from duat_cli.analysis.dynamic import attention_weights, dynamic_names, norm_scales
from duat_cli.analysis.inspect.save.asked import KINDS, require_folder
from duat_cli.analysis.session import Session
from duat_cli.analysis.tensor_file import TensorFile, require_disk
from duat_cli.compat.transformers import stated
from duat_cli.errors import InputError, needed
from duat_cli.loading.prompts import Prompt
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.text import clean, one_line

FORMAT = "duat states 1"
_REASON = 300  # most characters of the reason why a block has no b2
_READ = "the nonlinearity reads the FFN's input itself"


@contextlib.contextmanager
def saving(folder: Path, kinds: frozenset[str], decode: Callable[[int], str]) -> Iterator[StateFiles]:
    """A context with the files to fill. They get their names if it is left without an error; otherwise none remains."""
    require_folder(folder)
    made, moved = not folder.exists(), list[Path]()
    try:
        folder.mkdir(exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=folder, prefix=".duat-", suffix=".part"))
    except OSError as error:
        raise InputError(f"--save-to '{clean(str(folder))}': cannot write: {error.strerror or error}") from error
    files = StateFiles(part, kinds, decode)
    try:
        yield files
        for file in sorted(part.iterdir()):
            with file.open("rb+") as written:
                os.fsync(written.fileno())
            moved.append(folder / file.name)
            os.replace(file, moved[-1])
        moved.clear()
    finally:
        files.close()
        for file in moved:
            file.unlink(missing_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        if made and not any(folder.iterdir()):
            folder.rmdir()


class StateFiles:
    """The files, which a run fills one block under one prompt at a time; H is written in pieces of rows."""

    def __init__(self, folder: Path, kinds: frozenset[str], decode: Callable[[int], str]) -> None:
        """decode: gives the text of a token id."""
        self._folder, self._kinds, self._decode = folder, kinds, decode
        self._files: dict[int, _StateFile] = {}

    def open(self, session: Session, prompts: Sequence[Prompt], blocks: Sequence[int]) -> None:
        """Prepares the files. Raises InputError where the disk has no room for them."""
        self._dtype = torch.promote_types(session.loaded.model.dtype, torch.float32)
        self._facts = {
            "format": FORMAT,
            "duat_version": __version__,
            "model_type": session.loaded.model.config.model_type,
            "dtype": session.loaded.dtype,
            "kinds": ",".join(kind for kind in KINDS if kind in self._kinds),
        }
        self._names = [
            f"block.{b}.{name}"
            for b in blocks
            for name in ("b2", "b3", *dynamic_names(session.structure.block(b).parts))
        ]
        self._depth = len(blocks)
        self._require_room(session, [prompt.input_ids.shape[1] for prompt in prompts])

    def begin(self, number: int, prompt: Prompt) -> None:
        """Opens the file of a prompt; begins it again if a sweep begins again."""
        if number in self._files:
            self._files.pop(number).file.close()
        texts = json.dumps([self._decode(token) for token in prompt.input_ids[0].tolist()])
        facts = self._facts | {"sha256": prompt.sha256, "tokens": texts}
        path = self._folder / f"prompt-{number}.safetensors"
        path.unlink(missing_ok=True)
        reasons = 12 * (_REASON + 8) * (self._depth + 1)  # a character takes up to 12 bytes
        file = TensorFile(path, ["input_ids", *self._names], facts, reasons, self._dtype)
        file.add("input_ids", prompt.input_ids[0])
        self._files[number] = _StateFile(file)

    def block(self, number: int, run: BlockRun, step: Step, decomposition: Decomposition) -> None:
        """Writes one block under one prompt, just after the decomposition's step, while its weights are in memory."""
        here = self._files[number]
        if "H" in self._kinds:
            for name, rows in attention_weights(run):
                here.file.add_rows(f"block.{run.index}.{name}", rows)
        if "S" in self._kinds:
            for name, tensor in norm_scales(run):
                here.add(run.index, name, tensor)
        if "bias" in self._kinds:
            here.add(run.index, "b3", needed(decomposition.carried).bias)
            here.bias(run, step)

    def end(self, number: int) -> None:
        """Finishes the file of a prompt."""
        self._files.pop(number).finish()

    def close(self) -> None:
        """Closes the files that are unfinished."""
        for one in self._files.values():
            one.file.close()
        self._files.clear()

    def _require_room(self, session: Session, lengths: Sequence[int]) -> None:
        heads, width = stated(session.loaded.model.config, "num_attention_heads") or 1, session.structure.hidden_size
        heads = heads if isinstance(heads, int) else 0  # a list by stages: the size of H is not known yet
        each = {"H": lambda n: heads * n * n, "S": lambda n: 2 * (n + width), "bias": lambda n: 2 * n * width}
        need = self._dtype.itemsize * self._depth * sum(each[kind](n) for kind in self._kinds for n in lengths)
        advice = "take fewer or shorter prompts (--max-tokens), or fewer blocks"
        require_disk(self._folder, need, "--save-to: the files take at least", advice)


class _StateFile:
    """The file of one prompt."""

    def __init__(self, file: TensorFile) -> None:
        self.file = file
        self._first: dict[int, str] = {}
        self._missing: dict[int, str] = {}

    def add(self, block: int, name: str, tensor: Tensor) -> None:
        self.file.add(f"block.{block}.{name}", tensor)

    def bias(self, run: BlockRun, step: Step) -> None:
        """Writes b'_{j,2}, or notes the reason why there is none."""
        found = step.bias()
        if found is None:
            self._missing[run.index] = one_line(step.terms.pre_activation_reason or "no reason was given", _REASON)
            return
        self.add(run.index, "b2", found)
        names = {module: name for name, module in run.parts.module.named_modules()}
        self._first[run.index] = _READ if step.first is None else names[step.first]

    def finish(self) -> None:
        self.file.finish(first=self._first, missing=self._missing)
