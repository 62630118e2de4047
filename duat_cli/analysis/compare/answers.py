"""Which tokens' logits `--patch` follows, where they are asked for."""

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
    """The options that say it: `target` is the token whose logit rises where the prediction becomes b's, `against` the
    one whose logit is subtracted; for all pairs, or under these fields in each pair's line."""

    target: str | None = None
    against: str | None = None
    target_field: str | None = None
    against_field: str | None = None

    def of(self, texts: Texts, file: str | None, *, patched: bool) -> list[tuple[Named, Named]] | None:
        """Both of every pair; None where none is asked for. file: what the pairs were read from."""
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
    """Of every pair."""
    found = field_beside(f"--{name}", text, field, file)
    if found is not None:
        return [found.of(texts.texts[a].line) for a, _ in texts.pairs]
    return None if text is None else [(f"--{name}", text)] * len(texts.pairs)


def tokens_of(answers: Sequence[tuple[Named, Named]], words: Words | Labels) -> list[tuple[int, int]]:
    """Of every pair the token, or class, whose logit is subtracted, and the one whose logit is followed. InputError
    where one is no single token, or no class, or both are the same."""
    found = []
    for target, against in answers:
        rising, falling = words.token(*target), words.token(*against)
        if rising == falling:
            raise InputError(f"{against[0]} {shown(against[1])}: that is the target itself; name another")
        found.append((falling, rising))
    return found
