"""The whole analysis on trained weights: how well prediction and ablation agree, on a sample that runs in seconds."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import as_loaded, minilm, single_model, token_ids, two_single
from paging import two_saved
from transformers import LlamaConfig, LlamaForCausalLM

from duat_cli.analysis.plan.task import PruneOptions
from duat_cli.analysis.prune.report import NO_DAMAGE, how_far_off, valid_to
from duat_cli.analysis.prune.run import fresh, prune_bound
from duat_cli.analysis.prune.terms.damage import rounding_of
from duat_cli.errors import InputError
from duat_cli.kinds import Kind
from duat_cli.loading.model.load import LoadedModel, load
from duat_cli.loading.model.tokenizer import load_tokenizer
from duat_cli.loading.prompts import Prompt, default_prompts, encode, limits
from duat_cli.results.prune.report import PruneReport
from duat_cli.statistics.ranking import spearman


def quiet(done: int, total: int, what: str) -> None:
    pass


def some_prompts(loaded: LoadedModel, count: int, tokens: int) -> list[Prompt]:
    known, tokenizer = limits(loaded.model), load_tokenizer(Path(loaded.files.path))
    return encode(tokenizer, default_prompts()[:count], tokens, known.max_positions, known.vocab_size)


@functools.cache
def analysed(
    name: str | None, kind: Kind, *, measure: int, probes: int = 32, count: int = 3, tokens: int = 24
) -> PruneReport:
    loaded = load(name)
    options = PruneOptions(kinds=(kind,), measure=measure, probes=probes, budget=1e-4, effort="quick")
    return prune_bound(loaded, some_prompts(loaded, count, tokens), [], options, quiet).report


# Bounds a little below what 300 neurons and all bundled prompts give: here are fewer of both.
@pytest.mark.parametrize(
    ("name", "kind", "measure", "probes", "size"),
    [("minilm", "neuron", 50, 32, {"count": 2, "tokens": 16}), ("demo", "head", 36, 64, {})],
)
def test_the_prediction_orders_and_sizes_the_measured_damage(
    name: str, kind: Kind, measure: int, probes: int, size: dict[str, int]
) -> None:
    report = analysed(str(minilm()) if name == "minilm" else None, kind, measure=measure, probes=probes, **size)
    assert report.protocol.metric == ("hidden" if name == "minilm" else "kl")
    assert report.certificate.exact
    [found] = report.prediction
    assert found.n == measure
    assert found.spearman is not None
    assert found.median_ratio is not None
    assert found.spearman.value >= 0.96
    near = 0.1 if name == "minilm" else 0.2
    assert 1 - near <= found.median_ratio.value <= 1 + near
    for criterion, value in found.criteria.items():
        assert value is None or value.value < found.spearman.value, criterion


def test_a_plan_names_its_set_and_bounds_stand_beside_the_stream(short: Path) -> None:
    """The sets as a reader would rebuild them from the terms; the stream's norm by a plain hook."""
    loaded = load(str(short / "demo"))
    given, options = some_prompts(loaded, 2, 16), PruneOptions(kinds=("head", "ffn"), measure=4, budget=0.3)
    held_out = some_prompts(loaded, 15, 12)[2:]
    options = replace(options, exceed=0.5, confidence=0.9)
    report = prune_bound(loaded, given, held_out, options, quiet).report
    assert [plan.granularity for plan in report.plans] == ["head", "ffn"]
    for plan in report.plans:
        terms = sorted((t for t in report.terms if t.kind == plan.granularity), key=lambda t: t.linearised or 0.0)
        assert plan.set == [f"block.{t.block}.{t.kind}.{t.index}" for t in terms[: plan.removed]]
        if plan.guarantee is not None:
            assert plan.guarantee.tested[-1] == plan.removed
            assert plan.guarantee.removed in (0, *plan.guarantee.tested)
            assert plan.guarantee.set == plan.set[: plan.guarantee.removed]
    assert any(plan.removed > 0 and plan.guarantee is not None for plan in report.plans)
    layers = loaded.model.model.layers
    sizes: dict[str, list[float]] = {}
    handles = []
    for k, layer in enumerate(layers):
        handles.append(
            layer.post_attention_layernorm.register_forward_pre_hook(
                lambda m, a, k=k: sizes.setdefault(f"input of layers.{k}.post_attention_layernorm", []).append(
                    rms(a[0])
                )
            )
        )
        handles.append(
            layer.register_forward_hook(
                lambda m, a, o, k=k: sizes.setdefault(f"output of layers.{k}", []).append(
                    rms(o if isinstance(o, torch.Tensor) else o[0])
                )
            )
        )
    with torch.no_grad():
        for one in given:
            loaded.model(input_ids=one.input_ids)
    for handle in handles:
        handle.remove()
    for term in report.terms:
        assert term.place is not None
        assert term.place.startswith("input" if term.kind == "head" else "output")
        assert term.certified is not None
        size = sum(sizes[term.place]) / len(given)
        assert term.certified_relative == pytest.approx(term.certified / size, rel=1e-4)
    for block in report.blocks:
        [ffn] = [t for t in report.terms if t.kind == "ffn" and t.block == block.index]
        assert (block.ffn_place, block.certified_ffn) == (ffn.place, ffn.certified)
        assert block.certified_ffn_relative == ffn.certified_relative
        assert block.certified_attention_relative is None
        assert "leaves attention out" in block.reasons["certified_attention_relative"]


def test_every_block_that_lacks_a_kind_is_named_with_its_reason(tmp_path: Path) -> None:
    """Of a mixture of experts: nothing was left out of --granularity."""
    loaded = load(str(two_saved("mixtral", tmp_path / "m")))
    ids = [token_ids(loaded.model, tokens=6, seed=k) for k in range(2)]
    given = [Prompt("", f"{k:064}", one, k) for k, one in enumerate(ids)]
    report = prune_bound(loaded, given, [], PruneOptions(probes=2, measure=1), quiet).report
    [neurons] = [entry.what for entry in report.skipped if entry.what.startswith("neurons of")]
    assert neurons == "neurons of blocks 0-1"
    assert {block.reasons["neurons"] for block in report.blocks} == {
        "the block has no neurons that could be told apart"
    }


def rms(x: torch.Tensor) -> float:
    return float(x.square().sum(dim=-1).mean() ** 0.5)


def prompt(*ids: int) -> Prompt:
    return Prompt("", "".join(map(str, ids)), torch.tensor([ids]), 1)


def test_fresh_prompts() -> None:
    choosing, kept = [prompt(1, 2), prompt(3)], [prompt(4), prompt(1, 3)]
    assert fresh(choosing, kept) == (kept, [])
    found, [note] = fresh(choosing, [*kept, prompt(1, 2), prompt(4)])
    assert found == kept
    assert note.startswith("2 of 4 held-out prompts are left out")
    with pytest.raises(InputError, match="nothing is left to hold out"):
        fresh(choosing, [prompt(3)])
    assert fresh(choosing, []) == ([], [])


def test_a_quick_run_says_what_it_leaves_out() -> None:
    """Prompts are cut for the picture, not for the guarantee, which fewer of them give; there are no bounds."""
    model = two_single("llama")
    given = [Prompt("", str(k), token_ids(model, 300 if k < 2 else 5, k), k) for k in range(2 + 60)]
    options = PruneOptions(kinds=("head",), probes=4, measure=2, budget=0.3, effort="quick")
    report = prune_bound(as_loaded(model), given[:2], given[2:], options, lambda *_: None).report
    assert [p.tokens for p in report.prompts] == [192, 192]
    assert any("2 of 2 prompts are cut to 192 tokens" in note for note in report.warnings)
    assert any("46 of 60 held-out prompts" in note for note in report.warnings)
    [plan] = report.plans
    assert plan.guarantee is not None
    assert plan.guarantee.holdout_prompts == 46
    assert len(plan.guarantee.tested) <= 3
    assert {term.certified for term in report.terms} == {None}
    assert {term.reasons["certified"] for term in report.terms} == {"certified bounds are left out by --effort quick"}
    assert all(term.frozen is not None for term in report.terms)


def test_a_few_ablations_say_what_all_would() -> None:
    """Of the demo's heads: the mean over all of them, the most harmful ones, and which criterion orders them best."""
    every, few = (analysed(None, "head", measure=n, probes=64) for n in (36, 12))
    [all_of_them], [some] = every.prediction, few.prediction
    assert (all_of_them.n, some.n, some.of) == (36, 12, 36)
    exact, mean = all_of_them.mean_measured, some.mean_measured
    assert exact is not None
    assert mean is not None
    truth = [term.measured for term in every.terms]
    assert exact.low == exact.value == exact.high == pytest.approx(sum(truth) / 36)
    assert mean.low <= exact.value <= mean.high
    assert mean.high - mean.low < 0.3 * exact.value
    assert some.mean_predicted == all_of_them.mean_predicted
    known = [term.linearised if term.measured is None else term.measured for term in few.terms]
    assert float(spearman(torch.tensor(known), torch.tensor(truth))) >= 0.95
    worst = [set(torch.tensor(values).topk(6).indices.tolist()) for values in (known, truth)]
    assert worst[0] == worst[1]
    for one in (all_of_them, some):
        assert one.spearman is not None
        assert all(one.spearman.value >= other.value for other in one.criteria.values() if other is not None)


def test_a_prediction_is_valid_up_to_the_first_that_is_off_by_more_than_twice() -> None:
    guess, truth = torch.tensor([0.3, 0.1, 0.2, 0.4]), torch.tensor([0.9, 0.06, 0.25, 0.4])
    assert valid_to(guess, truth) == pytest.approx(0.2)  # 0.3 is off; that 0.4 is not does not count
    assert valid_to(guess, guess / 2) == pytest.approx(0.4)
    assert valid_to(guess, guess * 2.1) is None
    good = torch.tensor([-3.0, -0.01], dtype=guess.dtype)  # of nll: a removal that helps, by another factor
    assert valid_to(torch.cat([guess, good]), torch.cat([guess / 2, 5 * good])) == pytest.approx(0.4)
    assert valid_to(torch.cat([guess, good[1:]]), torch.cat([guess / 2, -good[1:]])) is None
    twice = torch.tensor([0.1, 0.2, 0.2, 0.3], dtype=torch.float64)
    for factors in ([1, 1, 3, 1], [1, 3, 1, 1]):  # of two equal predictions one is off, in whichever order
        assert valid_to(twice, twice * torch.tensor(factors)) == pytest.approx(0.1)


def test_a_factor_is_given_of_few_terms_too_and_none_where_one_side_is_zero() -> None:
    """A largest ratio needs no ranking; a term predicted to do nothing that does something is off without end."""

    def found(guess: list[float], truth: list[float]) -> tuple[float | None, float | None, dict[str, str]]:
        names = [f"term {k}" for k in range(len(guess))]
        return how_far_off(*(torch.tensor(x, dtype=torch.float64) for x in (guess, truth)), names)

    assert found([0.1, 0.2], [0.15, 1.0]) == (pytest.approx(5.0), pytest.approx(0.1), {})
    assert found([0.1, 0.0], [0.15, 0.0]) == (pytest.approx(1.5), pytest.approx(0.1), {})
    assert found([0.0, 0.0], [0.0, 0.0])[2] == {"worst_ratio": NO_DAMAGE, "valid_to": NO_DAMAGE}
    worst, within, reasons = found([0.1, 0.0, 0.2], [0.1, 1.76, 0.6])
    assert (worst, within) == (None, None)
    assert "1 of 3 ablated terms" in reasons["worst_ratio"]
    assert "term 1 is predicted to do 0 and did 1.76" in reasons["worst_ratio"]
    assert "the worst factor is 3" in reasons["worst_ratio"]
    assert "term 1" in reasons["valid_to"]
    assert found([0.1, 0.2], [0.1, 0.0])[:2] == (None, pytest.approx(0.1))
    assert found([-0.1, 0.2], [0.1, 0.2])[:2] == (None, None), "a gain was predicted and a loss came"


def test_what_rounding_does_is_no_damage_that_was_not_predicted() -> None:
    """A dead neuron, ablated beside others in the rows of one pass, is measured as 1e-15 or as 0."""
    guess, truth = (torch.tensor(x, dtype=torch.float64) for x in ([0.1, 0.0, 2e-14], [0.15, 2e-15, 3e-15]))
    least = rounding_of("kl", torch.float32)
    assert how_far_off(guess, truth, ["a", "b", "c"], least)[:2] == (pytest.approx(1.5), pytest.approx(0.1))
    assert how_far_off(guess, truth + 1e-9, ["a", "b", "c"], least)[:2] == (None, None)
    model = single_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[:, 3] = 0
    prompts = [Prompt("", str(k), token_ids(model, 5 + k, k), k) for k in range(3)]
    options = PruneOptions(kinds=("neuron",), measure=200, probes=64)
    report = prune_bound(as_loaded(model), prompts, [], options, quiet).report
    [found], dead = report.prediction, report.terms[3]
    assert dead.linearised == 0
    assert dead.measured == pytest.approx(0, abs=least)
    assert found.worst_ratio is not None
    assert found.valid_to is not None


def test_few_ablated_terms_have_a_worst_factor_though_they_are_not_ranked() -> None:
    report = analysed(None, "attention", measure=1, probes=8, count=1)
    [found], known = report.prediction, [t for t in report.terms if t.measured is not None]
    assert found.n == len(known) == 4
    assert found.spearman is None
    factors = [max(t.linearised / t.measured, t.measured / t.linearised) for t in known if t.linearised and t.measured]
    assert found.worst_ratio == pytest.approx(max(factors))
    assert found.reasons["spearman"] == "4 ablated terms are too few to be ranked"


def test_neurons_are_idle_by_what_they_did_where_all_were_ablated() -> None:
    """A model that is certain of every token: KL is flat there, so that nothing is predicted, and each costs nats."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, tie_word_embeddings=False, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.3)
        model.lm_head.weight.mul_(2000)
    loaded, given = as_loaded(model), [Prompt("", str(k), torch.randint(0, 97, (1, 12)), k) for k in range(2)]
    for measure, idle in ((12, 0.0), (2, 1.0)):
        options = PruneOptions(kinds=("neuron",), measure=measure, probes=8)
        report = prune_bound(loaded, given, [], options, quiet).report
        known = [t.measured for t in report.terms if t.measured is not None]
        assert len(known) == measure
        assert min(known) > 0.001
        assert [b.neurons and b.neurons.negligible_share for b in report.blocks] == [idle, idle]


@pytest.mark.parametrize("model_type", ["albert", "zamba2"])
def test_a_set_holds_no_more_than_all_where_blocks_share_weights(model_type: str) -> None:
    """All blocks of albert are one module; two of zamba2 share most of theirs."""
    model = single_model(model_type)
    prompts = [Prompt("", str(k), token_ids(model, 5 + k, k), k) for k in range(2)]
    options = PruneOptions(kinds=("block",), measure=3, probes=2, budget=1e9)
    [plan] = prune_bound(as_loaded(model), prompts, [], options, quiet).report.plans
    assert plan.removed == 2
    assert plan.parameters_share < 1
    if model_type == "albert":
        assert plan.parameters_share == pytest.approx(2 / 3)


def test_processes_that_share_the_prompts_find_the_same() -> None:
    """Terms, sets, their trial and Eq. 16; the model's modules are those that the results name."""
    loaded = as_loaded(two_single("llama"))
    prompts = [Prompt("", str(k), token_ids(loaded.model, 4 + k, k), k) for k in range(7)]
    given, held_out = prompts[:3], prompts[3:]
    options = PruneOptions(kinds=("head", "ffn"), probes=4, measure=2, budget=0.2, exceed=0.5, confidence=0.9)
    both = [replace(loaded, processes=count) for count in (1, 2)]
    alone, shared = (prune_bound(one, given, held_out, options, quiet).report for one in both)
    assert alone.plans[0].guarantee is not None
    assert shared == alone.model_copy(update={"run": shared.run})


def test_every_block_has_its_own_number_of_key_and_value_heads() -> None:
    """A block of MiniMax has softmax attention, whose heads share keys and values, or a mixer whose heads do not."""
    model = single_model("minimax")
    options = PruneOptions(kinds=("head",), measure=0, probes=2, metric="hidden")
    report = prune_bound(as_loaded(model), [Prompt("", "0", token_ids(model, 6), 1)], [], options, quiet).report
    found = [(block.heads.count, block.heads.kv_heads) for block in report.blocks if block.heads]
    assert found == [(4, 2 if kind == "full_attention" else 4) for kind in model.config.layer_types]


def test_neurons_that_cannot_be_told_apart_are_refused_with_the_reason() -> None:
    """Falcon-H1 multiplies the output of its FFN's last layer by a number."""
    model = single_model("falcon_h1")
    options = PruneOptions(kinds=("neuron",), measure=0, probes=2, metric="hidden")
    why = r"told apart \(neurons of blocks 0-2: the output of FalconH1MLP is not made by one .*\); it has head, ffn"
    with pytest.raises(InputError, match=why):
        prune_bound(as_loaded(model), [Prompt("", "0", token_ids(model, 6), 1)], [], options, quiet)
