"""Declared skips and sizes: ignored by transformers' Llama, obeyed by classes that are made to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import as_loaded
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from duat_cli.analysis.check import obeyed
from duat_cli.analysis.check.obeyed import STREAMED, judged
from duat_cli.loading.declared.per_layer import Override, overrides
from duat_cli.loading.model.load import LoadedModel, load
from duat_cli.models.discovery.modality import probe_ids
from duat_cli.zoo import tiny

SKIPPED = [Override(1, "skip", ["mlp"])]


class Zero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def skipped(config: Any, layer: int) -> bool:
    """As a class would read it, with or without transformers' own view of the field."""
    declared = getattr(config, "per_layer_config", None) or {}
    if isinstance(declared, dict):
        return "mlp" in declared.get(layer, {}).get("skip", ())
    return "mlp" in getattr(declared[layer], "skip", ())


class AsItIsBuilt(LlamaForCausalLM):
    """Leaves the FFN out when it is built."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            if skipped(config, number):
                layer.mlp = Zero()


class AsItRuns(LlamaForCausalLM):
    """Leaves it out when it runs: its modules are those of a model without the declaration."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        handles = [
            layer.mlp.register_forward_hook(lambda module, given, output: torch.zeros_like(output))
            for number, layer in enumerate(self.model.layers)
            if skipped(self.config, number)
        ]
        try:
            return super().forward(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()


class Sized(LlamaForCausalLM):
    """Its FFN in layer 2 is as wide as declared, and no other."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            width = getattr(config, "per_layer_config", None) and _width(config, number)
            if width and number == 2:
                layer.mlp.up_proj = nn.Linear(config.hidden_size, width, bias=False)


def _width(config: Any, layer: int) -> int | None:
    declared = config.per_layer_config
    found = declared.get(layer, {}) if isinstance(declared, dict) else vars(declared[layer])
    return found.get("intermediate_size")


def made(cls: type[LlamaForCausalLM], declared: list[Override]) -> LoadedModel:
    """A tiny model of the class that declares this, with the weights of the tiny llama where they have its shapes."""
    own = tiny.tiny_model("llama")
    own.config._attn_implementation = "eager"
    own.config.allow_global_per_layer_attribute_access = True
    model = cls(obeyed._config(own, declared)).eval()
    fitting = {n: v for n, v in own.state_dict().items() if n in (m := model.state_dict()) and m[n].shape == v.shape}
    model.load_state_dict(fitting, strict=False)
    return as_loaded(model)


def test_llama_ignores_a_skip_and_the_output_is_the_same_bit_for_bit() -> None:
    loaded = made(LlamaForCausalLM, SKIPPED)
    [found] = judged(loaded, SKIPPED)
    assert found.ignored
    assert "the output is the same without it" in found.why
    plain = made(LlamaForCausalLM, [])
    ids = probe_ids(plain.model, 9)
    with torch.no_grad():
        assert torch.equal(loaded.model(input_ids=ids).logits, plain.model(input_ids=ids).logits)


@pytest.mark.parametrize("cls", [AsItIsBuilt, AsItRuns])
def test_a_class_that_obeys_a_skip_is_no_finding(cls: type[LlamaForCausalLM]) -> None:
    loaded = made(cls, SKIPPED)
    with torch.no_grad():  # it really skips
        ids = probe_ids(loaded.model, 9)
        assert not torch.equal(loaded.model(input_ids=ids).logits, made(cls, []).model(input_ids=ids).logits)
    assert [one for one in judged(loaded, SKIPPED) if one.ignored] == []


def test_of_two_skips_the_ignored_one_is_found() -> None:
    """One names a part that the class knows nothing of."""
    both = [*SKIPPED, Override(2, "skip", ["self_attn"])]
    assert [(one.layer, one.ignored) for one in judged(made(AsItRuns, both), both)] == [(1, False), (2, True)]


def test_sizes_are_obeyed_in_one_layer_and_ignored_in_another() -> None:
    declared = [Override(1, "intermediate_size", 32), Override(2, "intermediate_size", 40)]
    found = judged(made(Sized, declared), declared)
    assert [(one.layer, one.ignored) for one in found] == [(1, True), (2, False)]
    assert "nothing in the layer is built otherwise" in found[0].why


def test_what_changes_no_module_is_not_judged() -> None:
    """A norm's epsilon is in no shape; an activation is a module of another class."""
    declared = [Override(1, "rms_norm_eps", 0.1), Override(0, "hidden_act", "gelu")]
    found = judged(made(LlamaForCausalLM, declared), declared)
    assert [(one.field, one.ignored) for one in found] == [("hidden_act", True)]
    assert judged(made(LlamaForCausalLM, []), []) == ()


def test_a_class_of_transformers_that_obeys_its_own_declaration(tmp_path: Path) -> None:
    """dots3_note declares numbers of heads and ranks of single layers."""
    if "dots3_note" not in tiny.text_model_types():
        pytest.skip("this transformers has no such type")
    tiny.tiny_model("dots3_note").save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    declared = overrides(json.loads((tmp_path / "config.json").read_text()))
    assert len(declared) == 4
    assert [one.ignored for one in judged(loaded, declared)] == [False] * 3  # the fourth is in no shape


def test_one_that_cannot_be_tried_keeps_no_other_from_being_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [*SKIPPED, Override(2, "skip", ["mlp"]), Override(0, "hidden_act", "gelu")]
    loaded, twin, tree = made(AsItRuns, declared), obeyed._twin, obeyed._tree

    def broken(model: Any, config: Any) -> Any:
        if not skipped(config, 1):
            raise KeyError("x")
        return twin(model, config)

    monkeypatch.setattr(obeyed, "_twin", broken)
    monkeypatch.setattr(obeyed, "_tree", lambda model, those: tree(model, those) if those else None)
    found = judged(loaded, declared)
    assert [one.ignored for one in found] == [None, False, None]
    assert "does not run: KeyError" in found[0].why
    assert "a config without declarations could not be built" in found[2].why


def test_what_cannot_be_tried_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = made(LlamaForCausalLM, SKIPPED)
    paged: Any = object()
    [one] = judged(replace(loaded, paged=paged), SKIPPED)
    assert (one.ignored, one.why) == (None, STREAMED)
    [one] = judged(replace(loaded, nonfinite_weights={"a": 1}), SKIPPED)
    assert one.ignored is None
    assert "not finite" in one.why

    def broken(*_: Any) -> Any:
        raise KeyError("x")

    monkeypatch.setattr(obeyed, "_twin", broken)
    [one] = judged(loaded, SKIPPED)
    assert one.why == "the model without it does not run: KeyError"
    monkeypatch.setattr(obeyed, "_built", lambda *_: None)
    [one] = judged(loaded, SKIPPED)
    assert "could not be built" in one.why
