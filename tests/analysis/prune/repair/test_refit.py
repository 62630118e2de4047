"""The repair of a whole model against one by hand: plain hooks, weights zeroed by name, numpy's lstsq in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import single_model, token_ids
from image_models import build, picture
from torch import Tensor, nn

from duat_cli.analysis.prune.repair import refit as module
from duat_cli.analysis.prune.repair.consumers import consumers
from duat_cli.analysis.prune.repair.refit import HELD_BACK, Calls, Refit, Refitting
from duat_cli.models.discovery.structure import discover, run_stack
from duat_cli.models.edits.surgery import exchanged
from duat_cli.models.sweep.passes import record, removals
from duat_cli.models.sweep.rows import run_without
from duat_cli.models.terms.sites import TermId, find_sites
from duat_cli.operators.refit import RIDGES

BLOCKS = 3
TERMS = [TermId("neuron", 0, n) for n in range(0, 40, 2)] + [TermId("head", 1, 2), TermId("neuron", 2, 5)]
LAYERS = {  # blocks, attention's output projection, the FFN's last layer, and whether its output is the block's
    "llama": ("model.layers", "self_attn.o_proj", "mlp.down_proj", True),
    "gpt2": ("transformer.h", "attn.c_proj", "mlp.c_proj", True),  # Conv1D, biases
    "gemma2": ("model.layers", "self_attn.o_proj", "mlp.down_proj", False),  # a norm behind each
    "gpt_neox": ("gpt_neox.layers", "attention.dense", "mlp.dense_4h_to_h", True),  # parallel, biases
    "bert": ("bert.encoder.layer", "attention.output.dense", "output.dense", False),  # norms on the stream
}


class Tool:
    """What the package makes of a tiny model."""

    def __init__(
        self,
        model_type: str,
        terms: list[TermId],
        prompts: int = 6,
        tokens: int = 12,
        dtype: torch.dtype = torch.float64,
        prepare: Callable[[Any], None] | None = None,
    ) -> None:
        """prepare: changes the model, whose prompts then open with token 7."""
        self.model = single_model(model_type).to(dtype)
        self.ids = [token_ids(self.model, tokens, seed=k) for k in range(prompts)]
        if prepare is not None:
            prepare(self.model)
            self.ids = [opening(self.model, k) for k in range(prompts)]
        self.structure = discover(self.model)
        self.sites = find_sites(self.structure)
        self.gone = removals(self.structure, self.sites, terms)
        found, self.left = consumers(self.model, self.structure, self.sites)
        recorded = [Calls.of(self.structure, record(self.structure, self.forward(x)).calls) for x in self.ids]
        self.refitting = Refitting(self.structure, found, recorded, torch.float64)
        self.refit: Refit = self.refitting.refit(self.gone, lambda *_: None)

    def forward(self, ids: Tensor) -> Any:
        return lambda: run_stack(self.model, ids)[0]

    def output(self, ids: Tensor, values: Any = None) -> Tensor:
        """Of the repaired model without the terms; values: other weights than the repair's."""
        recorded = record(self.structure, self.forward(ids))
        with exchanged(self.refit.values if values is None else values):
            return run_without(self.structure, self.forward(ids), recorded, self.gone)


def matrix(layer: nn.Module) -> Tensor:
    """(in, out), a view."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.data if type(layer).__name__ == "Conv1D" else weight.data.T


class ByHand:
    """Columns zeroed, and the rest fitted front to back; `worse`: layers whose fit leaves more on the tokens."""

    def __init__(self, model: Any, model_type: str, terms: list[TermId], prompts: list[Tensor]) -> None:
        self.dense, self.model, self.prompts = model, copy.deepcopy(model), prompts
        blocks, attention, down, self.arrives = LAYERS[model_type]
        self.paths = [(f"{blocks}.{k}", f"{blocks}.{k}.{name}") for k in range(BLOCKS) for name in (attention, down)]
        self.kept: dict[str, list[int]] = {}
        self.given: dict[str, list[Tensor]] = {}
        self.ridges: list[float] = []
        self.worse = 0
        heads, size = model.config.num_attention_heads, model.config.hidden_size
        width = getattr(model.config, "head_dim", None) or size // heads
        for _, path in self.paths:
            layer = self.model.get_submodule(path)
            gone = self._gone(path, terms, attention, down, blocks, width)
            matrix(layer)[gone] = 0
            self.kept[path] = [k for k in range(len(matrix(layer))) if k not in gone]
        for block, path in self.paths:
            self._fit(block, path, path.endswith(down))

    def _gone(self, path: str, terms: list[TermId], attention: str, down: str, blocks: str, width: int) -> list[int]:
        found: list[int] = []
        for term in terms:
            if term.kind == "neuron" and path == f"{blocks}.{term.block}.{down}":
                found.append(int(term.index or 0))
            if term.kind == "head" and path == f"{blocks}.{term.block}.{attention}":
                found += range(int(term.index or 0) * width, (int(term.index or 0) + 1) * width)
        return found

    def _seen(self, model: Any, path: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Of a module, in a plain pass: its first input and its output."""
        seen: list[Tensor] = []

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen.extend((args[0][0].clone(), (output if isinstance(output, Tensor) else output[0])[0].clone()))

        handle = model.get_submodule(path).register_forward_hook(hook)
        with torch.no_grad():
            model(input_ids=ids)
        handle.remove()
        return seen[0], seen[1]

    def _given(self, path: str) -> list[Tensor]:
        """By a module of the dense model, under every prompt; one run of each."""
        if path not in self.given:
            self.given[path] = [self._seen(self.dense, path, ids)[1] for ids in self.prompts]
        return self.given[path]

    def _rows(self, block: str, path: str, arrives: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        layer, place = self.model.get_submodule(path), block if arrives else path
        for ids, dense in zip(self.prompts, self._given(place), strict=True):
            x = self._seen(self.model, path, ids)[0][:, self.kept[path]]
            lacking = dense - self._seen(self.model, place, ids)[1]
            if layer.bias is not None:
                x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
            root = torch.maximum(dense.square().sum(1), self._median(place)).rsqrt()[:, None]
            yield (x * root).numpy(), (lacking * root).numpy()

    def _median(self, place: str) -> Tensor:
        """Of the squared length of what the dense model gives there."""
        return torch.cat([dense.square().sum(1) for dense in self._given(place)]).median()

    def _fit(self, block: str, path: str, last: bool) -> None:
        layer, kept = self.model.get_submodule(path), self.kept[path]
        rows = list(self._rows(block, path, last and self.arrives))
        fit = [pair for k, pair in enumerate(rows) if k % HELD_BACK != HELD_BACK - 1]
        back = [pair for k, pair in enumerate(rows) if k % HELD_BACK == HELD_BACK - 1]
        none = sum(float((r**2).sum()) for _, r in back)
        bias = layer.bias is not None
        errors = {c: sum(float(((r - x @ self._change(fit, c, bias)) ** 2).sum()) for x, r in back) for c in RIDGES}
        best = min(errors, key=lambda c: errors[c])
        if errors[best] >= none:
            return
        self.ridges.append(best)
        change = self._change(rows, best, bias)
        before = sum(float((r**2).sum()) for _, r in rows)
        self.worse += sum(float(((r - x @ change) ** 2).sum()) for x, r in rows) > before
        matrix(layer)[kept] += torch.from_numpy(change[: len(kept)])
        if layer.bias is not None:
            layer.bias.data += torch.from_numpy(change[-1])

    def _change(self, rows: list[tuple[np.ndarray, np.ndarray]], ridge: float, bias: bool) -> np.ndarray:
        x, r = (np.vstack(side) for side in zip(*rows, strict=True))
        inputs = x.shape[1] - bias
        extra = np.sqrt(ridge * (x[:, :inputs] ** 2).sum() / inputs) * np.eye(inputs, x.shape[1])
        return np.linalg.lstsq(np.vstack([x, extra]), np.vstack([r, np.zeros((len(extra), r.shape[1]))]), rcond=None)[0]


@pytest.mark.parametrize("model_type", list(LAYERS))
def test_the_repair_is_that_of_plain_hooks_and_lstsq(model_type: str) -> None:
    tool = Tool(model_type, TERMS)
    before = {name: value.clone() for name, value in tool.model.state_dict().items()}
    hand = ByHand(tool.model, model_type, TERMS, tool.ids)
    assert hand.ridges == list(tool.refit.ridges.values())
    assert len(hand.ridges) + tool.refit.unchanged == 2 * BLOCKS
    assert hand.ridges
    assert hand.worse == 0
    new = {name for name, p in tool.model.named_parameters() if p in tool.refit.values}
    assert len(new) == len(hand.ridges) * (1 + (hand.model.get_submodule(hand.paths[0][1]).bias is not None))
    for name, parameter in tool.model.named_parameters():
        if parameter in tool.refit.values:
            expected = dict(hand.model.named_parameters())[name]
            error = (tool.refit.values[parameter] - expected.detach()).norm() / expected.detach().norm()
            assert float(error) < 1e-8, name
    with torch.no_grad():
        for ids in tool.ids[:2]:
            expected = hand.model(input_ids=ids).logits
            assert float((tool.output(ids) - expected).norm() / expected.norm()) < 1e-8
    assert all(torch.equal(value, before[name]) for name, value in tool.model.state_dict().items())


def test_layers_that_write_nothing_are_left() -> None:
    """A removed FFN, attention or block has nothing to refit; blocks in front of the first removal stay."""
    tool = Tool("llama", [TermId("ffn", 1, 0), TermId("block", 2)])
    layers = tool.model.model.layers
    assert set(tool.refit.values) <= {layers[1].self_attn.o_proj.weight}
    tool = Tool("llama", [TermId("attention", 1, 0)])
    layers = tool.model.model.layers
    changed = set(tool.refit.values)
    assert layers[1].mlp.down_proj.weight in changed
    assert layers[1].self_attn.o_proj.weight not in changed
    assert not changed & set(layers[0].parameters())


def test_few_prompts_are_enough_and_few_tokens_are_said() -> None:
    tool = Tool("llama", [TermId("neuron", 0, 3)], prompts=2, tokens=12)
    assert tool.refit.short == 2 * BLOCKS  # 24 tokens; 47 or 48 neurons, and 64 inputs from heads
    assert len(tool.refit.ridges) + tool.refit.unchanged == 2 * BLOCKS
    assert Tool("llama", [TermId("neuron", 0, 3)], prompts=8, tokens=12).refit.short == 0


def test_experts_are_left_and_the_rest_is_refitted() -> None:
    tool = Tool("mixtral", [TermId("expert", 0, 1), TermId("head", 1, 0)], dtype=torch.float32)
    assert [("expert" in one.why, one.what) for one in tool.left] == [(True, "the FFN's last layer from block 0 on")]
    projections = {layer.self_attn.o_proj.weight for layer in tool.model.model.layers}
    assert tool.refit.values
    assert set(tool.refit.values) <= projections


def test_weights_are_those_that_a_file_can_hold() -> None:
    """Rounded to the stored dtype before the next block is fitted."""
    tool = Tool("llama", TERMS)
    found, _ = consumers(tool.model, tool.structure, tool.sites)
    recorded = [Calls.of(tool.structure, record(tool.structure, tool.forward(x)).calls) for x in tool.ids]
    refit = Refitting(tool.structure, found, recorded, torch.bfloat16).refit(tool.gone, lambda *_: None)
    assert refit.values
    for parameter, value in refit.values.items():
        changed = value != parameter
        assert bool(changed.any())
        assert torch.equal(value[changed], value[changed].bfloat16().double())


def massive_first_token(model: Any) -> None:
    """Neuron 0 of the first FFN fires for token 7 alone, and writes a hundred times what others do."""
    first = model.bert.encoder.layer[0]
    seen: list[Tensor] = []
    handle = first.intermediate.dense.register_forward_hook(lambda _m, args, _o: seen.append(args[0][0]))
    with torch.no_grad():
        for seed in range(8):
            model(input_ids=opening(model, seed))
        handle.remove()
        axis = torch.stack([x[0] for x in seen]).mean(0) - torch.cat([x[1:] for x in seen]).mean(0)
        ordinary = torch.cat([x[1:] for x in seen]) @ axis
        top = torch.stack([x[0] for x in seen]) @ axis
        first.intermediate.dense.weight[0] = axis / (top.mean() - ordinary.mean()) * 10
        first.intermediate.dense.bias[0] = -10 * ordinary.max() / (top.mean() - ordinary.mean())
        first.output.dense.weight[:, 0] *= 100 / first.output.dense.weight[:, 0].norm()


def opening(model: Any, seed: int) -> Tensor:
    """A prompt that opens with token 7."""
    ids = token_ids(model, 12, seed=seed)
    ids[:, 0] = 7
    return ids


def test_a_token_with_massive_activations_is_not_all_that_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt opens with a token for which one neuron gives nearly all of the FFN's output. With it gone, a fit of
    all tokens alike makes other prompts worse than no repair does; one in relation to their size makes them better."""

    def left() -> tuple[float, float]:
        """Mean relative change of the output on other prompts, their first token left out: without, and with repair."""
        tool = Tool("bert", [TermId("neuron", 0, n) for n in range(0, 40, 2)], prepare=massive_first_token)
        sides: list[list[float]] = [[], []]
        for seed in range(50, 60):
            ids = token_ids(tool.model, 12, seed=seed)
            whole = run_stack(tool.model, ids)[0][:, 1:]
            for side, values in zip(sides, ({}, tool.refit.values), strict=True):
                change = tool.output(ids, values)[:, 1:] - whole
                side.append(float((change.norm(dim=-1) / whole.norm(dim=-1)).detach().mean()))
        return sum(sides[0]) / 10, sum(sides[1]) / 10

    without, with_it = left()
    assert with_it < without
    monkeypatch.setattr(module, "_typical", lambda targets: 1e30)  # no token is larger: all count alike
    assert left()[1] > without


def test_the_arguments_that_are_kept_hold_no_states_of_a_map() -> None:
    """SAM's blocks take (1, height, width, M): what stands in place of the hidden states has their shape."""
    model, given = build("sam"), picture()
    structure = discover(model, given)
    calls = record(structure, lambda: run_stack(structure.stack, given)[0]).calls
    for (args, kwargs), call in zip(Calls.of(structure, calls).arguments, calls, strict=True):
        held = structure.block(0).parts.hidden.get(args, kwargs)
        assert held.shape == call.before.shape
        assert held.untyped_storage().nbytes() == held.element_size()
