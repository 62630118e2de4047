"""Tiny models: how many types there are, that each is deterministic, finite, and hides no mistake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from duat_cli.zoo import tiny
from duat_cli.zoo.rule import Rule

RUNNABLE = 283  # of 289 listed, transformers 5.23.0
SHARE = 0.95  # of the listed types, with any other version

REASONS = {  # what the types below lack, in transformers 5.23.0
    "gemma3n": "TimmWrapperModel",  # behind Pillow
    "gemma4_assistant": "hidden_size_per_layer_input",  # as transformers itself makes the default config
    "gemma4_unified_assistant": "layer types",
    "nemo_speechlm": "audio_hidden_size",
    "qwen3_omni_moe_talker_text": "embed_tokens",
    "voxtral_realtime_text": "NoneType",
}


@pytest.fixture(scope="module")
def swept() -> dict[str, tiny.TinyModel | tiny.NotBuilt]:
    return {t: tiny.build(t) for t in tiny.text_model_types()}


def runnable(swept: dict[str, tiny.TinyModel | tiny.NotBuilt]) -> Iterator[tiny.TinyModel]:
    return (r for r in swept.values() if isinstance(r, tiny.TinyModel))


def saved(model: nn.Module) -> dict[str, Tensor]:
    return {n: t for n, t in model.state_dict().items() if t.is_floating_point()}


@pytest.mark.slow
def test_the_number_of_runnable_types_does_not_fall(swept: dict[str, tiny.TinyModel | tiny.NotBuilt]) -> None:
    missing = {r.model_type: r.reason for r in swept.values() if isinstance(r, tiny.NotBuilt)}
    count = len(swept) - len(missing)
    assert count >= min(RUNNABLE, SHARE * len(swept)), missing
    assert all(missing.values())


@pytest.mark.slow
def test_what_does_not_run_has_the_known_reason(swept: dict[str, tiny.TinyModel | tiny.NotBuilt]) -> None:
    for model_type, part in REASONS.items():
        result = swept.get(model_type)
        assert not isinstance(result, tiny.NotBuilt) or part in result.reason, result


@pytest.mark.slow
def test_models_are_small_eager_float32_and_in_eval_mode(swept: dict[str, tiny.TinyModel | tiny.NotBuilt]) -> None:
    for result in runnable(swept):
        parameters = list(result.model.parameters())
        assert sum(p.numel() for p in parameters) < tiny.MAX_PARAMETERS, result.model_type
        assert {p.dtype for p in parameters} == {torch.float32}, result.model_type
        assert not any(m.training for m in result.model.modules()), result.model_type
        assert result.model.config._attn_implementation == "eager", result.model_type


@pytest.mark.slow
def test_no_saved_tensor_is_constant(swept: dict[str, tiny.TinyModel | tiny.NotBuilt]) -> None:
    for result in runnable(swept):
        flat = [n for n, t in saved(result.model).items() if t.numel() > 1 and t.std() < 1e-3]
        assert not flat, (result.model_type, flat)


@pytest.mark.slow
def test_a_second_build_is_the_same_and_logits_are_of_order_one(
    swept: dict[str, tiny.TinyModel | tiny.NotBuilt],
) -> None:
    for place, first in enumerate(runnable(swept)):
        with torch.no_grad():
            ours = first.model(**first.inputs)
        if (logits := ours.get("logits")) is not None:
            assert 0.01 < logits.std() < 50, (first.model_type, logits.std())
        if place % 4:  # one generator fills all types in one way
            continue
        second = tiny.tiny_model(first.model_type)
        assert all(map(torch.equal, saved(first.model).values(), saved(second).values())), first.model_type
        with torch.no_grad():
            theirs = second(**first.inputs)
        assert all(map(torch.equal, tiny._floats(ours), tiny._floats(theirs))), first.model_type


def test_another_seed_gives_another_model() -> None:
    one, two = (saved(tiny.tiny_model("qwen2", seed=s)) for s in (0, 1))
    assert not any(torch.equal(a, b) for a, b in zip(one.values(), two.values(), strict=True))


@pytest.mark.parametrize(("model_type", "centre"), [("llama", 1.0), ("gemma2", 0.0), ("gpt2", 1.0)])
def test_gains_vary_around_the_value_they_are_stored_around(model_type: str, centre: float) -> None:
    norms = [m for m in tiny.tiny_model(model_type).modules() if "Norm" in type(m).__name__]
    gains = torch.stack([m.weight for m in norms])
    assert (gains - centre).abs().max() <= 0.3
    assert (gains - centre).std() > 0.1
    biases = [m.bias for m in norms if getattr(m, "bias", None) is not None]
    assert all(b.std() > 0.03 for b in biases)
    assert bool(biases) == (model_type == "gpt2")


def test_attention_is_neither_uniform_nor_one_hot() -> None:
    for model_type in ("llama", "gemma2", "bert", "gpt_oss", "deepseek_v3"):
        built = tiny.build(model_type)
        assert isinstance(built, tiny.TinyModel)
        with torch.no_grad():
            last = torch.stack(built.model(**built.inputs, output_attentions=True).attentions)[..., -1, :]
        assert 0.3 < last.max(-1).values.mean() < 0.95, model_type


def test_layers_of_every_kind_occur() -> None:
    """Every layer type of the default config, sliding windows that bite, dense layers beside experts."""
    for model_type in ("gemma2", "gemma3_text", "gpt_oss", "lfm2", "qwen3_next", "modernbert", "olmo3"):
        default = CONFIG_MAPPING[model_type]().layer_types
        assert set(tiny.tiny_config(model_type).layer_types) == set(default), model_type
    for model_type in ("deepseek_v3", "qwen2_moe", "qwen3_moe", "glm4_moe", "jamba", "llama4_text", "mellum"):
        modules = tiny.tiny_model(model_type).modules()
        layers = next(m for m in modules if isinstance(m, nn.ModuleList) and len(m) == 3)
        names = {type(getattr(x, "mlp", None) or getattr(x, "feed_forward", None)).__name__ for x in layers}
        assert len(names) == 2, (model_type, names)
    assert (
        tiny.tiny_config("gemma2").sliding_window < tiny.tiny_inputs(tiny.tiny_config("gemma2"))["input_ids"].shape[1]
    )


def test_what_has_to_agree_stays_the_same() -> None:
    """A width that another part's is, under another name; lists of widths shrink with their heads."""
    tied, small = tiny.tiny_config("granite_docling", "tied"), CONFIG_MAPPING["granite_docling"]()
    assert tied.vision_config.out_hidden_size == tied.text_config.hidden_size < small.text_config.hidden_size
    with pytest.raises(Exception, match=r"must equal text_config\.hidden_size"):
        tiny.tiny_config("granite_docling")
    shallow, default = tiny.tiny_config("bert", "shallow"), tiny.tiny_config("bert", "default")
    assert (shallow.hidden_size, default.hidden_size) == (768, 768)
    assert shallow.num_hidden_layers == 3 < default.num_hidden_layers


def test_widths_differ_so_that_a_transposed_matrix_shows() -> None:
    config = tiny.tiny_config("qwen3")
    heads = config.num_attention_heads * config.head_dim
    grouped = config.num_key_value_heads * config.head_dim
    assert len({config.hidden_size, config.intermediate_size, heads, config.vocab_size}) == 4
    assert grouped < heads


def test_inputs_avoid_special_ids_and_follow_the_seed() -> None:
    config = tiny.tiny_config("t5")
    inputs = tiny.tiny_inputs(config, tokens=9, seed=3)
    assert inputs["input_ids"].shape == (1, 9)
    assert inputs["decoder_input_ids"].shape == (1, 7)
    assert tiny.FIRST_ORDINARY_ID <= inputs["input_ids"].min() <= inputs["input_ids"].max() < config.vocab_size
    assert torch.equal(inputs["input_ids"], tiny.tiny_inputs(config, tokens=9, seed=3)["input_ids"])
    assert not torch.equal(inputs["input_ids"], tiny.tiny_inputs(config, tokens=9, seed=4)["input_ids"])


def nested(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from nested(value)


def made(model_type: str) -> dict[str, object] | str:
    try:
        return dict(tiny.tiny_config(model_type).to_dict())
    except Exception as error:  # the class refuses what the entry avoids
        return str(error)


def without(model_type: str, key: str) -> Rule:
    rule = tiny.rule()
    entry = rule.types[model_type]
    less = entry.model_copy(update={"set": {k: v for k, v in entry.set.items() if k != key}})
    return rule.model_copy(update={"types": {**rule.types, model_type: less}})


@pytest.mark.slow
def test_every_entry_of_the_table_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule names a field that some type has; an exception changes the config of the type it names."""
    fields: set[str] = set()
    homes: dict[str, str] = {}  # type of a (nested) config -> a listed type that holds it
    others = sorted(tiny.other_model_types())
    for model_type in [*tiny.text_model_types(), *others]:
        try:
            configs = list(nested(tiny.tiny_config(model_type)))
        except Exception:  # counted by the sweep
            continue
        fields |= {name for config in configs for name in tiny._declared(type(config))}
        homes |= {config.model_type: model_type for config in configs}
    rule = tiny.rule()
    assert {k for k in rule.fields if "*" not in k} | set(rule.lists) | set(rule.ids) | set(rule.tied) <= fields
    assert set(rule.types) <= set(homes)
    for model_type, entry in rule.types.items():
        full = made(homes[model_type])
        for key in entry.set:
            less = without(model_type, key)
            with monkeypatch.context() as patch:
                patch.setattr(tiny, "rule", lambda less=less: less)
                assert made(homes[model_type]) != full, (model_type, key)


def test_a_type_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "MAX_PARAMETERS", 1000)
    result = tiny.build("llama")
    assert isinstance(result, tiny.NotBuilt)
    assert "more than 1000" in result.reason


def test_what_takes_no_token_ids_is_made_all_the_same() -> None:
    """The reason is what its forward pass lacks, and of a config that transformers itself refuses, what that says."""
    talker = tiny.build("qwen3_omni_moe_talker_text")
    assert isinstance(talker, tiny.NotBuilt)
    assert talker.made
    assert "does not run on token ids alone" in talker.reason
    assert tiny.default_fault("llama") is None
    assert "Gemma4AssistantConfig() fails" in (tiny.default_fault("gemma4_assistant") or "")
