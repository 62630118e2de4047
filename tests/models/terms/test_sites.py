"""Sites: which terms each architecture has, and that a term taken out there is the term whose weights are zero."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers import token_ids
from removal import OWN, head_dim, weights_zeroed
from sharing import model_of
from torch import Tensor

from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.sweep.passes import Removal, record
from duat_cli.models.sweep.rows import run_without
from duat_cli.models.terms.sites import BlockSites, Site, TermId, find_sites, watching

KINDS = ("neuron", "head", "expert", "ffn", "attention", "block")
COUNTS = {  # of each kind in every block
    "llama": [(48, 4, 0, 1, 1, 1)] * 3,
    "gpt2": [(128, 4, 0, 1, 1, 1)] * 3,
    "bert": [(48, 4, 0, 1, 1, 1)] * 3,
    "gemma2": [(48, 4, 0, 1, 1, 1)] * 3,
    "falcon": [(48, 4, 0, 1, 1, 1)] * 3,
    "mixtral": [(0, 4, 4, 1, 1, 1)] * 3,
    "qwen3_moe": [(48, 4, 0, 1, 1, 1), (0, 4, 4, 1, 1, 1), (0, 4, 4, 1, 1, 1)],
    "xlnet": [(48, 0, 0, 1, 0, 1)] * 3,
    "gpt_oss": [(0, 4, 4, 1, 1, 1)] * 3,
    "albert": [(48, 4, 0, 1, 1, 1)] * 3,
    "gemma4 sharing": [(48, 4, 0, 2, 1, 1)] * 4,
    "jamba": [(48, 0, 0, 1, 1, 1), (0, 4, 4, 1, 1, 1), (48, 0, 0, 1, 1, 1)],
}


@functools.cache
def found(model_type: str) -> tuple[Any, ModelStructure, dict[Any, BlockSites], Tensor]:
    model = model_of(model_type)
    structure = discover(model)
    return model, structure, find_sites(structure), token_ids(model)


def without(model_type: str, *terms: TermId) -> Tensor:
    """The final hidden states with the terms removed at their sites."""
    _, structure, sites, ids = found(model_type)
    removals: dict[int, Removal] = {}
    for block in {t.block for t in terms}:
        masks: dict[Site, Tensor] = {}
        for term in terms:
            if term.block == block and term.kind != "block":
                site, place = sites[structure.calls[block]].find(term)
                masks.setdefault(site, torch.ones(site.count))[place] = 0
        removals[block] = Removal(masks, whole=TermId("block", block) in terms)
    forward = functools.partial(hidden_states, structure, ids)
    return run_without(structure, forward, record(structure, forward), removals)


def hidden_states(structure: ModelStructure, ids: Tensor) -> Tensor:
    return run_stack(structure.stack, ids)[0]


def terms_of(model_type: str) -> list[TermId]:
    """The first and the last term of every kind in the first and the last block."""
    _, structure, sites, _ = found(model_type)
    terms = []
    for block in (0, len(structure.calls) - 1):
        here = sites[structure.calls[block]]
        for kind in KINDS:
            count = here.count(kind)
            terms += [TermId(kind, block, None if kind == "block" else k) for k in sorted({0, count - 1}) if count]
    return terms


@pytest.mark.parametrize("model_type", COUNTS)
def test_terms_of_every_kind(model_type: str) -> None:
    _, structure, sites, _ = found(model_type)
    assert [tuple(sites[m].count(kind) for kind in KINDS) for m in structure.calls] == COUNTS[model_type]
    for module in structure.calls:
        here = sites[module]
        assert {kind for kind in KINDS if not here.count(kind)} == set(here.reasons)
        assert all(here.reasons.values())
        for kind in KINDS[:-1]:
            places = [here.find(TermId(kind, 0, k)) for k in range(here.count(kind))]
            assert len(set(places)) == len(places)
            with pytest.raises(IndexError):
                here.find(TermId(kind, 0, here.count(kind)))


@pytest.mark.parametrize("model_type", OWN)
def test_a_term_removed_is_its_weights_set_to_zero(model_type: str) -> None:
    model, structure, _, ids = found(model_type)
    whole = hidden_states(structure, ids).detach()
    for term in terms_of(model_type):
        removed = without(model_type, term)
        with weights_zeroed(model, OWN[model_type], [term]), torch.no_grad():
            zeroed = hidden_states(structure, ids)
        moved = (zeroed - whole).norm() / whole.norm()
        assert moved > 1e-6 or term.kind == "expert", term  # an expert may have had no token
        assert (removed - zeroed).norm() <= 2e-6 * whole.norm() + 1e-4 * (zeroed - whole).norm(), term
    with torch.no_grad():
        assert torch.equal(hidden_states(structure, ids), whole)


@pytest.mark.parametrize("model_type", ["llama", "bert", "gemma2", "falcon", "qwen3_moe"])
def test_a_set_removed_is_all_its_weights_set_to_zero(model_type: str) -> None:
    model, structure, _, ids = found(model_type)
    terms = [t for t in terms_of(model_type) if t.kind != "block" or t.block]
    with weights_zeroed(model, OWN[model_type], terms), torch.no_grad():
        zeroed = hidden_states(structure, ids)
    assert (without(model_type, *terms) - zeroed).norm() <= 1e-5 * zeroed.norm()


def test_blocks_that_share_their_weights_are_removed_call_by_call() -> None:
    """albert runs one module three times: its head is taken out of the second call alone."""
    model, structure, _, ids = found("albert")
    assert len(set(structure.calls)) == 1
    projection = next(m for n, m in model.named_modules() if n.endswith("attention.dense"))
    calls = []

    def cut(module: Any, args: tuple[Tensor]) -> Any:
        calls.append(1)
        edited = args[0].clone()
        edited[..., : head_dim(model)] = 0
        return (edited,) if len(calls) == 2 else None

    handle = projection.register_forward_pre_hook(cut)
    try:
        with torch.no_grad():
            by_hand = hidden_states(structure, ids)
    finally:
        handle.remove()
    assert len(calls) == 3
    assert torch.allclose(without("albert", TermId("head", 1, 0)), by_hand, atol=1e-6)


@pytest.mark.parametrize("model_type", ["gemma2", "olmo2"])
def test_a_branch_with_a_norm_behind_it_is_seen_behind_the_norm(model_type: str) -> None:
    """A norm does not see its input's length: in front of it the branch would have no slope at all."""
    _, structure, sites, _ = found(model_type)
    for module in structure.calls:
        for kind, norm in (("attention", "post_attention_layernorm"), ("ffn", "post_feedforward_layernorm")):
            [site] = sites[module].of(kind)  # type: ignore[arg-type]
            assert site.watched is module.get_submodule(norm)
            assert site.watched is not site.module
    assert all(site.behind is None for here in found("bert")[2].values() for site in here.sites)


def test_a_gate_inside_a_norm_is_no_term() -> None:
    """axk2's norms hold a small gated FFN whose output goes into attention, not to the residual stream."""
    _, structure, sites, _ = found("axk2")
    for module in structure.calls:
        assert sites[module].count("ffn") == 1
        [site] = sites[module].of("ffn")
        assert site.module is module.get_submodule("mlp")


def test_watching_sees_every_site_and_leaves_no_hook() -> None:
    model, structure, sites, ids = found("qwen3_moe")
    seen: set[str] = set()

    def see(site: Site, value: Tensor, index: Tensor | None) -> None:
        seen.add(site.kind)
        assert (index is not None) == (site.kind == "expert")

    with watching([s for here in sites.values() for s in here.sites], see), torch.no_grad():
        hidden_states(structure, ids)
    assert seen == set(KINDS) - {"block"}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_spread_and_collect_are_adjoint() -> None:
    """⟨spread(m), v⟩ = ⟨m, collect(v)⟩ for heads, for one term, and for experts by their index."""
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Linear(1, 1)
    value = torch.randn(1, 5, 12, generator=generator)
    routed = torch.randn(5, 2, generator=generator)
    index = torch.tensor([[0, 2], [1, 0], [3, 1], [2, 3], [0, 3]])
    for site, tensor, where in (
        (Site("head", module, "input", 4), value, None),
        (Site("neuron", module, "input", 12), value, None),
        (Site("ffn", module, "output", 1), value, None),
        (Site("expert", module, "routing", 4), routed, index),
    ):
        mask = torch.randn(site.count, generator=generator)
        left = (site.spread(mask, tensor, where) * tensor).sum()
        right = (site.collect(tensor[None], where)[0] * mask).sum()
        assert torch.allclose(left, right, atol=1e-5), site.kind
