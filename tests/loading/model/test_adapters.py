"""What is made of a PEFT model in memory gives the logits of that model, in whatever state its layers are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.model.given import given
from duat_cli.zoo import tiny

IDS = torch.tensor([[5, 6, 7, 5, 6, 11, 90, 3]])


def base(tie: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=tie,
        attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def lora(*targets: str, **options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 3, "target_modules": list(targets or ("q_proj", "o_proj")), **options})


def trained(model: Any) -> Any:
    """Everything of the adapters moves, in float64."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.double().named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens", "ia3_", "ln_tuning")):
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model.eval()


def tuned(config: peft.PeftConfig, *, tie: bool = False, then: Callable[[Any], Any] = lambda model: None) -> Any:
    model = trained(peft.get_peft_model(base(tie), config))
    then(model)
    return model


def two(model: Any) -> None:
    model.add_adapter("b", lora("q_proj", "v_proj", r=2))
    trained(model)


def both(model: Any) -> None:
    two(model)
    model.base_model.set_adapter(["default", "b"])


def other_is_active(model: Any) -> None:
    two(model)
    model.set_adapter("b")


def merged_and_other_is_active(model: Any) -> None:
    two(model)
    model.merge_adapter()
    q_proj(model).set_adapter("b")


def merged(model: Any) -> None:
    model.merge_adapter()


def none_active(model: Any) -> None:
    model.base_model.set_adapter([])


def off(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def merged_and_off(model: Any) -> None:
    model.merge_adapter()
    off(model)


def q_proj(model: Any, block: int = 0) -> Any:
    return model.get_base_model().model.layers[block].self_attn.q_proj


def one_off(model: Any) -> None:
    q_proj(model).enable_adapters(False)


def one_merged(model: Any) -> None:
    q_proj(model).merge()


def one_merged_and_off(model: Any) -> None:
    one_merged(model)
    one_off(model)


def head_off(model: Any) -> None:
    model.get_base_model().lm_head.enable_adapters(False)


TOKENS = {"trainable_token_indices": [5, 7]}
SAVED = {"modules_to_save": ["input_layernorm", "lm_head"]}
CASES: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: tuned(lora()),
    "LoRA, off": lambda: tuned(lora(), then=off),
    "LoRA, merged": lambda: tuned(lora(), then=merged),
    "LoRA, merged and off": lambda: tuned(lora(), then=merged_and_off),
    "LoRA, one layer off": lambda: tuned(lora(), then=one_off),
    "LoRA, one layer merged": lambda: tuned(lora(), then=one_merged),
    "LoRA, one layer merged and off": lambda: tuned(lora(), then=one_merged_and_off),
    "LoRA, none active": lambda: tuned(lora(), then=none_active),
    "two adapters": lambda: tuned(lora(), then=both),
    "the other of two": lambda: tuned(lora(), then=other_is_active),
    "one merged, the other active": lambda: tuned(lora(), then=merged_and_other_is_active),
    "DoRA": lambda: tuned(lora(use_dora=True)),
    "DoRA, merged and off": lambda: tuned(lora(use_dora=True), then=merged_and_off),
    "saved": lambda: tuned(lora(**SAVED)),
    "saved, off": lambda: tuned(lora(**SAVED), then=off),
    "saved, merged and off": lambda: tuned(lora(**SAVED), then=merged_and_off),
    "saved, head off": lambda: tuned(lora(**SAVED), then=head_off),
    "saved, of the other of two": lambda: tuned(lora(**SAVED), then=other_is_active),
    "saved, tied": lambda: tuned(lora(**SAVED), tie=True),
    "saved, tied, off": lambda: tuned(lora(**SAVED), tie=True, then=off),
    "tokens": lambda: tuned(lora(**TOKENS)),
    "tokens, off": lambda: tuned(lora(**TOKENS), then=off),
    "tokens, merged and off": lambda: tuned(lora(**TOKENS), then=merged_and_off),
    "tokens, tied": lambda: tuned(lora(**TOKENS), tie=True),
    "tokens, tied, off": lambda: tuned(lora(**TOKENS), tie=True, then=off),
    "tokens, tied, head off": lambda: tuned(lora(**TOKENS), tie=True, then=head_off),
    "embedding, tied": lambda: tuned(lora("embed_tokens"), tie=True),
    "embedding, tied, off": lambda: tuned(lora("embed_tokens"), tie=True, then=off),
    "embedding, tied, merged": lambda: tuned(lora("embed_tokens"), tie=True, then=merged),
    "embedding, tied, merged and off": lambda: tuned(lora("embed_tokens"), tie=True, then=merged_and_off),
    "head, tied": lambda: tuned(lora("lm_head", "q_proj"), tie=True),
    "head, tied, DoRA": lambda: tuned(lora("lm_head", use_dora=True), tie=True),
    "both, tied": lambda: tuned(lora("embed_tokens", "lm_head"), tie=True),
    "both, tied, head off": lambda: tuned(lora("embed_tokens", "lm_head"), tie=True, then=head_off),
    "both, tied factors": lambda: tuned(lora("embed_tokens", ensure_weight_tying=True), tie=True),
    "IA3": lambda: tuned(peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "norms": lambda: tuned(peft.LNTuningConfig(target_modules=["input_layernorm", "norm"])),
    "norms, merged and off": lambda: tuned(peft.LNTuningConfig(target_modules=["norm"]), then=merged_and_off),
    "inside, one layer off": lambda: tuned(lora(), then=one_off).get_base_model(),
    "inside, merged and off": lambda: tuned(lora(), then=merged_and_off).get_base_model(),
}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def error(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("case", CASES)
def test_the_copy_has_the_logits_of_the_model(case: str) -> None:
    model = CASES[case]()
    before = {name: (value.clone(), value.data_ptr()) for name, value in model.state_dict().items()}
    found = logits(given(model).model)
    after = model.state_dict()  # a layer that is merged and off changes its weights itself, once the model runs
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[n]) and after[n].data_ptr() == place for n, (value, place) in before.items())
    assert error(found, logits(model)) < 1e-12
    everything_off = case.endswith((", off", "and off")) and "one layer" not in case
    assert (error(found, logits(base("tied" in case))) < 1e-12) == (everything_off or "none active" in case)


def test_what_is_off_is_said_with_how_many() -> None:
    assert given(CASES["LoRA, off"]()).warnings == (
        "the adapter 'default' is disabled: these are the numbers of its base",
    )
    several = CASES["two adapters"]()
    off(several)
    said = "the adapters 'b', 'default' are disabled: these are the numbers of their base"
    assert given(several).warnings == (said,)
    assert given(CASES["LoRA, one layer off"]()).warnings == (
        "the adapter 'default' is merged into the base, but disabled in 1 of 4 layers",
    )
    assert given(CASES["LoRA, none active"]()).warnings == ("no adapter is active: these are the numbers of the base",)
    assert given(CASES["two adapters"]()).warnings == ("the adapters 'b', 'default' are merged into the base",)
    assert given(CASES["one merged, the other active"]()).warnings == ("the adapter 'default' is merged into the base",)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_a_tied_weight_is_changed_where_the_adapter_is(target: str) -> None:
    model = CASES["embedding, tied" if target == "embed_tokens" else "head, tied"]()
    loaded = given(model)
    own = loaded.model
    assert own.lm_head.weight is not own.model.embed_tokens.weight
    assert own.config.tie_word_embeddings is False
    assert model.config.tie_word_embeddings is True
    assert any("'lm_head.weight', 'model.embed_tokens.weight' were one weight" in note for note in loaded.warnings)
    apart = logits(own)
    assert error(apart, logits(model.merge_and_unload())) > 0.1


@pytest.mark.parametrize("case", ["tokens, tied", "embedding, tied, off", "untrained"])
def test_what_comes_out_equal_stays_one_weight(case: str) -> None:
    model = peft.get_peft_model(base(True), lora("embed_tokens")) if case == "untrained" else CASES[case]()
    loaded = given(model)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.model.config.tie_word_embeddings is True
    assert len(loaded.warnings) == 1


def test_a_layer_that_stands_elsewhere_too_is_changed_where_the_adapter_is() -> None:
    """Encoder and decoder of T5 hold the shared embedding itself, which PEFT wraps in one place."""
    whole = tiny.tiny_model("t5").double()
    whole.set_attn_implementation("eager")
    model = trained(peft.get_peft_model(whole, lora("shared", "q")))
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS, "use_cache": False}
    with torch.no_grad():
        assert error(given(model).model(**inputs).logits, model(**inputs).logits) < 1e-12


def doubled(_: Any, args: Any, output: Any = None) -> Any:
    return output * 2 if output is not None else (args[0] * 2,)


def raised(_: Any, args: Any, output: Any = None) -> Any:
    return output + 1 if output is not None else (args[0] + 1,)


def named(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
    return output * (2 + len(kwargs))


def hooked(case: str, place: str, *, pre: bool = False) -> Any:
    model = CASES[case]()
    at = model.get_base_model().get_submodule(place)
    (at.register_forward_pre_hook if pre else at.register_forward_hook)(doubled)
    return model


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize(
    ("case", "place"),
    [
        ("LoRA", Q),
        ("LoRA", "model.layers.1.mlp"),
        ("LoRA, merged", f"{Q}.base_layer"),
        ("LoRA, off", Q),
        ("LoRA, one layer off", f"{Q}.base_layer"),
        ("DoRA", Q),
        ("saved", "lm_head"),
        ("saved", "lm_head.modules_to_save.default"),
        ("saved, off", "lm_head"),
        ("saved, off", "lm_head.original_module"),
        ("head, tied", "lm_head"),
    ],
)
def test_hooks_act_as_in_the_model(case: str, place: str, pre: bool) -> None:
    model = hooked(case, place, pre=pre)
    loaded = given(model)
    assert error(logits(loaded.model), logits(model)) < 1e-12
    assert error(logits(loaded.model), logits(CASES[case]())) > 1e-3
    assert any(note.startswith("forward hooks of") for note in loaded.warnings)


@pytest.mark.parametrize("place", ["lm_head.original_module", "model.norm"])
def test_a_hook_on_what_does_not_run_makes_no_difference(place: str) -> None:
    model = hooked("saved", place)
    assert error(logits(given(model).model), logits(model)) < 1e-12


def test_hooks_of_tokens_and_those_with_keywords() -> None:
    model = CASES["tokens"]()
    model.get_base_model().model.embed_tokens.register_forward_hook(doubled)
    q_proj(model).register_forward_hook(named, with_kwargs=True, always_call=True)
    assert error(logits(given(model).model), logits(model)) < 1e-12
    assert error(logits(given(model).model), logits(CASES["tokens"]())) > 1e-3


def test_hooks_on_a_layer_stand_around_those_of_what_it_wraps() -> None:
    model = CASES["LoRA, off"]()
    for layer, hook in ((q_proj(model), doubled), (q_proj(model).base_layer, raised)):
        layer.register_forward_hook(hook)
        layer.register_forward_pre_hook(hook)
    assert error(logits(given(model).model), logits(model)) < 1e-12


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize(
    ("case", "place"),
    [
        ("LoRA", f"{Q}.base_layer"),
        ("LoRA", f"{Q}.lora_A.default"),
        ("LoRA", f"{Q}.lora_dropout.default"),
        ("tokens", "model.embed_tokens.token_adapter"),
        ("tokens, off", "model.embed_tokens.token_adapter"),
    ],
)
def test_a_hook_without_a_place_is_refused(case: str, place: str, pre: bool) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{place}: a forward hook on it has no place") as caught:
        given(hooked(case, place, pre=pre))
    assert "\n" not in str(caught.value)


def more(_: Any, args: Any, output: Any) -> Any:
    output.logits = output.logits * 2
    return output


def most(_: Any, args: Any, output: Any) -> Any:
    output.logits = output.logits + 1
    return output


def other_tokens(_: Any, args: Any, kwargs: Any) -> Any:
    return args, kwargs | {"input_ids": (kwargs["input_ids"] + 1) % 97}


@pytest.mark.parametrize("case", ["LoRA", "LoRA, off"])
def test_hooks_on_the_peft_model_act_as_in_the_model(case: str) -> None:
    model = CASES[case]()
    model.register_forward_hook(most)
    model.get_base_model().register_forward_hook(more)
    model.register_forward_pre_hook(other_tokens, with_kwargs=True)
    loaded = given(model)
    assert error(logits(loaded.model), logits(model)) < 1e-12
    assert error(logits(loaded.model), logits(CASES[case]())) > 0.1
    assert loaded.warnings[1].startswith("forward hooks of 'LlamaForCausalLM' run on every pass")


def test_a_hook_between_the_peft_model_and_its_base_is_refused() -> None:
    model = CASES["LoRA"]()
    model.base_model.register_forward_hook(more)
    with pytest.raises(UnsupportedModelError, match="LoraModel: a forward hook on it has no place"):
        given(model)
