"""Repaired checkpoints, read back by transformers alone and compared with the repaired model with hooks in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import prompt_of, single_model, token_ids
from pruning import applied
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from duat_cli.analysis.prune.repair.repairer import Repairer
from duat_cli.analysis.prune.sets.apply import Applied
from duat_cli.analysis.prune.terms.ablation import Ablator
from duat_cli.analysis.prune.terms.damage import Hidden
from duat_cli.loading.model.load import load
from duat_cli.models.discovery.structure import discover, run_stack
from duat_cli.models.sweep.passes import record, removals
from duat_cli.models.sweep.rows import run_without
from duat_cli.models.terms.sites import TermId, find_sites

MODELS = ["llama", "gemma2", "gpt2", "mixtral", "bert"]


class Written:
    """A tiny checkpoint, one of its sets repaired and written."""

    def __init__(self, model_type: str, folder: Path, kinds: list[str], dtype: torch.dtype = torch.float32) -> None:
        single_model(model_type).to(dtype).save_pretrained(folder / "source")
        self.loaded = load(str(folder / "source"))
        self.model: Any = self.loaded.model
        self.structure = discover(self.model)
        self.sites = find_sites(self.structure)
        self.terms = self._terms(kinds)
        prompts = [prompt_of(token_ids(self.model, 24, seed=k)) for k in range(8)]
        metric = Hidden(self.structure)
        ablator = Ablator(self.structure, self.sites, metric)
        self.repaired = Repairer(self.model, ablator, prompts, prompts, dtype, lambda *_: None).repaired(self.terms)
        self.ids = token_ids(self.model, 11, seed=99)
        self.dense = {name: value.clone() for name, value in self.model.state_dict().items()}
        with self.repaired.in_place():
            self.expected = self._output(self.model)
            self.done: Applied = applied(self.loaded, self.structure, self.terms, folder / "out")
        kind = AutoModelForMaskedLM if model_type == "bert" else AutoModelForCausalLM
        self.again = kind.from_pretrained(folder / "out", dtype=torch.float32)
        with torch.no_grad():
            self.got = self.again(input_ids=self.ids).logits

    def _terms(self, kinds: list[str]) -> list[TermId]:
        found: list[TermId] = []
        for call, module in enumerate(self.structure.calls):
            if "neuron" in kinds:
                found += [TermId("neuron", call, n) for n in range(0, self.sites[module].count("neuron"), 3)]
            if "head" in kinds and call == 1:
                found.append(TermId("head", call, 1))
            if "expert" in kinds and call == 2 and self.sites[module].count("expert"):
                found.append(TermId("expert", call, 0))
        return found

    def _output(self, model: Any) -> Tensor:
        def forward() -> Tensor:
            return run_stack(model, self.ids)[0]

        with torch.no_grad():
            gone = removals(self.structure, self.sites, self.terms)
            return run_without(self.structure, forward, record(self.structure, forward), gone)

    @property
    def error(self) -> float:
        return float((self.got.double() - self.expected.double()).norm() / self.expected.double().norm())


@pytest.mark.parametrize("model_type", MODELS)
def test_the_written_checkpoint_gives_the_repaired_models_output(model_type: str, tmp_path: Path) -> None:
    one = Written(model_type, tmp_path, ["neuron", "head", "expert"])
    assert one.repaired.refit.values
    assert not one.repaired.dropped
    assert one.error <= 1e-6
    assert one.done.error <= 1e-6
    assert all(torch.equal(value, one.dense[name]) for name, value in one.model.state_dict().items())
    # the repair is in the file: the set alone gives another output
    without = one._output(one.model)
    assert float((without - one.expected).norm() / one.expected.norm()) > 1e-3
    neurons = one.sites[one.structure.calls[0]].count("neuron")
    assert one.done.removed_neurons == -(-neurons // 3)
    assert (one.done.bytes_after < one.done.bytes_before) == bool(neurons)  # mixtral's experts have no neurons to cut


def test_a_bfloat16_checkpoint_stays_one(tmp_path: Path) -> None:
    """New weights are rounded before they are measured, so that what is written is what was measured."""
    one = Written("llama", tmp_path, ["neuron"], torch.bfloat16)
    assert one.model.dtype == torch.float32
    assert one.repaired.refit.values
    assert one.done.dtype == "bfloat16"
    assert one.error <= 1e-6
    assert one.done.bytes_after < one.done.bytes_before


def test_a_block_goes_and_the_others_make_it_good(tmp_path: Path) -> None:
    single_model("llama").save_pretrained(tmp_path / "source")
    loaded = load(str(tmp_path / "source"))
    structure = discover(loaded.model)
    sites = find_sites(structure)
    prompts = [prompt_of(token_ids(loaded.model, 24, seed=k)) for k in range(8)]
    ablator = Ablator(structure, sites, Hidden(structure))
    terms = [TermId("block", 1)]
    tool = Repairer(loaded.model, ablator, prompts, prompts, torch.float32, lambda *_: None)
    repaired = tool.repaired(terms)
    assert repaired.after < repaired.before
    with repaired.in_place():
        done = applied(loaded, structure, terms, tmp_path / "out")
    assert done.removed_blocks == (1,)
    assert done.error <= 1e-6
    again = load(str(tmp_path / "out"))
    changed = [float(tool.damages(terms, repaired, [p], "")[0][1]) for p in prompts[:2]]
    for prompt, damage in zip(prompts, changed, strict=False):
        with torch.no_grad():
            own, new = (run_stack(m.model.base_model, prompt.input_ids)[0].double() for m in (loaded, again))
        assert float((new - own).norm() / own.norm()) == pytest.approx(damage, rel=1e-4)
