"""An ablator whose damage is told, prompts for it, bounds, branches and parameters alone, a tiny checkpoint whose words
are known, and one that sets are taken out of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers import single_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from duat_cli.analysis.prune.sets.apply import Applied, apply_terms
from duat_cli.analysis.prune.terms.ablation import Effect
from duat_cli.analysis.prune.terms.certified import BlockBounds, Certified
from duat_cli.analysis.prune.terms.damage import Hidden
from duat_cli.kinds import KINDS, Kind
from duat_cli.loading.model.load import LoadedModel, load
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.modality import DISCOVERY_TOKENS, probe_ids
from duat_cli.models.discovery.structure import ModelStructure, discover, probe_trace, run_stack
from duat_cli.models.edits.parameters import BlockParameters, block_parameters
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.lockstep import one_by_one
from duat_cli.models.terms.branches import BlockBranches, Branches, block_branches
from duat_cli.models.terms.sites import Sites, TermId, find_sites
from duat_cli.zoo import tiny

IDS = torch.tensor([[21, 33, 45, 17, 52]])
WORDS = [f"w{k}" for k in range(20)]


class Fake:
    """An ablator whose damage is a number a prompt, the more the larger the set."""

    def __init__(self, damage: Any) -> None:
        self.damage_of, self.metric, self.runs = damage, Hidden(None), 0  # type: ignore[arg-type]

    def place(self, prompt: Prompt) -> int:
        return prompt.line

    def record(self, ids: int) -> None:
        return None

    def removals(self, terms: Any) -> int:
        return len(list(terms))

    def damage(self, recorded: None, ids: int, removals: int) -> float:
        self.runs += 1
        return self.damage_of(ids, removals)

    def effects(self, recorded: None, ids: int, gone: Any, done: Any) -> list[Effect]:
        damages = [self.damage(recorded, ids, one) for one in gone]
        return [Effect(damage, damage / 2) for damage in damages]


def certified_bounds(structure: ModelStructure, kinds: Sequence[Kind] = KINDS) -> list[BlockBounds]:
    """One entry a block call, by passes that run alone."""
    sites = find_sites(structure)
    found = Certified(structure, sites, branches_of(structure, sites), kinds=kinds)
    with found.attached():
        one_by_one(found.passes)
    return found.bounds


def branches_of(structure: ModelStructure, sites: Sites) -> Branches:
    """Of every attention and FFN site, from one short run."""
    found: dict[nn.Module, BlockBranches] = {}

    def listen(run: BlockRun) -> None:
        module = run.parts.module
        if module not in found:
            found[module] = block_branches(run, sites[module])

    ids = probe_ids(structure.stack, DISCOVERY_TOKENS)
    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, ids), listen)
    return found


def parameters_of(structure: ModelStructure, sites: Sites) -> dict[nn.Module, BlockParameters]:
    """Of every distinct block module, from one short run."""
    written = probe_trace(structure.stack)
    return {
        block.parts.module: block_parameters(block.parts, sites[block.parts.module], written)
        for block in structure.blocks
    }


def applied(loaded: LoadedModel, structure: ModelStructure, terms: Sequence[TermId], folder: Path) -> Applied:
    """A checkpoint without the terms."""
    sites = find_sites(structure)
    return apply_terms(loaded, structure, sites, parameters_of(structure, sites), terms, folder)


def prompts(count: int) -> list[Prompt]:
    return [Prompt("", str(k), torch.zeros(1, 1, dtype=torch.long), k) for k in range(count)]


def save(model_type: str, folder: Path, bare: bool = False) -> str:
    """A tiny checkpoint with a tokenizer of a few words; `bare`: without its LM head."""
    model = tiny.tiny_model(model_type)
    (model.base_model if bare else model).save_pretrained(folder)
    ids = {word: number for number, word in enumerate(["<unk>", *WORDS], tiny.FIRST_ORDINARY_ID)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return str(folder)


class Case:
    """A tiny checkpoint on disk, loaded as duat loads it."""

    def __init__(self, folder: Path, model_type: str, dtype: torch.dtype = torch.float32) -> None:
        single_model(model_type).to(dtype).save_pretrained(folder / "source")
        (folder / "source" / "tokenizer.json").write_text("{}")
        self.loaded: LoadedModel = load(str(folder / "source"))
        self.model: Any = self.loaded.model
        self.structure: ModelStructure = discover(self.model)
        self.sites = find_sites(self.structure)
        self.folder = folder
        self.out = folder / "out"

    def apply(self, *terms: TermId) -> Applied:
        return applied(self.loaded, self.structure, terms, self.out)

    def logits(self) -> Tensor:
        """Of what was written, by transformers alone."""
        with torch.no_grad():
            return AutoModelForCausalLM.from_pretrained(self.out, dtype=torch.float32)(input_ids=IDS).logits

    def own(self) -> Tensor:
        with torch.no_grad():
            return self.model(input_ids=IDS).logits


def neurons(blocks: int, *index: int) -> list[TermId]:
    return [TermId("neuron", block, n) for block in range(blocks) for n in index]
