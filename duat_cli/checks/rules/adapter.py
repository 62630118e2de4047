"""Rules about an adapter: a rule for each id of its linter, under --adapter."""

from __future__ import annotations

from collections.abc import Iterable

from duat_cli.checks.policy import Level
from duat_cli.checks.rule import Evidence, Measurement, Rule, Settings

# the linter's id -> what it is about, what to do
_ERRORS = {
    "ambiguous-layout": ("factors whose shapes fit two layouts", "Save the adapter again with PEFT."),
    "alpha-zero": ("a scaling of zero", "Set lora_alpha in adapter_config.json to what it was trained with."),
    "config": ("fields of adapter_config.json that contradict the tensors", "Restore the config of the training run."),
    "convolution": ("factors of convolutions, which duat does not read", "Check these modules by hand."),
    "dora-flag-missing": ("magnitudes without use_dora", "Set use_dora to true in adapter_config.json."),
    "dora-magnitude-missing": ("use_dora without magnitudes", "Save the adapter again with all its tensors."),
    "factor-missing": ("an A without its B, or a B without its A", "Save the adapter again with all its tensors."),
    "foreign-code": (
        "modules that adapter_config.json names for import",
        "Set the field to null, or load the adapter only where you trust that module.",
    ),
    "magnitude": (
        "matrices whose change is more than ten times their norm, above once a warning",
        "Check scaling, learning rate and the base: such a change leaves little of the base.",
    ),
    "non-finite": ("NaN and infinite values", "Go back to the last sound adapter."),
    "rank-mismatch": ("ranks that contradict adapter_config.json", "Restore the config of the training run."),
    "shape-mismatch": ("factors that do not fit the base", "Give the base that the adapter was trained on."),
    "target-absent": ("modules that the base does not have", "Give the base that the adapter was trained on."),
    "two-tied-deltas": ("two changes of one tied weight", "Keep one of them, or untie the base."),
    "unknown-tensor": ("tensors that no method of PEFT has", "Remove them, or save the adapter again with PEFT."),
}
_WARNINGS = {
    "mutated-base": ("an initialisation that changed the base", "Publish the adapter converted to the original base."),
    "expert-keys": ("experts under keys that name no parameter", "Check that your runtime reads them."),
    "module-saved-by-accident": ("modules that a pattern saved by accident", "Name the module in full."),
    "target-unmatched": (
        "targets, or layers of them, without a tensor",
        "Find out whether the tensors were lost at saving.",
    ),
    "tied-weights": ("a change of a tied weight", "Decide whether it is meant at both places before you merge."),
    "untouched": ("modules that training never touched", "Leave them out of target_modules."),
}
_NOTES = {
    "base-name": ("the name of another base in adapter_config.json", "Check that the base given is a copy of it."),
    "embedding-saved": ("an embedding saved whole", "Drop it, if the vocabulary was not resized."),
    "key-dialect": ("keys in another library's dialect", "Save the adapter again with PEFT."),
    "needs-base": ("what cannot be checked without the base", "Give the base as MODEL."),
}


def _found(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    found = [f for f in evidence.adapter or () if LINT.get(f.rule) is settings.rule]
    # a finding that the linter itself takes lighter than its rule warns
    lighter: dict[str, Level] = {"warning": "warn"} if settings.rule.level == "error" else {}
    key = (evidence.adapter_file, "")
    return [Measurement(1, f.message, where=f.where, level=lighter.get(f.level), key=key) for f in found]


def _rules(table: dict[str, tuple[str, str]], level: Level) -> dict[str, Rule]:
    return {
        name: Rule(
            f"adapter.{name.replace('-', '_')}", about, advice, _found, ("adapter",), level=level, unit="findings"
        )
        for name, (about, advice) in table.items()
    }


LINT = _rules(_ERRORS, "error") | _rules(_WARNINGS, "warn") | _rules(_NOTES, "off")
"""The linter's id -> its rule."""
LEVELS = {name: {"error": "error", "warn": "warning", "off": "note"}[rule.level] for name, rule in LINT.items()}
"""The linter's own names of them."""
RULES = list(LINT.values())
