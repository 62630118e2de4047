"""What a written checkpoint is worth, against transformers' own loss and counts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import prompt_of, token_ids, two_single
from pruning import applied
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from duat_cli.analysis.prune.sets import worth as module
from duat_cli.analysis.prune.sets.worth import NO_TOKENS, worth
from duat_cli.analysis.prune.terms.damage import metric_for
from duat_cli.loading.model.load import LoadedModel, load
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.structure import discover
from duat_cli.models.terms.sites import TermId
from duat_cli.results.prune.written import Written

TERMS = [TermId("neuron", block, n) for block in range(2) for n in range(12)]


def prompts(model: Any, *lengths: int) -> list[Prompt]:
    return [prompt_of(token_ids(model, n, seed=k)) for k, n in enumerate(lengths)]


def written(model_type: str, folder: Path, lengths: tuple[int, ...], **more: Any) -> tuple[LoadedModel, Written]:
    two_single(model_type).save_pretrained(folder / "source")
    loaded = load(str(folder / "source"))
    structure = discover(loaded.model)
    terms = [TermId("head", 0, 1)] if model_type == "bert" else TERMS
    done = applied(loaded, structure, terms, folder / "out")
    given = {"held_out": prompts(loaded.model, *lengths), "prompts": prompts(loaded.model, 5), "no_loss": None} | more
    given |= {"metric": metric_for(given.pop("metric", None), loaded.model, structure), "budget": 1e-3}
    return loaded, worth(loaded, done, folder / "out", kind="neuron", terms=len(terms), repaired=False, **given)


def perplexity(folder: Path, texts: list[Prompt]) -> float:
    """By transformers' own loss of each text, weighted with the tokens that it is a mean over."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = count = 0.0
    for text in texts:
        scored = text.input_ids.shape[1] - 1
        with torch.no_grad():
            total += float(model(input_ids=text.input_ids, labels=text.input_ids).loss) * scored
        count += scored
    return math.exp(total / count)


def test_perplexity_sizes_and_times(tmp_path: Path) -> None:
    loaded, found = written("llama", tmp_path, (9, 14, 1, 30))
    texts = prompts(loaded.model, 9, 14, 30)
    texts[2] = prompt_of(token_ids(loaded.model, 30, seed=3))
    assert found.perplexity_before == pytest.approx(perplexity(tmp_path / "source", texts), rel=1e-5)
    assert found.perplexity_after == pytest.approx(perplexity(tmp_path / "out", texts), rel=1e-5)
    assert found.perplexity_before != pytest.approx(found.perplexity_after, rel=1e-4)
    assert (found.measured_on, found.prompts, found.tokens) == ("held out", 4, 8 + 13 + 29)
    for folder, parameters, size in (
        ("source", found.parameters_before, found.bytes_before),
        ("out", found.parameters_after, found.bytes_after),
    ):
        tensors = load_file(tmp_path / folder / "model.safetensors")
        assert (parameters, size) == (sum(t.numel() for t in tensors.values()), sum(t.nbytes for t in tensors.values()))
    assert found.removed_neurons == 12
    assert found.seconds_before > 0
    assert found.seconds_after > 0
    assert found.timed_tokens == 54


@pytest.mark.parametrize(
    ("model_type", "metric", "auto"),
    [("llama", "kl", AutoModelForCausalLM), ("llama", "hidden", AutoModel), ("bert", "kl", AutoModelForMaskedLM)],
)
def test_damage_is_that_of_the_file(model_type: str, metric: str, auto: Any, tmp_path: Path) -> None:
    """By transformers' own loading: KL of the tokens, or the relative change of the last states."""
    loaded, found = written(model_type, tmp_path, (9, 14, 30), metric=metric)
    models = [auto.from_pretrained(tmp_path / name, dtype=torch.float64) for name in ("source", "out")]
    damages = []
    for text in prompts(loaded.model, 9, 14, 30):
        with torch.no_grad():
            one, two = (m(input_ids=text.input_ids)[0][0] for m in models)
        p, q = one.log_softmax(-1), two.log_softmax(-1)
        damages.append(float((p.exp() * (p - q)).sum(-1).mean() if metric == "kl" else (two - one).norm() / one.norm()))
    assert found.damage == pytest.approx(sum(damages) / 3, rel=1e-3)
    assert found.exceeded == sum(damage > 1e-3 for damage in damages) > 0


def test_times_are_medians_of_alternating_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is told: the first round does not count, and one slow run moves no median."""
    clock, order = [0.0], list[str]()

    def runs(name: str, times: list[float]) -> Any:
        left = iter(times)

        def run() -> None:
            order.append(name)
            clock[0] += next(left)

        return run

    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    found = module._timed([runs("a", [99.0, 1, 2, 3, 4, 5, 6, 70]), runs("b", [50.0] + [8.0] * 7)], "cpu")
    assert found == [4.0, 8.0]
    assert len(order) == 16
    assert [order[k : k + 2] for k in (0, 2, 4)] == [["b", "a"], ["a", "b"], ["b", "a"]]


def test_without_held_out_prompts_those_that_chose_the_set_are_run_and_named(tmp_path: Path) -> None:
    _, found = written("llama", tmp_path, ())
    assert (found.measured_on, found.prompts, found.tokens) == ("chose the set", 1, 4)
    assert found.timed_tokens == 5


@pytest.mark.parametrize(
    ("model_type", "more", "reason"),
    [
        ("bert", {"no_loss": "BertForMaskedLM does not predict the next token"}, "does not predict the next token"),
        ("llama", {"held_out": [], "prompts": None}, NO_TOKENS),
    ],
)
def test_no_perplexity_has_a_reason(model_type: str, more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    if more.get("prompts", 1) is None:
        more = {**more, "prompts": [prompt_of(torch.tensor([[33]]))]}
    _, found = written(model_type, tmp_path, (7,), **more)
    assert found.perplexity_before is None
    assert found.perplexity_after is None
    assert all(reason in why for why in found.reasons.values())
    assert set(found.reasons) == {"perplexity_before", "perplexity_after"}


@pytest.mark.parametrize(("loss", "says"), [(1e4, "is no number"), (math.inf, "not finite"), (math.nan, "not finite")])
def test_a_loss_without_an_exponential(loss: float, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Loss, "loss", lambda *_: loss)
    _, found = written("llama", tmp_path, (7,))
    assert found.perplexity_after is None
    assert says in found.reasons["perplexity_after"]
