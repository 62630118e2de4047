"""Decoders of tiny encoder-decoders, run block by block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bad_checkpoints
import torch
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from duat_cli.models.discovery.modality import STATES, decoder_of
from duat_cli.models.discovery.proof import ProvedBlock
from duat_cli.models.discovery.structure import discover, run_stack
from duat_cli.models.instrument.rig import BlockRun

IDS = torch.tensor([[41, 52, 63, 74, 85, 41, 60]])
OWN = torch.tensor([[0, 45, 56, 67, 78]])


T5 = T5Config(
    vocab_size=264, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4,
    decoder_start_token_id=259, pad_token_id=259, eos_token_id=257,
)  # fmt: skip
"""Two blocks in its encoder, three in its decoder."""


BART = BartConfig(
    vocab_size=264, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, pad_token_id=259,
    bos_token_id=256, eos_token_id=257, decoder_start_token_id=257, forced_eos_token_id=None,
)  # fmt: skip


def save_t5(folder: Path) -> Path:
    """The model of `T5`, and a tokenizer of bytes."""
    return _saved(T5ForConditionalGeneration, T5, folder)


def save_bart(folder: Path) -> Path:
    """The model of `BART`, and a tokenizer of bytes."""
    return _saved(BartForConditionalGeneration, BART, folder)


def _saved(kind: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(3)
    kind(config).save_pretrained(folder)
    bad_checkpoints.tokenizer(folder)
    return folder


def carried(attention: Any) -> Tensor:
    """A_h = V_h O_h of one attention of T5, (heads, width, width)."""
    heads = attention.v.weight.T.unflatten(1, (4, 8)), attention.o.weight.T.unflatten(0, (4, 8))
    return torch.einsum("mhd,hdn->hmn", *heads).detach()


def dense_crossing(H: Tensor, A: Tensor) -> Tensor:
    """W'_c = sum_h H_h (x) A_h^T, (N, width, K, width), where it is added to the stream as it is, as in T5."""
    return torch.einsum("hnk,hmo->nokm", H, A)


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
