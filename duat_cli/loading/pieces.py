"""The text of one token of a vocabulary, where decoding it alone loses half a character or the space in front."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SPACE = "▁"  # sentencepiece's mark for a space in front of a word
_WHOLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that byte-level BPE writes as they are
_BYTES = {chr(byte): byte for byte in _WHOLE} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(_WHOLE)))
}
_CHARACTERS = {byte: character for character, byte in _BYTES.items()}
_MARKS = (SPACE, _CHARACTERS[ord(" ")], _CHARACTERS[ord("\n")])
_LOST = "\ufffd"
_BYTE = re.compile("<0x([0-9A-F]{2})>")


def piece_text(tokenizer: Any, token: int) -> str:
    """The text of a token as it is decoded, with sentencepiece's space in front. Bytes that are no whole character are
    written '\\xe6', and sentencepiece's byte tokens '<0xE6>', except line breaks and other controls."""
    text = str(tokenizer.decode([token]))
    named = getattr(tokenizer, "convert_ids_to_tokens", None)  # a caller's own tokenizer may lack it
    piece = None if named is None else named(token)
    if not isinstance(piece, str):
        return text
    if (byte := _BYTE.fullmatch(piece)) is not None:
        return chr(int(byte[1], 16)) if int(byte[1], 16) < ord(" ") else piece
    if _LOST in text and _LOST not in piece:
        return _bytes_of(piece)
    return f" {text}" if piece.startswith(SPACE) and not text.startswith(" ") else text


def _bytes_of(piece: str) -> str:
    """The text of the bytes of a byte-level BPE piece; any other piece unchanged."""
    found = [_BYTES.get(character) for character in piece]
    known = [byte for byte in found if byte is not None]
    return bytes(known).decode("utf-8", "backslashreplace") if len(known) == len(found) else piece


def byte_count(tokenizer: Any, token: int) -> int | None:
    """How many bytes a token stands for: of byte-level BPE, which names it by a character a byte, or a byte token of
    sentencepiece. None where its name has other characters."""
    named = getattr(tokenizer, "convert_ids_to_tokens", None)
    piece = None if named is None else named(token)
    if not isinstance(piece, str):
        return None
    if _BYTE.fullmatch(piece) is not None:
        return 1
    return len(piece) if all(character in _BYTES for character in piece) else None


def pieces_that_say(tokenizer: Any, vocabulary: Mapping[str, int], text: str) -> list[int]:
    """Tokens whose text is this one: written in the vocabulary as it is, with sentencepiece's space, as one of its byte
    tokens, or in the characters of byte-level BPE. If the text has one of the vocabulary's marks, also tokens that are
    written exactly so. vocabulary: the tokenizer's."""
    written = "".join(_CHARACTERS[byte] for byte in text.encode("utf-8", "surrogatepass"))
    byte = f"<0x{ord(text):02X}>" if len(text) == 1 else text
    asked = dict.fromkeys((text, text.replace(" ", SPACE), byte, written))
    found = {vocabulary[piece]: piece for piece in asked if piece in vocabulary}
    marked = any(mark in text for mark in _MARKS)
    return [t for t, piece in found.items() if piece_text(tokenizer, t) == text or (marked and piece == text)]
