"""Certified bounds against adversarial search: gradient ascent on a block's own input, through the block's own code.

What is measured is the removal itself: the block run with and without each term, where its branch meets the stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import single_model, two_single
from pruning import certified_bounds
from torch import Tensor, nn

from duat_cli.analysis.prune.terms import certified, layers
from duat_cli.analysis.prune.terms.certified import NOT_ASKED, BlockBounds
from duat_cli.kinds import Kind
from duat_cli.models.block.slots import HiddenSlot
from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.sweep.passes import record
from duat_cli.models.terms.sites import BlockSites, Site, find_sites, watching
from duat_cli.operators import bounds
from duat_cli.zoo import tiny

BLOCK = 1
STARTS = 32
STEPS = 60


@dataclass(frozen=True)
class Place:
    """Where a type's branches meet the stream: modules of block 1 whose output is added, and what multiplies it."""

    attention: str
    ffn: str
    factor: float = 1.0
    after: str | None = None  # the norm at the end of the block in front, where the stream itself is normalised
    near: float = 0.95  # how near the search comes; bert's neurons are reached through two norms and attention
    tight: bool = True  # whether neurons and heads have a norm in front and none behind, so that bounds are attained


PLACES = {
    "llama": Place("self_attn.o_proj", "mlp"),
    "granite": Place("self_attn.o_proj", "mlp", 0.6),
    "phi3": Place("self_attn.o_proj", "mlp"),
    "cohere": Place("self_attn.o_proj", "mlp"),  # LayerNorm, gated, parallel
    "gpt2": Place("attn.c_proj", "mlp"),
    "gpt_neox": Place("attention.dense", "mlp"),
    "bert": Place("attention.output.dense", "output.dense", after="output.LayerNorm", near=0.88),
    "nemotron": Place("self_attn.o_proj", "mlp"),
    "deepseek_v3": Place("self_attn.o_proj", "mlp"),
    "mixtral": Place("self_attn.o_proj", "mlp"),
    "gemma2": Place("post_attention_layernorm", "post_feedforward_layernorm", tight=False),
    "olmo2": Place("post_attention_layernorm", "post_feedforward_layernorm", tight=False),
}
MOE = {"deepseek_v3", "mixtral"}


@dataclass
class Searched:
    """One block of one model, its bounds, and a way to run it on any tokens."""

    model: Any
    structure: ModelStructure
    sites: BlockSites
    bounds: BlockBounds
    place: Place
    run: Callable[[Tensor], Any]  # (items, 1, M) through the block

    def moved(self, x: Tensor, site: Site, terms: Tensor, read: str) -> Tensor:
        """How far removing the terms moves what the branch adds, item by item: (items,)."""
        whole, less = self.caught(torch.cat([x, x]), [(site, terms)], read).chunk(2)
        return (whole - less).norm(dim=-1)[:, 0] * self.place.factor

    def caught(self, x: Tensor, removed: list[tuple[Site, Tensor]], read: str) -> Tensor:
        """The branch's output; of the last items, one a term, the k-th is without the k-th term."""
        masks = {}
        for site, terms in removed:
            mask = torch.ones(len(x), 1, site.count)
            mask[torch.arange(len(x) - len(terms), len(x)), 0, terms] = 0
            masks[site] = mask
        seen: list[Tensor] = []
        block = self.structure.calls[BLOCK]
        hook = block.get_submodule(read).register_forward_hook(
            lambda module, args, output: seen.append(output if isinstance(output, Tensor) else output[0])
        )
        try:
            with watching(list(masks), functools.partial(edited, masks)):
                self.run(x)
        finally:
            hook.remove()
        return seen[0]


def edited(masks: dict[Site, Tensor], site: Site, value: Tensor, index: Tensor | None) -> Tensor:
    mask = masks[site]
    if index is not None:  # a routing weight belongs to the expert that it is for
        return value * mask[:, 0].gather(1, index)
    return value * mask.repeat_interleave(value.shape[-1] // site.count, dim=-1)


@functools.lru_cache
def searched(model_type: str, tokens: int = 1) -> Searched:
    model = two_single(model_type).requires_grad_(False)
    structure = discover(model)
    ids = torch.full((1, tokens), 20)
    recorded = record(structure, lambda: run_stack(structure.stack, ids).last_hidden_state)
    call = recorded.calls[BLOCK]
    parts = structure.block(BLOCK).parts

    def run(x: Tensor) -> Any:
        if PLACES[model_type].after is not None:  # a block behind a norm never sees anything else
            x = structure.calls[BLOCK - 1].get_submodule(str(PLACES[model_type].after))(x)
        args, kwargs = parts.hidden.put(call.args, call.kwargs, x)
        kwargs = {k: None if "cache" in k or k == "past_key_values" else v for k, v in kwargs.items()}
        return parts.module(*args, **kwargs)

    return Searched(
        model, structure, find_sites(structure)[parts.module], certified_bounds(structure)[BLOCK],
        PLACES[model_type], run,
    )  # fmt: skip


def ascend(moved: Callable[[Tensor], Tensor], count: int, width: int) -> Tensor:
    """Largest removal found for each of `count` terms: (count,). moved: (STARTS count, 1, M) to (STARTS count,)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STARTS * count, 1, width, generator=generator) * 30
    best = torch.zeros(STARTS * count)
    x.requires_grad_()
    optimiser = torch.optim.Adam([x], lr=10.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for _ in range(STEPS):
        optimiser.zero_grad()
        sizes = moved(x)
        best = torch.maximum(best, sizes.detach())
        (-sizes.clamp_min(1e-9).log().sum()).backward()
        optimiser.step()
        schedule.step()
    return best.reshape(STARTS, count).amax(dim=0).double()


TYPES = [t for t in PLACES if t not in MOE]


@pytest.mark.parametrize("model_type", TYPES)
def test_no_neuron_exceeds_its_bound_and_the_bound_is_attained(model_type: str) -> None:
    case = searched(model_type)
    (site,) = case.sites.of("neuron")
    terms = torch.arange(0, site.count, site.count // 5)
    bounds = case.bounds.of(case.sites, "neuron")
    limit = torch.tensor([bounds[i].value for i in terms.tolist()], dtype=torch.float64)
    found = ascend(lambda x: case.moved(x, site, terms.repeat(STARTS), case.place.ffn), len(terms), 32)
    assert bool((found <= limit).all())
    assert all(bounds[i].vacuous != case.place.tight for i in terms.tolist())
    if case.place.tight:
        assert bool((found >= case.place.near * limit).all()), (found / limit).min()


@pytest.mark.parametrize("model_type", list(PLACES))
def test_no_head_exceeds_its_bound_and_the_bound_is_attained(model_type: str) -> None:
    case = searched(model_type)
    (site,) = case.sites.of("head")
    terms = torch.arange(site.count)
    bounds = case.bounds.of(case.sites, "head")
    limit = torch.tensor([bound.value for bound in bounds], dtype=torch.float64)
    found = ascend(lambda x: case.moved(x, site, terms.repeat(STARTS), case.place.attention), site.count, 32)
    assert bool((found <= limit).all())
    if case.place.tight:
        assert bool((found >= case.place.near * limit).all()), (found / limit).min()


@pytest.mark.parametrize("model_type", sorted(MOE))
def test_no_expert_exceeds_its_bound(model_type: str) -> None:
    case = searched(model_type)
    (site,) = case.sites.of("expert")
    terms = torch.arange(site.count)
    limit = torch.tensor([b.value for b in case.bounds.of(case.sites, "expert")], dtype=torch.float64)
    found = ascend(lambda x: case.moved(x, site, terms.repeat(STARTS), case.place.ffn), site.count, 32)
    assert bool((found <= limit).all())
    assert bool((found >= 0.08 * limit).all()), found / limit
    whole = case.bounds.units[0].whole
    added = functools.partial(case.caught, removed=[], read=case.place.ffn)
    assert whole.stream is not None
    assert float(ascend(lambda x: added(x).norm(dim=-1)[:, 0], 1, 32)) <= float(whole.stream)


@pytest.mark.parametrize("model_type", TYPES)
def test_no_branch_exceeds_its_bound(model_type: str) -> None:
    case = searched(model_type)
    for kind, read, terms in (("attention", case.place.attention, case.bounds.attention),
                              ("ffn", case.place.ffn, case.bounds.units[0].whole)):  # fmt: skip
        assert terms.stream is not None
        found = ascend(lambda x, read=read: case.caught(x, [], read).norm(dim=-1)[:, 0] * case.place.factor, 1, 32)
        assert float(found) <= float(terms.stream)
        assert float(found) >= 0.1 * float(terms.stream), kind
    assert case.bounds.block.stream is not None

    def change(x: Tensor) -> Tensor:
        return (HiddenSlot(0).found(case.run(x), x) - x).norm(dim=-1)[:, 0]

    if model_type != "bert":  # there the input itself must come from a norm
        found = ascend(change, 1, 32)
        assert float(found) <= float(case.bounds.block.stream)


@pytest.mark.parametrize("model_type", ["bert"])
def test_no_block_behind_a_norm_exceeds_its_bound(model_type: str) -> None:
    case = searched(model_type)
    norm = case.structure.calls[BLOCK - 1].output.LayerNorm

    def change(x: Tensor) -> Tensor:
        y = norm(x)
        return (HiddenSlot(0).found(case.run(x), x) - y).norm(dim=-1)[:, 0]

    found = ascend(change, 1, 32)
    assert case.bounds.block.stream is not None
    assert 0.5 * float(case.bounds.block.stream) <= float(found) <= float(case.bounds.block.stream)


@pytest.mark.parametrize("model_type", ["llama", "bert", "gpt2"])
def test_real_tokens_stay_far_below(model_type: str) -> None:
    """Several tokens at once, ordinary ones: every head and neuron at every token."""
    structure = searched(model_type).structure
    sites, bounds = find_sites(structure), certified_bounds(structure)
    generator = torch.Generator().manual_seed(1)
    seen: list[Tensor] = []
    for number, module in enumerate(structure.calls):
        for kind, terms in (("neuron", bounds[number].units[0].neurons), ("head", bounds[number].heads)):
            (site,) = sites[module].of(kind)  # type: ignore[arg-type]

            side = site.module.weight.numel() // 32
            with torch.no_grad():
                columns = site.module(torch.eye(side)[None])[0] - site.module(torch.zeros(1, 1, side))[0]
            pieces = columns.reshape(site.count, side // site.count, -1)

            def listen(site: Site, value: Tensor, index: Any, terms: Any = terms, pieces: Tensor = pieces) -> None:
                split = value[0].unflatten(-1, (site.count, -1))
                seen.append((torch.einsum("nkd,kdm->nkm", split, pieces).norm(dim=-1) / terms.stream).max())

            with watching([site], listen), torch.no_grad():  # type: ignore[arg-type]
                run_stack(structure.stack, torch.randint(10, 60, (1, 30), generator=generator))
    assert len(seen) == 2 * len(structure.calls)
    assert max(map(float, seen)) <= 1.0


# -- refusals ----------------------------------------------------------------------


def test_a_norm_behind_attention_bounds_it_whatever_its_values_are() -> None:
    """Gemma 4 has a norm on its values, which is no linear layer, and another behind attention, sqrt(M) max|g| long."""
    model = tiny.tiny_model("gemma4_text").requires_grad_(False)
    structure = discover(model)
    for layer, found in zip(model.model.layers, certified_bounds(structure), strict=True):
        longest = layer.post_attention_layernorm.weight.abs().max() * model.config.hidden_size**0.5
        assert found.attention.stream is not None
        assert float(found.attention.stream) == pytest.approx(float(longest), rel=1e-5)
        assert found.heads.stream is not None
        assert found.heads.vacuous
        assert found.heads.stream.tolist() == [pytest.approx(2 * float(longest), rel=1e-5)] * 4
        x = 30 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
        assert layer.post_attention_layernorm(x).norm(dim=-1).max() <= found.attention.stream


def test_a_branch_that_another_unit_reads_through_a_layer_has_no_bound() -> None:
    """Gemma 4's FFN goes into a gate without a norm, which reacts: at the block's output more moves than the FFN."""
    model = single_model("gemma4_text").requires_grad_(False)
    structure = discover(model)
    (ffn, _), layer = certified_bounds(structure)[BLOCK].units, structure.calls[BLOCK]
    for terms in (ffn.whole, ffn.neurons):
        assert terms.stream is None
        assert "reads the stream through a layer of its own and reacts" in str(terms.reason)
    recorded = record(structure, lambda: run_stack(structure.stack, torch.full((1, 1), 20)).last_hidden_state)
    call, parts, seen = recorded.calls[BLOCK], structure.block(BLOCK).parts, []
    norm = layer.post_feedforward_layernorm

    def run(x: Tensor) -> Tensor:
        args, kwargs = parts.hidden.put(call.args, call.kwargs, x.clone())
        return parts.hidden.found(parts.module(*args, **kwargs), x)

    for x in 3 * torch.randn(20, 1, 1, 32, generator=torch.Generator().manual_seed(0)):
        whole = run(x)
        with norm.register_forward_hook(lambda _module, _args, out: torch.zeros_like(out)):
            seen.append(float((whole - run(x)).norm()))
    longest = norm.weight.abs().max() * model.config.hidden_size**0.5 * max(1.0, float(layer.layer_scalar))
    assert max(seen) > longest


def test_what_has_no_bound_says_why() -> None:
    structure = discover(two_single("olmoe"))
    bounds, sites = certified_bounds(structure)[0], find_sites(structure)[structure.calls[0]]
    for kind in ("expert", "ffn", "block"):
        found = bounds.of(sites, kind)  # type: ignore[arg-type]
        assert found
        assert all(bound.value is None and "routing weights do not sum" in str(bound.reason) for bound in found)
    assert all(bound.value is not None for bound in bounds.of(sites, "head"))
    bounds = certified_bounds(discover(two_single("longcat_flash")))[0]
    assert "2 times" in str(bounds.heads.reason)
    assert any(unit.neurons.stream is not None for unit in bounds.units)


def test_a_bias_behind_which_a_norm_stands_is_part_of_the_attention_bound() -> None:
    """gemma2 with attention biases: the block adds nothing else, and is never moved further than its bound."""
    config = tiny.tiny_config("gemma2")
    config.attention_bias = True
    model = tiny.model_class(config)._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    tiny.randomise(model, 0)
    block = model.requires_grad_(False).model.layers[BLOCK]
    assert bool(block.self_attn.o_proj.bias.any())
    bounds = certified_bounds(discover(model))[BLOCK]
    assert bounds.block.stream is not None
    assert float(bounds.block.stream) == pytest.approx(float(bounds.attention.stream + bounds.units[0].whole.stream))  # type: ignore[operator]
    seen: list[Any] = []
    handle = block.register_forward_pre_hook(lambda m, a, k: seen.append((a, k)), with_kwargs=True)
    model(input_ids=torch.full((1, 1), 20), use_cache=False)
    handle.remove()
    (args, kwargs) = seen[0]

    def change(x: Tensor) -> Tensor:
        return (HiddenSlot(0).found(block(x, *args[1:], **kwargs), x) - x).norm(dim=-1)[:, 0]

    found = ascend(change, 1, 32)
    assert 0.5 * float(bounds.block.stream) <= float(found) <= float(bounds.block.stream)


def test_heads_that_are_changed_in_front_of_their_projection_have_no_bound() -> None:
    """BitNet has a norm between attention's heads and the layer that takes them."""
    structure = discover(two_single("bitnet"))
    sites = find_sites(structure)
    for found, module in zip(certified_bounds(structure), structure.calls, strict=True):
        for bound in [*found.of(sites[module], "head"), *found.of(sites[module], "attention")]:
            assert bound.value is None
            assert "does not arrive at the residual stream as it is" in str(bound.reason)


def test_what_a_block_adds_beside_its_branches_is_no_bias_of_theirs() -> None:
    """A llama block that adds a constant of its own has no bound."""
    model = two_single("llama")
    layer = model.model.layers[BLOCK]
    before = layer.forward
    layer.forward = lambda x, *args, **kwargs: before(x, *args, **kwargs) + 0.01
    bounds = certified_bounds(discover(model))
    assert bounds[BLOCK].block.stream is None
    assert "beside attention and FFN" in str(bounds[BLOCK].block.reason)
    assert bounds[0].block.stream is not None


def test_the_first_call_of_a_shared_block_reads_another_input() -> None:
    """albert: block 0 reads a projection of the embedding, later calls the block's own last norm."""
    bounds = certified_bounds(discover(two_single("albert")))
    assert bounds[0].heads.stream is None
    assert "not the output of a norm" in str(bounds[0].heads.reason)
    assert all(later.heads.stream is not None for later in bounds[1:])


@pytest.mark.parametrize("model_type", ["opt", "gemma2"])
def test_other_dtypes_give_the_bounds_of_the_same_weights(model_type: str) -> None:
    """Weights that bfloat16 holds, in each dtype."""
    model = two_single(model_type).bfloat16()
    rounded, plain, double = (
        certified_bounds(discover(model.to(dtype)))[1] for dtype in (torch.bfloat16, torch.float32, torch.float64)
    )
    for other, tolerance in ((rounded, 1e-2), (double, 1e-5)):
        for a, b in ((other.heads, plain.heads), (other.units[0].neurons, plain.units[0].neurons),
                     (other.attention, plain.attention), (other.block, plain.block)):  # fmt: skip
            assert a.stream is not None
            assert b.stream is not None
            assert torch.allclose(a.stream.double(), b.stream.double(), rtol=tolerance)


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral", "bert"])
def test_weights_in_pieces_have_the_same_bounds(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    structure, whole = searched(model_type).structure, searched(model_type).bounds
    for module, name in ((layers, "NEURONS_AT_ONCE"), (certified, "BOUNDED_ENTRIES"), (bounds, "ROWS")):
        monkeypatch.setattr(module, name, 5)
    pieces, sites = certified_bounds(structure)[BLOCK], find_sites(structure)[structure.calls[BLOCK]]
    for kind in ("neuron", "head", "expert", "ffn", "attention", "block"):
        wanted, found = ([one.value for one in each.of(sites, kind)] for each in (whole, pieces))
        assert found == [pytest.approx(value, rel=1e-12) for value in wanted]


@pytest.mark.parametrize("kind", ["neuron", "head"])
def test_bounds_of_other_kinds_are_not_computed(kind: Kind) -> None:
    """And those that are asked for are the same."""
    structure, every = searched("llama").structure, searched("llama").bounds
    one = certified_bounds(structure, [kind])[BLOCK]
    sites = find_sites(structure)[structure.calls[BLOCK]]
    assert one.of(sites, kind) == every.of(sites, kind)
    assert all(bound.value is not None for bound in one.of(sites, kind))
    for other in ("ffn", "attention", "block"):
        [bound] = one.of(sites, other)
        assert (bound.value, bound.reason) == (None, NOT_ASKED)


def test_nothing_is_left_behind() -> None:
    model = two_single("llama")
    certified_bounds(discover(model))
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in model.modules())
    assert isinstance(model, nn.Module)
