"""What an adapter does under a prompt: against dense operators by automatic differentiation, PEFT's wrapped model and
naive sums."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapters
import helpers
import peft
import pytest
import torch
import transformers
from adapters import weights_of
from classifiers import KINDS, classifier
from helpers import quiet
from safetensors.torch import load_file, save_file
from torch import Tensor

from duat_cli.analysis.lora.applied import adapted
from duat_cli.analysis.lora.findings import Findings
from duat_cli.analysis.lora.ground import ground_of
from duat_cli.analysis.lora.places import FrontNorms, sup_local, true_gain
from duat_cli.analysis.lora.prompts import Comparer
from duat_cli.analysis.lora.reading import logits_of
from duat_cli.analysis.lora.report import adapter_pair, checkpoint_pair
from duat_cli.analysis.lora.weights.adapter_diff import adapter_report
from duat_cli.analysis.lora.weights.checkpoint_diff import checkpoint_report
from duat_cli.analysis.lora.weights.weight_change import Directions
from duat_cli.analysis.session import Session
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.loading.adapter.folder import open_adapter
from duat_cli.loading.model.load import load
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import random_like
from duat_cli.models.edits.tuned import tuned_copy
from duat_cli.models.sweep.lockstep import one_by_one
from duat_cli.operators.lowrank import LowRank
from duat_cli.results.base import Run
from duat_cli.results.lora import LoraReport
from duat_cli.zoo import tiny

RUN = Run(started="now", seconds=0.0, peak_memory_bytes=None)
NAMES: dict[str, list[str]] = {
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "olmo2": ["k_proj", "v_proj", "o_proj", "up_proj"],
    "bert": ["query", "value", "dense"],
    "phi": ["q_proj", "v_proj", "dense", "fc1", "fc2"],
}


def some_prompts(model: Any, count: int = 2) -> list[Prompt]:
    ids = [helpers.token_ids(model, tokens=5 + k, seed=k) for k in range(count)]
    return [Prompt(f"text {k}", "0" * 64, i, k) for k, i in enumerate(ids)]


def shown(token: int) -> str:
    return f"<{token}>"


def compare_on_prompts(base: Session, tuned: Session, prompts: list[Prompt]) -> Findings:
    found = Findings()
    grounds = (ground_of(one, layers=False) for one in (base, tuned))
    for one in Comparer(*grounds, str, len(prompts), quiet)(list(enumerate(prompts))):
        found.add(one)
    return found


def report_of(base: Path, adapter: Path, count: int = 2, processes: int = 1) -> LoraReport:
    opened, loaded = open_adapter(adapter, "adapter"), replace(load(str(base)), processes=processes)
    first = adapter_report(weights_of(base), [opened], Directions(), quiet, lambda **_: RUN)
    with adapter_pair(first, weights_of(base), opened, loaded, quiet) as pair:
        return pair.report(some_prompts(loaded.model, count), shown, lambda **_: RUN)


def made(model_type: str, folder: Path, targets: list[str] | str | None = None, **config: Any) -> tuple[Path, Path]:
    base = adapters.base_of(model_type, folder / "base")
    fields = {"r": 3, "lora_alpha": 30, "target_modules": targets or NAMES[model_type], **config}
    return base, adapters.make(base, folder / "adapter", peft.LoraConfig(**fields))


Reported = Callable[[str], tuple[Path, Path, LoraReport]]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    """A type's base, an adapter on all that NAMES has, and the report of one prompt: made once, and only read."""

    @functools.cache
    def of(model_type: str) -> tuple[Path, Path, LoraReport]:
        base, adapter = made(model_type, tmp_path_factory.mktemp(model_type))
        return base, adapter, report_of(base, adapter, count=1)

    return of


def merged_model(base: Path, adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(adapters.load_base(base), adapter).merge_and_unload().eval()


def wrapped_model(base: Path, adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(adapters.load_base(base), adapter).eval()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_processes_that_share_the_prompts_give_the_same_report(tmp_path: Path) -> None:
    base, adapter = made("llama", tmp_path)
    alone, shared = (report_of(base, adapter, 4, processes) for processes in (1, 3))
    assert alone == shared
    assert alone.eq18 is not None
    assert alone.eq18.holds
    assert len(alone.by_prompt or []) == 4


@pytest.mark.parametrize("model_type", NAMES)
def test_the_change_of_every_operator_is_that_of_the_dense_ones(model_type: str, reported: Reported) -> None:
    base, adapter, report = reported(model_type)
    assert report.certificate is not None
    assert report.certificate.exact
    assert report.eq18 is not None
    assert report.eq18.holds
    plain, tuned = adapters.load_base(base).double(), merged_model(base, adapter).double()
    [prompt] = some_prompts(plain, 1)
    wiring = helpers.WIRINGS[model_type]
    before, after = (helpers.dense_blocks(m, prompt.input_ids, wiring) for m in (plain, tuned))
    assert report.blocks is not None
    for block, one, two in zip(report.blocks, before, after, strict=True):
        expected = float((two.W - one.W).norm() / one.W.norm())
        assert block.operator.relative_change == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("targets", "still"),
    [(["q_proj", "k_proj"], ("weights", "interaction")), (["v_proj", "o_proj"], ("routing", "interaction"))],
)
def test_what_cannot_move_does_not(targets: list[str], still: tuple[str, str], tmp_path: Path) -> None:
    """Queries and keys only route; values and outputs only carry, in the first block, whose input is as before."""
    base, adapter = made("llama", tmp_path, targets)
    report = report_of(base, adapter)
    assert report.blocks is not None
    first = report.blocks[0].operator
    for name in still:
        assert getattr(first, name) == pytest.approx(0.0, abs=1e-6)
    [moving] = {"routing", "weights"} - set(still)
    assert getattr(first, moving) == pytest.approx(first.relative_change, rel=1e-5)
    assert first.relative_change is not None
    assert first.relative_change > 0.01
    if "weights" in still:
        assert all(block.operator.weights == 0.0 for block in report.blocks)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_the_wrapped_and_the_merged_model_agree(model_type: str, reported: Reported) -> None:
    base, adapter, by_file = reported(model_type)
    loaded = load(str(base))
    wrapped = replace(loaded, model=wrapped_model(base, adapter).base_model.model)
    merged = replace(loaded, model=merged_model(base, adapter))
    sessions = [Session(one, quiet, cache=False) for one in (loaded, wrapped, merged)]
    prompts = some_prompts(loaded.model, 1)
    found = [compare_on_prompts(sessions[0], one, prompts) for one in sessions[1:]]
    for one, two in zip(found[0].blocks, found[1].blocks, strict=True):
        assert one.operator.relative_change == pytest.approx(two.operator.relative_change, rel=1e-3)
        assert one.terms.output == pytest.approx(two.terms.output, rel=1e-4)
        assert one.tuned_certificate < 1e-5
    assert by_file.by_prompt is not None
    for ours, theirs in zip(by_file.by_prompt, found[0].order.most, strict=True):
        assert ours.kl == pytest.approx(theirs.kl, rel=1e-4)


def test_outputs_losses_and_kl_by_naive_sums(tmp_path: Path) -> None:
    base, adapter = made("llama", tmp_path, use_dora=True)
    report = report_of(base, adapter)
    plain, tuned = adapters.load_base(base), wrapped_model(base, adapter)
    assert report.by_prompt is not None
    assert [p.kl for p in report.by_prompt] == sorted((p.kl for p in report.by_prompt), reverse=True)  # type: ignore[type-var]
    for row in report.by_prompt:
        ids = some_prompts(plain)[row.prompt].input_ids
        with torch.no_grad():
            p, q = (m(input_ids=ids).logits[0].double().softmax(-1) for m in (plain, tuned))
        each = (p * (p / q).log()).sum(-1)
        assert row.kl == pytest.approx(float(each.mean()), rel=1e-4)
        assert row.moved_tokens[0].position == int(each.argmax())
        assert row.moved_tokens[0].kl == pytest.approx(float(each.max()), rel=1e-4)
        assert row.moved_tokens[0].text == f"<{int(ids[0, each.argmax()])}>"
        for logits, loss in ((p, row.loss_base), (q, row.loss_tuned)):
            expected = -sum(float(logits[k, ids[0, k + 1]].log()) for k in range(ids.shape[1] - 1))
            assert loss == pytest.approx(expected / (ids.shape[1] - 1), rel=1e-4)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_block_outputs_and_ffn_terms_by_hooks(model_type: str, reported: Reported) -> None:
    base, adapter, report = reported(model_type)
    seen: list[dict[str, list[Tensor]]] = []
    for model in (adapters.load_base(base), merged_model(base, adapter)):
        kept: dict[str, list[Tensor]] = {"out": [], "ffn": []}
        for block in model.get_submodule(helpers.WIRINGS[model_type].blocks):
            for name, module in (("out", block), ("ffn", block.mlp)):
                module.register_forward_hook(
                    lambda m, a, o, into=kept[name]: into.append(o if isinstance(o, Tensor) else o[0])
                )
        with torch.no_grad():
            model(input_ids=some_prompts(model, 1)[0].input_ids)
        seen.append(kept)
    assert report.blocks is not None
    for k, block in enumerate(report.blocks):
        for name, value in (("out", block.terms.output), ("ffn", block.terms.ffn)):
            a, b = seen[0][name][k], seen[1][name][k]
            assert value == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-4)


# type -> LoRA's targets, and the module whose output is the FFN's part of the residual stream; of llama and gpt2, above
ADDED: dict[str, tuple[str | list[str], str]] = {
    "opt": (["fc2"], "fc2"),  # the unit that is captured ends at the activations
    "bert": (r".*layer\.\d+\.output\.dense", "output.dense"),
    "falcon": (["dense_4h_to_h"], "mlp"),
    "gemma2": (["up_proj", "down_proj"], "post_feedforward_layernorm"),
    "granite": (["down_proj"], "mlp"),  # with a factor behind, the same in both
    "deepseek_v3": (["o_proj", "shared_experts.down_proj"], "mlp"),
}


@pytest.mark.parametrize("model_type", ADDED)
def test_the_ffns_term_is_what_plain_hooks_see_added_to_the_stream(model_type: str, tmp_path: Path) -> None:
    """In base and PEFT's merged model, in float64."""
    targets, added = ADDED[model_type]
    base, adapter = made(model_type, tmp_path, targets)
    report = report_of(base, adapter, count=1)
    seen: list[list[Tensor]] = []
    for model in (adapters.load_base(base), merged_model(base, adapter)):
        kept: list[Tensor] = []
        for block in model.get_submodule(helpers.WIRINGS[model_type].blocks):
            block.get_submodule(added).register_forward_hook(
                lambda m, a, o, kept=kept: kept.append((o if isinstance(o, Tensor) else o[0]).clone())
            )
        if getattr(model, "_can_set_experts_implementation", lambda: False)():
            model.set_experts_implementation("eager")  # grouped_mm has no float64
        with torch.no_grad(), helpers.InDouble():
            model.double()(input_ids=some_prompts(model, 1)[0].input_ids)
        seen.append(kept)
    assert report.blocks is not None
    for block, a, b in zip(report.blocks, *seen, strict=True):
        want = float((b - a).norm() / a.norm())
        assert want > 0.01
        assert block.terms.ffn == pytest.approx(want, rel=1e-4)


def test_the_dynamic_bias_is_what_earlier_ffns_make_of_the_pre_activation(reported: Reported) -> None:
    """In the first block there are none; in a later one it is the frozen linear image of all but the input path."""
    _, _, report = reported("llama")
    assert report.blocks is not None
    assert report.blocks[0].terms.dynamic_bias == pytest.approx(0.0, abs=1e-6)
    assert all((block.terms.dynamic_bias or 0.0) > 0.01 for block in report.blocks[1:])


# -- where a change acts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "third"),
    [("llama", "down_proj"), ("gpt2", "mlp.c_proj"), ("bert", "output.dense"), ("phi", "fc2")],
)
def test_which_side_of_the_nonlinearity(model_type: str, third: str, reported: Reported) -> None:
    _, _, report = reported(model_type)
    assert report.eq18 is not None
    found = report.eq18
    lists = (found.on_second, found.on_third, found.through_attention, found.elsewhere)
    everything = {n for names in lists for n in names}
    assert sum(map(len, lists)) == len(everything)
    assert found.not_covered == []
    assert everything == {f"{m.name}.{m.parameter}" for m in report.modules}
    assert set(found.on_third) == {n for n in everything if n.endswith(f"{third}.weight") and "attention" not in n}
    attention = {n for n in everything if "attn" in n or "attention" in n}
    assert set(found.through_attention) == attention
    assert not any("layer" in n for n in found.elsewhere)


@pytest.mark.parametrize(
    ("model_type", "name"), [("llama", "self_attn.q_proj"), ("gpt2", "attn.c_attn"), ("phi", "fc1")]
)
def test_the_largest_effect_is_never_exceeded(model_type: str, name: str, reported: Reported) -> None:
    base, adapter, report = reported(model_type)
    model, changes = adapters.load_base(base), adapters.ours(base, adapter)
    loaded = load(str(base))
    session = Session(loaded, quiet, cache=False)
    for module in [m for m in report.modules if m.name.endswith(name)]:
        key = f"{module.name}.weight"
        norms = FrontNorms(session, some_prompts(model, 1)[0], [key])
        with norms.attached():
            one_by_one(norms.passes)
        front = norms.found()[key]
        norm, form = front.norm, front.form
        change = changes[key].T if model_type == "gpt2" else changes[key]  # (out, in)
        generator = torch.Generator().manual_seed(0)
        x = 50 * torch.randn(4000, change.shape[1], generator=generator)
        with torch.no_grad():
            reached = (norm(x[None])[0].double() @ change.T).norm(dim=1)
        assert module.sup_local is not None
        assert float(reached.max()) <= module.sup_local * (1 + 1e-5)
        if form.bias is None and not form.centered:  # attained, at the leading right vector
            best = torch.linalg.svd(change * front.gain)[2][0].float()
            with torch.no_grad():
                reached = (norm(1e3 * best[None, None])[0].double() @ change.T).norm(dim=1)
            assert float(reached) == pytest.approx(module.sup_local, rel=1e-4)
    others = [m for m in report.modules if m.name.endswith(("down_proj", "o_proj", "c_proj", "dense", "fc2"))]
    assert others
    assert all(m.sup_local is None and "no norm" in m.reasons["sup_local"] for m in others)


def test_the_largest_effect_of_factors_and_of_the_matrix_are_one() -> None:
    model = tiny.tiny_model("phi")
    norm = model.model.layers[0].input_layernorm
    from duat_cli.models.block.norms import recognise

    x = torch.randn(1, 7, norm.weight.numel(), generator=torch.Generator().manual_seed(0))
    form = recognise(norm, x, norm(x))
    assert form is not None
    torch.testing.assert_close(true_gain(norm, form), norm.weight.detach().double(), rtol=1e-4, atol=1e-5)
    low = LowRank(torch.randn(9, 2, dtype=torch.float64), torch.randn(2, norm.weight.numel(), dtype=torch.float64))
    values = [sup_local((piece,), turned, true_gain(norm, form), form) for piece, turned in
              ((low, False), (low.dense(), False), (low.mT, True), (low.dense().T, True))]  # fmt: skip
    assert values == pytest.approx([values[0]] * 4)


# -- the tuned model -----------------------------------------------------------------------------------------


def test_what_does_not_change_is_shared_and_the_base_stays_as_it_is() -> None:
    model = tiny.tiny_model("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    before = {n: p.clone() for n, p in model.named_parameters()}
    tuned = tuned_copy(model, {name: lambda: torch.ones_like(before[name]).double()})
    for other, parameter in tuned.named_parameters():
        assert (parameter is model.get_parameter(other)) == (other != name)
    assert torch.equal(model.get_parameter(name), before[name])
    torch.testing.assert_close(tuned.get_parameter(name), before[name] + 1)
    assert tuned.model.layers[1].self_attn is not model.model.layers[1].self_attn


def test_a_weight_has_the_name_that_loading_gives_it() -> None:
    model = transformers.LlavaForConditionalGeneration(tiny.tiny_config("llava"))
    old = model.lm_head.weight.detach().clone()
    tuned = tuned_copy(model, {"language_model.lm_head.weight": lambda: torch.ones_like(old, dtype=torch.float64)})
    assert torch.equal(tuned.lm_head.weight, old + 1)
    assert torch.equal(model.lm_head.weight, old)


def test_a_tied_weight_changes_where_it_is_wrapped() -> None:
    model = tiny.tiny_model("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    change = {"transformer.wte.weight": lambda: torch.ones_like(model.lm_head.weight).double()}
    tuned = tuned_copy(model, change)
    assert tuned.lm_head.weight is model.lm_head.weight
    tuned = tuned_copy(model, change, tied=frozenset(change))
    assert tuned.lm_head.weight is tuned.transformer.wte.weight


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]}),
        ("gpt2", {"target_modules": ["c_attn"], "trainable_token_indices": [3, 4], "fan_in_fan_out": True}),
        ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
        ("opt", {"target_modules": ["q_proj"], "lora_bias": True}),
        ("llama", {"target_modules": ["o_proj"], "modules_to_save": ["norm"]}),
        ("qwen3_moe", {"target_modules": ["v_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
    ],
)
def test_the_tuned_model_is_pefts(model_type: str, config: dict[str, Any], tmp_path: Path) -> None:
    base, adapter = made(model_type, tmp_path, config.pop("target_modules"), **config)
    [prompt] = some_prompts(adapters.load_base(base), 1)
    tuned = tuned_copy(
        adapters.load_base(base),
        {name: (lambda c=change: c) for name, change in adapters.ours(base, adapter).items()},
        tied=frozenset({"transformer.wte.weight"}),
    )
    expected = helpers.logits_of(wrapped_model(base, adapter), prompt.input_ids)
    torch.testing.assert_close(helpers.logits_of(tuned, prompt.input_ids), expected, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_under_prompts_is_its_adapter(reported: Reported, tmp_path: Path) -> None:
    base, adapter, expected = reported("llama")
    merged_model(base, adapter).save_pretrained(tmp_path / "tuned")
    weights = [weights_of(f) for f in (base, tmp_path / "tuned")]
    first = checkpoint_report(weights[0], weights[1], Directions(), quiet, lambda **_: RUN)
    loaded = load(str(base))
    with checkpoint_pair(first, loaded, load(str(tmp_path / "tuned")), quiet) as pair:
        found = pair.report(some_prompts(loaded.model, 1), shown, lambda **_: RUN)
    assert found.blocks is not None
    assert expected.blocks is not None
    for one, two in zip(found.blocks, expected.blocks, strict=True):
        assert one.operator.relative_change == pytest.approx(two.operator.relative_change, rel=1e-4)


@pytest.mark.parametrize(("model_type", "part"), [("mixtral", "experts"), ("bart", "final_logits_bias")])
def test_tensors_that_have_no_module_of_their_name_are_compared(model_type: str, part: str, tmp_path: Path) -> None:
    """Experts that have a tensor each in the files, and one outside of all modules."""
    models = [tiny.tiny_model(model_type) for _ in range(2)]
    for name, tensor in models[1].state_dict().items():
        if part in name:
            tensor.add_(random_like(tensor), alpha=0.05)
    folders = [tmp_path / name for name in ("base", "tuned")]
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder)
    weights = [weights_of(f) for f in folders]
    first = checkpoint_report(weights[0], weights[1], Directions(), quiet, lambda **_: RUN)
    changed = [one.whole_name for one in first.modules]
    assert changed
    assert all(part in name and name in weights[0].files.tensors for name in changed)
    loaded = [load(str(folder)) for folder in folders]
    prompts = some_prompts(loaded[0].model)
    with checkpoint_pair(first, *loaded, quiet) as pair:
        found = pair.report(prompts, shown, lambda **_: RUN)
    assert found.eq18 is not None
    assert [*(skipped.what for skipped in found.eq18.not_covered), *found.eq18.elsewhere] == changed
    assert found.by_prompt is not None
    if model_type == "mixtral":
        for one in found.by_prompt:
            before, after = (helpers.logits_of(m, prompts[one.prompt].input_ids).double() for m in models)
            p, q = before.log_softmax(-1), after.log_softmax(-1)
            assert one.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)


def test_what_has_no_meaning_under_prompts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = made("llama", tmp_path, layer_replication=[[0, 2], [1, 2]])
    with pytest.raises(UnsupportedModelError, match="layer_replication"):
        report_of(base, adapter)
    base, adapter = made("llama", tmp_path / "b")
    stated = adapter / "adapter_config.json"
    stated.write_text(stated.read_text().replace('"init_lora_weights": true', '"init_lora_weights": "corda"'))
    with pytest.raises(UnsupportedModelError, match="mutated by corda"):
        report_of(base, adapter)
    base, adapter = made("llama", tmp_path / "r")
    file = adapter / "adapter_model.safetensors"
    rows = adapters.load_base(base).get_input_embeddings().weight.shape[0]
    table = torch.ones(rows + 4, adapters.load_base(base).config.hidden_size)
    save_file({**load_file(file), "base_model.model.model.embed_tokens.weight": table}, file)
    resized = (
        rf"embed_tokens.weight has {rows + 4} rows, the base's {rows}: .*duat lora-diff BASE MERGED --prompts FILE"
    )
    with pytest.raises(UnsupportedModelError, match=resized):
        report_of(base, adapter)
    opened = open_adapter(adapter, "adapter")
    with pytest.raises(UnsupportedModelError, match=resized), adapted(load(str(base)), opened, weights_of(base)):
        pass
    base, adapter = made("llama", tmp_path / "c")
    monkeypatch.setattr("duat_cli.analysis.lora.prompts.KEPT_BYTES", 300)
    with pytest.raises(InputError, match=r"--max-tokens \d"):
        report_of(base, adapter)


def test_an_encoder_has_no_next_token(tmp_path: Path) -> None:
    base, adapter = made("bert", tmp_path)
    report = report_of(base, adapter)
    assert report.by_prompt is not None
    assert all(p.kl is None and "no next-token model" in p.reasons["kl"] for p in report.by_prompt)
    assert [p.output for p in report.by_prompt] == sorted((p.output for p in report.by_prompt), reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_divergence_of_classifiers_is_that_of_their_classes(kind: str, tmp_path: Path) -> None:
    classifier(kind).save_pretrained(tmp_path / "base")
    base, tuned = load(str(tmp_path / "base")), load(str(tmp_path / "base"))
    with torch.no_grad():
        for parameter in tuned.model.parameters():
            parameter.add_(0.1 * parameter.roll(1, 0))
    prompts = some_prompts(base.model)
    found = compare_on_prompts(Session(base, quiet), Session(tuned, quiet), prompts)
    each = []
    for prompt in prompts:
        with torch.no_grad():
            p, q = (one.model(input_ids=prompt.input_ids).logits.double().log_softmax(-1) for one in (base, tuned))
        each.append((p.exp() * (p - q)).sum(-1)[0])
    assert found.whole.kl == pytest.approx(sum(float(one.mean()) for one in each) / len(each), rel=1e-4)
    assert "classes, and the true ones are not known" in found.whole.reasons["loss_change"]
    [first, _] = found.order.most
    moved = [(one.position, one.kl) for one in first.moved_tokens]
    if kind == "token":
        place = int(each[first.prompt].argmax())
        assert moved[0] == (place, pytest.approx(float(each[first.prompt][place]), rel=1e-4))
    else:
        assert moved == []


def test_classifiers_of_other_classes_are_not_compared(tmp_path: Path) -> None:
    classifier("text").save_pretrained(tmp_path / "base")
    classifier("text", num_labels=2, id2label={0: "no", 1: "yes"}).save_pretrained(tmp_path / "tuned")
    base, tuned = load(str(tmp_path / "base")), load(str(tmp_path / "tuned"))
    found = compare_on_prompts(Session(base, quiet), Session(tuned, quiet), some_prompts(base.model))
    assert found.whole.reasons["kl"] == "the models predict 3 and 2 classes"


def test_classes_are_compared_with_those_of_their_names(tmp_path: Path) -> None:
    """With a shift of the head's rows and of the names, nothing has changed; with other names nothing is compared."""
    model = classifier("text")
    model.save_pretrained(tmp_path / "base")
    for parameter in model.classifier.parameters():
        parameter.data = parameter.data.roll(1, 0)
    base = Session(load(str(tmp_path / "base")), quiet)
    prompts = some_prompts(base.loaded.model)
    shifted, other = {0: "Good", 1: "bad", 2: "so"}, {0: "good", 1: "bad", 2: "well"}
    found = {}
    for name, labels in (("shifted", shifted), ("other", other), ("none", {k: f"LABEL_{k}" for k in range(3)})):
        model.config.id2label = labels
        model.save_pretrained(tmp_path / name)
        found[name] = compare_on_prompts(base, Session(load(str(tmp_path / name)), quiet), prompts).whole
    assert found["shifted"].kl == pytest.approx(0.0, abs=1e-12)
    assert found["other"].reasons["kl"] == (
        "the models predict other classes: class 0 is 'bad' in the base, 'good' in the tuned model"
    )
    assert "true ones are not known" in found["other"].reasons["loss_change"]
    assert found["none"].kl is not None
    assert found["none"].kl > 1e-3  # by number, as transformers' own names say nothing


# -- the next token ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Camembert", "Electra"])
@pytest.mark.parametrize("decoder", [False, True])
def test_a_head_for_next_tokens_needs_a_causal_mask(name: str, decoder: bool, tmp_path: Path) -> None:
    """Without is_decoder these classes are encoders: a token's logits have seen the next one."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=40, is_decoder=decoder, pad_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, lora_alpha=30, target_modules=["query", "value"])
    adapter = adapters.make(tmp_path / "base", tmp_path / "adapter", config)
    report = report_of(tmp_path / "base", adapter, count=1)
    assert report.by_prompt is not None
    for prompt in report.by_prompt:
        assert (prompt.kl is not None) == (prompt.loss_base is not None) == bool(prompt.moved_tokens) == decoder
        assert decoder or "move with later tokens" in prompt.reasons["kl"]
    assert (report.summary.kl is not None) == decoder
    assert decoder or "move with later tokens" in report.summary.reasons["kl"]


def test_logits_that_rule_out_tokens(reported: Reported, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both at -inf: not counted. Only the tuned model's: infinite, so null with the reason, and no mean of the rest."""
    base, adapter, _ = reported("llama")
    calls: list[Tensor] = []

    def ruled_out(session: Session, output: Any, ids: Tensor) -> Tensor:
        calls.append(logits_of(session, output, ids).clone())
        calls[-1][:, 0] = -torch.inf
        if len(calls) == 4:  # the tuned model's of the second prompt
            calls[-1][0, 1] = -torch.inf
        return calls[-1]

    monkeypatch.setattr("duat_cli.analysis.lora.prompts.logits_of", ruled_out)
    report = report_of(base, adapter)
    assert report.by_prompt is not None
    [first, second] = sorted(report.by_prompt, key=lambda row: row.prompt)
    p, q = (logits[:, 1:].double().softmax(-1) for logits in calls[:2])
    assert first.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-6)
    assert second.kl is None
    assert "probability 0" in second.reasons["kl"]
    assert report.summary.kl is None
    assert report.summary.reasons["kl"] == second.reasons["kl"]


def test_a_bias_that_the_base_lacks_has_no_change(tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    model = transformers.LlamaForCausalLM(
        transformers.AutoConfig.from_pretrained(base, attention_bias=True)  # as the adapter's own base had them
    )
    biased = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], bias="all"))
    biased.save_pretrained(tmp_path / "biased")
    with pytest.raises(UnsupportedModelError, match=r"the change of .*_proj\.bias is not defined: the base has no "):
        report_of(base, tmp_path / "biased")


def test_where_nothing_changes_nothing_is_announced(tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "none")
    report = report_of(base, tmp_path / "none")
    assert not [line for line in report.summary.notable if "moved" in line or "changed most" in line or "loss" in line]


HEADS_TOKENS = {
    "head": {"lm_head": [3, 4]},
    "both, other tokens": {"wte": [3, 4], "lm_head": [3, 5]},
    "embedding": {"wte": [3, 4]},
}


@pytest.mark.parametrize("tokens", HEADS_TOKENS)
def test_trainable_tokens_of_a_tied_table_act_where_peft_wraps_it(tokens: str, tmp_path: Path) -> None:
    """PEFT ties those of the input embedding to the head, and none of the head to the embedding."""
    fields: dict[str, Any] = {"fan_in_fan_out": True, "trainable_token_indices": HEADS_TOKENS[tokens]}
    base, adapter = made("gpt2", tmp_path, ["c_attn"], **fields)
    opened, loaded = open_adapter(adapter, "adapter"), load(str(base))
    ids = torch.tensor([[3, 4, 5, 3, 7]])
    expected = helpers.logits_of(wrapped_model(base, adapter), ids)
    with adapted(loaded, opened, weights_of(base)) as tuned:
        torch.testing.assert_close(helpers.logits_of(tuned.model, ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", ["dt_proj", "x_proj"])
def test_layers_that_the_model_never_calls_are_named(target: str, tmp_path: Path) -> None:
    """Mamba reads the weight of dt_proj itself: PEFT's adapter of it does nothing until it is merged."""
    base, adapter = made("mamba", tmp_path, [target])
    report = report_of(base, adapter, count=1)
    notes = [note for note in report.warnings if "never calls" in note]
    [prompt] = some_prompts(adapters.load_base(base), 1)
    before, wrapped = (
        helpers.logits_of(one, prompt.input_ids) for one in (adapters.load_base(base), wrapped_model(base, adapter))
    )
    still = float((wrapped - before).norm() / before.norm()) < 1e-5
    assert [still, bool(notes)] == [target == "dt_proj"] * 2
    assert all(f"backbone.layers.{k}.mixer.dt_proj.weight" in note for note in notes for k in range(2))
