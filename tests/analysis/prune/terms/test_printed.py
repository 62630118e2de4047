"""Eq. 16 against dense matrices in float64, and against ablations: the bound, its other way, and the sum of norms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import Detached, InDouble, double_model, single_model, token_ids, two_single
from removal import OWN
from torch import Tensor, nn

from duat_cli.analysis.prune.terms.ablation import mean_values
from duat_cli.analysis.prune.terms.damage import Hidden
from duat_cli.analysis.prune.terms.printed import Printed, PrintedReader
from duat_cli.analysis.prune.terms.responses import TermList
from duat_cli.kinds import KINDS
from duat_cli.models import budgets
from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.sweep.passes import Means, removals
from duat_cli.models.terms.sites import TermId, find_sites

HEADS = {"llama": 4, "gpt2": 4}
SETS = {
    "neurons": [TermId("neuron", b, k) for b in range(3) for k in range(0, 20, 1 + b)],
    "heads": [TermId("head", 0, 1), TermId("head", 1, 0), TermId("head", 1, 3), TermId("head", 2, 2)],
    "neurons and heads": [TermId("neuron", 1, 5), TermId("head", 0, 2), TermId("head", 1, 2), TermId("neuron", 2, 0)],
    "FFN": [TermId("ffn", 0, 0)],
    "FFNs": [TermId("ffn", 0, 0), TermId("ffn", 2, 0)],
    "attention": [TermId("attention", 0, 0)],
    "attentions": [TermId("attention", 1, 0), TermId("attention", 2, 0)],
    "block": [TermId("block", 0)],
    "blocks": [TermId("block", 0), TermId("block", 1)],
}


@dataclass
class Read:
    model: Any
    structure: ModelStructure
    sites: Any
    ids: Tensor


@functools.cache
def read(model_type: str, make: Callable[[str], Any] = single_model) -> Read:
    model = make(model_type)
    structure = discover(model)
    return Read(model, structure, find_sites(structure), token_ids(structure.stack))


def printed(here: Read, sets: list[list[TermId]], means: Means | None = None, seed: int = 0) -> list[Printed]:
    gone = [removals(here.structure, here.sites, terms, means) for terms in sets]
    singles = {
        t: removals(here.structure, here.sites, [t], means)[t.block] for s in sets for t in s if t.kind != "neuron"
    }
    reader = PrintedReader(here.sites, dict(enumerate(sets)), dict(enumerate(gone)), singles, seed)
    with here.structure.rig().active() as rig:
        rig.run(lambda: run_stack(here.structure.stack, here.ids), reader)
    return list(reader.found().values())


# -- by dense matrices ---------------------------------------------------------------------------------------


@dataclass
class DenseBlock:
    """All of one block by plain hooks and automatic differentiation, norms and softmax held; float64."""

    before: Tensor  # (N, M)
    after: Tensor
    mixed: Tensor  # what the heads give, (N, h d)
    slope: Tensor  # its derivative by the block's input, (N h d, N M)
    output: Tensor  # O, (h d, M)
    activations: Tensor  # (N, I)
    down: Tensor  # (I, M)
    biases: tuple[Tensor | float, Tensor | float]

    def heads(self, gone: list[int], heads: int) -> Tensor:
        """O without some heads."""
        kept = self.output.clone().reshape(heads, -1, self.output.shape[1])
        kept[gone] = 0
        return kept.flatten(0, 1)


def dense(model: Any, ids: Tensor, model_type: str) -> list[DenseBlock]:
    own, found = OWN[model_type], []
    for block in model.get_submodule(own.blocks):
        caught: dict[str, Tensor] = {}

        def leaf(module: nn.Module, args: Any, kwargs: Any, caught: dict[str, Tensor] = caught) -> Any:
            caught["x"] = args[0].detach().clone().requires_grad_()
            return (caught["x"], *args[1:]), kwargs

        def see(name: str, caught: dict[str, Tensor] = caught) -> Any:
            return lambda module, args: caught.__setitem__(name, args[0])

        def behind(module: nn.Module, args: Any, output: Any, caught: dict[str, Tensor] = caught) -> None:
            caught["after"] = output if isinstance(output, Tensor) else output[0]

        assert own.down is not None
        layers = block.get_submodule(own.attention), block.get_submodule(own.down)
        handles = [
            block.register_forward_pre_hook(leaf, with_kwargs=True), block.register_forward_hook(behind),
            layers[0].register_forward_pre_hook(see("z")), layers[1].register_forward_pre_hook(see("a")),
        ]  # fmt: skip
        try:
            with InDouble(), Detached(), torch.enable_grad():
                model(input_ids=ids)
        finally:
            for handle in handles:
                handle.remove()
        z, x = caught["z"], caught["x"]
        seeds = torch.eye(z.numel(), dtype=z.dtype).reshape(z.numel(), *z.shape)
        (rows,) = torch.autograd.grad(z, x, seeds, is_grads_batched=True)
        weights = [m.weight.detach() if type(m).__name__ == "Conv1D" else m.weight.detach().T for m in layers]
        biases = [0.0 if m.bias is None else m.bias.detach() for m in layers]
        found.append(
            DenseBlock(
                x[0].detach(), caught["after"][0].detach(), z[0].detach(), rows.reshape(z.numel(), -1).detach(),
                weights[0], caught["a"].detach().reshape(x.shape[1], -1), weights[1], (biases[0], biases[1]),
            )
        )  # fmt: skip
    return found


def by_hand(blocks: list[DenseBlock], terms: list[TermId], heads: int) -> tuple[float, float, float]:
    """(bound, triangle, held), relative."""
    carried: list[Tensor] = []
    stream = blocks[0].before
    for number, block in enumerate(blocks):
        here = [t for t in terms if t.block == number]
        kinds = {t.kind for t in here}
        gone = [t.index for t in here if t.kind == "head" and t.index is not None]
        output = torch.zeros_like(block.output) if "attention" in kinds else block.heads(gone, heads)
        rows, width = block.before.shape
        inner = block.mixed.shape[1]
        if "block" not in kinds:
            slope = torch.einsum("naM,am->nmM", block.slope.reshape(rows, inner, -1), output).reshape(rows * width, -1)
            carried = [c + (slope @ c.flatten()).reshape(rows, width) for c in carried]
            constant = block.mixed - (block.slope @ block.before.flatten()).reshape(rows, inner)
            mixed = (block.slope @ stream.flatten()).reshape(rows, inner) + constant
            stream = stream + mixed @ output + (0.0 if "attention" in kinds else block.biases[0])
            kept = torch.ones(block.down.shape[0], dtype=torch.float64)
            kept[[t.index for t in here if t.kind == "neuron" and t.index is not None]] = 0
            if "ffn" not in kinds:
                stream = stream + (block.activations * kept) @ block.down + block.biases[1]
        for t in here:
            if t.kind == "block":
                carried.append(block.after - block.before)
            elif t.kind == "attention":
                carried.append(block.mixed @ block.output + block.biases[0])
            elif t.kind == "ffn":
                carried.append(block.activations @ block.down + block.biases[1])
            elif t.kind == "head":
                alone = block.output - block.heads([t.index], heads)  # type: ignore[list-item]
                carried.append(block.mixed @ alone)
            else:
                carried.append(block.activations[:, t.index, None] * block.down[t.index])
    whole = blocks[-1].after
    size = float(whole.norm())
    bound, triangle = torch.stack(carried).sum(dim=0).norm(), sum(float(c.norm()) for c in carried)
    return float(bound) / size, triangle / size, float((whole - stream).norm()) / size


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_it_is_what_dense_matrices_in_float64_give(model_type: str) -> None:
    here = read(model_type, double_model)
    with InDouble():
        found = dict(zip(SETS, printed(here, list(SETS.values())), strict=True))
    blocks = dense(here.model, here.ids, model_type)
    for name, terms in SETS.items():
        bound, triangle, held = by_hand(blocks, terms, HEADS[model_type])
        assert bound == pytest.approx(held, rel=1e-9), name
        assert found[name].bound == pytest.approx(bound, rel=1e-6), name
        assert found[name].held == pytest.approx(held, rel=1e-6), name
        assert found[name].triangle == pytest.approx(triangle, rel=1e-6), name
        assert found[name].error < 1e-9, name
        assert found[name].variance == 0
        assert bound > 1e-3


# -- every architecture --------------------------------------------------------------------------------------

EVERY = [
    "jamba", "bert", "gemma2", "phi3", "falcon", "olmo2", "albert", "cohere", "mixtral", "qwen3_moe", "gpt_oss",
    "axk1",  # a norm behind the experts, in their own module
    "longcat_flash",  # two attentions in a block, one after the other
]  # fmt: skip


@pytest.mark.parametrize("model_type", EVERY)
@pytest.mark.parametrize("stand_in", ["zero", "mean"])
def test_held_and_bound_are_one_vector(model_type: str, stand_in: str) -> None:
    """Sets of every kind that go through both blocks, every third term of the model."""
    here, means = read(model_type, two_single), None
    if stand_in == "mean":
        means = mean_values(
            here.structure, here.sites, Hidden(here.structure), [here.ids, token_ids(here.structure.stack, 5, 1)]
        )
    sets = []
    for kind in KINDS:
        terms = TermList.of(here.structure, here.sites, (kind,)).ids[::3]
        if terms and not (kind == "expert" and means is not None):
            sets += [terms, terms[:1]]
    for terms, one in zip(sets, printed(here, sets, means), strict=True):
        assert one.error < 2e-6, terms[0]
        assert one.held == pytest.approx(one.bound, rel=1e-3, abs=2e-6)
        assert one.bound <= one.triangle * (1 + 1e-5)
        if len(terms) == 1:
            assert one.triangle == one.bound


def test_the_certificate_fails_where_something_else_is_removed() -> None:
    """The frozen blocks are run without one neuron more than the terms that are added up."""
    here, terms = read("llama"), SETS["neurons"]
    more = removals(here.structure, here.sites, [*terms, TermId("neuron", 1, 7)])
    reader = PrintedReader(here.sites, {"more": terms}, {"more": more}, {}, 0)
    with here.structure.rig().active() as rig:
        rig.run(lambda: run_stack(here.structure.stack, here.ids), reader)
    assert reader.found()["more"].error > 1e-4


def test_of_many_terms_the_sum_of_norms_is_estimated_from_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bias, and with a variance that says how far off; bound and held know every term as before."""
    here = read("llama")
    terms = TermList.of(here.structure, here.sites, ("neuron",)).ids[::2]
    monkeypatch.setattr(budgets, "PRINTED_TERMS", len(terms))
    [exact] = printed(here, [terms])
    monkeypatch.setattr(budgets, "PRINTED_TERMS", 9)
    drawn = [printed(here, [terms], seed=seed)[0] for seed in range(40)]
    assert exact.variance == 0
    assert all(one.bound == drawn[0].bound == pytest.approx(exact.bound) for one in drawn)
    found = torch.tensor([one.triangle for one in drawn], dtype=torch.float64)
    spread = float(found.std())
    assert 0 < spread < 0.2 * exact.triangle
    assert abs(float(found.mean()) - exact.triangle) < 4 * spread / len(drawn) ** 0.5
    said = sum(one.variance for one in drawn) / len(drawn)
    assert 0.5 < said**0.5 / spread < 2


def test_what_is_drawn_of_a_set_does_not_depend_on_the_sets_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of neurons and heads, of which some of each block are drawn together."""
    here = read("llama")
    terms = TermList.of(here.structure, here.sites, ("neuron", "head")).ids[::2]
    monkeypatch.setattr(budgets, "PRINTED_TERMS", 4)
    [alone] = printed(here, [terms], seed=3)
    beside = printed(here, [SETS["neurons"], terms, terms[5:]], seed=3)[1]
    assert alone.variance > 0
    assert beside.triangle == pytest.approx(alone.triangle, rel=1e-6)
    monkeypatch.setattr(budgets, "PRINTED_TERMS", len(terms))
    [exact] = printed(here, [terms])
    assert abs(alone.triangle - exact.triangle) < 5 * alone.variance**0.5
