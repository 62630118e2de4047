"""The names of transformers that duat relies on mean what duat takes them for."""

from __future__ import annotations

import datetime
import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import single_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoTokenizer, CanineConfig, LlamaConfig, PreTrainedTokenizerFast, modeling_utils
from transformers.models.bert import modeling_bert
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama
from transformers.models.llama4 import modeling_llama4

import duat_cli
from duat_cli.compat import transformers as compat
from duat_cli.loading.quiet import hushed
from duat_cli.zoo import tiny


@pytest.fixture(scope="module")
def llama() -> Any:
    return single_model("llama")


def test_the_oldest_release_is_the_one_that_pyproject_allows() -> None:
    text = (Path(duat_cli.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    floor = next(d for d in tomllib.loads(text)["project"]["dependencies"] if d.startswith("transformers"))
    assert f"known to work with {floor.removeprefix('transformers>=')} and" in str(compat.__doc__)


def test_a_field_is_none_where_a_config_states_it_twice_or_not_at_all() -> None:
    assert compat.stated(LlamaConfig(vocab_size=31), "vocab_size") == 31
    assert compat.stated(CanineConfig(), "vocab_size") is None
    assert compat.stated(None, "vocab_size") is None

    class Refusing(LlamaConfig):
        """Of two text parts, as MusicGen's, or with a field that layers state apart, as dots3's."""

        fault: Exception = ValueError("Multiple valid text configs were found")

        def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
            raise self.fault

    assert compat.stated(Refusing(), "vocab_size") is None
    apart = Refusing()
    apart.fault = RuntimeError("'num_attention_heads' is a per-layer attribute")
    assert compat.stated(apart, "num_attention_heads") is None


def test_every_implementation_in_force_is_read_and_set() -> None:
    """As transformers' own switch does, of the parts of a model as well, each apart from the others."""
    model = tiny.tiny_model("llava").eval()
    configs = compat.attention_configs(model)
    names = [compat.attention_implementation(config) for config in configs]
    assert configs[0] is model.config
    assert {id(model.config.text_config), id(model.config.vision_config)} < {id(config) for config in configs}
    model.set_attn_implementation("sdpa")
    assert {compat.attention_implementation(config) for config in configs} == {"sdpa"}
    for config, name in zip(configs, names, strict=True):
        compat.set_attention_implementation(config, name)
    assert [compat.attention_implementation(config) for config in configs] == names
    compat.set_attention_implementation(model.config, "sdpa")
    assert compat.attention_implementation(model.config.text_config) == names[0] == "eager"


def test_eager_attention_stands_beside_the_class(llama: Any) -> None:
    attention = llama.model.layers[0].self_attn
    assert compat.eager_attention(attention) is modeling_llama.eager_attention_forward
    derived = type("Derived", (type(attention),), {"__module__": "elsewhere"})
    assert compat.eager_attention(derived(llama.config, 0)) is modeling_llama.eager_attention_forward
    assert compat.eager_attention(nn.Linear(2, 2)) is None
    eye = object.__new__(modeling_llama4.Llama4VisionAttention)  # of two functions in one file the one that it names
    assert compat.eager_attention(eye) is modeling_llama4.vision_eager_attention_forward
    text = object.__new__(modeling_llama4.Llama4TextAttention)
    assert compat.eager_attention(text) is modeling_llama4.eager_attention_forward


def test_what_attention_is_handed_is_known(llama: Any) -> None:
    """A tensor by a name that is not listed would refuse every model."""
    seen: set[str] = set()

    def spying(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.update(name for name, given in kwargs.items() if isinstance(given, torch.Tensor))
        return modeling_llama.eager_attention_forward(module, query, key, value, mask, **kwargs)

    compat.register_attention("duat_spy", spying)
    try:
        llama.set_attn_implementation("duat_spy")
        with torch.no_grad():
            llama(torch.arange(7)[None] + 40, position_ids=torch.arange(7)[None])
    finally:
        llama.set_attn_implementation("eager")
    assert seen
    assert seen <= compat.ATTENTION_ARGUMENTS


def test_the_experts_implementation_is_read() -> None:
    model = single_model("mixtral")
    model.set_experts_implementation("eager")
    assert compat.experts_implementation(model) == "eager"
    model.set_experts_implementation("grouped_mm")
    assert compat.experts_implementation(model) == "grouped_mm"


@pytest.mark.parametrize(("model_type", "expected"), [("gpt_oss", True), ("mixtral", False)])
def test_experts_say_which_side_is_first(model_type: str, expected: bool) -> None:
    model = single_model(model_type)
    experts = next(m for name, m in model.named_modules() if name.endswith(".experts"))
    assert compat.experts_hold_inputs_first(experts) is expected
    weight = experts.gate_up_proj  # (experts, in, out) or (experts, out, in); out holds gate and up
    assert (weight.shape[1] == model.config.hidden_size) is expected
    assert compat.experts_hold_inputs_first(None) is False


def test_every_field_that_chooses_an_implementation_is_known() -> None:
    names = {name for model in (single_model("mixtral"), single_model("gemma3_text")) for name in vars(model.config)}
    found = {name for name in names if "implementation" in name}
    assert found
    assert [name for name in found if not compat.IMPLEMENTATION_FIELD.fullmatch(name)] == []


def test_fusion_is_still_asked_of_the_config(llama: Any) -> None:
    assert "fusion_config" in inspect.getsource(modeling_utils.PreTrainedModel.from_pretrained)
    assert compat.as_weights_are(type(llama.config)(fusion_config={"x": True})).fusion_config is None


def test_a_model_from_a_config_alone() -> None:
    config = tiny.tiny_config("llama")
    model = compat.eager_model(modeling_llama.LlamaForCausalLM, config, torch.float64)
    assert compat.attention_configs(model) == [model.config]
    assert compat.attention_implementation(model.config) == "eager"
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_auto_classes() -> None:
    config = tiny.tiny_config("bert")
    assert compat.auto_models("BASE")[type(config)] is modeling_bert.BertModel
    assert compat.auto_models("MASKED_LM")[type(config)] is modeling_bert.BertForMaskedLM
    assert {"bert", "roberta"} <= compat.auto_types("MASKED_LM")
    assert "llama" not in compat.auto_types("MASKED_LM")
    assert {"BertModel", "BertForMaskedLM", "BertForSequenceClassification"} <= compat.auto_class_names("bert")


def test_modeling_files() -> None:
    config = tiny.tiny_config("gemma3_text")
    assert compat.modeling_file(config) is modeling_gemma3
    assert compat.modeling_files(type(config)) == ("transformers.models.gemma3", [modeling_gemma3])
    assert compat.modeling_file(nn.Linear(2, 2)) is not None  # the same module: nothing to replace in its name
    stranger = type("Stranger", (), {"__module__": "nowhere.configuration_x"})()
    assert compat.modeling_file(stranger) is None


def test_the_load_report_is_known_by_its_words(llama: Any, tmp_path: Path) -> None:
    """A checkpoint without one tensor, and with one too many, makes transformers log its report."""
    llama.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.0.extra.weight"] = state.pop("model.norm.weight")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with hushed() as log:
        type(llama).from_pretrained(tmp_path)
    assert [line for line in log if compat.is_load_report(line)]
    assert not compat.is_load_report("the tokenizer is old")


def test_every_initialiser_goes_through_a_function_and_comes_back() -> None:
    called: list[str] = []

    def through(function: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(function.__name__)
        return function(tensor, *args, **kwargs)

    own = nn.init.kaiming_uniform_
    with compat.initialisers_through(through):
        nn.Linear(2, 3)
    assert "kaiming_uniform_" in called
    assert nn.init.kaiming_uniform_ is own
    called.clear()
    nn.Linear(2, 3)
    assert called == []


# -- tokenizers --------------------------------------------------------------------------------------------------------


def test_tokens_by_role(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "<image>": 2}, unk_token="a"))
    named = {"bos_token": "<s>", "unk_token": "a"}
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **named, extra_special_tokens={"image_token": "<image>"}
    )
    assert compat.named_tokens(found) == {**named, "image_token": "<image>"}
    found.save_pretrained(tmp_path)
    with hushed():
        read = AutoTokenizer.from_pretrained(tmp_path)
    assert compat.named_tokens(read)["image_token"] == "<image>"


def test_what_is_wrong_with_a_chat_template() -> None:
    assert compat.template_fault("{% for m in messages %}{{ m.content }}{% endfor %}") is None
    added = "{% generation %}{{ messages }}{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}"
    assert compat.template_fault(added) is None  # statements that Jinja alone does not have
    found = compat.template_fault("{{ messages }}\n{% for m in messages %}{{ m.content }")
    assert found is not None
    assert found.startswith("line 2: ")


def test_a_chat_template_is_told_a_fixed_date() -> None:
    folder = {"bos_token": "<s>", "chat_template": "{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<s>": 0})), **folder)
    messages, today = [{"role": "user", "content": "hello"}], str(datetime.date.today())
    with compat.stopped_clock():
        assert tokenizer.apply_chat_template(messages, tokenize=False) == "2024-07-26 hello"
    assert tokenizer.apply_chat_template(messages, tokenize=False) in (
        f"{today} hello",
        f"{datetime.date.today()} hello",
    )


def test_a_tensor_goes_to_a_gpu_as_it_is_stored() -> None:
    asked: list[str] = []

    class Stored:
        def __getitem__(self, place: Any) -> Any:
            return self

        def to(self, device: str) -> Any:
            asked.append(device)
            return torch.ones(2)

    stored = Stored()
    assert compat.OnDevice(stored, "cpu")[...] is stored
    assert compat.OnDevice(stored, "mps")[...] is stored  # which takes no float64: cast on the way
    assert torch.equal(compat.OnDevice(stored, "cuda:1")[...], torch.ones(2))
    assert asked == ["cuda:1"]
