"""The loss with an adapter applied, against PEFT's own model."""

from __future__ import annotations

from pathlib import Path

import adapters
import peft
import pytest
import torch
from paging import in_parts, whole

from duat_cli.analysis.check.behaviour import Asking, tuned_behaviour
from duat_cli.analysis.inspect.options import Filled, InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.opening import Found
from duat_cli.loading.adapter.folder import open_adapter
from duat_cli.loading.checkpoint.source import Source
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.results.behaviour import TunedBehaviour

LENGTHS = (9, 1, 23)
CONFIGS = {
    "lora": peft.LoraConfig(r=3, lora_alpha=9, target_modules=["q_proj", "down_proj"]),
    "saved head": peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(7)
    return [
        Prompt("x", f"{n:064}", torch.randint(10, 90, (1, length), generator=generator), n)
        for n, length in enumerate(LENGTHS)
    ]


def tuned(loaded: LoadedModel, adapter: Path) -> TunedBehaviour:
    asking = Asking(None)
    inspect(loaded, prompts(), InspectOptions(cache=False), lambda *_: None, Filled(beside=asking))
    found = Found(Source(loaded.files.path, "base", None), loaded.files)
    return tuned_behaviour(open_adapter(adapter, str(adapter)), found, loaded, asking)


@pytest.mark.parametrize("method", CONFIGS)
def test_the_loss_is_that_of_peft_s_model(method: str, tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    made = adapters.make(base, tmp_path / "a", CONFIGS[method])
    model = peft.PeftModel.from_pretrained(adapters.load_base(base), made).eval()
    losses = []
    with torch.no_grad():
        for prompt in prompts():
            logits = model(input_ids=prompt.input_ids).logits[0, :-1].double()
            losses.append(torch.nn.functional.cross_entropy(logits, prompt.input_ids[0, 1:], reduction="none"))
    found = tuned(whole(base), made)
    assert found.loss_per_token == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    with in_parts(base) as loaded:
        assert tuned(loaded, made) == found


def test_what_makes_another_model_than_the_base_says_so(tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    made = adapters.make(base, tmp_path / "a", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    config = made / "adapter_config.json"
    config.write_text(config.read_text().replace('"layer_replication": null', '"layer_replication": [[0, 2], [1, 2]]'))
    found = tuned(whole(base), made)
    assert found.loss_per_token is None
    assert "layer_replication" in found.reasons["loss_per_token"]


def test_another_base_s_adapter_says_so(tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    other = adapters.base_of("gpt2", tmp_path / "other")
    made = adapters.make(other, tmp_path / "a", peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    assert "no such module" in tuned(whole(base), made).reasons["loss_per_token"]
