"""Faults planted in the instruments: whatever they do to the model, it is never certified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import as_loaded, prompt_of, quiet, single_model, token_ids
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutput

from duat_cli.analysis import decomposition
from duat_cli.analysis.decomposition import Step
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.inspect.verify import verify
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import relative_error
from duat_cli.models.block import norms
from duat_cli.models.discovery.structure import discover
from duat_cli.models.instrument import attention, interception, rig
from duat_cli.models.instrument.attention import AttentionCall, StoredRows
from duat_cli.models.instrument.plain import Outputs, deviation
from duat_cli.results.base import Certificate


def certificate_of(model: Any) -> Certificate:
    return verify(as_loaded(model), [prompt_of(token_ids(model, 9))], quiet).certificate


def verdict(model: Any) -> str:
    try:
        return "exact" if certificate_of(model).exact else "not exact"
    except UnsupportedModelError:
        return "refused"


# -- a model that is no part of transformers -----------------------------------------------------------------


class OwnConfig(PreTrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size: int = 64, hidden_size: int = 24, **kwargs: Any) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**kwargs)


class OwnAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (3, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(q, k, v, None, 0.0, True)  # everything by position
        return self.o(mixed.transpose(1, 2).flatten(2))


class OwnBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention, self.second = nn.LayerNorm(width), OwnAttention(width), nn.LayerNorm(width)
        self.ffn = nn.Sequential(nn.Linear(width, 40), nn.GELU(), nn.Linear(40, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.ffn(self.second(x))


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OwnBlock(config.hidden_size) for _ in range(3))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> BaseModelOutput:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return BaseModelOutput(last_hidden_state=self.norm(x))


def own_model() -> OwnModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = OwnModel(OwnConfig())
        for parameter in model.parameters():
            parameter.data = 0.5 * torch.randn_like(parameter)
    return model.requires_grad_(False).eval()


def test_arguments_by_position_reach_the_attention() -> None:
    certificate = certificate_of(own_model())
    assert certificate.exact
    assert certificate.capture == "softmax interception"
    assert 0 < certificate.plain_error < 1e-5  # torch's kernel and the written-out form round apart


# -- faults --------------------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def lost_mask(patch: pytest.MonkeyPatch) -> None:
    """The attention function of that name has no mask function: the mask is None."""
    patch.setattr(AttentionMaskInterface, "register", classmethod(lambda cls, name, function: None))
    patch.delitem(AttentionMaskInterface._global_mapping, attention.INTERFACE_NAME, raising=False)


def lost_argument(name: str, value: Any) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        captured = attention._captured_call

        def without(*args: Any) -> Any:
            return captured(*args[:-1], {**args[-1], name: value})

        patch.setattr(attention, "_captured_call", without)

    return plant


def lost_flag(name: str, value: Any) -> Plant:
    """The stand-in of torch's attention reads its arguments and leaves one out."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        whole = interception._understood

        def understood(called: str, stand_in: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if called != "scaled_dot_product_attention":
                return whole(called, stand_in, args, kwargs)
            q, k, v, _, _, causal = args
            return stand_in(q, k, v, **{"is_causal": causal, name: value})

        patch.setattr(interception, "_understood", understood)

    return plant


def norm_in_the_pass(patch: pytest.MonkeyPatch) -> None:
    """The instrumented norm has another epsilon than the model's."""
    own = rig.Rig._norm_forward

    def planted(self: rig.Rig, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
        def other(x: Tensor, *args: Any) -> Tensor:
            return original(x, *args) * (x.square().mean(-1, keepdim=True) / (x.square().mean(-1, keepdim=True) + 0.1))

        return own(self, module, other, args, kwargs)

    patch.setattr(rig.Rig, "_norm_forward", planted)


def norm_in_replay(patch: pytest.MonkeyPatch) -> None:
    """The norm that is held has another scale than the one that ran."""
    patch.setattr(rig, "freeze", lambda form, x, y: replace(norms.freeze(form, x, y), scale=torch.rsqrt(
        x.square().mean(-1, keepdim=True) + 0.1)))  # fmt: skip


def head_order(of_output: bool) -> Plant:
    """H of another head than its V; with `of_output` the model goes on with that product."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        captured = attention._captured_call

        def planted(*args: Any) -> AttentionCall:
            call = captured(*args)
            assert isinstance(call.rows, StoredRows)
            rows = StoredRows(call.rows.matrix.flip(0))
            output = attention.apply_rows(rows, call.value) if of_output else call.output
            return replace(call, rows=rows, output=output)

        patch.setattr(attention, "_captured_call", planted)

    return plant


FAULTS: dict[str, tuple[Callable[[], Any], Plant]] = {
    "lost mask": (lambda: single_model("llama"), lost_mask),
    "lost scale": (lambda: single_model("llama"), lost_argument("scaling", 1.0)),
    "lost softcap": (lambda: single_model("gemma2"), lost_argument("softcap", None)),
    "lost causal flag": (own_model, lost_flag("is_causal", False)),
    "lost scale of torch's": (own_model, lost_flag("scale", 1.0)),
    "another epsilon in the pass": (lambda: single_model("llama"), norm_in_the_pass),
    "another epsilon in replay": (lambda: single_model("llama"), norm_in_replay),
    "H of another head order": (lambda: single_model("llama"), head_order(False)),
    "H of another head order goes on": (lambda: single_model("llama"), head_order(True)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_never_certified(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, plant = FAULTS[name]
    assert verdict(build()) == "exact"
    plant(monkeypatch)
    assert verdict(build()) in ("not exact", "refused")


def test_a_fault_that_the_sum_cannot_see_is_seen_against_the_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    lost_argument("scaling", 1.0)(monkeypatch)
    model = single_model("llama")
    certificate = certificate_of(model)
    assert certificate.relative_error <= certificate.tolerance < certificate.plain_error
    assert not certificate.exact
    assert discover(model).plain_error > certificate.tolerance


def fault_from(tokens: int, patch: pytest.MonkeyPatch) -> None:
    """A fault that shows on prompts of that many tokens alone."""
    captured = attention._captured_call

    def planted(*args: Any) -> Any:
        query, kwargs = args[2], args[-1]
        return captured(*args[:-1], kwargs | ({"scaling": 1.0} if query.shape[2] == tokens else {}))

    patch.setattr(attention, "_captured_call", planted)


def test_inspect_holds_its_first_prompt_against_the_plain_model_and_verify_every_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = single_model("llama")
    first, second = (prompt_of(token_ids(model, n)) for n in (9, 13))
    fault_from(13, monkeypatch)
    loaded, options = as_loaded(model), InspectOptions(cache=False)
    assert inspect(loaded, [first, second], options, quiet).certificate.plain_error == 0.0
    assert not inspect(loaded, [second, first], options, quiet).certificate.exact
    assert not verify(loaded, [first, second], quiet).certificate.exact


@pytest.mark.parametrize("planted", ["values", "token_scale"])
def test_factors_that_miss_what_attention_adds_are_refused(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """W' x' is compared with the model's own attention, whatever the fits of its factors say."""
    own = Step.operator

    def wrong(self: Step, run: Any, block: Any) -> Any:
        operator = own(self, run, block)
        return replace(operator, **{planted: 1.01 * getattr(operator, planted)})

    model = single_model("llama")
    sound = inspect(as_loaded(model), [prompt_of(token_ids(model, 9))], InspectOptions(cache=False), quiet)
    assert all(0 < (block.operator.certificate_error or 0) < 1e-5 for block in sound.blocks)
    monkeypatch.setattr(Step, "operator", wrong)
    report = inspect(as_loaded(model), [prompt_of(token_ids(model, 9))], InspectOptions(cache=False), quiet)
    assert all(block.operator.frobenius_norm is None for block in report.blocks)
    assert "residual of 1.0e-02" in report.blocks[0].operator.reasons["frobenius_norm"]


def test_what_is_not_finite_is_no_error_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's max loses a NaN, and with it the fault."""
    ones, lost = torch.ones(1, 2, 3), torch.full((1, 2, 3), float("nan"))
    assert relative_error(lost, ones) == relative_error(ones, lost) == float("inf")
    for seen, plain in ((Outputs(ones, lost), Outputs(ones, ones)), (Outputs(ones, ones), Outputs(ones, lost))):
        with pytest.raises(UnsupportedModelError, match="not finite"):
            deviation(seen, plain)
    calls = iter(range(100))
    errors = decomposition.token_errors
    monkeypatch.setattr(decomposition, "token_errors", lambda *a: [float("inf")] if next(calls) == 3 else errors(*a))
    assert verdict(single_model("llama")) == "refused"


def test_large_value_biases_leave_w_in_bfloat16() -> None:
    """The constants outside W' cancel in the comparison of W' x'; what rounding leaves of them is no error of W'."""
    model = single_model("opt")
    for layer in model.model.decoder.layers:
        bias = layer.self_attn.v_proj.bias
        bias.data += 3 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(0))
    narrow = replace(as_loaded(model.to(torch.bfloat16)), dtype="bfloat16")
    report = inspect(narrow, [prompt_of(token_ids(model, 9))], InspectOptions(cache=False), quiet)
    assert report.blocks[0].operator.frobenius_norm is not None
