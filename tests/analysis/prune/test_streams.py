"""Removals in models whose tokens have several streams, against plain hooks on the untouched model in float64; and what
other commands say of such models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attributing import as_double, report_of
from helpers import as_loaded, prompt_of, quiet, token_ids
from own_code import PROMPTS, WIDTH, Attention, FeedForward, OwnStack, own
from torch import Tensor, nn

from duat_cli.analysis.compare.request import Texts
from duat_cli.analysis.compare.run import CompareOptions, compare
from duat_cli.analysis.matrix.run import matrix
from duat_cli.api.models import inspect, prune_bound, verify
from duat_cli.errors import UnsupportedModelError, needed
from duat_cli.loading.texts import PromptText
from duat_cli.loading.words import Words
from duat_cli.results.prune.terms import PruneTerm
from duat_cli.zoo import tiny

HEADS = 4
KINDS = {
    "hy_v4": {"neuron", "head", "expert", "ffn", "attention", "block"},  # blocks share a choice of keys
    "glm5_next_text": {"neuron", "head", "expert", "ffn", "attention", "block"},
    "qwen4_exp_text": {"head", "expert", "ffn", "attention", "block"},
    "gemma3n_text": {"neuron", "head", "ffn", "attention", "block"},  # blocks share values; a second FFN
    "deepseek_v4": {"expert", "ffn", "attention", "block"},  # experts are chosen by the token's id
}


def nothing(_module: nn.Module, _args: Any, out: Any) -> Any:
    return torch.zeros_like(out) if isinstance(out, Tensor) else (torch.zeros_like(out[0]), *out[1:])


def silenced(block: Any, term: PruneTerm) -> Any:
    """A hook that takes the term out of this block."""
    if term.kind == "block":
        keep = lambda _m, args, _kwargs, out: args[0] if isinstance(out, Tensor) else (args[0], *out[1:])  # noqa: E731
        return block.register_forward_hook(keep, with_kwargs=True)
    if term.kind == "expert":
        unused = lambda _m, args: (*args[:2], args[2].masked_fill(args[1] == term.index, 0))  # noqa: E731
        return block.mlp.experts.register_forward_pre_hook(unused)
    layer = block.get_submodule(term.module.split("layers.", 1)[1].split(".", 1)[1])
    if term.kind in ("ffn", "attention"):
        return layer.register_forward_hook(nothing)
    width = layer.in_features // HEADS if term.kind == "head" else 1

    def silent(_m: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert term.index is not None
        value, first = args[0].clone(), term.index * width % layer.in_features  # a second FFN's are counted on
        value[..., first : first + width] = 0
        return (value,)

    return layer.register_forward_pre_hook(silent)


def output(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(input_ids=ids, use_cache=False)
    return (found.logits if "logits" in found else found.last_hidden_state)[0].double()


@pytest.mark.parametrize("model_type", KINDS)
def test_every_measured_term_is_what_hooks_say(model_type: str) -> None:
    model = as_double(tiny.tiny_model(model_type))
    ids = token_ids(model, tokens=9)
    report = prune_bound(model, prompts=[ids[0].tolist()], measure=8, probes=4, effort="quick")
    assert report.certificate.exact
    assert report.model.streams == 4
    assert max(row.error for row in report.eq16) < 1e-6
    before, kinds = output(model, ids), set[str]()
    blocks = model.get_submodule("model.layers" if hasattr(model, "lm_head") else "layers")
    for term in (one for one in report.terms if one.measured is not None):
        hook = silenced(blocks[term.block], term)
        after = output(model, ids)
        hook.remove()
        if report.protocol.metric == "kl":
            p, q = before.log_softmax(-1), after.log_softmax(-1)
            damage = float((p.exp() * (p - q)).sum(-1).mean())
        else:
            damage = float((after - before).norm() / before.norm())
        assert term.measured == pytest.approx(damage, rel=1e-6, abs=1e-10), term
        kinds.add(term.kind)
    assert kinds == KINDS[model_type]


@pytest.mark.parametrize("model_type", ["hy_v4", "gemma3n_text"])
def test_an_attribution_adds_up(model_type: str) -> None:
    """Gemma 3n scales what comes out of its last block to one length, by a norm that is written out."""
    model = as_double(tiny.tiny_model(model_type))
    certificate = report_of(model, token_ids(model, tokens=5), position=3).certificate
    assert certificate.exact
    assert certificate.residual <= certificate.tolerance == 1e-6


def test_two_w_are_not_laid_beside_each_other() -> None:
    model = tiny.tiny_model("hy_v4")
    ids = token_ids(model, tokens=5)
    other = torch.cat([ids[:, :-1], ids[:, :1]], dim=1)
    texts = Texts([PromptText("a", "--prompt 1", 0), PromptText("b", "--prompt 2", 1)], 2, [(0, 1)])
    prompts = [prompt_of(ids), prompt_of(other)]
    report = compare(as_loaded(model), texts, prompts, CompareOptions(cache=False, per_prompt=True), Words(None), quiet)
    assert report.certificate.exact
    blocks = needed(report.pairs[0].blocks)
    assert len(blocks) == 3
    for block in blocks:
        assert block.operator.relative is None
        assert "several streams" in block.operator.reasons["relative"]
    with pytest.raises(UnsupportedModelError, match="has no explicit matrices: a token has several streams"):
        matrix(as_loaded(model), prompt_of(ids), 1, str, quiet)


class Weighed(nn.Module):
    """A block of two streams that returns one tensor; its weights are made in its own forward."""

    inline = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.ffn = nn.RMSNorm(WIDTH), Attention(), FeedForward()
        self.make = nn.Linear(2 * WIDTH, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made = self.make(x.flatten(2))
        read, reached, ffn = (part.sigmoid()[..., None] for part in made.chunk(3, dim=-1))
        one = self.first((read * x).sum(dim=2))
        if self.inline:
            scores = (one @ one.mT).masked_fill(torch.ones(one.shape[1], one.shape[1]).triu(1).bool(), float("-inf"))
            return x + reached * (scores.softmax(dim=-1) @ one)[:, :, None]
        x = x + reached * self.attention(one)[:, :, None]
        return x + ffn * self.ffn(self.first((read * x).sum(dim=2)))[:, :, None]


class Inline(Weighed):
    """With attention in that forward too."""

    inline = True


class TwoStreams(OwnStack):
    def through(self, x: Tensor) -> Tensor:
        return super().through(torch.stack([x, 0.5 * x], dim=2)).mean(dim=2)


def test_code_of_ones_own_with_a_padding_token_and_blocks_that_go() -> None:
    """The row of a padding token is zero, so that no scale of its values can be fitted to it."""
    model = own(Weighed, TwoStreams)
    model.model.embed.weight[5] = 0.0
    report = prune_bound(model, prompts=PROMPTS, granularity="block", measure=2, probes=20)
    assert report.certificate.exact
    assert report.model.streams == 2
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    for term in report.terms:
        damages = []
        for one in ids:
            whole = model(one).logits[0].log_softmax(-1)
            hook = model.model.layers[term.block].register_forward_hook(lambda _m, args, _out: args[0])
            less = model(one).logits[0].log_softmax(-1)
            hook.remove()
            damages.append(float((whole.exp() * (whole - less)).sum(-1).mean()))
        assert term.measured == pytest.approx(sum(damages) / 2, rel=1e-4)
    for block in inspect(model, prompts=PROMPTS).blocks:
        assert (block.operator.rows, block.operator.columns) == (15.0 / 2 * 2 * WIDTH, 15.0 / 2 * 2 * WIDTH)
        assert block.operator.frobenius_norm is not None


def test_attention_in_the_forward_that_weighs_streams_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="attends in the forward that weighs its streams"):
        verify(own(Inline, TwoStreams), prompts=PROMPTS)
