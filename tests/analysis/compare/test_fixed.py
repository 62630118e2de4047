"""Losses of a model whose dynamic parameters are held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from function_modes import SOFTMAX, Kept
from helpers import as_loaded, prompt_of, quiet, token_ids, two_deep, two_single
from paging import in_parts, two_saved, whole
from torch import Tensor, nn

from duat_cli.analysis.compare import captured
from duat_cli.analysis.compare.fixed import fixed
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.loading.model.load import LoadedModel
from duat_cli.results.compare.report import FixedParameters
from duat_cli.zoo import tiny


def found_of(loaded: LoadedModel, count: int = 5, tokens: int = 7) -> FixedParameters:
    prompts = [prompt_of(token_ids(loaded.model, tokens, seed)) for seed in range(count)]
    report = fixed(loaded, prompts, True, quiet)
    assert report.fixed is not None
    assert report.certificate.exact
    return report.fixed


def loss_of(found: FixedParameters, held: str, source: str) -> float:
    [run] = [run for run in found.runs if (run.held, run.source) == (held, source)]
    assert run.loss is not None
    return run.loss


def test_losses_are_those_of_the_model_whose_softmax_is_told_what_to_give() -> None:
    model = two_single("llama")
    found = found_of(as_loaded(model))
    ids = [token_ids(model, 7, seed) for seed in range(5)]
    model.set_attn_implementation("eager")

    def loss(k: int, given: list[Tensor] | None) -> tuple[float, list[Tensor]]:
        with torch.no_grad(), Kept(SOFTMAX, given) as mode:
            logits = model(input_ids=ids[k]).logits[0, :-1].double()
        return float(nn.functional.cross_entropy(logits, ids[k][0, 1:])), mode.values

    live = [loss(k, None) for k in range(5)]
    assert found.live == pytest.approx(sum(one for one, _ in live) / 5, rel=1e-5)
    weights = [values for _, values in live]
    mean = [torch.stack(same).mean(dim=0) for same in zip(*weights, strict=True)]
    other = [loss(k, weights[(k + 1) % 5])[0] for k in range(5)]
    average = [loss(k, mean)[0] for k in range(5)]
    assert loss_of(found, "H", "another prompt") == pytest.approx(sum(other) / 5, rel=1e-5)
    assert loss_of(found, "H", "mean") == pytest.approx(sum(average) / 5, rel=1e-5)
    assert found.holds
    assert all(abs(run.change) < 1e-5 for run in found.runs if run.source == "own")
    for run in found.runs:
        assert run.change == pytest.approx(run.loss - found.live, abs=1e-9)
        if run.source == "own" and run.low is None:  # exactly nothing for every prompt
            assert run.reasons["low"] == "too many prompts differ by the same"
            continue
        assert run.low is not None
        assert run.high is not None
        assert run.change is not None
        assert run.low <= run.change <= run.high


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "mixtral", "bloom", "qwen3"])
def test_own_values_give_back_the_live_loss(model_type: str) -> None:
    found = found_of(as_loaded(two_single(model_type)), count=2)
    assert found.own_error < 1e-5
    assert loss_of(found, "H and norms", "another prompt") != pytest.approx(found.live, rel=1e-4)
    assert all(run.low is None and run.reasons["low"] == "needs 5 prompts" for run in found.runs)


def test_a_wrong_own_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duat_cli.analysis.compare.fixed.of_kinds", lambda block, _kinds: captured.Held(
        [captured.StoredRows(rows.matrix.flip(0)) for rows in block.attention]))  # fmt: skip
    assert not found_of(as_loaded(two_single("llama")), count=2).holds


def test_a_model_that_overflows_with_held_values_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Falcon-H1 does with norm scales of another prompt; here the last of 2 live and 12 held passes has no loss."""
    losses = iter([3.0] * 13)
    monkeypatch.setattr("duat_cli.analysis.compare.fixed.mean_loss", lambda *_: next(losses, float("nan")))
    *sound, last = found_of(as_loaded(two_single("llama")), count=2).runs
    assert (last.held, last.source, last.loss, last.change) == ("H and norms", "mean", None, None)
    assert last.reasons["loss"] == "the model overflows with these parameters held, for 1 of 2 prompts"
    assert all(run.loss == 3.0 for run in sound)


def test_weights_read_block_by_block_give_the_same_losses(tmp_path: Path) -> None:
    expected = found_of(whole(two_saved("llama", tmp_path)))
    with in_parts(tmp_path) as loaded:
        assert found_of(loaded) == expected


def test_what_cannot_be_held_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = as_loaded(two_single("llama"))
    some = [prompt_of(token_ids(loaded.model, n)) for n in (7, 5)]
    with pytest.raises(InputError, match=r"prompts of 5, 7 tokens; .* use --max-tokens 5"):
        fixed(loaded, some, True, quiet)
    bundled = fixed(loaded, some, False, quiet)
    assert [prompt.tokens for prompt in bundled.prompts] == [5, 5]
    with pytest.raises(InputError, match="one prompt has no other"):
        fixed(loaded, some[:1], True, quiet)
    with pytest.raises(InputError, match="one token has no loss"):
        fixed(loaded, [prompt_of(token_ids(loaded.model, 1))] * 2, True, quiet)
    with pytest.raises(UnsupportedModelError, match="no next-token model"):
        found_of(as_loaded(two_single("bert")), count=2)
    with pytest.raises(UnsupportedModelError, match="writes with its decoder"):
        found_of(as_loaded(two_single("bart")), count=2)
    monkeypatch.setattr(captured, "KEPT_BYTES", 100)
    with pytest.raises(InputError, match="use fewer prompts or --max-tokens"):
        found_of(loaded)


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "minimax"])
def test_mixers_take_the_same_operations_under_a_head(model_type: str) -> None:
    """A class with a head may name no `use_cache`: with a cache a mixer would run other code than it was proved in."""
    assert found_of(as_loaded(two_deep(tiny.tiny_model(model_type))), count=2).holds


def test_router_weights_are_held_in_a_third_step() -> None:
    """The same model, its routers told what to give: the second way patches the router's own module."""
    model = two_single("mixtral")
    found = found_of(as_loaded(model), count=2)
    assert [run.held for run in found.runs[-3:]] == ["H, norms and routers"] * 3
    assert found.holds
    live = [run.change for run in found.runs if run.source == "own"]
    assert all(abs(change) < 1e-5 for change in live)
    assert loss_of(found, "H, norms and routers", "mean") != pytest.approx(
        loss_of(found, "H and norms", "mean"), rel=1e-5
    )
    assert {run.held for run in found_of(as_loaded(two_single("llama")), count=2).runs} == {"H", "H and norms"}
