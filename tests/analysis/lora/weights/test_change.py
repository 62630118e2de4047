"""Every way PEFT stores a change, against PEFT's own merge."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapters
import peft
import pytest
import torch
import transformers
from adapters import weights_of
from safetensors.torch import load_file, save_file

from duat_cli.analysis.lora.weights.change import adapter_tensors, change_of
from duat_cli.analysis.lora.weights.lint import lint_adapter
from duat_cli.errors import CheckpointError, DuatError
from duat_cli.loading.adapter.base_weights import BaseWeights
from duat_cli.loading.adapter.folder import open_adapter
from duat_cli.loading.adapter.keys import read_keys
from duat_cli.loading.adapter.parameter import AdapterFault, ParameterPlan
from duat_cli.loading.adapter.plan import plans

ATTENTION = ["q_proj", "o_proj"]
GPT2 = ["c_attn", "c_proj", "c_fc"]


def lora(**fields: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": ATTENTION, **fields})


CASES: dict[str, tuple[str, Any]] = {
    "lora": ("llama", lora()),
    "all linear": ("llama", lora(target_modules="all-linear")),
    "rslora": ("llama", lora(use_rslora=True)),
    "patterns": (
        "llama",
        lora(
            rank_pattern={"layers.0.self_attn.q_proj": 2, "q_proj": 4, r"layers\.\d+\.self_attn\.o_proj": 1},
            alpha_pattern={"o_proj": 7, "q_proj": 9},
        ),
    ),
    "conv1d": ("gpt2", lora(target_modules=GPT2, fan_in_fan_out=True)),
    "conv1d dora": ("gpt2", lora(target_modules=GPT2, fan_in_fan_out=True, use_dora=True)),
    "bias all": ("opt", lora(target_modules=["q_proj"], bias="all")),
    "bias lora_only": ("opt", lora(target_modules=["q_proj"], bias="lora_only")),
    "lora bias": ("opt", lora(target_modules=["q_proj"], lora_bias=True)),
    "modules to save": ("llama", lora(modules_to_save=["norm", "lm_head"])),
    "dora": ("llama", lora(use_dora=True)),
    "embedding": ("llama", lora(target_modules=["embed_tokens", "q_proj"])),
    "embedding dora": ("llama", lora(target_modules=["embed_tokens"], use_dora=True)),
    "tokens": ("llama", lora(trainable_token_indices=[3, 11, 4])),
    "tokens by name": ("llama", lora(trainable_token_indices={"embed_tokens": [7]})),
    "tokens alone": ("llama", peft.TrainableTokensConfig(token_indices=[1, 5], target_modules=["embed_tokens"])),
    "pissa": ("llama", lora(init_lora_weights="pissa")),
    "pissa dora": ("llama", lora(init_lora_weights="pissa", use_dora=True)),
    "olora dora": ("llama", lora(init_lora_weights="olora", use_dora=True, lora_alpha=3)),
    "rslora pissa": ("llama", lora(init_lora_weights="pissa", use_rslora=True)),
    "pissa conv1d": ("gpt2", lora(target_modules=GPT2, fan_in_fan_out=True, init_lora_weights="pissa")),
    "olora": ("llama", lora(init_lora_weights="olora", lora_alpha=3)),
    "olora scaled": ("llama", lora(init_lora_weights="olora")),
    "orthogonal": ("llama", lora(init_lora_weights="orthogonal", r=4)),
    "gaussian": ("llama", lora(init_lora_weights="gaussian")),
    "experts": (
        "qwen3_moe",
        lora(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ),
    "experts transposed": (
        "gpt_oss",
        lora(target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ),
    "experts by all-linear": ("mixtral", lora(target_modules="all-linear")),
    "mixtral experts": ("mixtral", lora(target_modules=[], target_parameters=["experts.down_proj"])),
    "adalora": ("llama", peft.AdaLoraConfig(init_r=4, target_r=2, total_step=9, target_modules=ATTENTION)),
    "ia3": (
        "llama",
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "ia3 bias": ("opt", peft.IA3Config(target_modules=["k_proj", "fc2"], feedforward_modules=["fc2"])),
    "ia3 conv1d": ("gpt2", peft.IA3Config(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"])),
    "loha": ("llama", peft.LoHaConfig(r=3, alpha=5, target_modules=ATTENTION)),
    "lokr": ("llama", peft.LoKrConfig(r=3, alpha=5, target_modules=ATTENTION)),
    "lokr both": ("llama", peft.LoKrConfig(r=2, alpha=5, target_modules=ATTENTION, decompose_both=True)),
}  # fmt: skip


Bases = Callable[[str], Path]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """The base of a model's type: made once, and only read."""
    return functools.cache(lambda model_type: adapters.base_of(model_type, tmp_path_factory.mktemp(model_type)))


@pytest.mark.parametrize("name", CASES)
def test_every_change_is_pefts_merge(name: str, bases: Bases, tmp_path: Path) -> None:
    model_type, config = CASES[name]
    base = bases(model_type)
    adapter = adapters.make(base, tmp_path / "adapter", config)
    expected, found = adapters.merged(base, adapter), adapters.ours(base, adapter)
    moved = {key for key, change in expected.items() if float(change.norm()) > 1e-6}
    assert moved
    assert moved <= set(found)
    for key, change in found.items():
        size = max(1.0, float(expected[key].norm()))
        torch.testing.assert_close(change, expected[key], rtol=0, atol=1e-6 * size, msg=lambda m, k=key: f"{k}: {m}")


def test_trainable_tokens_of_a_tied_table_are_one_change(bases: Bases, tmp_path: Path) -> None:
    base = bases("gemma")
    config = peft.TrainableTokensConfig(token_indices=[1, 5], target_modules=["embed_tokens"])
    adapter = adapters.make(base, tmp_path / "adapter", config)
    assert sum("trainable_tokens_delta" in key for key in load_file(adapter / "adapter_model.safetensors")) == 2
    expected, found = adapters.merged(base, adapter), adapters.ours(base, adapter)
    assert list(found) == ["model.embed_tokens.weight"]
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        torch.testing.assert_close(found["model.embed_tokens.weight"], expected[key], rtol=0, atol=1e-6)


# -- what files look like in practice --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("llama")
    base = adapters.base_of("llama", folder / "base")
    return base, adapters.make(base, folder / "adapter", lora())


def rewritten(adapter: Path, folder: Path, rename: Callable[[str], str], **config: Any) -> Path:
    """The same adapter with other keys and other fields in its config."""
    shutil.copytree(adapter, folder)
    file = folder / "adapter_model.safetensors"
    save_file({rename(k): v for k, v in load_file(file).items()}, file)
    stated = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(stated | config))
    return folder


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.replace("base_model.model.model.", "base_model.model."),
        lambda key: key.replace(".weight", ".default.weight"),
    ],
    ids=["no prefix", "single prefix", "adapter name"],
)
def test_key_dialects_mean_the_same(rename: Callable[[str], str], llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = llama
    expected = adapters.ours(base, adapter)
    found = adapters.ours(base, rewritten(adapter, tmp_path / "a", rename))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_olora_on_conv1d_is_refused_as_peft_cannot_do_it(bases: Bases, tmp_path: Path) -> None:
    base = bases("gpt2")
    adapter = adapters.make(base, tmp_path / "adapter", lora(target_modules=GPT2, fan_in_fan_out=True))
    wrong = rewritten(adapter, tmp_path / "wrong", lambda key: key, init_lora_weights="olora")
    assert refused(base, wrong)


@pytest.mark.parametrize("stated", [True, False])
def test_the_base_decides_the_layout_not_the_config(stated: bool, bases: Bases, tmp_path: Path) -> None:
    base = bases("gpt2")  # attn.c_proj is square
    adapter = adapters.make(base, tmp_path / "adapter", lora(target_modules=GPT2, fan_in_fan_out=True))
    wrong = rewritten(adapter, tmp_path / "wrong", lambda key: key, fan_in_fan_out=stated)
    expected, found = adapters.merged(base, adapter), adapters.ours(base, wrong)
    assert all(float((found[key] - expected[key]).norm()) < 1e-6 for key in found)


@pytest.mark.parametrize("known", [True, False])
def test_a_linear_base_with_a_config_that_says_conv1d(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT goes by the class of the layer. The config counts where no class is known, and no bias shows the layout."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
    )
    base, targets = tmp_path / "base", ["q_proj", "down_proj"]
    transformers.LlamaForCausalLM(config).save_pretrained(base)
    adapter = adapters.make(base, tmp_path / "adapter", lora(target_modules=targets))
    wrong = rewritten(adapter, tmp_path / "wrong", lambda key: key, fan_in_fan_out=True)
    if not known:
        monkeypatch.setattr(BaseWeights, "layer_is_transposed", lambda *_: None)
    expected, found = adapters.merged(base, wrong), adapters.ours(base, wrong)
    assert sorted(tuple(change.shape) for change in found.values()) == [(16, 16), (16, 24)]
    for key, change in found.items():
        turned = not known and "q_proj" in key
        torch.testing.assert_close(change.T if turned else change, expected[key], rtol=0, atol=1e-6)


def test_a_copy_of_the_embedding_is_no_change(bases: Bases, tmp_path: Path) -> None:
    base = bases("llama")
    adapter = adapters.make(base, tmp_path / "adapter", lora(target_modules=["embed_tokens"]))
    keys = load_file(adapter / "adapter_model.safetensors")
    assert "base_model.model.model.embed_tokens.base_layer.weight" in keys  # PEFT saves it
    assert list(adapters.ours(base, adapter)) == ["model.embed_tokens.weight"]
    file = adapter / "adapter_model.safetensors"
    save_file({k: v.bfloat16() if "base_layer" in k else v for k, v in keys.items()}, file)
    found, expected = adapters.ours(base, adapter), load_file(file)
    low = expected["base_model.model.model.embed_tokens.lora_embedding_B"] @ expected[
        "base_model.model.model.embed_tokens.lora_embedding_A"
    ]  # fmt: skip
    torch.testing.assert_close(found["model.embed_tokens.weight"], low.T.double() * 5 / 3, rtol=0, atol=1e-6)


def test_of_a_module_that_is_saved_whole_the_layout_is_the_bases(bases: Bases, tmp_path: Path) -> None:
    base = bases("gpt2")
    config = lora(target_modules=["c_fc"], modules_to_save=["wpe", "c_attn", "lm_head"], fan_in_fan_out=True)
    files = open_adapter(adapters.make(base, tmp_path / "adapter", config), "a")
    with weights_of(base) as weights:
        found = [plan for plan in plans(files, read_keys(files), weights) if isinstance(plan, ParameterPlan)]
    turned = {plan.parameter for plan in found if plan.kind == "saved" and plan.inputs_first}
    assert turned == {"transformer.wpe.weight", *(f"transformer.h.{k}.attn.c_attn.weight" for k in range(2))}


def test_modules_to_save_of_a_resized_table_are_read_once(bases: Bases, tmp_path: Path) -> None:
    """PEFT 0.21 writes them with its infix and without, behind a save that finds the vocabulary resized."""
    base = bases("llama")
    rows = adapters.load_base(base).get_input_embeddings().weight.shape[0]

    def resized() -> Any:
        model = adapters.load_base(base)
        model.resize_token_embeddings(rows + 4)
        return model

    tuned = peft.get_peft_model(resized(), lora(modules_to_save=["embed_tokens", "lm_head"]))
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    tuned.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors, head = load_file(file), "base_model.model.lm_head.weight"
    assert {head, head.replace("head.", "head.modules_to_save.")} <= set(tensors)
    merged = peft.PeftModel.from_pretrained(resized(), tmp_path / "adapter").merge_and_unload().state_dict()
    before, found = adapters.load_base(base).state_dict(), adapters.ours(base, tmp_path / "adapter")
    assert {"lm_head.weight", "model.embed_tokens.weight"} < set(found)
    for name, change in found.items():
        expected = merged[name][:rows].double() - before[name].double()
        torch.testing.assert_close(change[:rows], expected, rtol=0, atol=1e-6)
    save_file({**tensors, head: tensors[head] + 1}, file)
    with pytest.raises(CheckpointError, match="mean the same tensor"):
        read_keys(open_adapter(tmp_path / "adapter", "adapter"))
    save_file({**tensors, head: tensors[head].bfloat16()}, file)
    with pytest.raises(CheckpointError, match="mean the same tensor"):
        read_keys(open_adapter(tmp_path / "adapter", "adapter"))


def test_layer_replication_reads_the_repeated_layer(bases: Bases, tmp_path: Path) -> None:
    """Against the wrapped layers applied to unit vectors: PEFT's merge would add both copies to their shared weight."""
    base = bases("llama")
    config = lora(layer_replication=[[0, 2], [1, 2]], use_dora=True)
    adapter = adapters.make(base, tmp_path / "adapter", config)
    found = adapters.ours(base, adapter)
    tuned = peft.PeftModel.from_pretrained(adapters.load_base(base), adapter).base_model.model
    plain = adapters.load_base(base).state_dict()
    for key, change in found.items():
        number = int(key.split(".")[2])
        old = plain[key.replace(f"layers.{number}.", f"layers.{[0, 1, 1][number]}.")]
        layer = tuned.get_submodule(key.removesuffix(".weight"))
        bias = layer(torch.zeros(1, old.shape[1]))
        new = (layer(torch.eye(old.shape[1])) - bias).T.detach()
        torch.testing.assert_close(change, new.double() - old.double(), rtol=0, atol=2e-6)
    assert {int(key.split(".")[2]) for key in found} == {0, 1, 2}


def test_experts_stored_the_other_way_round(bases: Bases, tmp_path: Path) -> None:
    """Files of older PEFT have A on the parameter's second axis; shapes tell."""
    base = bases("qwen3_moe")
    config = lora(target_modules=[], target_parameters=["mlp.experts.down_proj"])
    adapter = adapters.make(base, tmp_path / "adapter", config)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    expected = adapters.ours(base, adapter)
    old = {}
    for key, value in tensors.items():
        if "lora_A" not in key:
            continue
        second = tensors[key.replace("lora_A", "lora_B")]
        experts = len(next(iter(expected.values())))
        a = value.reshape(experts, -1, value.shape[1])  # (E, r, in)
        b = second.reshape(second.shape[0], -1, experts)  # (out, r, E)
        old[key] = b.permute(2, 1, 0).reshape(-1, b.shape[0]).contiguous()
        old[key.replace("lora_A", "lora_B")] = a.permute(2, 1, 0).reshape(a.shape[2], -1).contiguous()
    save_file(old, file)
    found = adapters.ours(base, adapter)
    assert all(float((found[key] - expected[key]).abs().max()) < 1e-9 for key in expected)


def test_an_initialisation_that_cannot_be_undone_says_so(llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = llama
    for init in ("corda", "lora_ga", "pissa_niter_4", "loftq"):
        changed = rewritten(adapter, tmp_path / init, lambda key: key, init_lora_weights=init)
        with weights_of(base) as weights:
            found = list(plans(open_adapter(changed, "a"), read_keys(open_adapter(changed, "a")), weights))
        assert all(isinstance(plan, ParameterPlan) and plan.mutated == init and not plan.needs_base for plan in found)


def test_adalora_with_pruned_ranks(bases: Bases, tmp_path: Path) -> None:
    base = bases("llama")

    def prune(tuned: Any) -> None:
        pattern = {}
        for name, module in tuned.base_model.model.named_modules():
            if hasattr(module, "lora_E"):
                pattern[f"{name}.lora_E.default"] = [True, False, "q_proj" in name, False]
        tuned.peft_config["default"].rank_pattern = pattern

    adapter = adapters.make(base, tmp_path / "adapter", CASES["adalora"][1], edit=prune)
    expected, found = adapters.merged(base, adapter), adapters.ours(base, adapter)
    assert found
    for key, change in found.items():
        assert torch.linalg.matrix_rank(change) == (2 if "q_proj" in key else 1)
        torch.testing.assert_close(change, expected[key], rtol=0, atol=1e-6)


def test_an_untouched_dora_is_no_change(bases: Bases, tmp_path: Path) -> None:
    base = bases("llama")
    adapter = tmp_path / "adapter"
    peft.get_peft_model(adapters.load_base(base), lora(use_dora=True)).save_pretrained(adapter)
    assert adapters.ours(base, adapter) == {}


def test_dora_on_an_output_of_zeros_is_said_to_be_undefined(bases: Bases, tmp_path: Path) -> None:
    """PEFT divides the magnitude by the norm of its weights, and so does its forward pass."""
    base = tmp_path / "base"
    shutil.copytree(bases("llama"), base)
    tensors, name = load_file(base / "model.safetensors"), "model.layers.1.self_attn.o_proj.weight"
    tensors[name][3] = 0.0
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    adapter = tmp_path / "adapter"
    peft.get_peft_model(adapters.load_base(base), lora(target_modules=["o_proj"], use_dora=True)).save_pretrained(
        adapter
    )
    assert bool(adapters.merged(base, adapter)[name].isnan().any())
    files = open_adapter(adapter, "a")
    with weights_of(base) as weights:
        found = [
            change_of(plan, adapter_tensors(files), weights)
            for plan in plans(files, read_keys(files), weights)
            if isinstance(plan, ParameterPlan)
        ]
        linted = lint_adapter(files, weights)
    faults = {change.plan.parameter: change.fault for change in found if change.fault}
    assert faults == {name: f"DoRA divides by a norm of zero: {tensors[name].shape[1]} values NaN"}
    assert [(one.rule, one.level, one.where) for one in linted if one.rule != "untouched"] == [
        ("non-finite", "error", name)
    ]


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])
def test_a_square_expert_parameter(model_type: str, tmp_path: Path) -> None:
    """Shapes do not tell its layout: a module that says it stores inputs first settles it, otherwise it is refused."""
    from duat_cli.zoo import tiny

    model = tiny.tiny_model(model_type)
    experts = model.model.layers[-1].mlp.experts
    sides = tuple(experts.down_proj.shape[1:])
    config = type(model.config)(**{**model.config.to_dict(), "intermediate_size": sides[0], "hidden_size": sides[0]})
    if model_type == "qwen3_moe":
        config.moe_intermediate_size = config.hidden_size
    torch.manual_seed(0)
    base = tmp_path / "base"
    type(model)(config).save_pretrained(base)
    adapter = adapters.make(base, tmp_path / "a", lora(target_modules=[], target_parameters=["mlp.experts.down_proj"]))
    if model_type == "qwen3_moe":
        with pytest.raises(AssertionError, match="square parameter"):
            adapters.ours(base, adapter)
        return
    expected, found = adapters.merged(base, adapter), adapters.ours(base, adapter)
    assert found
    for key, change in found.items():
        assert change.shape[1] == change.shape[2]
        torch.testing.assert_close(change, expected[key], rtol=0, atol=1e-6)


# -- untrusted files -------------------------------------------------------------------------------------------

JUNK = (None, True, -1, 1.5, "(", [1], {"q_proj": "x"}, {"(": 1}, [[0, 99]])
FIELDS = (
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "target_parameters", "use_dora",
    "layer_replication", "trainable_token_indices", "init_lora_weights", "modules_to_save", "fan_in_fan_out",
    "exclude_modules",
)  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_a_wrong_type_is_refused_or_read_but_never_a_crash(
    field: str, llama: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = llama
    shutil.copytree(adapter, tmp_path / "a")
    stated = json.loads((adapter / "adapter_config.json").read_text())
    for junk in JUNK:
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**stated, field: junk}))
        refused(base, tmp_path / "a")  # either way, and nothing but a DuatError on the way


def refused(base: Path, adapter: Path) -> bool:
    """Whether anything of the adapter is refused; whatever else happens on the way is a failure of the test."""
    try:
        files = open_adapter(adapter, "a")
        read = adapter_tensors(files)
        with weights_of(base) as weights:
            for plan in plans(files, read_keys(files), weights):
                if not isinstance(plan, ParameterPlan) or change_of(plan, read, weights).fault is not None:
                    return True
    except DuatError:
        return True
    return False


@pytest.mark.parametrize("name", ["lora", "dora", "adalora", "ia3", "loha", "lokr", "tokens"])
def test_a_tensor_of_another_shape_is_refused(name: str, bases: Bases, tmp_path: Path) -> None:
    model_type, config = CASES[name]
    base = bases(model_type)
    adapter = adapters.make(base, tmp_path / "adapter", config)
    assert not refused(base, adapter)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    for key in [k for k in tensors if "layers.0" in k or "embed" in k]:
        for shape in ((), (0,), (3,), (2, 0), (1, 1), (2, 3, 4)):
            save_file({**tensors, key: torch.ones(shape)}, file)
            assert refused(base, adapter), (key, shape)


@pytest.mark.parametrize("name", ["lora", "dora", "adalora", "loha"])
def test_half_a_pair_is_refused(name: str, bases: Bases, tmp_path: Path) -> None:
    model_type, config = CASES[name]
    base = bases(model_type)
    adapter = adapters.make(base, tmp_path / "adapter", config)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    for key in [k for k in tensors if "layers.0" in k]:
        save_file({k: v for k, v in tensors.items() if k != key}, file)
        assert refused(base, adapter), key


def test_a_token_that_is_named_twice_is_refused(bases: Bases, tmp_path: Path) -> None:
    base = bases("llama")
    adapter = adapters.make(base, tmp_path / "adapter", lora(trainable_token_indices=[3, 11, 4]))
    config = adapter / "adapter_config.json"
    stated = json.loads(config.read_text())
    config.write_text(json.dumps(stated | {"trainable_token_indices": [3, 11, 3]}))
    files = open_adapter(adapter, "adapter")
    faults = [plan for plan in plans(files, read_keys(files), weights_of(base)) if isinstance(plan, AdapterFault)]
    assert [fault.rule for fault in faults] == ["config"]
    assert "token 3 is named twice" in faults[0].text
