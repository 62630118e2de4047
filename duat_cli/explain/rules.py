"""The rules of `duat check` and the lint rules of `duat lora-diff`."""

from __future__ import annotations

from duat_cli.checks.registry import all_rules
from duat_cli.checks.rule import Need, Rule
from duat_cli.checks.rules.adapter import LEVELS, LINT
from duat_cli.results.explain import Explanation

_NEEDS: dict[Need, str] = {
    "load": "the model loaded",
    "report": "a forward pass",
    "slack": "`duat prune-bound`'s sets, which take minutes",
    "behaviour": "a forward pass",
    "predictions": "a model that predicts tokens",
    "answers": "a baseline that holds answers",
    "tuned": "a tuned model that can run",
    "baseline": "--baseline",
    "adapter": "--adapter",
    "declared": "a baseline of this version of duat",
    "tokenizer": "the tokenizer",
}
_OWN_LIMIT = "within bounds of its own: of the policy, of the baseline's tolerance, or of the dtype"


def rules() -> list[Explanation]:
    return [_rule(rule) for rule in all_rules().values()]


def lint_rules() -> list[Explanation]:
    """The linter's ids; each is a rule adapter.* as well, whose levels are the linter's under other names."""
    return [_lint(name, rule) for name, rule in LINT.items()]


def _rule(rule: Rule) -> Explanation:
    limit = _OWN_LIMIT if rule.max is None else f"at most {rule.max:g} {rule.unit}".rstrip()
    facts = {"level": rule.level, "passes": limit, "needs": ", ".join(_NEEDS[need] for need in rule.needs)}
    facts |= {"allowed": ", ".join(rule.allowed or ()), "advice": rule.advice}
    said = {name: text for name, text in facts.items() if text}
    return Explanation.of(rule.id, "rule", rule.about, "duat check", unit=rule.unit or None, facts=said)


def _lint(name: str, rule: Rule) -> Explanation:
    facts = {"level": LEVELS[name], "in duat check": rule.id, "advice": rule.advice}
    return Explanation.of(name, "lint rule", rule.about, "duat lora-diff --lint", facts=facts)
