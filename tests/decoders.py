"""Decoders of tiny encoder-decoders, run block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from duat_cli.models.discovery.modality import STATES, decoder_of
from duat_cli.models.discovery.proof import ProvedBlock
from duat_cli.models.discovery.structure import discover, run_stack
from duat_cli.models.instrument.rig import BlockRun

IDS = torch.tensor([[41, 52, 63, 74, 85, 41, 60]])
OWN = torch.tensor([[0, 45, 56, 67, 78]])


def given_to(model: Any) -> dict[str, Tensor]:
    """What its decoder reads: the tokens of OWN and the encoder's states of IDS."""
    with torch.no_grad():
        return {"input_ids": OWN, STATES: model.get_encoder()(input_ids=IDS)[0]}


def through(model: Any, listen: Callable[[BlockRun, ProvedBlock], None]) -> None:
    """Its decoder, discovered and run; `listen` is called behind every block."""
    given = given_to(model)
    structure = discover(decoder_of(model), given)
    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, given), lambda run: listen(run, structure.block(run.index)))


def attentions(model: Any) -> Any:
    """The decoder's own output, with the attention weights that transformers gives."""
    with torch.no_grad():
        return model.get_decoder()(**given_to(model), use_cache=False, output_attentions=True)
