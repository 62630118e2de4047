"""A repair and the damage with it, on the demo's trained weights and on random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import picture_texts
import pytest
import torch

from duat_cli.analysis.prune.repair import repairer as module
from duat_cli.analysis.prune.repair.refit import Refit, Refitting
from duat_cli.analysis.prune.repair.repairer import Repairer
from duat_cli.analysis.prune.terms.ablation import Ablator
from duat_cli.analysis.prune.terms.damage import Hidden, metric_for
from duat_cli.loading.model.load import LoadedModel, load
from duat_cli.loading.model.tokenizer import load_tokenizer
from duat_cli.loading.prompts import Prompt, default_prompts, encode, holdout_prompts, limits
from duat_cli.models.discovery.structure import discover
from duat_cli.models.terms.sites import TermId, find_sites

BLOCKS = 3  # of the demo
HALF = [TermId("neuron", block, n) for block in range(BLOCKS) for n in range(0, 384, 2)]


@pytest.fixture(scope="module")
def loaded(three: Path) -> LoadedModel:
    return load(str(three / "demo"))


@pytest.fixture(scope="module")
def ablator(loaded: LoadedModel) -> Ablator:
    structure = discover(loaded.model)
    return Ablator(structure, find_sites(structure), metric_for("kl", loaded.model, structure))


def texts(loaded: LoadedModel, *, held_out: bool) -> list[Prompt]:
    known, tokenizer = limits(loaded.model), load_tokenizer(Path(loaded.files.path))
    read = holdout_prompts()[:20] if held_out else default_prompts()
    return encode(tokenizer, read, None, known.max_positions, known.vocab_size)


def quiet(done: int, total: int, what: str) -> None:
    pass


def repairer(loaded: LoadedModel, ablator: Ablator) -> Repairer:
    prompts = texts(loaded, held_out=False)
    return Repairer(loaded.model, ablator, prompts[:4], prompts, torch.bfloat16, quiet)


def test_a_repair_helps_prompts_that_took_no_part(loaded: LoadedModel, ablator: Ablator) -> None:
    """Every other neuron of trained weights: damage falls by a third at least, in-sample by more."""
    tool = repairer(loaded, ablator)
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    found = tool.repaired(HALF)
    assert not found.dropped
    assert not tool.left
    assert found.after < 0.6 * found.before
    damages = tool.damages(HALF, found, texts(loaded, held_out=True), "")
    without, with_it = (sum(side) / len(damages) for side in zip(*damages, strict=True))
    assert with_it < 0.67 * without
    assert all(torch.equal(value, before[name]) for name, value in loaded.model.state_dict().items())
    with found.in_place():
        changed = [n for n, v in loaded.model.state_dict().items() if not torch.equal(v, before[n])]
        assert sum("down_proj" in name for name in changed) == BLOCKS
        weight = loaded.model.model.layers[2].mlp.down_proj.weight
        assert not bool(weight[:, ::2].any())


def test_what_is_kept_of_the_dense_model_changes_nothing(
    loaded: LoadedModel, ablator: Ablator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for nothing the dense model runs again, for every set and prompt."""
    prompts = texts(loaded, held_out=True)[:3]
    passes: list[int] = []
    plain = Ablator.record

    def record(self: Ablator, ids: torch.Tensor) -> Any:
        passes.append(1)
        return plain(self, ids)

    monkeypatch.setattr(Ablator, "record", record)
    found, counts = [], []
    for room in (1 << 30, 0):
        monkeypatch.setattr(module, "KEPT_BYTES", room)
        tool = Repairer(loaded.model, ablator, prompts, prompts, torch.float32, quiet)
        found.append(tool.repaired(HALF))
        counts.append(len(passes))
    kept, again = found
    assert counts[0] == 3  # of the prompts, which are also those of the halves
    assert counts[1] - counts[0] == 6
    assert kept.refit.ridges == again.refit.ridges
    assert torch.allclose(torch.tensor(kept.damages), torch.tensor(again.damages), rtol=1e-4)
    for parameter, value in kept.refit.values.items():
        assert float((value - again.refit.values[parameter]).norm() / value.norm()) < 1e-5


def test_the_halves_are_not_asked_above_the_limit(
    loaded: LoadedModel, ablator: Ablator, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, fits = texts(loaded, held_out=True)[:2], list[int]()
    weight = loaded.model.model.layers[1].mlp.down_proj.weight

    def refit(self: Refitting, *given: Any) -> Refit:
        fits.append(self.tokens)
        return Refit(values={weight: weight.data})

    monkeypatch.setattr(Refitting, "refit", refit)
    monkeypatch.setattr(module, "_lower", lambda damages: True)
    tool = Repairer(loaded.model, ablator, prompts, prompts, torch.bfloat16, quiet)
    damage = tool.repaired(HALF).after
    assert len(fits) == 3
    assert not tool.repaired(HALF, 0.9 * damage).dropped
    assert fits[3:] == [tool.tokens]
    tool.repaired(HALF, 1.1 * damage)
    assert len(fits) == 7


def test_a_repair_that_does_not_help_is_dropped(
    loaded: LoadedModel, ablator: Ablator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a repaired set is never worse than the set alone on the prompts that choose sets."""
    weight = loaded.model.model.layers[1].mlp.down_proj.weight
    monkeypatch.setattr(Refitting, "refit", lambda *_: Refit(values={weight: 3 * weight.data}))
    tool = repairer(loaded, ablator)
    found = tool.repaired(HALF)
    assert found.dropped
    assert found.after == found.before
    with found.in_place():
        assert loaded.model.model.layers[1].mlp.down_proj.weight.data_ptr() == weight.data_ptr()
    assert all(before == after for before, after in tool.damages(HALF, found, texts(loaded, held_out=True)[:3], ""))


def test_a_repair_that_does_not_help_unfitted_prompts_is_dropped(
    loaded: LoadedModel, ablator: Ablator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fitted to all prompts it helps them; fitted to one half it harms the other."""
    prompts = texts(loaded, held_out=False)[:4]
    weight, plain = loaded.model.model.layers[1].mlp.down_proj.weight, Refitting.refit

    def refit(self: Refitting, *given: Any) -> Refit:
        return plain(self, *given) if self.tokens == whole else Refit(values={weight: 3 * weight.data})

    tool = Repairer(loaded.model, ablator, prompts, prompts, torch.bfloat16, quiet)
    whole = tool.tokens
    assert not tool.repaired(HALF).dropped
    monkeypatch.setattr(Refitting, "refit", refit)
    found = tool.repaired(HALF)
    assert found.dropped
    assert sum(after for _, after in found.damages) < sum(before for before, _ in found.damages)
    others = Repairer(loaded.model, ablator, texts(loaded, held_out=True)[:4], prompts, torch.bfloat16, quiet)
    assert not others.repaired(HALF).dropped  # the prompts that choose sets are not fitted


def test_a_layer_that_does_not_run_once_for_every_token_is_named(loaded: LoadedModel, ablator: Ablator) -> None:
    tool = repairer(loaded, ablator)
    [one] = tool.skipped([Refit(irregular={2}), Refit()])
    assert one.what == "a layer of block 2"


def test_features_of_a_picture_added_between_blocks_are_in_what_layers_read() -> None:
    """Qwen3-VL adds some behind its first block. Without a neuron that does nothing the model is the dense one, and no
    layer has anything to make good."""
    model = picture_texts.build("qwen3_vl").double()
    picture_texts.blocks_of(model)[0].mlp.down_proj.weight[:, 3] = 0
    given = [picture_texts.doubled(picture_texts.inputs("qwen3_vl", model, seed)) for seed in range(4)]
    structure = discover(model, given[0])
    ablator = Ablator(structure, find_sites(structure, given[0]), Hidden(structure))
    prompts = [Prompt("", str(k), one["input_ids"], k, prepared=one) for k, one in enumerate(given)]
    found = Repairer(model, ablator, prompts, prompts, torch.float64, quiet).repaired([TermId("neuron", 0, 3)])
    for parameter, value in found.refit.values.items():
        assert torch.allclose(value, parameter, rtol=1e-6, atol=1e-9)
