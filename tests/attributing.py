"""Second ways for attributions: forwards written by hand whose attention, norm scales and activations are held."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import helpers
import torch
from torch import Tensor

from duat_cli.analysis.attribute.run import AttributeOptions, attribute
from duat_cli.analysis.attribute.targets import Asked
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.words import Words
from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.sweep.ending import Ending, find_ending
from duat_cli.models.sweep.passes import Behind, record
from duat_cli.results.attribute import AttributeReport, Attribution
from duat_cli.zoo import tiny


class Letters:
    """A tokenizer whose tokens are 't40 ', 't41 ' and so on."""

    unk_token_id, unk_token, mask_token_id = 3, "<unk>", 89
    all_special_ids: tuple[int, ...] = ()

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(w[1:]) if w[1:].isdecimal() else 3 for w in text.split()]}

    def decode(self, ids: list[int]) -> str:
        return f"t{ids[0]} "

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"t{token}"

    def get_vocab(self) -> dict[str, int]:
        return {f"t{token}": token for token in range(100)}


WORDS = Words(Letters())


def report_of(model: Any, ids: Tensor, top: int = 10, **asked: Any) -> AttributeReport:
    """The report on a model in memory."""
    return report_on(helpers.as_loaded(model), ids, top, **asked)


def report_on(loaded: LoadedModel, ids: Tensor, top: int = 10, **asked: Any) -> AttributeReport:
    options = AttributeOptions(Asked(**asked), top)
    return attribute(loaded, [helpers.prompt_of(ids)], WORDS, options, lambda *_: None)


@dataclass
class Held:
    """One frozen forward: its output, and the leaves that it is a linear function of."""

    logits: Tensor = field(default_factory=lambda: torch.empty(0))  # (N, vocabulary)
    x: Tensor = field(default_factory=lambda: torch.empty(0))  # (N, M)
    heads: list[Tensor] = field(default_factory=list)  # H V, a block: (N, heads, d)
    neurons: list[Tensor] = field(default_factory=list)  # a block: (N, neurons)
    rests: list[Tensor] = field(default_factory=list)  # constants that are added to the stream, (N, M)

    def parts(self, target: Tensor) -> SimpleNamespace:
        """Gradient times value of everything, in float64."""
        leaves = [self.x, *self.heads, *self.neurons, *self.rests]
        grads = torch.autograd.grad(target, leaves, allow_unused=True)
        got = [0 * x if g is None else (g * x).detach() for g, x in zip(grads, leaves, strict=True)]
        count = len(self.heads)
        return SimpleNamespace(
            tokens=got[0].sum(-1),
            heads=[g.sum((0, 2)) for g in got[1 : 1 + count]],
            neurons=[g.sum(0) for g in got[1 + count : 1 + 2 * count]],
            rests=[g.sum() for g in got[1 + 2 * count :]],
        )

    def head(self, value: Tensor, *, cut: bool) -> Tensor:
        """What heads give; cut: as a leaf of its own, so that nothing in front of it is reached."""
        kept = value.detach().requires_grad_() if cut else value
        self.heads.append(kept)
        return kept

    def leaf(self, value: Tensor, to: list[Tensor]) -> Tensor:
        to.append(value.detach().clone().requires_grad_())
        return to[-1]


def rms(x: Tensor, norm: Any) -> Tensor:
    scale = torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return x * scale * norm.weight.double()


def layer_norm(x: Tensor, norm: Any) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered * torch.rsqrt(centered.detach().square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with its matrix held: (heads, N, d) each, to (N, heads, d)."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(mask, -torch.inf).softmax(-1).detach() @ v).transpose(0, 1)


def llama(model: Any, ids: Tensor, *, cut: bool = False) -> Held:
    """cut: as for the direct reading."""
    held, config, base = Held(), model.config, model.model
    tokens, width = ids.shape[1], config.head_dim
    place = torch.arange(tokens).double()
    speed = config.rope_parameters["rope_theta"] ** -(torch.arange(0, width, 2).double() / width)
    angle = torch.outer(place, speed).repeat(1, 2)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()

    def split(x: Tensor, linear: Any) -> Tensor:
        out = x @ linear.weight.double().T
        out = out if linear.bias is None else out + linear.bias.double()
        return out.reshape(tokens, -1, width).transpose(0, 1)

    held.x = base.embed_tokens(ids)[0].detach().double().requires_grad_()
    x = held.x
    for block in base.layers:
        z, own = rms(x, block.input_layernorm), block.self_attn
        groups = config.num_attention_heads // config.num_key_value_heads
        k, v = (split(z, linear).repeat_interleave(groups, 0) for linear in (own.k_proj, own.v_proj))
        mixed = held.head(attended(turned(split(z, own.q_proj)), turned(k.detach()), v), cut=cut)
        x = x + mixed.flatten(1) @ own.o_proj.weight.double().T
        z = rms(x, block.post_attention_layernorm)
        gate, up = (z @ linear.weight.double().T for linear in (block.mlp.gate_proj, block.mlp.up_proj))
        a = held.leaf(torch.nn.functional.silu(gate) * up, held.neurons)
        x = x + a @ block.mlp.down_proj.weight.double().T
    held.logits = rms(x, base.norm) @ model.lm_head.weight.double().T
    return held


def gpt2(model: Any, ids: Tensor, *, cut: bool = False) -> Held:
    """With biases: those of norms and layers are leaves of their own, `rests`."""
    held, base, heads = Held(), model.transformer, model.config.n_head
    tokens = ids.shape[1]

    def added(x: Tensor, bias: Tensor) -> Tensor:
        return x + held.leaf(bias.double(), held.rests)

    def norm(x: Tensor, module: Any) -> Tensor:
        return added(layer_norm(x, module), module.bias)

    held.x = (base.wte(ids)[0] + base.wpe(torch.arange(tokens))).detach().double().requires_grad_()
    x = held.x
    for block in base.h:
        z = norm(x, block.ln_1)
        z = added(z @ block.attn.c_attn.weight.double(), block.attn.c_attn.bias)
        q, k, v = (part.reshape(tokens, heads, -1).transpose(0, 1) for part in z.chunk(3, -1))
        mixed = held.head(attended(q, k, v), cut=cut)
        x = x + added(mixed.flatten(1) @ block.attn.c_proj.weight.double(), block.attn.c_proj.bias)
        z = norm(x, block.ln_2)
        a = held.leaf(block.mlp.act(added(z @ block.mlp.c_fc.weight.double(), block.mlp.c_fc.bias)), held.neurons)
        x = x + added(a @ block.mlp.c_proj.weight.double(), block.mlp.c_proj.bias)
    held.logits = norm(x, base.ln_f) @ model.lm_head.weight.double().T
    return held


def double(model_type: str) -> Any:
    return as_double(tiny.tiny_model(model_type))


def as_double(model: Any) -> Any:
    """The model itself, in float64."""
    model = model.double()
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("eager")  # grouped_mm has no float64
    return model


@functools.lru_cache(maxsize=1)
def structure_of(model: Any) -> ModelStructure:
    """What discovery found of the model that was asked about last, whose weights stay as they are."""
    return discover(model)


def without(model: Any, ids: Tensor, one: Attribution, change: Callable[[int, BlockRun, list[Tensor]], Tensor | None],
            first: Callable[[Tensor], Tensor] = lambda x: x) -> float:  # fmt: skip
    """The logit of the frozen network, block by block forwards, with something changed in it.

    change(block, its run, what its units give) may change the latter in place, and give what heads give instead.
    """
    structure = structure_of(model)

    def forward() -> Tensor:
        return run_stack(model, ids).logits

    recorded = record(structure, forward)
    stream = [first(recorded.calls[0].before)]

    def listen(run: BlockRun) -> None:
        given = [unit.output[None].clone() for unit in run.units]
        heads = change(run.index, run, given)
        if heads is not None:  # what is missing of the heads, on its way from a stream of zeros
            kept = run.replay(stream[0], given).mixed[0] - heads
            stream[0] = run.replay(stream[0], given, attention=kept).output
        else:
            stream[0] = run.replay(stream[0], given).output

    with structure.rig().active() as active:
        active.run(lambda: run_stack(structure.stack, ids), listen)
    behind = Behind(structure, forward, recorded)
    ending = Ending(behind, find_ending(model, behind))
    assert one.position is not None
    assert one.target.token is not None
    return float(ending(stream[0])[0, one.position, one.target.token.id])


def lost(model: Any, ids: Tensor, one: Attribution, change: Callable[..., Tensor | None]) -> float:
    """How much of the frozen network's logit is gone with a change, as of `without`."""
    return without(model, ids, one, lambda *_: None) - without(model, ids, one, change)
