"""Reports of tiny models: parts that add up, and each kind of part against the frozen network without it."""

from __future__ import annotations

import gc
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from attributing import WORDS, double, report_of, report_on, structure_of, without
from classifiers import LABELS, classifier
from helpers import far, minilm, single_model, token_ids, two_deep, two_single
from paging import in_parts, two_saved, whole
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForMultipleChoice, AutoModelForPreTraining

from duat_cli.analysis.attribute.run import AttributeOptions, attribute
from duat_cli.analysis.attribute.targets import Asked
from duat_cli.analysis.attribute.total import AttributeTotal
from duat_cli.analysis.attribute.work import Work
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.loading.model.load import load
from duat_cli.loading.model.tokenizer import load_tokenizer
from duat_cli.loading.prompts import encode, read_prompts
from duat_cli.models.discovery.structure import discover, run_stack
from duat_cli.models.instrument import attention
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.terms.sites import Site, find_sites, watching
from duat_cli.results.attribute import AttributeReport, Attribution
from duat_cli.zoo import tiny

TYPES = ["llama", "gpt2", "opt", "falcon", "phi", "gemma2", "mixtral", "gpt_oss", "deepseek_v3", "bert", "modernbert",
         "olmo2", "qwen3_next", "nystromformer"]  # fmt: skip

SINGLE = {"qwen3_next"}  # its mixers' kernels round to float32 whatever they are given


def added(one: Attribution) -> tuple[float, float]:
    """The parts of both readings, added here."""
    p, d = one.parts, one.direct
    total = [t.value for t in p.tokens] + p.static.blocks + [u.value for u in p.units] + [p.head_bias]
    direct = [d.tokens, d.static, d.head_bias] + [h.value for h in d.heads] + [u.value for u in d.units]
    return math.fsum(total), math.fsum(direct)


@pytest.mark.parametrize("model_type", TYPES)
def test_the_parts_add_up_to_the_models_own_logit(model_type: str) -> None:
    """In float64; in float32 every type does in test_every_type.py."""
    model, bar = two_deep(double(model_type)), 1e-6 if model_type in SINGLE else 1e-10
    ids = token_ids(model, tokens=9)
    with torch.no_grad():
        logits = run_stack(model, ids).logits.double()
    report = report_of(model, ids, target="t77", position=5)
    (one,) = report.attribution
    own = float(logits[0, 5, 77]) if one.capped is None else one.logit
    if one.capped is not None:
        assert one.capped == pytest.approx(float(logits[0, 5, 77]), rel=1e-6)
    probable = logits[0, 5].softmax(-1)
    assert one.probability == pytest.approx(float(probable[77]), rel=1e-5)
    probable[77] = 0.0
    assert one.rival is not None
    assert one.rival.id == int(probable.argmax())
    assert one.rival.text.strip() == f"t{one.rival.id}"
    assert one.rival.probability == pytest.approx(float(probable.max()), rel=1e-5)
    for value in added(one):
        assert abs(value - own) <= bar * max(abs(own), sum(abs(u.value) for u in one.parts.units))
    assert max(one.residual, one.direct.residual) == report.certificate.residual <= bar
    assert report.certificate.exact
    for unit in one.parts.units:
        assert unit.tokens is None or math.fsum(unit.tokens) == pytest.approx(unit.value, abs=1e-4)


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "gemma2", "mixtral"])
def test_a_part_of_each_kind_is_what_the_frozen_network_loses_without_it(model_type: str) -> None:
    model = double(model_type)
    ids = token_ids(model, tokens=6)
    (one,) = report_of(model, ids, target="t77", top=50).attribution

    def keep(block: int, run: BlockRun, given: list[Tensor]) -> None:
        return None

    base = without(model, ids, one, keep)
    assert base == pytest.approx(one.logit, rel=1e-6)

    def no_token(x: Tensor) -> Tensor:
        x = x.clone()
        x[0, 2] = 0
        return x

    assert base - without(model, ids, one, keep, no_token) == pytest.approx(one.parts.tokens[2].value, abs=1e-6)

    unit = next(u for u in one.parts.units if u.block == 1)

    def no_unit(block: int, run: BlockRun, given: list[Tensor]) -> None:
        if block == 1:
            bias = run.parts.unit_biases.get(run.units[unit.unit].module)
            here = given[unit.unit].reshape(6, -1)
            here[4] = 0 if bias is None else bias

    assert unit.tokens is not None
    assert base - without(model, ids, one, no_unit) == pytest.approx(unit.tokens[4], abs=1e-6)

    moved = next(head for head in one.direct.heads if (head.block, head.head) == (1, 2))

    def no_head(block: int, run: BlockRun, given: list[Tensor]) -> Tensor | None:
        if block != 1:
            return None
        gone = torch.zeros_like(run.attention[0].output)
        gone[:, :, 2] = run.attention[0].output[:, :, 2]
        return gone

    assert base - without(model, ids, one, no_head) == pytest.approx(moved.moved, abs=1e-6)
    inner = (one.parts.experts or one.parts.neurons)[0]
    kind = "expert" if one.parts.experts else "neuron"
    sites = find_sites(structure_of(model))

    def no_inner(block: int, run: BlockRun, given: list[Tensor]) -> None:
        if block != inner.block:
            return
        call = run.units[inner.unit]

        def silence(site: Site, value: Tensor, index: Tensor | None) -> Tensor:
            mask = torch.ones(site.count, dtype=value.dtype)
            mask[inner.index] = 0
            return value * site.spread(mask, value, index)

        site = sites[run.parts.module].of(kind)[0]
        if site.module in set(call.module.modules()):
            with watching([site], silence):
                output = call.module(call.input)
            given[inner.unit][0] = output if isinstance(output, Tensor) else output[0]
        else:
            given[inner.unit][..., inner.index] = 0

    assert base - without(model, ids, one, no_inner) == pytest.approx(inner.value, abs=1e-6)


def test_every_position_at_once_is_each_alone() -> None:
    model = two_single("llama").double()
    ids = token_ids(model, tokens=4)
    report = report_of(model, ids, position="all")
    following = ids[0, 1:].tolist()
    assert [one.target.token.id for one in report.attribution[:-1] if one.target.token] == following
    for place, one in enumerate(report.attribution):
        assert one.target.token is not None
        (alone,) = report_of(model, ids, target=f"t{one.target.token.id}", position=place).attribution
        for got, expected in zip(numbers_of(one), numbers_of(alone), strict=True):
            assert got == pytest.approx(expected, abs=1e-12)


def test_many_targets_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_single("gpt2").double()
    ids = token_ids(model, tokens=5)
    together = report_of(model, ids, position="all")
    monkeypatch.setattr("duat_cli.analysis.attribute.work.TARGET_BYTES", 1)
    apart = report_of(model, ids, position="all")
    for one, other in zip(together.attribution, apart.attribution, strict=True):
        assert numbers_of(one) == pytest.approx(numbers_of(other), abs=1e-12)


def numbers_of(one: Attribution) -> list[float]:
    return [
        one.logit,
        *(t.value for t in one.parts.tokens),
        *(t.direct for t in one.parts.tokens),
        *(u.value for u in one.parts.units),
        *(n.value for n in one.parts.neurons),
        *(number for head in one.direct.heads for number in (head.value, head.moved)),
        *(move.value for flow in one.flows for move in flow.moves),
    ]


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "bert", "jamba", "axk2"])
def test_weights_read_block_by_block_give_the_same(model_type: str, tmp_path: Path) -> None:
    folder = two_saved(model_type, tmp_path)
    known = whole(folder)
    prompts = [helpers.prompt_of(token_ids(known.model, tokens=n, seed=n)) for n in (5, 3)]
    options = AttributeOptions(Asked(target="t77"))

    def computed(loaded: Any) -> AttributeReport:
        return attribute(loaded, prompts, WORDS, options, lambda *_: None)

    expected = computed(known)
    with in_parts(folder) as loaded:
        got = computed(loaded)
        read = loaded.paged.pager.bytes_read
    assert got.certificate.exact
    assert got.model == expected.model
    assert got.skipped == expected.skipped
    assert got.model.heads == known.model.config.num_attention_heads  # not those of jamba's mixers
    assert len(got.attribution) == 2
    for one, other in zip(got.attribution, expected.attribution, strict=True):
        assert numbers_of(one) == pytest.approx(numbers_of(other), abs=1e-5)
    if model_type == "llama":  # forwards, backwards, and what stands behind the last block a few times
        assert read < 3 * sum(t.numel() * 4 for t in known.model.state_dict().values())


def test_no_weights_of_a_block_are_held_when_the_next_one_is_read(tmp_path: Path) -> None:
    """The forms of experts are views of their weights."""
    model, left = two_single("mixtral"), list[int]()
    sizes = {p.numel() * 4 for p in model.model.layers[0].mlp.experts.parameters()}

    def held() -> int:
        """Memories as large as the experts' weights, those of models that other tests keep among them."""
        tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and not t.is_meta]
        return len({t.untyped_storage().data_ptr() for t in tensors if t.untyped_storage().nbytes() in sizes})

    with in_parts(two_saved("mixtral", tmp_path)) as loaded:
        most = held()
        loaded.paged.pager.freed = lambda _: left.append(held())
        prompt = helpers.prompt_of(token_ids(model, tokens=5, seed=1))
        attribute(loaded, [prompt], WORDS, AttributeOptions(Asked(target="t77"), measure=2), lambda *_: None)
    assert len(left) > 6
    assert max(left) <= most


def test_flows_are_the_entries_of_h_times_values() -> None:
    model = single_model("llama").double()
    ids = token_ids(model, tokens=4)
    (one,) = report_of(model, ids, target="t77").attribution
    assert len(one.flows) == 10
    sizes = [abs(flow.moved) for flow in one.flows]
    assert sizes == sorted(sizes, reverse=True)
    for flow in one.flows:
        head = next(h for h in one.direct.heads if (h.block, h.head) == (flow.block, flow.head))
        assert flow.moved == head.moved
        assert len(flow.moves) == (4 if flow.block == 2 else 10)  # all of a causal 4 x 4; behind the last, one row
        assert math.fsum(move.value for move in flow.moves) == pytest.approx(flow.moved, abs=1e-12)
        for move in flow.moves:
            assert move.source <= move.target
            assert move.value == pytest.approx(move.attention * move.carried, abs=1e-15)


def test_a_classifier() -> None:
    model = classifier("text")
    ids = token_ids(model, tokens=7)
    with torch.no_grad():
        logits = model(ids).logits[0]
    report = report_of(model, ids, target="good", against="bad")
    (one,) = report.attribution
    assert (one.target.kind, one.position) == ("class", None)
    assert one.logit == pytest.approx(float(logits[2] - logits[0]), rel=1e-5)
    assert report.certificate.exact
    assert one.rank == 1 + int((logits > logits[2]).sum())
    odds = logits.double().softmax(dim=-1)
    assert one.probability == pytest.approx(float(odds[2]), rel=1e-5)
    assert one.rival is not None
    assert one.rival.text == {0: "bad", 1: "so"}[int(odds[:2].argmax())]
    with pytest.raises(InputError, match="'fine': no class of this model; it has bad, so, good"):
        report_of(model, ids, target="fine")
    with pytest.raises(InputError, match="--position"):
        report_of(model, ids, target="good", position=1)


def test_one_number_for_each_token_is_no_class_of_the_prompt() -> None:
    model = AutoModelForPreTraining.from_config(tiny.tiny_config("electra"), attn_implementation="eager").eval()
    ids = token_ids(model, tokens=7)
    assert model(ids).logits.shape == ids.shape
    with pytest.raises(UnsupportedModelError, match="ElectraForPreTraining gives one number for each token"):
        report_of(model, ids)


def test_a_choice_between_texts_is_refused_in_words() -> None:
    model = AutoModelForMultipleChoice.from_config(tiny.tiny_config("bert"), attn_implementation="eager").eval()
    with pytest.raises(UnsupportedModelError, match="BertForMultipleChoice chooses between several texts"):
        report_of(model, token_ids(model, tokens=7))


def test_a_classifier_of_tokens() -> None:
    model = classifier("token")
    ids = token_ids(model, tokens=7)
    with torch.no_grad():
        logits = model(ids).logits[0]
    (one,) = report_of(model, ids, target="good", against="bad", position=3).attribution
    assert (one.target.kind, one.position) == ("class", 3)
    assert one.logit == pytest.approx(float(logits[3, 2] - logits[3, 0]), rel=1e-5)
    assert one.probability == pytest.approx(float(logits[3].double().softmax(dim=-1)[2]), rel=1e-5)
    every = report_of(model, ids, position="all").attribution
    names = [None if one.target.token is None else one.target.token.text for one in every]
    assert names == [LABELS[int(k)] for k in logits.argmax(dim=-1)]
    with pytest.raises(InputError, match="'fine': no class of this model; it has bad, so, good"):
        report_of(model, ids, target="fine")


def test_a_model_without_a_head() -> None:
    model = AutoModel.from_config(two_single("bert").config, attn_implementation="eager").eval()
    tiny.randomise(model, 1)
    ids = token_ids(model, tokens=7)
    with torch.no_grad():
        pooled = model(ids).last_hidden_state[0].mean(0)
    (norm,), (third,) = (report_of(model, ids, target=text).attribution for text in ("norm", "3"))
    assert norm.logit == pytest.approx(float(pooled.norm()), rel=1e-6)
    assert third.logit == pytest.approx(float(pooled[3]), rel=1e-4)
    assert max(norm.residual, third.residual) < 1e-5
    with pytest.raises(InputError, match=r"no --target: this model has no head; .* 0 to 31, or norm"):
        report_of(model, ids)
    with pytest.raises(InputError, match="--target '32': this model has no head"):
        report_of(model, ids, target="32")


def test_a_replay_that_is_wrong_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate is of the sum against the untouched model: a frozen H that is not the model's shows."""
    model = two_single("llama")
    structure = discover(model)
    plain = attention.apply_rows
    monkeypatch.setattr("duat_cli.analysis.session.discover", lambda *_, **__: structure)
    monkeypatch.setattr(attention, "apply_rows", lambda rows, value: 1.001 * plain(rows, value))
    report = report_of(model, token_ids(model, tokens=7))
    assert not report.certificate.exact
    assert report.certificate.residual > 1e-5


def test_a_prompt_of_one_token() -> None:
    model = two_single("llama")
    report = report_of(model, token_ids(model, tokens=1))
    assert report.certificate.exact
    assert len(report.attribution[0].parts.tokens) == 1


def test_half_precision_says_its_tolerance() -> None:
    model = two_single("llama").bfloat16()
    report = report_on(helpers.as_loaded(model), token_ids(model, tokens=7))
    assert report.certificate.tolerance == 5e-2
    wide = report_of(two_single("llama"), token_ids(model, tokens=7), target=str(
        report.attribution[0].target.token and f"t{report.attribution[0].target.token.id}"
    ))  # fmt: skip
    assert far([t.value for t in report.attribution[0].parts.tokens], [
        t.value for t in wide.attribution[0].parts.tokens
    ]) < 0.2  # fmt: skip


def test_what_blocks_share_is_said_to_be_held() -> None:
    """A side channel from the first block to the last."""
    model = two_single("llama")
    ids = token_ids(model, tokens=7)
    assert report_of(model, ids).skipped == []
    kept: list[Any] = []
    layers = model.model.layers
    layers[0].register_forward_hook(lambda m, a, out: kept.append(out))
    layers[1].register_forward_pre_hook(lambda m, a, k: (a, {**k, "shared": {"keys": kept[-1]}}), with_kwargs=True)
    (entry,) = report_of(model, ids).skipped
    assert entry.what == "what layers.1 reads beside hidden states"
    assert "counts among biases" in entry.why


def test_an_output_that_is_not_finite_is_one_line() -> None:
    model = two_single("llama")
    model.lm_head.weight.data[77] = torch.inf
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM: its output is not finite"):
        report_of(model, token_ids(model, tokens=5), target="t77")


@pytest.mark.parametrize("model_type", ["yoso", "zaya"])  # a kernel without a graph; experts beside their router
def test_mixers_add_up(model_type: str) -> None:
    model = two_single(model_type)
    assert report_of(model, token_ids(model, tokens=5), position=3).certificate.residual <= 1e-5


def test_heads_of_two_attentions_in_a_block_are_told_apart() -> None:
    """What each head of the last block writes straight to the logit, by plain hooks; a block of longcat_flash has two
    attentions."""
    model = double("longcat_flash")
    ids, place, seen = token_ids(model, tokens=6), 4, []
    last = model.model.layers[-1]
    for module in (*(one.o_proj for one in last.self_attn), model.model.norm):
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0][0, place].detach()))
    report = report_of(model, ids, top=50, position=place)
    assert report.certificate.residual <= 1e-10
    [found] = report.attribution
    del seen[:]
    model(ids)
    *mixed, final = seen
    norm = model.model.norm
    scale = (final.square().mean() + norm.variance_epsilon).rsqrt()
    row = model.lm_head.weight[found.target.token.id] * norm.weight * scale
    expected = [
        float(part)
        for mla, heads in zip(last.self_attn, mixed, strict=True)
        for part in (row @ mla.o_proj.weight * heads).reshape(model.config.num_attention_heads, -1).sum(dim=1)
    ]
    direct = {head.head: head.value for head in found.direct.heads if head.block == len(model.model.layers) - 1}
    assert [direct[k] for k in range(len(expected))] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("model_type", ["mamba2", "jamba", "qwen3_next"])
def test_heads_of_a_mixer_move_what_the_frozen_network_loses_without_them(model_type: str) -> None:
    """Also where nothing but the mixer's values, a UAT term, reaches them."""
    model = two_single(model_type)
    ids = token_ids(model, tokens=5)
    (one,) = report_of(model, ids, position=3).attribution

    def no_heads(block: int, run: BlockRun, given: list[Tensor]) -> Tensor | None:
        return run.attention[0].output if block == 0 else None

    lost = one.logit - without(model, ids, one, no_heads)
    heads = [head for head in one.direct.heads if head.block == 0]
    assert math.fsum(head.moved for head in heads) == pytest.approx(lost, abs=1e-5)
    assert max(abs(head.moved) for head in heads) > 1e-3


def test_a_real_encoder_without_a_head() -> None:
    loaded = load(str(minilm()))
    tokenizer = load_tokenizer(loaded.files.path)
    read = read_prompts(["The cat sat."], None, None)
    (prompt,) = encode(tokenizer, read, None, 512, loaded.model.config.vocab_size)
    with torch.no_grad():
        pooled = loaded.model(prompt.input_ids).last_hidden_state[0].double().mean(0)
    report = attribute(loaded, [prompt], WORDS, AttributeOptions(Asked(target="norm")), lambda *_: None)
    (one,) = report.attribution
    assert one.logit == pytest.approx(float(pooled.norm()), rel=1e-5)
    assert max(one.residual, one.direct.residual) <= 1e-5
    assert report.certificate.exact


# -- several prompts ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
@pytest.mark.parametrize(
    "options",
    [
        AttributeOptions(),
        AttributeOptions(Asked(position="all")),
        AttributeOptions(steps=2),
        AttributeOptions(measure=2),
    ],
    ids=["last position", "every position", "greedy tokens", "measured"],
)
def test_processes_that_share_the_prompts_find_the_same(options: AttributeOptions) -> None:
    loaded = helpers.as_loaded(two_single("llama"))
    prompts = [helpers.prompt_of(token_ids(loaded.model, tokens=count)) for count in (5, 3, 4)]
    said: list[tuple[int, int]] = []
    both = [replace(loaded, processes=count) for count in (1, 2)]
    alone, shared = (attribute(one, prompts, WORDS, options, lambda *at: said.append(at[:2])) for one in both)
    whole = 3 * 2  # prompts, blocks
    assert {(done, of) for done, of in said if of == whole} >= {(done, whole) for done in range(1, whole + 1)}
    assert max(done for done, of in said if of == whole) == whole
    assert shared == alone.model_copy(update={"run": shared.run})
    assert alone.certificate.exact
    assert {one.prompt for one in alone.attribution} == {0, 1, 2}


def test_what_a_prompt_gave_is_in_the_report_before_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of one prompt at a time are there, however many prompts there are."""
    order: list[str] = []
    for owner, name in ((Work, "run"), (AttributeTotal, "add")):
        own = getattr(owner, name)
        told = lambda *given, own=own, name=name: (order.append(name), own(*given))[1]  # noqa: E731
        monkeypatch.setattr(owner, name, told)
    loaded = helpers.as_loaded(two_single("llama"))
    prompts = [helpers.prompt_of(token_ids(loaded.model, tokens=count)) for count in (4, 5, 6)]
    attribute(loaded, prompts, WORDS, AttributeOptions(), lambda *_: None)
    assert order == ["run", "add"] * 3


def test_neurons_that_no_single_layer_reads_are_missed_with_a_reason() -> None:
    """As of a layer with an adapter that is not merged."""

    class Both(nn.Module):
        def __init__(self, own: nn.Linear) -> None:
            super().__init__()
            self.own, self.added = own, nn.Linear(own.in_features, own.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.own(x) + self.added(x)

    model = tiny.tiny_model("llama")
    assert report_of(model, token_ids(model)).warnings == []
    for block in list(model.model.layers)[1:]:
        block.mlp.down_proj = Both(block.mlp.down_proj)
    report = report_of(model, token_ids(model))
    assert {neuron.block for neuron in report.attribution[0].parts.neurons} == {0}
    (said,) = report.warnings
    assert said.endswith("no neurons are listed: the output of LlamaMLP is not made by one linear layer of its neurons")
    assert said.startswith("block")
