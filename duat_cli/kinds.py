"""The kinds of terms that a model can lose."""

from __future__ import annotations

from typing import Literal, get_args

Kind = Literal["neuron", "head", "expert", "ffn", "attention", "block"]
KINDS: tuple[Kind, ...] = get_args(Kind)
