"""Tokenizers of the kinds that decode a single token otherwise than within a text."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from duat_cli.loading.checkpoint.source import demo_path

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "t", "h", "e", "c", "a", "s", "o", "n", "▁t", "he", "▁the", "ca", "▁ca", "▁cat", "cat", "at"]
MERGES = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("c", "a"), ("▁", "ca"), ("▁ca", "t"), ("ca", "t"), ("a", "t")]


def sentencepiece() -> Any:
    """As Llama 2's tokenizer.json: a space in front of every text, bytes for what it lacks."""
    vocabulary = {piece: number for number, piece in enumerate(["<unk>", "<s>", "</s>", *BYTES, *PIECES])}
    made = Tokenizer(models.BPE(vocabulary, MERGES, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def word_pieces() -> Any:
    """As BERT's."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "dog", "#", "s"]
    made = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", mask_token="[MASK]")


def byte_level() -> Any:
    """The demo's."""
    return AutoTokenizer.from_pretrained(demo_path())


def with_end(tokenizer: Any) -> Any:
    """The same, which puts its special tokens around every text."""
    first, last = tokenizer.bos_token, tokenizer.eos_token
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (first, last)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", special_tokens=ids
    )
    return tokenizer
