"""Two prompts through one model: every number of every block against the model itself, dense and in float64."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from classifiers import classifier
from helpers import (
    WIRINGS,
    Detached,
    InDouble,
    as_loaded,
    blocks_of,
    dense_blocks,
    far,
    prompt_of,
    quiet,
    single_model,
    token_ids,
    two_double,
    two_single,
)
from paging import in_parts, pager_of, two_saved, whole
from torch import Tensor, nn
from transformers.models.jamba import modeling_jamba

from duat_cli.analysis.compare import states
from duat_cli.analysis.compare.alignment import Aligned
from duat_cli.analysis.compare.parameters import change_of_scales
from duat_cli.analysis.compare.request import Texts
from duat_cli.analysis.compare.run import CompareOptions, compare
from duat_cli.errors import InputError
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.texts import PromptText
from duat_cli.loading.words import Words
from duat_cli.models.instrument.hooks import hooked
from duat_cli.operators.input_change import Routed
from duat_cli.results.compare.report import CompareReport

OPTIONS = CompareOptions(cache=False)


@dataclass(frozen=True)
class Named:
    """Modules of a block, as the model's code names them."""

    in_front: str | None  # the norm that attention reads through
    behind: str | None  # the norm that attention's output goes through
    ffn: str  # whose output is f, its last bias aside
    bias: str | None  # the layer that this bias belongs to
    first: str | None  # the layer whose output the nonlinearity reads


MODELS = {
    "llama": Named("input_layernorm", None, "mlp", None, "mlp.gate_proj"),
    "gpt2": Named("ln_1", None, "mlp", "mlp.c_proj", "mlp.c_fc"),
    "gemma2": Named("input_layernorm", "post_attention_layernorm", "mlp", None, "mlp.gate_proj"),
    "bert": Named(None, None, "intermediate", None, "intermediate.dense"),
    "mixtral": Named("input_layernorm", None, "mlp", None, None),
}


def ids_of(model: Any) -> tuple[Tensor, Tensor]:
    """Two prompts of 7 and 8 tokens with 5 in common, one of them at another place."""
    a = token_ids(model, 7, 0)
    other = token_ids(model, 8, 3)
    b = torch.cat([a[:, :3], other[:, :3], a[:, 5:]], dim=1)
    return a, b


def texts_of(count: int, pairs: list[tuple[int, int]] | None = None, **more: Any) -> Texts:
    texts = [PromptText(f"text {k}", f"--prompt {k + 1}", k) for k in range(count)]
    return Texts(texts, more.pop("runs", count), pairs or [(0, k) for k in range(1, count)], **more)


def report_of(loaded: LoadedModel, *ids: Tensor, options: CompareOptions = OPTIONS, **more: Any) -> CompareReport:
    prompts = [prompt_of(one) for one in ids]
    return compare(loaded, texts_of(len(ids), **more), prompts, options, Words(None), quiet)


@functools.cache
def in_double(model_type: str, by_place: bool = False) -> CompareReport:
    model = two_double(model_type)
    a, b = ids_of(model)
    with InDouble():
        options = CompareOptions(cache=False, by_place=by_place)
        return report_of(as_loaded(model), a, b[:, : a.shape[1]] if by_place else b, options=options)


@functools.cache
def in_single(model_type: str) -> CompareReport:
    model = two_single(model_type)
    return report_of(as_loaded(model), *ids_of(model))


# -- the model itself ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """One block under one prompt, by hooks."""

    source: Tensor  # scale of the norm in front, (N,)
    token: Tensor  # scale of the norm behind, (N,)
    f: Tensor
    input: Tensor
    output: Tensor
    bias: Tensor | None  # b'_{j,2}: what the first layer gives less what x_0 gives it by the linear path


def scale_of(norm: nn.Module, x: Tensor) -> Tensor:
    eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", 0.0)
    centered = x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x
    return (centered.square().mean(-1) + eps).rsqrt()


def seen_of(model_type: str, ids: Tensor) -> list[Seen]:
    model, named = two_double(model_type), MODELS[model_type]
    blocks = list(model.get_submodule(WIRINGS[model_type].blocks))
    tokens = ids.shape[1]
    kept: dict[tuple[int, str], Tensor] = {}

    def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        made = output if isinstance(output, Tensor) else output[0]
        kept[number[module], "out " + name[module]] = made[0]
        kept[number[module], "in " + name[module]] = (args or tuple(kwargs.values()))[0][0]

    number, name = {}, {}
    for k, block in enumerate(blocks):
        for path in ("", *filter(None, (named.in_front, named.behind, named.ffn, named.first))):
            module = block.get_submodule(path)
            number[module], name[module] = k, path
    with InDouble(), torch.no_grad(), hooked(number, after=keep):
        model(input_ids=ids)
    linear = linear_paths(model, blocks, named, ids)
    found = []
    for k, block in enumerate(blocks):
        ones = torch.ones(tokens, dtype=torch.float64)
        paths = {role: getattr(named, role) for role in ("in_front", "behind")}
        scales = {
            role: ones if path is None else scale_of(block.get_submodule(path), kept[k, f"in {path}"])
            for role, path in paths.items()
        }
        f = kept[k, f"out {named.ffn}"]
        f = f if named.bias is None else f - block.get_submodule(named.bias).bias
        bias = None if named.first is None else kept[k, f"out {named.first}"] - linear[k]
        found.append(Seen(scales["in_front"], scales["behind"], f, kept[k, "in "], kept[k, "out "], bias))
    return found


def linear_paths(model: Any, blocks: list[Any], named: Named, ids: Tensor) -> list[Tensor]:
    """J x_0 at the first layer of every FFN: softmax weights, scales of norms and FFN outputs constant to autograd."""
    if named.first is None:
        return []
    caught: dict[Any, Tensor] = {}

    def leaf(module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = None if args else "hidden_states"
        caught["x"] = x = (args[0] if args else kwargs[key]).detach().clone().requires_grad_()
        return ((x * 1.0, *args[1:]), kwargs) if args else (args, {**kwargs, key: x * 1.0})

    def constant(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return output.detach()

    def catch(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        caught[module] = output

    firsts = [block.get_submodule(named.first) for block in blocks]
    ffns = [block.get_submodule(named.ffn) for block in blocks]
    with (
        InDouble(), Detached(), torch.enable_grad(), hooked([blocks[0]], leaf), hooked(ffns, after=constant),
        hooked(firsts, after=catch),
    ):  # fmt: skip
        model(input_ids=ids)
    x, found = caught["x"], []
    for first in firsts:
        out = caught[first]
        seeds = torch.eye(out.numel(), dtype=out.dtype).reshape(-1, *out.shape)
        (rows,) = torch.autograd.grad(out, x, seeds, is_grads_batched=True, retain_graph=True)
        found.append((rows.reshape(out.numel(), -1) @ x.detach().reshape(-1)).reshape(out.shape[1:]))
    return found


def relative(a: Tensor, b: Tensor, places: tuple[list[int], list[int]]) -> float:
    one, two = a.detach()[places[0]], b.detach()[places[1]]
    return float((two - one).norm() / one.norm())


def of_tokens(a: Tensor, b: Tensor, places: tuple[list[int], list[int]]) -> float:
    return statistics.fmean(far(b[there], a[here]) for here, there in zip(*places, strict=True))


@pytest.mark.parametrize(
    ("model_type", "by_place"),
    [*((one, False) for one in MODELS), *((one, True) for one in ("llama", "gemma2", "bert"))],
)
def test_every_number_is_that_of_the_model_itself(model_type: str, by_place: bool) -> None:
    report, model = in_double(model_type, by_place), two_double(model_type)
    ids = ids_of(model)
    assert report.certificate.relative_error < 1e-6
    at = [0, 1, 2, 5, 6], [0, 1, 2, 6, 7]
    runs = [(run.a, run.b, run.tokens, run.text_b is None) for run in report.pairs[0].runs]
    if by_place:
        ids, at = (ids[0], ids[1][:, :7]), ([*range(7)], [*range(7)])
        assert runs == [(0, 0, 3, True), (3, 3, 4, False)]
    else:
        assert runs == [(0, 0, 3, True), (5, 6, 2, True)]
    dense = [dense_blocks(model, one, WIRINGS[model_type]) for one in ids]
    seen = [seen_of(model_type, one) for one in ids]
    for block, W_a, W_b, one, two in zip(report.comparison.blocks, *dense, *seen, strict=True):
        sizes = [blocks_of(W.W, len(W.x)) for W in (W_a, W_b)]
        A, B = (W[p][:, p] for W, p in zip(sizes, at, strict=True))  # (n, n, M, M)
        source = two.source[at[1]] / one.source[at[0]]
        token = two.token[at[1]] / one.token[at[0]]
        ratio = (token[:, None] * source)[..., None, None]  # S_b / S_a
        parts = {"relative": B - A, "routing": B / ratio - A, "scale": A * ratio - A}
        parts["interaction"] = parts["relative"] - parts["routing"] - parts["scale"]
        for name, part in parts.items():
            expected = float(part.norm() / A.norm())
            assert getattr(block.operator, name) == pytest.approx(expected, rel=1e-6, abs=1e-9), name
        for k, name in enumerate(("unaligned_a", "unaligned_b")):
            rows = sizes[k][at[k]].square().sum((2, 3))
            expected = 1 - float(rows[:, at[k]].sum() / rows.sum())
            assert getattr(block.operator, name) == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert block.ffn == pytest.approx(relative(one.f, two.f, at), rel=1e-6)
        assert block.output == pytest.approx(of_tokens(one.output, two.output, at), rel=1e-6)
        into = of_tokens(one.input, two.input, at)
        if into:
            assert block.input == pytest.approx(into, rel=1e-6)
            assert block.output is not None
            assert block.amplification == pytest.approx(block.output / into, rel=1e-6)
        else:
            assert block.reasons["amplification"] == "the block's input does not change"
        if one.bias is None or two.bias is None:
            assert block.bias is None
        elif float(one.bias.detach().norm()) > 1e-9:
            assert block.bias == pytest.approx(relative(one.bias, two.bias, at), rel=1e-6)
        else:
            assert block.reasons["bias"] == "it is zero under the first prompt"


def test_of_an_amplification_only_what_it_measures_is_said() -> None:
    """A change relative to the norm, which a block may lower: of no block is it said that it drives the prompts
    apart."""
    for model_type in MODELS:
        comparison = in_double(model_type).comparison
        known = [(block.amplification, block.index) for block in comparison.blocks if block.amplification is not None]
        said = [text for text in comparison.notable if "its output changes" in text]
        size, index = max(known, default=(0.0, 0))
        expected = f"block {index} raises the change most: its output changes {size:.3g} times as much as its input"
        assert said == ([f"{expected}, relative to their tokens' norms"] if size >= 1.5 else [])


@pytest.mark.parametrize("model_type", MODELS)
def test_float32_agrees_with_float64(model_type: str) -> None:
    for one, two in zip(in_single(model_type).comparison.blocks, in_double(model_type).comparison.blocks, strict=True):
        for name in ("relative", "routing", "scale", "interaction", "unaligned"):
            assert getattr(one.operator, name) == pytest.approx(getattr(two.operator, name), rel=1e-3, abs=1e-5)
        for name in ("bias", "ffn", "output", "amplification"):
            if getattr(two, name) is None:
                assert getattr(one, name) is None
            else:
                assert getattr(one, name) == pytest.approx(getattr(two, name), rel=1e-3)


@pytest.mark.parametrize("model_type", MODELS)
def test_identical_prompts_give_zero_everywhere(model_type: str) -> None:
    model = two_single(model_type)
    a, _ = ids_of(model)
    report = report_of(as_loaded(model), a, a)
    for block in report.comparison.blocks:
        for name in ("relative", "routing", "scale", "interaction", "unaligned"):
            assert getattr(block.operator, name) == 0.0
        assert block.operator.null.relative == block.operator.null.unaligned == 0.0
        assert {block.bias, block.ffn, block.output, block.input} <= {0.0, None}
        assert block.output == block.ffn == 0.0
        assert all(head.relative == head.unaligned == 0.0 for head in block.heads)
    assert not any(parameter.moved or parameter.change for parameter in report.comparison.parameters)
    assert report.pairs[0].kl in (0.0, None)
    assert report.comparison.notable == ["no operator W' moved: the compared tokens read nothing that differs"]


def test_rounding_of_a_common_beginning_is_told_as_no_movement() -> None:
    """A causal model's first tokens do not see how the text goes on; passes of other lengths round differently."""
    model = two_single("llama")
    a, _ = ids_of(model)
    longer = torch.cat([a[:, :2], a[:, :1].expand(1, 60)], dim=1)
    report = report_of(as_loaded(model), a[:, :3], longer)
    blocks = report.comparison.blocks
    assert any(block.input for block in blocks)
    assert {block.amplification for block in blocks} == {None}
    assert {block.reasons["amplification"] for block in blocks} == {
        "the block's input does not change",
        "the block's input does not change beyond rounding",
    }
    assert report.comparison.notable == [
        "no operator W' moved: the compared tokens read nothing that differs; they are a common beginning: "
        "give texts that differ early and end alike"
    ]


def test_heads_are_those_of_the_models_attention_weights() -> None:
    """In the first block the scales of equal tokens are equal: a head moves as its attention weights do."""
    model = two_single("llama")
    a, b = ids_of(model)
    norm, table = model.model.layers[0].input_layernorm, model.model.embed_tokens
    model.set_attn_implementation("eager")
    with torch.no_grad():
        scale = scale_of(norm, table(a[0])).double()[[0, 1, 2, 5, 6]]
        H = [model(input_ids=one, output_attentions=True).attentions[0][0].double() for one in (a, b)]
    one, two = (h[:, p][:, :, p] * scale for h, p in zip(H, ([0, 1, 2, 5, 6], [0, 1, 2, 6, 7]), strict=True))
    heads = in_single("llama").comparison.blocks[0].heads
    assert [head.head for head in heads] == list(range(model.config.num_attention_heads))
    for head in heads:
        expected = float((two[head.head] - one[head.head]).norm() / one[head.head].norm())
        assert head.relative == pytest.approx(expected, rel=1e-4)
        assert head.scale == pytest.approx(0.0, abs=1e-6)


def test_which_parameters_moved() -> None:
    report = in_single("gpt2")
    found = {parameter.name: parameter for parameter in report.comparison.parameters}
    assert not any(p.moved for p in found.values() if p.set_by == "checkpoint")
    assert all(found[name].moved for name in ("H_h", "S", "W'", "b'_{j,2}", "f_j", "b'_{j,3}", "norm scales"))
    largest = max(block.operator.relative or 0.0 for block in report.comparison.blocks)
    assert found["W'"].change == largest
    assert "output gates" not in found


def test_the_constants_of_a_block_are_its_biases() -> None:
    """Behind gpt2's first block they are the same for every input, as each row of H sums to 1; llama has none."""
    report = report_of(as_loaded(two_single("gpt2")), *ids_of(two_single("gpt2")), options=replace(OPTIONS, layers={0}))
    [constants] = [one for one in report.comparison.parameters if one.name == "b'_{j,3}"]
    assert constants.change == pytest.approx(0.0, abs=1e-6)
    assert all(one.name != "b'_{j,3}" for one in in_single("llama").comparison.parameters)


def test_the_divergence_is_that_of_the_models_own_logits() -> None:
    model = two_single("llama")
    a, b = ids_of(model)
    [pair] = in_single("llama").pairs
    with torch.no_grad():
        p, q = (model(input_ids=one).logits[0, -1].double().log_softmax(-1) for one in (a, b))
    assert pair.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)


def test_the_divergence_of_a_classifier_is_that_of_its_classes() -> None:
    model = classifier("text")
    a, b = ids_of(model)
    [pair] = report_of(as_loaded(model), a, b).pairs
    with torch.no_grad():
        p, q = (model(input_ids=one).logits[0].double().log_softmax(-1) for one in (a, b))
    assert pair.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)
    [pair] = report_of(as_loaded(classifier("token")), a, b).pairs  # whose last token is any
    assert "no next-token model" in pair.reasons["kl"]


def test_a_model_that_predicts_no_next_token_says_so() -> None:
    [pair] = in_single("bert").pairs
    assert pair.kl is None
    assert "no next-token model" in pair.reasons["kl"]


def test_a_pair_that_differs_in_its_last_token() -> None:
    """A causal model moves nothing in front of it, so that the token itself is all there is to compare."""
    model = two_single("llama")
    a = token_ids(model, 7, 0)
    b = torch.cat([a[:, :6], (a[:, 6:] + 1) % model.config.vocab_size], dim=1)
    still = report_of(as_loaded(model), a, b).comparison
    [note] = still.notable
    assert note.startswith("no operator W' moved")
    assert "--align position" in note
    moved = report_of(as_loaded(model), a, b, options=CompareOptions(cache=False, by_place=True))
    assert [(run.tokens, run.text_b is None) for run in moved.pairs[0].runs] == [(6, True), (1, False)]
    assert all(block.operator.relative and block.amplification for block in moved.comparison.blocks)
    assert all(block.operator.unaligned == 0.0 for block in moved.comparison.blocks)
    with pytest.raises(InputError, match=r"--align position: --prompt 1 has 7 tokens and --prompt 2 6"):
        report_of(as_loaded(model), a, b[:, :6], options=CompareOptions(cache=False, by_place=True))


def test_several_pairs_are_averaged() -> None:
    model = two_single("llama")
    a, b = ids_of(model)
    c = torch.cat([a[:, :4], token_ids(model, 3, 9)], dim=1)
    both = report_of(as_loaded(model), a, b, c, options=CompareOptions(cache=False, per_prompt=True))
    alone = [report_of(as_loaded(model), a, other) for other in (b, c)]
    assert both.comparison.pairs == 2
    for k, block in enumerate(both.comparison.blocks):
        rows = [report.comparison.blocks[k] for report in alone]
        values = [row.operator.relative or 0.0 for row in rows]
        assert block.operator.relative == pytest.approx(sum(values) / 2, rel=1e-12)
        assert block.heads[1].routing == pytest.approx(sum(r.heads[1].routing or 0.0 for r in rows) / 2, rel=1e-12)
        assert block.certificate_error == max(row.certificate_error for row in rows)
        assert [pair.blocks[k] for pair in both.pairs if pair.blocks] == rows


def test_the_pair_without_a_number_is_named() -> None:
    """The prompt beside itself has no amplification, and leaves the mean without one; in block 0 no pair has any."""
    model = two_single("llama")
    a, b = ids_of(model)
    report = report_of(as_loaded(model), a, b, a)
    first, *others = (block.reasons["amplification"] for block in report.comparison.blocks)
    assert first == "the block's input does not change"
    assert set(others) == {f"pair 2: {first}"}


def test_a_shared_text_is_compared_on_its_own_tokens() -> None:
    """The contexts have a token in common, which is no part of the shared text."""
    model = two_single("llama")
    shared, first, second = token_ids(model, 4, 0), token_ids(model, 3, 1), token_ids(model, 5, 2)
    second[0, 1] = first[0, 0]
    a, b = torch.cat([first, shared], dim=1), torch.cat([second, shared], dim=1)
    report = report_of(as_loaded(model), a, b, shared, runs=2, pairs=[(0, 1)], alone=2)
    assert [(run.a, run.b, run.tokens) for run in report.pairs[0].runs] == [(3, 5, 4)]
    assert len(report.prompts) == 2
    with pytest.raises(InputError, match="--shared: behind the contexts it has other tokens"):
        report_of(as_loaded(model), a, torch.cat([b, first], dim=1), shared, runs=2, pairs=[(0, 1)], alone=2)


def test_chosen_layers() -> None:
    model = two_single("llama")
    ids = ids_of(model)
    every = in_single("llama").comparison.blocks
    some = report_of(as_loaded(model), *ids, options=CompareOptions(layers=frozenset({1}), cache=False))
    assert some.comparison.blocks == every[1:]
    with pytest.raises(InputError, match="no block 2"):
        report_of(as_loaded(model), *ids, options=CompareOptions(layers=frozenset({2}), cache=False))


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "jamba"])
def test_weights_read_block_by_block_give_the_same_numbers(model_type: str, tmp_path: Path) -> None:
    known = whole(two_saved(model_type, tmp_path))
    ids = ids_of(known.model)
    expected = report_of(known, *ids).model_dump(exclude={"run"})
    with in_parts(tmp_path) as loaded:
        found = report_of(loaded, *ids)
        assert found.model_dump(exclude={"run"}) == expected
        if model_type == "llama":  # once through the blocks, once for the logits
            assert pager_of(loaded).bytes_read < 2.5 * loaded.files.total_bytes


def test_a_block_without_attention_has_its_reason() -> None:
    model = single_model("longcat_flash")
    report = report_of(as_loaded(model), *ids_of(model))
    without = [block for block in report.comparison.blocks if block.operator.relative is None]
    assert without
    assert all(block.operator.reasons["relative"] and not block.heads for block in without)
    assert all(block.output is not None for block in without)


def test_a_prompt_too_long_to_keep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "KEPT_BYTES", 1 << 10)
    model = two_single("llama")
    with pytest.raises(InputError, match=r"a prompt of 7 tokens: .* more than 0; use --max-tokens"):
        report_of(as_loaded(model), *ids_of(model))


def test_the_null_has_the_models_scales_and_uniform_attention() -> None:
    """Against loops over the dense W', whose blocks are made anew with H = 1 / i."""
    model = two_single("llama")
    a, b = ids_of(model)
    report = in_single("llama")
    at = [0, 1, 2, 5, 6], [0, 1, 2, 6, 7]
    layer = model.model.layers[1]
    width, kv = model.config.hidden_size, model.config.num_key_value_heads
    d = layer.self_attn.head_dim
    value = layer.self_attn.v_proj.weight.detach().double().reshape(kv, d, width)
    output = layer.self_attn.o_proj.weight.detach().double().T.reshape(-1, d, width)
    gain = layer.input_layernorm.weight.detach().double()
    A = sum(gain[:, None] * value[h // (len(output) // kv)].T @ output[h] for h in range(len(output)))
    size = float(torch.as_tensor(A).norm())
    lefts = []
    for ids, places in ((a, at[0]), (b, at[1])):
        scale = seen_single(model, ids)[places]
        rows = torch.tensor([[1.0 / (i + 1) if j <= i else 0.0 for j in places] for i in places]).double()
        lefts.append(rows * scale * size)
    expected = float((lefts[1] - lefts[0]).norm() / lefts[0].norm())
    assert report.comparison.blocks[1].operator.null.relative == pytest.approx(expected, rel=1e-4)


def test_the_null_of_a_mixer_has_its_gates() -> None:
    """Mamba's channels are heads of one channel: B_ij = O diag(g_i) / (i + 1) by hand."""
    model = two_single("jamba")
    a, b = ids_of(model)
    mixer = model.model.layers[0].mamba
    size = mixer.out_proj.weight.detach().double().norm(dim=0)  # of each channel's column
    lefts = []
    for ids, places in ((a, [0, 1, 2, 5, 6]), (b, [0, 1, 2, 6, 7])):
        kept: list[Tensor] = []
        with torch.no_grad(), hooked([mixer.in_proj], lambda _module, args, _kwargs, kept=kept: kept.append(args[0])):
            model(input_ids=ids)
        gate = nn.functional.silu(mixer.in_proj(kept[0])[0].chunk(2, dim=-1)[1]).detach().double() * size
        rows = torch.tensor([[1.0 / (i + 1) if j <= i else 0.0 for j in places] for i in places]).double()
        lefts.append(rows[..., None] * gate[places][:, None])
    expected = float((lefts[1] - lefts[0]).norm() / lefts[0].norm())
    report = report_of(as_loaded(model), a, b)
    assert report.comparison.blocks[0].operator.null.relative == pytest.approx(expected, rel=1e-4)


def test_the_gates_of_a_mixer_are_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model's own kernel without its gate, on impulses, and that gate: B_ij = O diag(g_i) diag(h_ij) by hand."""
    model = two_single("jamba")
    a, b = ids_of(model)
    mixer, own = model.model.layers[0].mamba, modeling_jamba.mamba_selective_scan
    size = mixer.out_proj.weight.detach().double().norm(dim=0)
    kernels, gates = [], []

    def scan(values: Tensor, *args: Any, z: Tensor, **named: Any) -> Any:
        if len(kernels) == len(gates):
            impulses = torch.eye(values.shape[-1])[:, None].expand(-1, values.shape[1], -1)
            each = [own(one[None], *args, z=None, **named) for one in impulses]
            kernels.append(torch.cat([one if isinstance(one, Tensor) else one[0] for one in each]).double())
            gates.append(nn.functional.silu(z[0]).double() * size[:, None])
        return own(values, *args, z=z, **named)

    b = b[:, : a.shape[1]]
    for ids in (a, b):
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(modeling_jamba, "mamba_selective_scan", scan)
            model(input_ids=ids)
    (H, H_b), (g, g_b) = kernels, gates  # (token read, channels, token), (channels, token)
    parts = {"relative": H_b * g_b - H * g, "routing": (H_b - H) * g, "scale": H * (g_b - g)}
    parts["interaction"] = parts["relative"] - parts["routing"] - parts["scale"]
    options = CompareOptions(cache=False, by_place=True)
    operator = report_of(as_loaded(model), a, b, options=options).comparison.blocks[0].operator
    for name, part in parts.items():
        assert float(part.norm()) > 1e-3
        assert getattr(operator, name) == pytest.approx(float(part.norm() / (H * g).norm()), rel=1e-4), name


def seen_single(model: Any, ids: Tensor) -> Tensor:
    """Scales of the norm in front of attention in block 1."""
    norm = model.model.layers[1].input_layernorm
    kept: list[Tensor] = []
    with torch.no_grad(), hooked([norm], lambda module, args, kwargs: kept.append(scale_of(norm, args[0][0]))):
        model(input_ids=ids)
    return kept[0].double()


def test_router_weights_are_among_the_parameters_that_the_input_sets() -> None:
    model = two_single("mixtral")
    a = token_ids(model, 6, 1)
    b = a.clone()
    b[0, 0] = a[0].max() + 1  # the others are aligned
    dense: list[list[Tensor]] = []
    for one in (a, b):
        seen: list[Any] = []
        gates = [block.mlp.gate for block in model.model.layers]
        with torch.no_grad(), hooked(gates, after=lambda _module, _args, _kwargs, out, kept=seen: kept.append(out)):
            model(input_ids=one)
        dense.append([torch.zeros_like(out[0]).scatter_(1, out[2], out[1])[1:] for out in seen])
    changes = [float((two - one).norm() / one.norm()) for one, two in zip(*dense, strict=True)]
    found = {p.name: p for p in report_of(as_loaded(model), a, b).comparison.parameters}
    assert found["router weights"].change == pytest.approx(max(changes), rel=1e-5)
    names = {p.name for p in in_single("llama").comparison.parameters}
    assert "router weights" not in names


def test_scales_of_channels_are_compared_token_by_token() -> None:
    """t of prompts of 5 and 4 tokens, where each of three channels has a scale of its own; s does not move."""
    t = torch.randn(3, 5, generator=torch.Generator().manual_seed(3))
    moved = 1.5 * t[:, [0, 1, 3, 4]]
    one, two = (Routed(torch.ones(3, n, n), torch.ones(3, n), token) for n, token in ((5, t), (4, moved)))
    aligned = Aligned(torch.tensor([0, 1, 3, 4]), torch.arange(4), torch.ones(4) > 0, (5, 4))
    found = change_of_scales(one, two, aligned, aligned)
    assert found is not None
    assert abs(found - 0.5) <= 1e-6
