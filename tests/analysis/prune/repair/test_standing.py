"""What stands in for removed terms as biases: by hand with numpy, and read back from a written checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import prompt_of, single_model, token_ids
from torch import Tensor

from duat_cli.analysis.plan.task import PruneOptions
from duat_cli.analysis.prune.repair.standing import biases
from duat_cli.analysis.prune.run import PruneOutcome, prune_bound
from duat_cli.analysis.prune.sets.card import ROUNDED_MEANS
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.model.load import load
from duat_cli.models.discovery.structure import run_stack
from duat_cli.models.terms.sites import TermId

TERMS = [TermId("neuron", 0, 3), TermId("neuron", 0, 7), TermId("head", 1, 2), TermId("neuron", 2, 0)]


def outcome(model_type: str, folder: Path, stored: torch.dtype = torch.float32) -> PruneOutcome:
    """Of a tiny checkpoint, means taken over two prompts."""
    single_model(model_type).to(stored).save_pretrained(folder / "source")
    loaded = load(str(folder / "source"))
    prompts = [prompt_of(token_ids(loaded.model, 9, seed=k)) for k in range(2)]
    options = PruneOptions(("neuron", "head"), joint=True, probes=2, measure=0, ablate_mean=True, remove=0.1)
    return prune_bound(loaded, prompts, [], options, lambda *_: None)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> PruneOutcome:
    return outcome("gpt2", tmp_path_factory.mktemp("gpt2"))


def inputs_of(outcome: PruneOutcome, name: str) -> Any:
    """What a layer of the dense model reads under the prompts, (tokens, inputs) float64."""
    model: Any = outcome.session.loaded.model
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    with torch.no_grad():
        for prompt in outcome.prompts:
            model(input_ids=prompt.input_ids)
    handle.remove()
    return torch.cat(seen).double().numpy()


@pytest.mark.parametrize(("name", "gone"), [("h.0.mlp.c_proj", [3, 7]), ("h.1.attn.c_proj", None)])
def test_a_bias_takes_the_mean_of_what_is_gone_through_the_layer(
    gpt2: PruneOutcome, name: str, gone: list[int] | None
) -> None:
    model: Any = gpt2.session.loaded.model
    layer = model.get_submodule(f"transformer.{name}")
    values = biases(model, gpt2.ablator, TERMS, torch.float32)
    width = model.config.n_embd // model.config.n_head
    gone = list(range(2 * width, 3 * width)) if gone is None else gone
    read, weight = inputs_of(gpt2, f"transformer.{name}"), layer.weight.detach().double().numpy()
    expected = layer.bias.detach().double().numpy() + read[:, gone].mean(axis=0) @ weight[gone]
    np.testing.assert_allclose(values[layer.bias].numpy(), expected, atol=1e-6)
    assert np.abs(expected - layer.bias.detach().numpy()).max() > 1e-3
    kept = [k for k in range(len(weight)) if k not in gone]
    assert torch.equal(values[layer.weight][kept], layer.weight[kept])
    assert not values[layer.weight][gone].any()


def test_the_written_checkpoint_does_the_damage_that_was_measured(gpt2: PruneOutcome, tmp_path: Path) -> None:
    model = gpt2.session.loaded.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    every = [TermId("neuron", call, 5) for call in range(3)]  # these leave the file
    written = gpt2.applied([*TERMS, *every], tmp_path / "out")
    assert (written.removed_neurons, written.repaired) == (1, False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    again = load(str(tmp_path / "out"))
    gone = gpt2.ablator.removals([*TERMS, *every])
    for prompt in gpt2.prompts:
        expected = gpt2.ablator.damage(gpt2.ablator.record(prompt.input_ids), prompt.input_ids, gone)
        with torch.no_grad():
            own, new = (run_stack(m, prompt.input_ids).logits for m in (model, again.model))
        assert gpt2.ablator.metric.measured(own, new, prompt.input_ids) == pytest.approx(expected, rel=1e-3)


def test_a_file_that_rounds_the_means_says_so(gpt2: PruneOutcome, tmp_path: Path) -> None:
    assert ROUNDED_MEANS not in gpt2.applied(TERMS, tmp_path / "single").notes
    half = outcome("gpt2", tmp_path, torch.bfloat16)
    assert ROUNDED_MEANS in half.applied(TERMS, tmp_path / "half").notes


def test_a_layer_without_bias_is_named(tmp_path: Path) -> None:
    found = outcome("llama", tmp_path)
    with pytest.raises(UnsupportedModelError, match="block 1: the output projection of attention has no bias"):
        found.applied([TermId("head", 1, 2)], tmp_path / "out")
    assert not (tmp_path / "out").exists()
