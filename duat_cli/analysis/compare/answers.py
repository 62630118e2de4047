"""The tokens whose logits `--patch` follows, where the user names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from duat_cli.analysis.compare.request import Texts
from duat_cli.errors import InputError
from duat_cli.loading.texts import field_beside
from duat_cli.loading.words import Labels, Named, Words
from duat_cli.text import shown


@dataclass(frozen=True)
class Asked:
    """The options that name the tokens: `target` is the token whose logit rises as the prediction becomes b's,
    `against` the one whose logit is subtracted. They are the same for all pairs, or fields in each pair's line."""

    target: str | None = None
    against: str | None = None
    target_field: str | None = None
    against_field: str | None = None

    def of(self, texts: Texts, file: str | None, *, patched: bool) -> list[tuple[Named, Named]] | None:
        """Target and the token against it, for every pair; None where neither is given. file: the pairs' file."""
        target = _named("target", self.target, self.target_field, texts, file)
        against = _named("against", self.against, self.against_field, texts, file)
        if target is None and against is None:
            return None
        if target is None or against is None:
            missing = "--target" if target is None else "--against"
            raise InputError(f"{missing}: not given; --patch follows the logit of one token or class less another")
        if not patched:
            raise InputError("--target: the token whose logit --patch follows; give --patch, or leave it out")
        return list(zip(target, against, strict=True))


def _named(name: str, text: str | None, field: str | None, texts: Texts, file: str | None) -> list[Named] | None:
    """One of the two tokens, for every pair; None where it is not given."""
    found = field_beside(f"--{name}", text, field, file)
    if found is not None:
        return [found.of(texts.texts[a].line) for a, _ in texts.pairs]
    return None if text is None else [(f"--{name}", text)] * len(texts.pairs)


def tokens_of(answers: Sequence[tuple[Named, Named]], words: Words | Labels) -> list[tuple[int, int]]:
    """The token, or class, whose logit is subtracted, and the one whose logit is followed, for every pair. Raises
    InputError where a name is no single token, or no class, or where both are the same."""
    found = []
    for target, against in answers:
        rising, falling = words.token(*target), words.token(*against)
        if rising == falling:
            raise InputError(f"{against[0]} {shown(against[1])}: that is the target itself; name another")
        found.append((falling, rising))
    return found
