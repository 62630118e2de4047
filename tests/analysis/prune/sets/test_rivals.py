"""Sets of other criteria: what they do, against zeros written into plain transformers; and the rules that they keep."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from duat_cli.analysis.plan.task import PruneOptions, besides
from duat_cli.analysis.plan.task import rivals as planned_rivals
from duat_cli.analysis.prune.run import PruneOutcome, begin, prune_bound
from duat_cli.analysis.prune.sets.nested import Nested
from duat_cli.analysis.prune.sets.order import Group, Sizes
from duat_cli.analysis.prune.sets.rivals import OURS, RANDOM, Rivals
from duat_cli.analysis.prune.terms.responses import TermList
from duat_cli.errors import InputError
from duat_cli.kinds import Kind
from duat_cli.loading.model.load import load
from duat_cli.loading.model.tokenizer import load_tokenizer
from duat_cli.loading.prompts import Prompt, default_prompts, encode, holdout_prompts, limits
from duat_cli.models.terms.sites import TermId
from duat_cli.results.prune.rivals import CriterionSet

KINDS: tuple[Kind, ...] = ("neuron", "head")
JOINT = PruneOptions(
    kinds=KINDS, joint=True, remove=0.2, probes=4, measure=8, exceed=0.5, confidence=0.9, effort="quick", whole=True
)


@pytest.fixture
def demo(three: Path) -> str:
    return str(three / "demo")


def texts(demo: str, count: int, held_out: int) -> tuple[list[Prompt], list[Prompt]]:
    loaded = load(demo)
    known, tokenizer = limits(loaded.model), load_tokenizer(Path(loaded.files.path))
    given, apart = (
        encode(tokenizer, some, 12, known.max_positions, known.vocab_size)
        for some in (default_prompts()[:count], holdout_prompts()[:held_out])
    )
    return given, apart


@functools.cache
def outcome(demo: str, options: PruneOptions) -> PruneOutcome:
    """Of the first blocks of the demo in float64."""
    given, apart = texts(demo, 3, 5)
    return prune_bound(load(demo, dtype="float64"), given, apart, options, lambda *_: None)


class Plain:
    """The demo as transformers has it: its last layers, what enters them, and its divergence once weights are zero."""

    def __init__(self, demo: str, given: list[Prompt], apart: list[Prompt]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            load(demo).files.path, dtype=torch.float64, attn_implementation="eager"
        )
        self.given, self.apart = given, apart
        config, layers = self.model.config, self.model.model.layers
        self.count = {"neuron": config.intermediate_size, "head": config.num_attention_heads}
        self.linear = {
            (kind, k): layer.mlp.down_proj if kind == "neuron" else layer.self_attn.o_proj
            for kind in KINDS
            for k, layer in enumerate(layers)
        }
        groups = config.num_attention_heads / config.num_key_value_heads
        head = config.hidden_size * (config.hidden_size // config.num_attention_heads)
        self.held = {"neuron": 3.0 * config.hidden_size, "head": head * (2 + 2 / groups)}
        self.inputs: dict[tuple[Kind, int], Tensor] = {}
        for key, linear in self.linear.items():
            linear.register_forward_pre_hook(functools.partial(self._see, key))
        self.whole = self.said()

    def _see(self, key: tuple[Kind, int], _module: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.inputs[key] = args[0].detach().requires_grad_() if not args[0].requires_grad else args[0]
        return (self.inputs[key],)

    def scores(self) -> dict[str, dict[tuple[Kind, int], Tensor]]:
        """By criterion and layer, (terms,)."""
        squares = {key: torch.zeros(one.in_features, dtype=torch.float64) for key, one in self.linear.items()}
        taylor = {key: torch.zeros(self.count[key[0]], dtype=torch.float64) for key in self.linear}
        for prompt in self.given:
            ids = prompt.input_ids
            loss = self.model(input_ids=ids, labels=ids).loss
            slopes = torch.autograd.grad(loss, [self.inputs[key] for key in self.linear])
            for key, slope in zip(self.linear, slopes, strict=True):
                x = self.inputs[key].detach()[0]
                squares[key] += x.square().sum(dim=0)
                by_term = (slope[0] * x).sum(dim=0).reshape(self.count[key[0]], -1)
                taylor[key] += by_term.sum(dim=1).abs() / len(self.given)
        found: dict[str, dict[tuple[Kind, int], Tensor]] = {"taylor": taylor}
        for key, linear in self.linear.items():
            weight = linear.weight.detach().T.reshape(self.count[key[0]], -1, linear.out_features)
            norms = squares[key].sqrt().reshape(self.count[key[0]], -1)
            size = weight.flatten(1).norm(dim=1)
            found.setdefault("magnitude", {})[key] = size
            found.setdefault("activation x norm", {})[key] = size * norms.norm(dim=1)
            found.setdefault("wanda", {})[key] = (weight.abs().sum(dim=2) * norms).sum(dim=1)
        return found

    def chosen(self, score: dict[tuple[Kind, int], Tensor], *, by_layer: bool, parameters: float) -> list[TermId]:
        """The terms of least score, as many as come nearest to the parameters."""
        every = []
        for (kind, block), values in score.items():
            place = values.argsort().argsort().double()
            worth = (place + 0.5) / len(values) if by_layer else values / self.held[kind]
            every += [(float(w), TermId(kind, block, k)) for k, w in enumerate(worth)]
        every.sort(key=lambda one: one[0])
        held = torch.tensor([self.held[term.kind] for _, term in every]).cumsum(dim=0)
        return [term for _, term in every[: int((held - parameters).abs().argmin()) + 1]]

    @torch.no_grad()
    def said(self) -> list[Tensor]:
        """The logarithms of the next-token distribution under each held-out prompt."""
        return [self.model(input_ids=p.input_ids).logits[0].log_softmax(dim=-1) for p in self.apart]

    @torch.no_grad()
    def damages(self, gone: list[TermId]) -> list[float]:
        """KL of the next-token distribution under each held-out prompt, zeros in the weights of the terms."""
        kept = {key: one.weight.clone() for key, one in self.linear.items()}
        for term in gone:
            weight, width = self.linear[term.kind, term.block].weight, self.count[term.kind]
            each = weight.shape[1] // width
            assert term.index is not None
            weight[:, term.index * each : (term.index + 1) * each] = 0
        now = self.said()
        for key, weight in kept.items():
            self.linear[key].weight.copy_(weight)
        return [
            float((one.exp() * (one - other)).sum(dim=-1).mean()) for one, other in zip(self.whole, now, strict=True)
        ]


def rows(found: PruneOutcome) -> dict[tuple[int, str, str], CriterionSet]:
    [plan] = found.report.plans
    return {(one.beside, one.criterion, one.allocation): one for one in plan.criteria}


def test_damages_are_those_of_zeros_written_into_the_weights(demo: str) -> None:
    """Scores, sets, damages and ratios, all of them anew."""
    found = outcome(demo, replace(JOINT, criteria=True))
    [plan], plain, made = found.report.plans, Plain(demo, *texts(demo, 3, 5)), rows(found)
    order, scores = found.nested["neuron,head"].order, plain.scores()
    sizes = sorted({beside for beside, _, _ in made})
    assert sizes == besides([one.removed for one in plan.held_out])
    assert sizes[-1] == plan.removed
    for size in sizes:
        own = plain.damages(order[:size])
        assert made[size, OURS, "one order"].mean == pytest.approx(sum(own) / len(own), rel=1e-5)
        parameters = sum(plain.held[term.kind] for term in order[:size])
        assert made[size, OURS, "one order"].parameters == round(parameters)
        for criterion, score in scores.items():
            for allocation in ("one order", "same share of layers"):
                row = made.pop((size, criterion, allocation))
                gone = plain.chosen(score, by_layer=allocation != "one order", parameters=parameters)
                damages = plain.damages(gone)
                assert row.removed == len(gone)
                assert abs(row.parameters - parameters) <= max(plain.held.values()) / 2
                assert row.mean == pytest.approx(sum(damages) / len(damages), rel=1e-5), (criterion, allocation)
                assert row.ratio == pytest.approx(sum(damages) / sum(own), rel=1e-5)
    assert {criterion for _, criterion, _ in made} == {OURS, RANDOM}  # and no others


def test_as_many_sets_are_run_as_are_planned(demo: str) -> None:
    given, apart = texts(demo, 2, 4)
    options = PruneOptions(criteria=True, probes=4, measure=2, exceed=0.5, confidence=0.9, budget=0.5, effort="quick")
    begun = begin(load(demo), given, apart, options, lambda *_: None)
    begun.work.run()
    begun.work.tested(apart)
    for kind, found in begun.work.rivals.items():
        terms = {one: len(begun.work.terms.places(one)) for one in options.kinds if one == kind}
        planned = planned_rivals(terms, replace(options, kinds=(*terms,)))
        assert len(found.sets) <= planned, kind
        if kind == "neuron":  # of few terms some sets coincide
            assert len(found.sets) == planned, kind
    assert begun.work.rivals.keys() >= {"neuron", "head", "ffn", "attention", "block"}


def test_without_the_option_the_report_is_the_same_but_for_these_sets(demo: str) -> None:
    """Rank correlations, plans and guarantees above all."""
    plain, asked = (
        outcome(demo, replace(JOINT, criteria=on)).report.model_dump(mode="json", exclude={"run"})
        for on in (False, True)
    )
    assert plain["prediction"][0]["criteria"].keys() >= {"magnitude", "activation x norm", "wanda", "taylor"}
    assert plain["plans"][0]["criteria"] == []
    assert asked["plans"][0].pop("criteria")
    assert plain["plans"][0].pop("criteria") == []
    assert asked == plain


def test_of_blocks_shortgpt_takes_those_that_turn_the_stream_least_and_one_block_stays(demo: str) -> None:
    found = outcome(demo, replace(JOINT, kinds=("block",), joint=False, remove=0.5, criteria=True))
    [plan], made = found.report.plans, rows(found)
    assert {criterion for _, criterion, _ in made} == {OURS, RANDOM, "shortgpt", "magnitude", "taylor"}
    assert {allocation for _, _, allocation in made} == {"one order"}
    assert {one.removed for one in made.values() if one.beside == plan.removed} == {2}
    plain, (given, apart) = load(demo, dtype="float64").model, texts(demo, 3, 5)
    with torch.no_grad():
        cosines = []
        for prompt in given:
            states = plain.model(prompt.input_ids, output_hidden_states=True).hidden_states
            pairs = itertools.pairwise(states[:-1])  # the last is behind the final norm
            cosines.append([float(torch.cosine_similarity(a, b, dim=-1).mean()) for a, b in pairs])
        last = plain.model.layers[-1]
        kept: list[Tensor] = []
        hook = last.register_forward_hook(lambda _m, args, out: kept.append(torch.stack([args[0], _hidden(out)])))
        for one, prompt in zip(cosines, given, strict=True):
            plain.model(prompt.input_ids)
            one.append(float(torch.cosine_similarity(*kept.pop(), dim=-1).mean()))
        hook.remove()
        mean = torch.tensor(cosines).mean(dim=0)
        gone = mean.argsort(descending=True)[:2].tolist()
        whole = [plain(p.input_ids).logits[0].log_softmax(dim=-1) for p in apart]
        layers = plain.model.layers
        plain.model.layers = torch.nn.ModuleList([layer for k, layer in enumerate(layers) if k not in gone])
        now = [plain(p.input_ids, use_cache=False).logits[0].log_softmax(dim=-1) for p in apart]
    each = [float((a.exp() * (a - b)).sum(dim=-1).mean()) for a, b in zip(whole, now, strict=True)]
    assert made[plan.removed, "shortgpt", "one order"].mean == pytest.approx(sum(each) / len(each), rel=1e-5)


def _hidden(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def rivals(
    group: Group, order: list[TermId], sizes: list[int], scores: dict[str, Tensor], layers: list[range]
) -> Rivals:
    return Rivals(Nested(group.kinds, order, []), group, layers, scores, sizes)


def small(options: PruneOptions, count: int, blocks: int, kind: Kind = "neuron", group: int = 1) -> Group:
    ids = [TermId(kind, block, None if kind == "block" else k) for block in range(blocks) for k in range(count)]
    terms = TermList(ids, {(kind, block): block * count for block in range(blocks)})
    sizes = Sizes(torch.full((len(ids),), 7.0, dtype=torch.float64), (100.0, 200.0), (group,) * blocks)
    return Group((kind,), terms, sizes, options)


def test_by_layer_layers_lose_alike_and_in_one_order_the_least_goes() -> None:
    group = small(PruneOptions(kinds=("neuron",)), 4, 2)
    score = torch.tensor([1.0, 2, 3, 4, 10, 20, 30, 40], dtype=torch.float64)
    ids, layers = group.terms.ids, [range(4), range(4, 8)]
    found = rivals(group, ids[::-1], [4], {"a": score, "none": score.where(score > 1, torch.nan)}, layers)
    assert found.sets[0] == ids[:3:-1]
    assert found.sets[1] == ids[:4]
    assert set(found.sets[2]) == {*ids[:2], *ids[4:6]}
    assert len(found.sets) == 3 + 5  # a criterion without a score for every term is left out
    assert len({frozenset(one) for one in found.sets}) == len(found.sets)


def test_a_set_that_several_choose_is_run_once_and_ratios_are_of_the_same_prompts() -> None:
    group = small(PruneOptions(kinds=("neuron",)), 3, 1)
    score = torch.tensor([1.0, 2, 3], dtype=torch.float64)
    found = rivals(group, group.terms.ids, [1, 2], {"a": score, "b": -score}, [range(3)])
    assert len(found.sets) <= 3 + 3  # of one term there are three sets, of two three more
    for prompt in range(6):
        for number, terms in enumerate(found.sets):
            found.add(number, (1 + prompt) * sum(1.0 + (term.index or 0) for term in terms))
    made = {(one.beside, one.criterion, one.allocation): one for one in found.rows(0.95)}
    own, other = made[2, OURS, "one order"], made[2, "b", "one order"]
    assert (own.mean, own.prompts) == (3.5 * 3, 6)
    assert (own.ratio, own.ratio_low, own.ratio_high) == (1.0, 1.0, 1.0)
    assert made[2, "a", "one order"].mean == own.mean
    assert other.ratio == pytest.approx(5 / 3)
    assert other.ratio_low == pytest.approx(5 / 3)  # the same under every prompt
    assert other.lowest is None
    assert "one set" in other.reasons["lowest"]
    drawn = made[1, RANDOM, "one order"]
    assert drawn.sets == 5
    assert drawn.lowest is not None
    assert drawn.highest is not None
    assert drawn.lowest <= drawn.mean <= drawn.highest
    assert drawn.lowest < drawn.highest


def test_a_set_without_damage_gives_no_ratio() -> None:
    group = small(PruneOptions(kinds=("neuron",)), 3, 1)
    found = rivals(group, group.terms.ids, [1], {"a": torch.tensor([3.0, 2, 1], dtype=torch.float64)}, [range(3)])
    for prompt in range(4):
        for number in found.running:
            found.add(number, float(number) if prompt else 0.0)
    for one in found.rows(0.95):
        assert one.ratio is None
        assert "no damage" in one.reasons["ratio_low"]


def test_uniform_sets_take_as_many_of_every_layer_and_never_all() -> None:
    group = small(PruneOptions(kinds=("neuron",), uniform=True), 4, 3)
    score = torch.arange(12.0, dtype=torch.float64)
    found = rivals(group, group.terms.ids, [12], {"a": score}, [range(4), range(4, 8), range(8, 12)])
    for terms in found.sets[1:]:
        assert [sum(term.block == block for term in terms) for block in range(3)] == [3, 3, 3]
    for number in found.running:
        found.add(number, 1.0)
    assert {one.allocation for one in found.rows(0.95)} == {"uniform"}


def test_all_blocks_never_go() -> None:
    group = small(PruneOptions(kinds=("block",)), 1, 4, "block")
    found = rivals(group, group.terms.ids, [4], {"shortgpt": torch.ones(4, dtype=torch.float64)}, [])
    assert all(len(terms) == 3 for terms in found.sets[1:])


def test_what_cannot_be_compared_is_refused(demo: str) -> None:
    given, _ = texts(demo, 2, 5)
    with pytest.raises(InputError, match=r"--criteria: .*--repair"):
        PruneOptions(criteria=True, repair=True)
    with pytest.raises(InputError, match=r"--criteria: sets are compared on held-out prompts; .*--holdout FILE"):
        prune_bound(load(demo), given, [], PruneOptions(criteria=True), lambda *_: None)
