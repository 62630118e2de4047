"""The kinds of terms that a model can lose, and the measures of the damage."""

from __future__ import annotations

from typing import Literal, get_args

MetricName = Literal["hidden", "kl", "nll"]
Kind = Literal["neuron", "head", "expert", "ffn", "attention", "block"]
KINDS: tuple[Kind, ...] = get_args(Kind)
