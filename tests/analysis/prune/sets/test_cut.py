"""What leaves the file where not all that is asked for can, against what is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from pruning import Case, neurons

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.edits.neurons import NeuronLayers
from duat_cli.models.terms.sites import TermId


def test_what_is_said_to_be_zeroed_is_not_removed(tmp_path: Path) -> None:
    """phi's config states the width of its FFNs, and not these numbers of heads."""
    case = Case(tmp_path, "phi")
    done = case.apply(*neurons(3, 4, 9), *(TermId("head", block, n) for block in range(3) for n in (2, 3)))
    assert (done.removed_neurons, done.removed_groups, done.zeroed) == (2, 0, 6)
    [note] = done.notes
    assert note.startswith("1 key and value head a block not removed but zeroed: no numbers of heads")


def test_heads_leave_where_neurons_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise UnsupportedModelError("no width")

    case = Case(tmp_path, "llama")
    monkeypatch.setattr(NeuronLayers, "config", refused)
    done = case.apply(*neurons(3, 4), *(TermId("head", block, n) for block in range(3) for n in (2, 3)))
    assert (done.removed_neurons, done.removed_groups, done.zeroed) == (0, 1, 3)
    assert done.notes == ("1 neuron a block not removed but zeroed: no width",)


def test_of_heads_that_cannot_leave_nothing_is_said_to_be_removed(tmp_path: Path) -> None:
    """With one head more in a block, which is zeroed in any case."""
    case = Case(tmp_path, "phi")
    lost = [TermId("head", block, n) for block in range(3) for n in (2, 3)]
    done = case.apply(*lost, TermId("head", 0, 1))
    assert (done.removed_groups, done.zeroed) == (0, 7)
    [note] = done.notes
    assert "not removed but zeroed: no numbers of heads" in note


def test_of_neurons_that_cannot_leave_nothing_is_said_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise UnsupportedModelError("no width")

    case = Case(tmp_path, "llama")
    monkeypatch.setattr(NeuronLayers, "config", refused)
    done = case.apply(*neurons(3, 4), TermId("neuron", 0, 9))
    assert done.notes == ("1 neuron a block not removed but zeroed: no width",)


def test_one_neuron_stays_where_all_are_to_go(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama")
    width = case.model.config.intermediate_size
    done = case.apply(*neurons(3, *range(width)))
    assert (done.removed_neurons, done.zeroed) == (width - 1, 3)
    assert done.notes == (f"{width - 1} neurons a block removed; those beyond, up to 1 a block, are zeroed",)
