"""Patterns over paths of a report: what they match, what they leave out, and what they ask for."""

from __future__ import annotations

import pytest

from duat_cli.checks.paths import asks_for, is_known, leaves_out, matches, may_be_negative
from duat_cli.checks.policy import read_policy
from duat_cli.checks.registry import settings_of
from duat_cli.errors import InputError


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.**", "a.b.c", True),
        ("**", "a", True),
        ("**.c", "a.b.c", True),
        ("a.**.c", "a.c", True),
        ("blocks.[0-3].x", "blocks.2.x", True),
        ("blocks.1?.x", "blocks.12.x", True),
        ("blocks.1?.x", "blocks.1.x", False),
        ("a", "a.b", False),
        ("", "a", False),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


def test_wildcards_do_not_reach_the_nulls() -> None:
    """A policy from before they were there bounds what it did; one that names them bounds them."""
    path = "blocks.0.null.uniform.coupling.effective_context"
    assert not matches("blocks.**.effective_context", path)
    assert not matches("blocks.*.*.*.*.effective_context", path)
    assert matches("blocks.*.null.*.coupling.effective_context", path)
    assert is_known("blocks.*.null.reinitialised.operator.effective_heads")
    assert matches("weights.**", "weights.model.null.weight")  # a tensor's name is no group of the report


def test_what_a_bound_asks_for() -> None:
    assert asks_for("blocks.*.null.reinitialised.operator.effective_heads") == {"null"}
    assert asks_for("blocks.*.null.uniform.operator.effective_heads") == set()
    assert asks_for("blocks.*.null.*.operator.effective_heads") == asks_for("blocks.*.null.**") == {"null"}
    assert asks_for("blocks.*.null.u*.operator.effective_heads") == set()
    assert asks_for("blocks.*.*.*.*.effective_heads") == {"per_prompt"}  # wildcards do not reach the nulls
    assert asks_for("blocks.*.operator.stable_rank") == {"spectrum"}
    assert asks_for("terms.*.share") == {"terms"}
    assert asks_for("blocks.*.prompts.*.terms.linear.share") == {"per_prompt"}
    assert asks_for("blocks.*.operator.s*") == asks_for("blocks.*.*.s*_[nr]*") == {"spectrum"}
    assert asks_for("blocks.*.prompts.*.operator.s*") == {"spectrum", "per_prompt"}
    assert asks_for("blocks.*.spreads.operator.spectral_norm.high") == {"spectrum", "per_prompt"}
    assert asks_for("*.0.share") == asks_for("t*.*.share") == {"terms"}
    assert asks_for("blocks.*.operator.*") == asks_for("**") == set()
    assert leaves_out("blocks.*.operator.*") == leaves_out("**") == ["spectral_norm", "stable_rank"]
    assert leaves_out("blocks.*.operator.s*") == leaves_out("blocks.*.density.*") == []


def test_which_fields_may_be_negative() -> None:
    """Shares of a sum of vectors, and their spreads; a pattern that ends in a wildcard may be for such."""
    for pattern in ("blocks.*.terms.*.share", "summary.linear_share", "blocks.*.terms.own.s*", "terms.*.share"):
        assert may_be_negative(pattern), pattern
    for pattern in ("blocks.*.spreads.terms.linear.share.low", "blocks.*.coupling.*", "**"):
        assert may_be_negative(pattern), pattern
    for pattern in ("blocks.*.terms.own.norm", "blocks.*.range.share", "blocks.*.coupling.first_token_share"):
        assert not may_be_negative(pattern), pattern


def test_hostile_patterns_end_soon() -> None:
    assert not is_known("**." * 30 + "x")
    assert not is_known("*a" * 190)
    policy = read_policy("default")
    with pytest.raises(InputError, match="no rule is named so"):
        settings_of(policy, ["*a" * 90])


def test_wildcards_do_not_reach_where_h_comes_from() -> None:
    assert asks_for("blocks.*.*.stable_rank") == {"spectrum"}
    assert asks_for("blocks.*.routing.stable_rank") == {"routing"}
    assert asks_for("blocks.*.*.effective_context") == set()
    assert asks_for("blocks.*.heads.uniform.effective_context") == {"heads"}
