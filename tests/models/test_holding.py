"""Attributes hold other values for a while, and no longer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from duat_cli.models.holding import holding


def test_values_are_held_and_given_back() -> None:
    owner = SimpleNamespace(one=1, two=2)
    with holding(owner, one=3):
        assert (owner.one, owner.two) == (3, 2)
        owner.two = 4
    assert (owner.one, owner.two) == (1, 4)


def test_values_are_given_back_after_an_error() -> None:
    owner = SimpleNamespace(one=1)
    with pytest.raises(ZeroDivisionError), holding(owner, one=0):
        owner.one = 1 // owner.one
    assert owner.one == 1


def test_an_attribute_that_is_not_there_is_an_error() -> None:
    owner = SimpleNamespace(one=1)
    with pytest.raises(AttributeError, match="other"), holding(owner, one=2, other=3):
        pass
    assert owner.one == 1
