"""The token or class that a text names, and the texts of tokens."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from duat_cli.errors import InputError
from duat_cli.loading.pieces import pieces_that_say
from duat_cli.loading.prompts import Prompt, said
from duat_cli.loading.quiet import calling_tokenizer
from duat_cli.text import clean, shown, some

Named = tuple[str, str]
"""A text's name in errors, and the text."""
_SHOWN = 6  # tokens in a message
_LISTED = 8  # classes in a message


class Words:
    """Texts and tokens by a model's tokenizer, or by token ids alone if there is none."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def mask(self) -> int | None:
        """The token that a masked LM fills in."""
        found = getattr(self._tokenizer, "mask_token_id", None)
        return found if isinstance(found, int) else None

    @functools.cached_property
    def special(self) -> frozenset[int]:
        """Ids of special tokens, which may be in every prompt."""
        return frozenset(getattr(self._tokenizer, "all_special_ids", ()))

    def says(self, tokens: list[int], front: str = "") -> str:
        """The text of consecutive tokens, not escaped. front: the beginning of the error."""
        return said(self._tokenizer, tokens, front)

    def text(self, token: int) -> str:
        """The text of a token, which may be part of a character; escaped for a terminal."""
        return clean(self.says([token]))

    def tokens(self, option: str, text: str) -> list[int]:
        """The tokens of a text, without special ones."""
        if self._tokenizer is None:
            if not re.fullmatch(r"#\d{1,9}( #\d{1,9})*", text, re.ASCII):
                raise InputError(
                    f"{option}: a text, but there is no tokenizer; expected #5, or the model's own tokenizer"
                )
            return [int(i) for i in text.replace("#", "").split()]
        with calling_tokenizer(f"{option}: the tokenizer fails", InputError):
            return self._read(text, special=False)

    def token(self, option: str, text: str, *, first: bool | None = None) -> int:
        """The one token that a text encodes to, or that is written so in the vocabulary, or whose id '#5' is.
        InputError for none or several. first: whether to take the first of several; None where a user has no option for
        that."""
        ids = self.tokens(option, text)
        if len(ids) == 1 and self._tokenizer is None:
            return ids[0]
        asked = f"{option} {shown(text)}"
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        if unknown is not None and ids[:1] == [unknown] and text.strip() != self._tokenizer.unk_token:
            ids = []
        pieces = self._pieces(option, text)
        if len(ids) == 1 and (not pieces or ids == pieces):
            return ids[0]
        if len(ids) != 1 and len(pieces) == 1:
            return pieces[0]
        if pieces:  # such as a word of sentencepiece, which exists with a space in front as well
            raise InputError(
                f"{asked}: may be {self._listed([*dict.fromkeys([*ids[:1], *pieces])])}; give one by its id"
            )
        if (number := re.fullmatch(r"#(\d{1,9})", text, re.ASCII)) is not None:
            return int(number[1])
        if not ids:
            raise InputError(f"{asked}: not in the vocabulary of this model's tokenizer; expected one of its tokens")
        if len(ids) > 1 and not first:
            other = "" if first is None else ", or --first-token to take the first"
            several = f"{len(ids)} tokens, {self._listed(ids)}"
            raise InputError(f"{asked}: {several}; expected one: give one by its id{other}")
        return ids[0]

    def _pieces(self, option: str, text: str) -> list[int]:
        if self._tokenizer is None:
            return []
        with calling_tokenizer(f"{option}: the tokenizer fails", InputError):
            return pieces_that_say(self._tokenizer, self._vocabulary, text)

    @functools.cached_property
    def _vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    def _listed(self, ids: Sequence[int]) -> str:
        several = ", ".join(f"{shown(self.text(token))} (#{token})" for token in ids[:_SHOWN])
        return several if len(ids) <= _SHOWN else f"{several}, ..."

    def behind(self, prompt: Prompt, where: str, text: str) -> tuple[list[int], list[int]]:
        """A prompt's tokens, and those of a text behind it.

        Both are encoded together, since a text may begin with other tokens alone than behind another text; tokens that
        the tokenizer puts behind every text are left out. The text is encoded alone if the prompt is token ids or was
        cut within a word. InputError where the text's first token joins the prompt's end.
        """
        own: list[int] = prompt.input_ids[0].tolist()
        option = "--continuation"
        if self._tokenizer is None:
            return own, self.tokens(option, text)
        whole = prompt.messages is None  # otherwise the template wrote the special tokens
        front = prompt.text
        with calling_tokenizer(f"{option}: the tokenizer fails", InputError):
            read = self._read(front, special=whole)
            if read != own and prompt.spans is not None:  # it was cut
                front = front[: max(end for _, end in prompt.spans)]
                read = self._read(front, special=whole)
            if read != own:
                return own, self.tokens(option, text)
            both = self._read(front + text, special=whole)
        for ending in range(len(own) + 1):  # how many tokens the tokenizer puts behind a text
            kept, end = own[: len(own) - ending], own[len(own) - ending :]
            if both[: len(kept)] == kept and both[len(both) - ending :] == end and len(both) > len(own):
                return kept, both[len(kept) : len(both) - ending]
            if ending == len(own) or own[-1 - ending] not in self.special:
                break
        first = next((k for k, (a, b) in enumerate(zip(own, both, strict=False)) if a != b), len(both) - 1)
        raise InputError(
            f"{option} {shown(text)}: behind {where} it is no token of its own: where they meet they are read as "
            f"{shown(self.text(both[first]))}; begin it where a token begins"
        )

    def _read(self, text: str, *, special: bool) -> list[int]:
        return [int(i) for i in self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]]


class Labels:
    """The names of a classifier's classes, by number; empty for a config that names none."""

    def __init__(self, config: Any) -> None:
        self._names = {int(k): str(v) for k, v in (getattr(config, "id2label", None) or {}).items()}

    def order_in(self, other: Labels) -> list[int] | str:
        """The tuned model's numbers of the classes of a base, whose labels these are, or why they are other classes.
        Where a model has only the names that transformers gives (LABEL_0), or where they have not as many, by number.
        """
        names, theirs = ([one.text(k).casefold() for k in range(len(one._names))] for one in (self, other))
        unnamed = any(all(re.fullmatch(r"label_\d+", name) for name in one) for one in (names, theirs))
        if names == theirs or unnamed or len(names) != len(theirs):
            return list(range(len(theirs)))
        if set(names) == set(theirs) and len(set(names)) == len(names):
            return [theirs.index(name) for name in names]
        apart = next(k for k, name in enumerate(names) if name != theirs[k])
        before, after = (shown(one.text(apart)) for one in (self, other))
        return f"the models predict other classes: class {apart} is {before} in the base, {after} in the tuned model"

    def text(self, number: int) -> str:
        """The name of a class, or its number if it has none."""
        return clean(self._names.get(number, str(number)))

    def token(self, option: str, text: str, count: int | None = None) -> int:
        """The class that a text names, or whose number it is. InputError if there is none, or if several have that
        name. count: number of all classes, where that is not the number of names."""
        count = len(self._names) if count is None else count
        found = [number for number, name in self._names.items() if name == text]
        if len(found) > 1:
            called = ", ".join(map(str, found))
            raise InputError(f"{option} {shown(text)}: classes {called} are called so; give one by its number")
        if not found and re.fullmatch(r"\d{1,9}", text, re.ASCII):
            found = [int(text)]
        if not found or found[0] >= count:
            names = some([self.text(number) for number in range(count)], _LISTED)
            raise InputError(f"{option} {shown(text)}: no class of this model; it has {names}")
        return found[0]
