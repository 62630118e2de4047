"""All rules: every file in rules/ has a list RULES, so that a new rule is one file."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from duat_cli.checks import rules
from duat_cli.checks.rule import Rule

_FAMILIES = ("integrity", "behaviour", "adapter", "exactness", "bounds", "pruning", "drift")


@functools.cache
def all_rules() -> dict[str, Rule]:
    """Id -> rule: causes before what follows from them, within a family as its file has them."""
    found: dict[str, Rule] = {}
    for module in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
        for rule in importlib.import_module(module.name).RULES:
            if rule.id in found:
                raise ValueError(f"two rules are named {rule.id}")
            found[rule.id] = rule
    return dict(sorted(found.items(), key=lambda pair: _place(pair[0])))


def _place(rule: str) -> int:
    family = rule.partition(".")[0]
    return _FAMILIES.index(family) if family in _FAMILIES else len(_FAMILIES)
