"""How an embedder makes one vector from a text, as 1_Pooling/config.json of sentence-transformers states it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from duat_cli.loading.checkpoint.files import read_json, refuse_foreign_link
from duat_cli.loading.declared.embedder import modules

POOLING = "1_Pooling/config.json"
NOT_STATED = f"mean over tokens; there is no {POOLING}"
_MAX_BYTES = 1 << 20


def _weighted(hidden: Tensor) -> Tensor:
    weights = torch.arange(1, len(hidden) + 1, dtype=hidden.dtype, device=hidden.device)
    return weights @ hidden / weights.sum()


_MODES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {  # functions of hidden states, (N, M) to (M,)
    "cls_token": ("first token", lambda hidden: hidden[0]),
    "max_tokens": ("largest over tokens", lambda hidden: hidden.amax(dim=0)),
    "mean_tokens": ("mean over tokens", lambda hidden: hidden.mean(dim=0)),
    "mean_sqrt_len_tokens": ("sum over tokens / sqrt(tokens)", lambda hidden: hidden.sum(dim=0) / len(hidden) ** 0.5),
    "weightedmean_tokens": ("mean over tokens, each weighing its position", _weighted),
    "lasttoken": ("last token", lambda hidden: hidden[-1]),
}
_SHORT = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "weightedmean": "weightedmean_tokens"}


@dataclass(frozen=True)
class Pooling:
    """The pooling modes, whose vectors are concatenated."""

    modes: tuple[str, ...]
    stated: bool

    @property
    def name(self) -> str:
        """The modes in words."""
        return ", ".join(_MODES[mode][0] for mode in self.modes) if self.stated else NOT_STATED

    def of(self, hidden: Tensor) -> Tensor:
        """The pooled output in float64. hidden: the final hidden states of one text, (1, N, M)."""
        states = hidden[0].double()
        return torch.cat([_MODES[mode][1](states) for mode in self.modes])


def pooling_of(folder: Path) -> Pooling | str:
    """The pooling of a checkpoint's folder, by default the mean over tokens; or the reason why it is unknown.

    CheckpointError names a fault of the file.
    """
    stated = (f"{one.path}/config.json" for one in modules(folder) or () if one.type.endswith("Pooling"))
    name = next(stated, POOLING)
    path = folder / name
    refuse_foreign_link(folder, name)
    if not (path.exists() or path.is_symlink()):
        return Pooling(("mean_tokens",), stated=False)
    content = read_json(path, limit=_MAX_BYTES)
    modes = {mode.removeprefix("pooling_mode_") for mode, on in content.items() if mode != "pooling_mode" and on is True
             and mode.startswith("pooling_mode_")}  # fmt: skip
    short = content.get("pooling_mode")
    for mode in short if isinstance(short, list) else [short] if short is not None else []:
        modes.add(_SHORT.get(str(mode), str(mode)))
    unknown = sorted(modes - set(_MODES))
    if unknown or not modes:
        return f"{name} states {', '.join(unknown) or 'no mode'}; known are {', '.join(_MODES)}"
    return Pooling(tuple(mode for mode in _MODES if mode in modes), stated=True)
