"""What one token of a vocabulary says, where decoding it alone loses half a character or the space in front."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SPACE = "▁"  # of sentencepiece, in front of a word
_WHOLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that byte-level BPE writes as they are
_BYTES = {chr(byte): byte for byte in _WHOLE} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(_WHOLE)))
}
_CHARACTERS = {byte: character for character, byte in _BYTES.items()}
_MARKS = (SPACE, _CHARACTERS[ord(" ")], _CHARACTERS[ord("\n")])
_LOST = "\ufffd"
_BYTE = re.compile("<0x([0-9A-F]{2})>")


def piece_text(tokenizer: Any, token: int) -> str:
    """As it is decoded, with the space of sentencepiece in front. Bytes that are no whole character are '\\xe6', and
    those that sentencepiece has beside its pieces '<0xE6>', but for line breaks and other controls."""
    text = str(tokenizer.decode([token]))
    named = getattr(tokenizer, "convert_ids_to_tokens", None)  # a caller's own tokenizer may have no names
    piece = None if named is None else named(token)
    if not isinstance(piece, str):
        return text
    if (byte := _BYTE.fullmatch(piece)) is not None:
        return chr(int(byte[1], 16)) if int(byte[1], 16) < ord(" ") else piece
    if _LOST in text and _LOST not in piece:
        return _bytes_of(piece)
    return f" {text}" if piece.startswith(SPACE) and not text.startswith(" ") else text


def _bytes_of(piece: str) -> str:
    """Of a piece of byte-level BPE what its bytes say; another one as it stands."""
    found = [_BYTES.get(character) for character in piece]
    known = [byte for byte in found if byte is not None]
    return bytes(known).decode("utf-8", "backslashreplace") if len(known) == len(found) else piece


def pieces_that_say(tokenizer: Any, vocabulary: Mapping[str, int], text: str) -> list[int]:
    """Tokens that say this: in the vocabulary with a space of sentencepiece, as one of its bytes, or in the characters
    of byte-level BPE; or that are written so, with a mark of the vocabulary's own. vocabulary: of the tokenizer."""
    written = "".join(_CHARACTERS[byte] for byte in text.encode("utf-8", "surrogatepass"))
    byte = f"<0x{ord(text):02X}>" if len(text) == 1 else text
    asked = dict.fromkeys((text, text.replace(" ", SPACE), byte, written))
    found = {vocabulary[piece]: piece for piece in asked if piece in vocabulary}
    marked = any(mark in text for mark in _MARKS)
    return [t for t, piece in found.items() if piece_text(tokenizer, t) == text or (marked and piece == text)]
