"""`local` and `frozen` against plain hooks, against products by hand, and against inspect's own terms."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import far, token_ids, two_single
from pruning import branches_of, certified_bounds
from torch import Tensor

from duat_cli.analysis.decomposition import Decomposition
from duat_cli.analysis.prune.terms import frozen, readings
from duat_cli.analysis.prune.terms.readings import Reader, Readings
from duat_cli.analysis.prune.terms.responses import TermList
from duat_cli.errors import UnsupportedModelError
from duat_cli.kinds import Kind
from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.passes import record
from duat_cli.models.terms.branches import Branch, ffn_terms
from duat_cli.models.terms.sites import TermId, find_sites

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


@functools.cache
def read(model_type: str) -> Read:
    model = two_single(model_type)
    structure = discover(model)
    sites, ids = find_sites(structure), token_ids(structure.stack)
    terms = TermList.of(structure, sites, KINDS).ids
    reader = Reader(sites, branches_of(structure, sites), terms, set(terms))
    decomposition = Decomposition(one_by_one=True)
    outputs: list[Tensor] = []

    def listen(run: BlockRun) -> None:
        reader(run)
        decomposition.advance(run)
        outputs.append(run.output)

    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, ids), listen)
    assert decomposition.carried is not None
    return Read(model, structure, sites, ids, reader.finish(outputs[-1]), decomposition.carried.terms, outputs[-1])


@pytest.mark.parametrize("model_type", [*DENSE, *ROUTED])
def test_every_term_is_read(model_type: str) -> None:
    here = read(model_type)
    terms = TermList.of(here.structure, here.sites, KINDS).ids
    assert set(here.found.local) == set(here.found.frozen) == set(terms)
    assert not here.found.reasons
    routed = [t for t in terms if t.kind == "expert"]
    assert all(here.found.local[t] > 0 for t in terms if t not in routed)


@dataclass(frozen=True)
class Wired:
    """Where a type's branches end and meet the stream, by hand: names inside a block; None is the block's output."""

    attention: str  # the layer that takes the heads
    ffn: str  # the layer that takes the neurons, or the module of all experts
    attention_meets: str | None = None  # the module whose input is the stream with attention's part
    ffn_meets: str | None = None
    attention_norm: str | None = None  # on the branch itself
    ffn_norm: str | None = None
    factor: float = 1.0


_NORM_BEFORE_FFN = "post_attention_layernorm"
WIRED = {
    "llama": Wired("self_attn.o_proj", "mlp.down_proj", _NORM_BEFORE_FFN),
    "granite": Wired("self_attn.o_proj", "mlp.down_proj", _NORM_BEFORE_FFN, factor=0.6),
    "gpt2": Wired("attn.c_proj", "mlp.c_proj", "ln_2"),
    "opt": Wired("self_attn.out_proj", "fc2", "final_layer_norm"),
    "bert": Wired("attention.output.dense", "output.dense", "attention.output.LayerNorm", "output.LayerNorm"),
    "gemma2": Wired(
        "self_attn.o_proj", "mlp.down_proj", "pre_feedforward_layernorm",
        attention_norm=_NORM_BEFORE_FFN, ffn_norm="post_feedforward_layernorm",
    ),
    "olmo2": Wired(
        "self_attn.o_proj", "mlp.down_proj", "mlp",
        attention_norm=_NORM_BEFORE_FFN, ffn_norm="post_feedforward_layernorm",
    ),
    "phi": Wired("self_attn.dense", "mlp.fc2"),
    "falcon": Wired("self_attention.dense", "mlp.dense_4h_to_h"),
    "cohere": Wired("self_attn.o_proj", "mlp.down_proj"),
    "mixtral": Wired("self_attn.o_proj", "mlp", _NORM_BEFORE_FFN),
}  # fmt: skip


@pytest.mark.parametrize("model_type", list(WIRED))
def test_local_is_what_plain_hooks_see_where_the_branch_meets_the_stream(model_type: str) -> None:
    """In a plain pass: each part is taken off its layer's output, and the norm on its branch is called anew."""
    here, wired = read(model_type), WIRED[model_type]
    for block, module in enumerate(here.structure.calls):
        branches = (
            ("head", "attention", wired.attention, wired.attention_norm, wired.attention_meets),
            ("neuron", "ffn", wired.ffn, wired.ffn_norm, wired.ffn_meets),
        )
        for part, whole, last, norm, meets in branches:
            taken, given, stream = hooked(here, module, last, meets)
            branch_norm = module.get_submodule(norm) if norm else None

            def lost(less: Tensor, given: Tensor = given, branch_norm: Any = branch_norm) -> float:
                ends = [given, given - less] if branch_norm is None else [branch_norm(given), branch_norm(given - less)]
                return wired.factor * float((ends[0] - ends[1]).detach().norm())

            term = TermId(whole, block, 0)  # type: ignore[arg-type]
            assert here.found.local[term] == pytest.approx(lost(given) / float(stream.norm()), rel=1e-4), term
            assert here.found.stream[term] == pytest.approx(float(stream.square().sum(-1).mean() ** 0.5), rel=1e-4)
            for site in here.sites[module].of(part):  # type: ignore[arg-type]
                weight = site.module.weight if type(site.module).__name__ == "Conv1D" else site.module.weight.T
                width = taken.shape[-1] // site.count
                for k in {0, site.count // 2, site.count - 1}:
                    rows = slice(k * width, (k + 1) * width)
                    want = lost(taken[..., rows] @ weight.detach()[rows]) / float(stream.norm())
                    assert here.found.local[TermId(part, block, k)] == pytest.approx(want, rel=1e-3), (part, block, k)  # type: ignore[arg-type]


@pytest.mark.parametrize("model_type", list(WIRED))
def test_the_place_where_a_branch_meets_the_stream_is_named(model_type: str) -> None:
    here, wired = read(model_type), WIRED[model_type]
    names = {module: name for name, module in here.structure.stack.named_modules()}
    branches = branches_of(here.structure, here.sites)
    for block in here.structure.calls:
        expected = (
            ("attention", wired.attention_meets, wired.attention_norm),
            ("ffn", wired.ffn_meets, wired.ffn_norm),
        )
        for kind, meets, norm in expected:
            [branch] = [b for end, b in branches[block].found.items() if end.kind == kind]
            assert isinstance(branch, Branch)
            place = f"output of {names[block]}" if meets is None else f"input of {names[block]}.{meets}"
            assert branch.name(names, block) == place
            assert branch.norm is (None if norm is None else block.get_submodule(norm))


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "gemma2", "falcon", "phi"])
def test_the_uat_term_is_what_the_ffn_adds_without_biases(model_type: str) -> None:
    """Eq. 11's term of the last block, where nothing follows; a bias (gpt2, opt, falcon, phi) is static in the sum."""
    here, wired = read(model_type), WIRED[model_type]
    block, seen = here.structure.calls[-1], []
    bias = getattr(block.get_submodule(wired.ffn), "bias", None)
    found = branches_of(here.structure, here.sites)[block]

    def listen(run: BlockRun) -> None:
        if run.index == len(here.structure.calls) - 1:
            seen.append(ffn_terms(run, found))

    with here.structure.rig().active() as rig:
        rig.run(lambda: run_stack(here.structure.stack, here.ids), listen)
    _, given, _ = hooked(here, block, wired.ffn, None)
    added = given if wired.ffn_norm is None else block.get_submodule(wired.ffn_norm)(given)
    assert far(seen[0], added.flatten()) < 1e-5
    assert far(here.uat[-1], added if bias is None else added - bias) < 1e-4


def hooked(here: Read, block: Any, last: str, meets: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """What the branch's last layer takes and gives, and the stream where it meets, in one plain pass: (N, …) each."""
    seen: dict[str, Tensor] = {}

    def keep_last(m: Any, args: Any, out: Any) -> None:
        seen["taken"], seen["given"] = args[0].clone(), (out if isinstance(out, Tensor) else out[0]).clone()

    def keep_input(m: Any, args: Any, kwargs: Any) -> None:
        seen["stream"] = (args[0] if args else kwargs["hidden_states"]).clone()

    def keep_output(m: Any, args: Any, out: Any) -> None:
        seen["stream"] = (out if isinstance(out, Tensor) else out[0]).clone()

    handles = [block.get_submodule(last).register_forward_hook(keep_last)]
    if meets is None:
        handles.append(block.register_forward_hook(keep_output))
    else:
        handles.append(block.get_submodule(meets).register_forward_pre_hook(keep_input, with_kwargs=True))
    with torch.no_grad():
        run_stack(here.structure.stack, here.ids)
    for handle in handles:
        handle.remove()
    return tuple(seen[name].reshape(-1, seen[name].shape[-1]) for name in ("taken", "given", "stream"))  # type: ignore[return-value]


@pytest.mark.parametrize("model_type", [*DENSE, *ROUTED])
def test_no_local_reading_is_above_its_certified_bound(model_type: str) -> None:
    """Both speak of the same place: what goes at this prompt's tokens, and the most that may go at any token."""
    here = read(model_type)
    checked = 0
    for block, bounds in enumerate(certified_bounds(here.structure)):
        for kind in KINDS:
            for index, bound in enumerate(bounds.of(here.sites[here.structure.calls[block]], kind)):
                term = TermId(kind, block, None if kind == "block" else index)
                if bound.value is not None:
                    assert here.found.local[term] * here.found.stream[term] <= bound.value, term
                    checked += 1
    assert checked >= 10


def test_neurons_of_several_ffns_in_a_block_are_read_from_their_own() -> None:
    """mobilebert has four of one width. Two are added to what the next one reads; two only arrive through a layer."""
    here = read("mobilebert")
    names = {module: name for name, module in here.structure.stack.named_modules()}
    checked = 0
    for block, module in enumerate(here.structure.calls):
        found = here.sites[module].of("neuron")
        assert len(found) == 4
        for site in found:
            layer = names[site.module].removeprefix(names[module] + ".")
            affine = layer.replace("dense", "LayerNorm")  # named a norm, but an elementwise map
            taken, _, _ = hooked(here, module, layer, None)
            _, stream, _ = hooked(here, module, affine, None)
            for place in (0, site.count - 1):
                term = TermId("neuron", block, site.offset + place)
                if layer not in ("ffn.0.output.dense", "ffn.1.output.dense"):
                    assert "does not arrive at the residual stream as it is" in here.found.reasons[term]
                    assert term not in here.found.local
                    assert term in here.found.frozen
                    continue
                part = taken[:, place, None] * site.module.weight[:, place] * module.get_submodule(affine).weight
                want = float(part.detach().norm() / stream.norm())
                assert here.found.local[term] == pytest.approx(want, rel=1e-4)
                checked += 1
    assert checked == 4 * len(here.structure.calls)


@pytest.mark.parametrize("model_type", [*DENSE, *ROUTED])
def test_behind_the_last_block_nothing_is_left_to_carry(model_type: str) -> None:
    """But norms on the stream of post-norm blocks, and norms on a branch, which `frozen` holds and `local` does not."""
    here = read(model_type)
    kinds = {"bert": {"block"}, "albert": {"block"}}.get(model_type, set(KINDS))
    kinds = {"attention", "ffn", "block"} if model_type in ("gemma2", "olmo2") else kinds
    checked = [t for t in here.found.local if t.block == len(here.structure.calls) - 1 and t.kind in kinds]
    assert checked
    for term in checked:
        size = here.found.stream[term] * here.ids.shape[1] ** 0.5 / float(here.output.norm())
        assert here.found.frozen[term] == pytest.approx(here.found.local[term] * size, rel=2e-3, abs=1e-6), term


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "falcon", "albert"])
def test_terms_in_pieces_are_read_as_all_at_once(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read(model_type).found
    monkeypatch.setattr(readings, "NEURONS_AT_ONCE", 5)
    monkeypatch.setattr(frozen, "AT_ONCE", 3)
    found = read.__wrapped__(model_type).found
    assert found.local == pytest.approx(whole.local, rel=1e-5)
    assert found.frozen == pytest.approx(whole.frozen, rel=1e-4)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3", "olmo2", "mixtral", "qwen3_moe"])
def test_frozen_of_an_ffn_is_inspects_uat_term(model_type: str) -> None:
    """Where FFNs have no bias; inspect counts a bias as static, a removal takes it along."""
    here = read(model_type)
    for block, term in enumerate(here.uat):
        want = float(term.norm() / here.output.norm())
        assert want > 1e-3
        assert here.found.frozen[TermId("ffn", block, 0)] == pytest.approx(want, rel=1e-3)


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


def test_experts_that_are_handed_their_routing_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="leave them out with --granularity"):
        read("diffusion_gemma_text")


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
    model = two_single("gemma2")
    structure = discover(model)
    sites, ids = find_sites(structure), token_ids(model)[:, :1]
    terms = TermList.of(structure, sites, KINDS).ids
    reader = Reader(sites, branches_of(structure, sites), terms, set(terms))
    outputs: list[Tensor] = []

    def listen(run: BlockRun) -> None:
        reader(run)
        outputs.append(run.output)

    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, ids), listen)
    found = reader.finish(outputs[-1])
    assert set(found.local) == set(terms)
    assert sum(found.local[t] for t in terms if t.kind == "neuron") > 0
