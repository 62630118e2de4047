"""The whole network written out: against Jacobians of the models in float64, and Eq. 33 evaluated from the file."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    WIRINGS,
    Detached,
    InDouble,
    as_loaded,
    double_model,
    far,
    prompt_of,
    quiet,
    single_model,
    token_ids,
    two_single,
    written_tensors,
)
from torch import Tensor, nn

from duat_cli.analysis.network import file as network_file
from duat_cli.analysis.network import layer as layer_module
from duat_cli.analysis.network import run
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.models.instrument.hooks import hooked
from duat_cli.results.matrix import NetworkReport

TOKENS = 3
TYPES = ("llama", "gpt2", "gemma2", "bert", "mixtral")
# parallel, norms behind, shared experts and blocks, routing weights whose sum differs from token to token
MORE = ("phi", "olmo2", "cohere", "deepseek_v3", "phi3", "albert", "olmoe")
SIGMA = {
    "llama": nn.functional.silu, "mixtral": nn.functional.silu, "bert": nn.functional.gelu,
    "gpt2": lambda t: nn.functional.gelu(t, approximate="tanh"),
    "gemma2": lambda t: nn.functional.gelu(t, approximate="tanh"),
}  # fmt: skip
FFN = {"llama": "mlp", "gpt2": "mlp", "gemma2": "mlp", "bert": "intermediate", "mixtral": "mlp"}
FIRST = {"llama": ("mlp.gate_proj", "mlp.up_proj"), "gpt2": ("mlp.c_fc",), "bert": ("intermediate.dense",)}
FIRST["gemma2"] = FIRST["llama"]
LAST = {"llama": "mlp.down_proj", "gemma2": "mlp.down_proj", "gpt2": "mlp.c_proj", "bert": "output.dense"}


Written = tuple[NetworkReport, dict[str, Tensor], dict[str, str]]


def written(model: Any, ids: Tensor, path: Path) -> Written:
    report = run.network(as_loaded(model), prompt_of(ids), str, quiet, path)
    return report, *written_tensors(path)


@pytest.fixture(scope="module")
def in_double(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """A type's network in float64: written once, and only read."""

    @functools.cache
    def of(model_type: str) -> Written:
        model = double_model(model_type)
        with InDouble():
            return written(model, token_ids(model, TOKENS), tmp_path_factory.mktemp(model_type) / "n.safetensors")

    return of


@pytest.mark.parametrize("model_type", [*TYPES, *MORE])
def test_every_step_is_the_models_own_in_both_dtypes(model_type: str, in_double: Callable[[str], Written]) -> None:
    model = two_single(model_type)
    single = run.network(as_loaded(model), prompt_of(token_ids(model, TOKENS)), str, quiet)
    for report, bound in ((single, 1e-5), (in_double(model_type)[0], 1e-10)):
        errors = [report.whole_error]
        for layer in report.layers:
            errors += [layer.output_error, layer.unit_error or 0.0, layer.pre_activation_error or 0.0]
            assert (layer.pre_activation_error is None) == ("pre_activation_error" in layer.reasons)
            assert (layer.pre_activation_error is None) == (layer.experts is not None)
            assert layer.unit_error is not None
        assert report.certificate.relative_error == max(errors) <= bound
        assert report.certificate.exact
        assert [layer.equation for layer in report.layers][:2] == ["21", "23"]


# -- against the model itself --------------------------------------------------------------------------------


def outputs_of(model_type: str, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """x_0 and every x_j by a plain pass in float64, vec."""
    model, found = double_model(model_type), list[Tensor]()

    def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not found:
            found.append((args[0] if args else kwargs["hidden_states"]).detach().reshape(-1))
        found.append((output if isinstance(output, Tensor) else output[0]).detach().reshape(-1))

    with InDouble(), torch.no_grad(), hooked(list(model.get_submodule(WIRINGS[model_type].blocks)), after=keep):
        model(input_ids=ids)
    return found[0], found[1:]


def jacobian(model_type: str, ids: Tensor, source: tuple[int, str], target: tuple[int, str]) -> Tensor:
    """Of what `target` gives by what `source` reads, (block, module in it, "" for the block), with softmax weights,
    scales of norms and FFNs constant to autograd; an FFN that the source stands in is not."""
    model = double_model(model_type)
    blocks = list(model.get_submodule(WIRINGS[model_type].blocks))
    caught: dict[str, Tensor] = {}

    def leaf(module: nn.Module, args: Any, kwargs: Any) -> Any:
        caught["x"] = x = (args[0] if args else kwargs["hidden_states"]).detach().clone().requires_grad_()
        return ((x * 1.0, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x * 1.0})

    def constant(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return output.detach()

    def catch(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        caught["out"] = output if isinstance(output, Tensor) else output[0]

    start, end = (blocks[index].get_submodule(name) for index, name in (source, target))
    ffns = [block.get_submodule(FFN[model_type]) for block in blocks]
    held = [ffn for ffn in ffns if start not in set(ffn.modules())]
    with (
        InDouble(), Detached(), torch.enable_grad(), hooked([start], leaf), hooked([end], after=catch),
        hooked(held, after=constant),
    ):  # fmt: skip
        model(input_ids=ids)
    x, out = caught["x"], caught["out"]
    seeds = torch.eye(out.numel(), dtype=out.dtype).reshape(-1, *out.shape)
    (rows,) = torch.autograd.grad(out, x, seeds, is_grads_batched=True)
    return rows.reshape(out.numel(), x.numel()).detach()


@pytest.mark.parametrize("model_type", TYPES)
def test_the_matrices_are_the_jacobians_of_the_model(model_type: str, in_double: Callable[[str], Written]) -> None:
    model = double_model(model_type)
    ids, (_, tensors, _) = token_ids(model, TOKENS), in_double(model_type)
    depth = len(list(model.get_submodule(WIRINGS[model_type].blocks)))
    for j in range(1, depth + 1):
        assert far(tensors[f"W'_{{{j},1}}"], jacobian(model_type, ids, (0, ""), (j - 1, ""))) < 1e-10
        if model_type == "mixtral":  # its experts' layers are in no modules
            continue
        first = [
            jacobian(model_type, ids, (0, ""), (j - 1, name)).unflatten(0, (TOKENS, -1)) for name in FIRST[model_type]
        ]
        assert far(tensors[f"W'_{{{j},2}}"], torch.cat(first, dim=1).flatten(0, 1)) < 1e-10
        last = jacobian(model_type, ids, (j - 1, LAST[model_type]), (depth - 1, ""))
        assert far(tensors[f"W'_{{{j},3}}"], last) < 1e-10
        alone = jacobian(model_type, ids, (j - 1, LAST[model_type]), (j - 1, ""))
        assert far(tensors[f"original.W'_{{{j},3}}"], alone) < 1e-10


@pytest.mark.parametrize("model_type", TYPES)
def test_eq_33_from_the_file_is_the_models_output(model_type: str, in_double: Callable[[str], Written]) -> None:
    report, t, metadata = in_double(model_type)
    x0, outputs = outputs_of(model_type, t["input_ids"][None])
    assert far(t["x'_{0}"], x0) < 1e-12
    depth = len(outputs)
    layers = json.loads(metadata["layers"])
    assert [layer["neurons"] for layer in layers] == [layer.neurons for layer in report.layers]

    def active(j: int, a: Tensor) -> Tensor:
        if not layers[j - 1]["gated"]:
            return SIGMA[model_type](a)
        gate, up = a.reshape(TOKENS, 2, -1).unbind(1)
        return (SIGMA[model_type](gate) * up).reshape(-1)

    whole = t[f"W'_{{{depth},1}}"] @ x0 + t[f"b'_{{{depth},3}}"]
    x, rest = x0, torch.zeros_like(x0)  # by Eq. 20 alone, from the originals
    b3 = torch.zeros_like(x0)
    for j in range(1, depth + 1):
        W1, W2, W3, b2, own3 = (t[f"original.{name}"] for name in (
            f"W'_{{{j},1}}", f"W'_{{{j},2}}", f"W'_{{{j},3}}", f"b'_{{{j},2}}", f"b'_{{{j},3}}"
        ))  # fmt: skip
        assert far(t[f"b'_{{{j},2}}"], (W2 @ b3 + b2) + W2 @ rest) < 1e-10  # Eq. 34
        h = active(j, t[f"W'_{{{j},2}}"] @ x0 + t[f"b'_{{{j},2}}"])
        whole = whole + t[f"W'_{{{j},3}}"] @ h
        x = W1 @ x + own3 + W3 @ active(j, W2 @ x + b2)
        b3, rest = W1 @ b3 + own3, W1 @ rest + W3 @ h
        assert far(x, outputs[j - 1]) < 1e-10
        assert far(t[f"x'_{{{j}}}"], outputs[j - 1]) < 1e-10
    assert far(whole, outputs[-1]) < 1e-10


def test_h_and_scales_are_those_of_the_model(tmp_path: Path) -> None:
    model = two_single("llama")
    ids = token_ids(model, TOKENS)
    _, t, metadata = written(model, ids, tmp_path / "n.safetensors")
    model.set_attn_implementation("eager")
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    norms = {m: n for n, m in model.model.layers[1].named_modules() if n.endswith("layernorm")}

    def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen[norms[module]] = args[0][0], output[0]

    with torch.no_grad(), hooked(list(norms), after=keep):
        own = model(input_ids=ids, output_attentions=True).attentions
    for block, expected in enumerate(own):
        assert far(t[f"H_{{{block + 1}}}"], expected[0]) < 1e-6
    assert sorted(norms.values()) == ["input_layernorm", "post_attention_layernorm"]
    for name, (x, y) in seen.items():
        assert far(t[f"S_{{2}}.{name}"][:, None] * x * t[f"gain_{{2}}.{name}"], y) < 1e-5
    assert json.loads(metadata["tokens"]) == [str(token) for token in ids[0].tolist()]
    assert torch.equal(t["input_ids"], ids[0])


def test_every_name_is_in_the_schema(tmp_path: Path) -> None:
    model = two_single("llama")
    report, t, _ = written(model, token_ids(model, 2), tmp_path / "n.safetensors")
    assert "matrices of all layers" in report.run.reasons["planned_memory_bytes"]
    for name in t:
        plain = name.removeprefix("original.").replace("{0}", "{j}")
        for number in range(1, 9):
            plain = plain.replace(f"{{{number}", "{j")
        assert plain.partition(".")[0] in (network_file.__doc__ or ""), name


# -- what makes it wrong, and what is refused ----------------------------------------------------------------


def test_a_wrong_activation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """gelu and its tanh form differ by 1e-4: the certificate must tell them apart in float64."""
    from duat_cli.operators.activations import KNOWN

    other = next(known for known in KNOWN if known.name == "gelu")
    own = layer_module.Sigma
    monkeypatch.setattr(layer_module, "Sigma", lambda _, *rest: own(other, *rest))
    model = double_model("gpt2")
    report = run.network(as_loaded(model), prompt_of(token_ids(model, TOKENS)), str, quiet)
    assert not report.certificate.exact
    assert report.layers[0].pre_activation_error is not None
    assert report.layers[0].pre_activation_error < 1e-10  # σ is behind it


def test_a_layer_without_an_ffn_has_no_sigma(tmp_path: Path) -> None:
    model = two_single("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
    report, t, _ = written(model, token_ids(model, TOKENS), tmp_path / "n.safetensors")
    assert report.certificate.exact
    assert report.layers[0].neurons is report.layers[0].unit_error is None
    assert "W'_{1,3}" not in t
    assert "W'_{2,3}" in t


def test_a_massive_activation_does_not_hide_what_is_wrong_of_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm over all tokens is that of the first: one hundredth of what the second's last FFN adds is nothing."""
    model = two_single("llama")
    ids, width, made = token_ids(model, TOKENS), model.config.hidden_size, run.layer_of
    ids[0, 0] = 0
    assert not bool((ids[0, 1:] == 0).any())
    with torch.no_grad():
        model.model.embed_tokens.weight[0, 3] = 1e4
    assert run.network(as_loaded(model), prompt_of(ids), str, quiet).certificate.exact

    def wrong(block: Any, *others: Any) -> Any:
        layer = made(block, *others)
        if block.index == 1:
            layer.W3[width : 2 * width] *= 1.01
        return layer

    monkeypatch.setattr(run, "layer_of", wrong)
    report = run.network(as_loaded(model), prompt_of(ids), str, quiet)
    assert report.layers[1].output_error > 1e-4
    assert not report.certificate.exact


def test_what_is_no_network_of_the_paper_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_single("llama")
    width = model.config.hidden_size
    tokens = 4096 // width + 1
    with pytest.raises(
        InputError, match=rf"N M = {tokens} x {width} = 4,\d+, more than 4,096; use --max-tokens {tokens - 1}"
    ):
        run.network(as_loaded(model), prompt_of(token_ids(model, tokens)), str, quiet)
    jamba = single_model("jamba")
    with pytest.raises(UnsupportedModelError, match=r"--network: block 0 \(layers.0\) has 2 nonlinear units"):
        run.network(as_loaded(jamba), prompt_of(token_ids(jamba, TOKENS)), str, quiet)
    half = two_single("llama").to(torch.bfloat16)
    with pytest.raises(InputError, match="give --dtype float32"):
        run.network(as_loaded(half), prompt_of(token_ids(half, TOKENS)), str, quiet)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(InputError, match=r"the matrices take 0.0 GiB, .* has 0.0 GiB left"):
        run.network(as_loaded(model), prompt_of(token_ids(model, TOKENS)), str, quiet, tmp_path / "n.safetensors")
