"""All rules, and their settings under a policy: level, threshold, and where they come from.

Every file in rules/ has a list RULES, so that a new rule needs only one file.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import replace

from duat_cli.checks import rules
from duat_cli.checks.nearest import suggestion
from duat_cli.checks.policy import Policy, select
from duat_cli.checks.rule import Rule, Settings
from duat_cli.errors import InputError
from duat_cli.text import shown

_FAMILIES = ("integrity", "behaviour", "adapter", "exactness", "bounds", "pruning", "drift")


@functools.cache
def all_rules() -> dict[str, Rule]:
    """Id -> rule. Families of causes come before those of effects; within a family the order is that of its file."""
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


def settings_of(policy: Policy, selected: Sequence[str] = ()) -> dict[str, Settings]:
    """Rule -> its settings. selected: patterns of --select, if any; every other rule is then off. Raises InputError for
    a pattern without a rule."""
    found = {name: Settings(r, r.level, r.max, r.allowed) for name, r in all_rules().items()}
    for layer, key, table in policy.rules():
        for name in select(key, found):
            old = found[name]
            found[name] = replace(
                old,
                level=table.level or old.level,
                max=old.max if table.max is None else table.max,
                allowed=old.allowed if table.allowed is None else tuple(table.allowed),
                level_source=layer.source if table.level else old.level_source,
                max_source=old.max_source if table.max is None and table.allowed is None else layer.source,
                key=(str(layer.file), key) if layer.file else old.key,
            )
    if not any(table.level != "off" for _, table in policy.bounds().values()):
        found["bounds"] = replace(found["bounds"], level="off", level_source="no [bounds] in the policy")
    if selected:
        kept = {name for pattern in selected for name in _selected(pattern)}
        for name in set(found) - kept:
            found[name] = replace(found[name], level="off", level_source="--select")
    return found


def _selected(pattern: str) -> list[str]:
    names = select(pattern, all_rules())
    if not names:
        near = suggestion(pattern, all_rules())
        raise InputError(f"--select {shown(pattern)}: no rule is named so{near}; duat explain lists all")
    return names
