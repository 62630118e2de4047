"""The prediction of `prune-bound` against ablation, and its memory."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import (
    DEMO,
    DUAT,
    Row,
    interleaved,
    minilm_path,
    peak,
    process_environment,
    python,
    random_prompt,
    seconds,
)
from benchmarks.shapes import SHAPES, write

if TYPE_CHECKING:
    from torch import Tensor

    from duat_cli.models.terms.sites import Site


def prune(runs: int) -> list[Row]:
    """The bundled prompts on MiniLM; ablations are timed on a sample and counted for all terms."""
    import torch

    from duat_cli.analysis.prune.terms.ablation import Ablator
    from duat_cli.analysis.prune.terms.damage import metric_for
    from duat_cli.analysis.prune.terms.responses import Responses, TermList
    from duat_cli.loading.model.load import load
    from duat_cli.loading.model.tokenizer import load_tokenizer
    from duat_cli.loading.prompts import default_prompts, encode, limits
    from duat_cli.models.discovery.structure import discover
    from duat_cli.models.terms.sites import find_sites, watching

    loaded = load(str(minilm_path()))
    room, tokenizer = limits(loaded.model), load_tokenizer(loaded.files.path)
    prompts = encode(tokenizer, default_prompts(), room.max_positions, room.max_positions, room.vocab_size)
    structure = discover(loaded.model)
    sites, metric = find_sites(structure), metric_for(None, loaded.model, structure)
    ablator = Ablator(structure, sites, metric)
    both, heads = (TermList.of(structure, sites, kinds) for kinds in (("neuron", "head"), ("head",)))
    recorded = [ablator.record(p.input_ids) for p in prompts]
    picked = torch.randperm(len(both.ids), generator=torch.Generator().manual_seed(0))[:8].tolist()

    def predict(k: int, terms: TermList) -> None:
        Responses(structure, sites, metric, prompts[k].input_ids, recorded[k], terms, 32, k).alone()

    def by_hooks(k: int) -> None:
        for place in picked:
            site, number = sites[structure.calls[both.ids[place].block]].find(both.ids[place])

            def silence(at: Site, value: Tensor, index: Tensor | None, number: int = number) -> Tensor:
                width = value.shape[-1] // at.count
                value = value.clone()
                value[..., number * width : (number + 1) * width] = 0
                return value

            with torch.no_grad(), watching([site], silence):
                metric.measured(recorded[k].output, metric.forward(prompts[k].input_ids)(), prompts[k].input_ids)

    def from_block(k: int) -> None:
        for place in picked:
            ablator.damage(recorded[k], prompts[k].input_ids, ablator.removals([both.ids[place]]))

    # prompt by prompt: the machine's speed drifts within seconds
    turns = [
        interleaved(
            [partial(predict, k, both), partial(predict, k, heads), partial(by_hooks, k), partial(from_block, k)], runs
        )
        for k in range(len(prompts))
    ]
    every, few, hooks, skipping = map(sum, zip(*turns, strict=True))
    scale = len(both.ids) / len(picked)
    large = peak("prune")
    return [
        Row(f"responses of {len(both.ids)} neurons and heads, {len(prompts)} prompts, 32 probes", every, "s"),
        Row("the heads alone", few / every, "x that"),
        Row("ablating each by a hook, a whole forward pass", hooks * scale / every, "x the responses", ">= 500"),
        Row("ablating each from its block on", skipping * scale / every, "x the responses"),
        Row(
            "1.2B parameters, 128 tokens, 8 probes: peak beyond the model",
            (large["peak"] - large["model"]) / 2**30,
            "GiB",
        ),
        Row("the same, time", large["seconds"], "s"),
        _with_picture(runs),
        *commands(),
    ]


def _with_picture(runs: int) -> Row:
    """An FFN of the middle block of the shape of SmolVLM-256M (93M of it read pictures), under a picture and a text."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3VisionConfig, LlamaConfig

    from duat_cli.analysis.prune.terms.ablation import Ablator
    from duat_cli.analysis.prune.terms.damage import metric_for
    from duat_cli.models.discovery.structure import discover
    from duat_cli.models.terms.sites import TermId, find_sites

    eye = Idefics3VisionConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=512,
        patch_size=16,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=49280, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config = Idefics3Config(vision_config=eye, text_config=text, image_token_id=7, scale_factor=4)
    model = Idefics3ForConditionalGeneration._from_config(config).eval().requires_grad_(False)
    ids = torch.cat([torch.full((64,), 7), torch.arange(100, 132)])[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 1, 3, 512, 512)}
    structure = discover(model, given)
    ablator = Ablator(structure, find_sites(structure, given), metric_for("kl", model, structure))
    recorded, gone = ablator.record(given), ablator.removals([TermId("ffn", 15, 0)])
    plain, ablation = interleaved(
        [torch.no_grad()(lambda: model(**given)), lambda: ablator.damage(recorded, given, gone)], runs
    )
    return Row("ablating an FFN of SmolVLM-256M's shape under a picture", ablation / plain, "x a plain pass", "<= 0.3")


COMMANDS = (("demo", "default", 20), ("135M", "quick", 120), ("135M", "default", 480))  # and seconds, on two cores


def commands() -> list[Row]:
    """Whole commands with the bundled prompts, on the demo and on a 135M llama shape with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        shape = Path(folder) / "135M"
        write(shape, SHAPES["135M"])
        models = {"demo": DEMO, "135M": shape}
        alone = _command(DEMO, "default", folder, cores=1)
        rows = [
            Row(f"{name}, --effort {effort}, 2 cores", _command(models[name], effort, folder), "s", f"<= {limit}")
            for name, effort, limit in COMMANDS
        ]
        return [*rows, Row("the demo on 1 core", alone / rows[0].value, "x that on 2")]


def _command(model: Path, effort: str, folder: str, cores: int = 2) -> float:
    report = str(Path(folder) / "report.json")
    given = ["prune-bound", str(model), "--effort", effort, "--json", "-q", "--output", report]
    environment = process_environment(folder) | {"OMP_NUM_THREADS": str(cores)}
    return seconds(lambda: subprocess.run([*python(DUAT), *given], env=environment, check=True))


def prune_child() -> None:
    """The responses of all terms of a 1B-parameter shape, in a process of its own."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from duat_cli.analysis.prune.terms.damage import metric_for
    from duat_cli.analysis.prune.terms.responses import Responses, TermList
    from duat_cli.loading.model.memory import peak_memory
    from duat_cli.models.discovery.structure import discover
    from duat_cli.models.sweep.passes import record
    from duat_cli.models.terms.sites import find_sites

    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    structure = discover(model)
    sites, metric = find_sites(structure), metric_for("kl", model, structure)
    ids = random_prompt(128256, 128).input_ids
    terms = TermList.of(structure, sites, ("neuron", "head", "ffn", "attention", "block"))
    start = time.perf_counter()
    with torch.no_grad():
        recorded = record(structure, metric.forward(ids))
    Responses(structure, sites, metric, ids, recorded, terms, 8, 0).alone()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print(json.dumps({"peak": peak_memory(), "model": size, "seconds": time.perf_counter() - start}))
