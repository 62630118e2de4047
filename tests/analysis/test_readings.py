"""`local` and `frozen` against replays one by one, against products by hand, and against inspect's own terms."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import single_model, token_ids
from torch import Tensor

from duat_cli.analysis.decomposition import Decomposition
from duat_cli.analysis.readings import Reader, Readings
from duat_cli.analysis.sketch import Terms
from duat_cli.kinds import Kind
from duat_cli.models.passes import record
from duat_cli.models.rig import BlockRun
from duat_cli.models.sites import TermId, find_sites
from duat_cli.models.structure import ModelStructure, discover, run_stack

KINDS: tuple[Kind, ...] = ("neuron", "head", "expert", "ffn", "attention", "block")
DENSE = ["llama", "gpt2", "bert", "gemma2", "phi3", "falcon", "olmo2", "albert"]
ROUTED = ["mixtral", "qwen3_moe", "gpt_oss"]


@dataclass
class Read:
    """A model read once, every term of it followed."""

    model: Any
    structure: ModelStructure
    sites: Any
    ids: Tensor
    found: Readings
    uat: list[Tensor]  # inspect's UAT terms at the last block, one a block
    output: Tensor
    removed: dict[TermId, float] = field(default_factory=dict)  # local of neurons, by replays one by one


@functools.cache
def read(model_type: str) -> Read:
    model = single_model(model_type)
    structure = discover(model)
    sites, ids = find_sites(structure), token_ids(structure.stack)
    terms = Terms.of(structure, sites, KINDS).ids
    reader, decomposition = Reader(sites, terms, set(terms)), Decomposition(one_by_one=True)
    outputs: list[Tensor] = []
    removed: dict[TermId, float] = {}

    def listen(run: BlockRun) -> None:
        reader(run)
        decomposition.advance(run)
        outputs.append(run.output)
        for site in sites[run.parts.module].of("neuron"):
            for place in (0, site.count // 2, site.count - 1):
                removed[TermId("neuron", run.index, place)] = replayed(run, site, place)

    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, ids), listen)
    assert decomposition.carried is not None
    return Read(
        model, structure, sites, ids, reader.finish(outputs[-1]), decomposition.carried.terms, outputs[-1], removed
    )


def replayed(run: BlockRun, site: Any, place: int) -> float:
    """|block - block without the neuron| / |block|: the unit's output less this neuron's part, given to a replay."""
    [unit] = run.units
    weight = site.module.weight if type(site.module).__name__ == "Conv1D" else site.module.weight.T  # (I, M)
    if unit.output.shape[-1] == site.count and unit.output.shape[-1] != run.input.shape[-1]:
        less = unit.output.clone()  # the unit puts out the activations themselves
        less[..., place] = 0
    else:
        seen: list[Tensor] = []
        handle = site.module.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
        unit.module(unit.input)
        handle.remove()
        activations = seen[0].reshape(*unit.output.shape[:-1], -1)
        less = unit.output - activations[..., place, None] * weight[place]
    whole, without = (run.replay(run.input, [u[None]]).output for u in (unit.output, less))
    assert whole is not None
    assert without is not None
    return float((whole - without).norm() / run.output.norm())


@pytest.mark.parametrize("model_type", [*DENSE, *ROUTED])
def test_every_term_is_read(model_type: str) -> None:
    here = read(model_type)
    terms = Terms.of(here.structure, here.sites, KINDS).ids
    assert set(here.found.local) == set(here.found.frozen) == set(terms)
    assert not here.found.reasons
    routed = [t for t in terms if t.kind == "expert"]
    assert all(here.found.local[t] > 0 for t in terms if t not in routed)


@pytest.mark.parametrize("model_type", DENSE)
def test_local_of_neurons_is_a_replay_without_each(model_type: str) -> None:
    here = read(model_type)
    assert len(here.removed) == 3 * len(here.structure.calls)
    for term, want in here.removed.items():
        assert here.found.local[term] == pytest.approx(want, rel=2e-3, abs=1e-6), term


def test_neurons_of_several_ffns_in_a_block_are_read_from_their_own() -> None:
    """mobilebert has four of one width, three of them in `ffn`."""
    model = single_model("mobilebert")
    structure = discover(model)
    sites, ids = find_sites(structure), token_ids(model)
    names = {module: name for name, module in model.named_modules()}
    reader = Reader(sites, Terms.of(structure, sites, ("neuron",)).ids, set())
    checked = 0

    def ffn_of(name: str) -> str:
        return name.partition(".ffn.")[2].partition(".")[0]  # 0, 1, 2; nothing for the block's own

    def listen(run: BlockRun) -> None:
        nonlocal checked
        reader(run)
        found = sites[run.parts.module].of("neuron")
        assert len(found) == 4
        for site in found:
            [own] = [u for u in run.units if ffn_of(names[u.module]) == ffn_of(names[site.module])]
            for place in (0, site.count - 1):
                given = []
                for unit in run.units:
                    output = unit.output.clone()
                    if unit is own:
                        output[..., place] = 0
                    given.append(output[None])
                whole, without = (run.replay(run.input, g).output for g in ([u.output[None] for u in run.units], given))
                assert whole is not None
                assert without is not None
                want = float((whole - without).norm() / run.output.norm())
                got = reader.found.local[TermId("neuron", run.index, site.offset + place)]
                assert got == pytest.approx(want, rel=2e-3)
                checked += 1

    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, ids), listen)
    assert checked == 8 * len(structure.calls)


@pytest.mark.parametrize("model_type", [*DENSE, *ROUTED])
def test_behind_the_last_block_nothing_is_left_to_carry(model_type: str) -> None:
    here = read(model_type)
    last = len(here.structure.calls) - 1
    checked = [t for t in here.found.local if t.block == last]
    assert len(checked) >= 6
    for term in checked:
        assert here.found.frozen[term] == pytest.approx(here.found.local[term], rel=2e-3, abs=1e-6), term


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3", "olmo2", "mixtral", "qwen3_moe"])
def test_frozen_of_an_ffn_is_inspects_uat_term(model_type: str) -> None:
    """Where FFNs have no bias; inspect counts a bias as static, a removal takes it along."""
    here = read(model_type)
    for block, term in enumerate(here.uat):
        want = float(term.norm() / here.output.norm())
        assert want > 1e-3
        assert here.found.frozen[TermId("ffn", block, 0)] == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "falcon"])
def test_local_of_heads_and_branches_by_hand(model_type: str) -> None:
    """No norm behind the branch: the term is the layer's product itself."""
    here = read(model_type)
    seen: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    handles = []
    for block, module in enumerate(here.structure.calls):
        for kind in ("head", "neuron"):
            [site] = here.sites[module].of(kind)

            def hook(m: Any, args: Any, out: Tensor, key: tuple[int, str] = (block, kind)) -> None:
                seen[key] = (args[0].clone()[0], out.clone()[0])

            handles.append(site.module.register_forward_hook(hook))
    recorded = record(here.structure, lambda: run_stack(here.structure.stack, here.ids)[0])
    for handle in handles:
        handle.remove()
    for block, module in enumerate(here.structure.calls):
        size = float(recorded.calls[block].after.norm())
        for part, whole in (("head", "attention"), ("neuron", "ffn")):
            [site] = here.sites[module].of(part)
            weight = site.module.weight if type(site.module).__name__ == "Conv1D" else site.module.weight.T
            weight, (taken, given) = weight.detach(), seen[block, part]
            assert here.found.local[TermId(whole, block, 0)] == pytest.approx(float(given.norm()) / size, rel=1e-4)
            width = taken.shape[-1] // site.count
            for k in (0, site.count - 1):
                rows = slice(k * width, (k + 1) * width)
                want = float((taken[:, rows] @ weight[rows]).norm()) / size
                assert here.found.local[TermId(part, block, k)] == pytest.approx(want, rel=1e-4), (block, part, k)
        moved = recorded.calls[block].after - recorded.calls[block].before
        assert here.found.local[TermId("block", block)] == pytest.approx(float(moved.norm()) / size, rel=1e-5)


@pytest.mark.parametrize("model_type", ROUTED)
def test_local_of_an_expert_by_hand(model_type: str) -> None:
    """The experts module called once more with this expert's routing weights at zero."""
    here = read(model_type)
    checked = 0
    for block, module in enumerate(here.structure.calls):
        for site in here.sites[module].of("expert"):
            seen: list[Any] = []
            handle = site.module.register_forward_hook(
                lambda m, a, k, o, seen=seen: seen.append((a, k, o)), with_kwargs=True
            )
            recorded = record(here.structure, lambda: run_stack(here.structure.stack, here.ids)[0])
            handle.remove()
            args, kwargs, output = seen[0]
            values = {**dict(enumerate(args)), **kwargs}
            index, weights = values[site.routing.index], values[site.routing.weights]
            for expert in range(site.count):
                values[site.routing.weights] = torch.where(index == expert, 0, weights)
                with torch.no_grad():
                    without = site.module(*[values[k] for k in range(len(args))], **{k: values[k] for k in kwargs})
                want = float((output - without).norm() / recorded.calls[block].after.norm())
                got = here.found.local[TermId("expert", block, expert)]
                assert got == pytest.approx(want, rel=1e-3, abs=1e-6), (block, expert)
                checked += want > 0.01
    assert checked > 2


def test_angles_of_blocks() -> None:
    here = read("bert")
    recorded = record(here.structure, lambda: run_stack(here.structure.stack, here.ids)[0])
    for block, call in enumerate(recorded.calls):
        a, b = call.before[0].double(), call.after[0].double()
        cosine = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
        assert here.found.cosine[block] == pytest.approx(float(cosine.mean()), abs=1e-5)
        assert here.found.angle[block] == pytest.approx(float((cosine.acos() / torch.pi).mean()), abs=1e-5)


def test_reading_leaves_the_model_as_it_was() -> None:
    here = read("mixtral")
    assert not any("forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for m in here.model.modules())


def test_one_token() -> None:
    model = single_model("gemma2")
    structure = discover(model)
    sites, ids = find_sites(structure), token_ids(model)[:, :1]
    terms = Terms.of(structure, sites, KINDS).ids
    reader = Reader(sites, terms, set(terms))
    outputs: list[Tensor] = []

    def listen(run: BlockRun) -> None:
        reader(run)
        outputs.append(run.output)

    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, ids), listen)
    found = reader.finish(outputs[-1])
    assert set(found.local) == set(terms)
    assert sum(found.local[t] for t in terms if t.kind == "neuron") > 0
