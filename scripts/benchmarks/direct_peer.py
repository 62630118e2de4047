"""Direct parts of `attribute` against TransformerLens: same tiny random checkpoints, prompt and pair of tokens.

Hybrids of attention and other token mixers are there as well: `attribute` takes them apart, the peer refuses them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import DEMO, Row
from benchmarks.peer import environment_of

PEER = "transformer-lens==4.3.0"
HYBRIDS = ("jamba", "qwen3_next", "falcon_h1")
PROMPT, TARGET, AGAINST = "def read(path):", "self", "return"

# Value biases stay where they are: folded, they would move from the heads' parts into a bias. Differences of two
# tokens, since the peer centres the vocabulary.
THEIRS = """
import json, sys, torch
from transformer_lens.model_bridge import TransformerBridge
path, ids, right, wrong = sys.argv[1], *map(json.loads, sys.argv[2:])
model = TransformerBridge.boot_transformers(path)
model.enable_compatibility_mode(disable_warnings=True, fold_value_biases=False)
model.set_use_attn_result(True)
with torch.no_grad():
    _, cache = model.run_with_cache(torch.tensor([ids]), prepend_bos=False)
    def parts(stack):
        return cache.logit_attrs(stack, tokens=right, incorrect_tokens=wrong, pos_slice=-1)[:, 0].tolist()
    heads = cache.stack_head_results(layer=-1, pos_slice=-1)
    units = cache.decompose_resid(layer=-1, pos_slice=-1, mode="mlp", incl_embeds=False)
    print(json.dumps([parts(heads), parts(units)]))
"""


def direct_peer(runs: int) -> list[Row]:
    """The largest difference over heads and FFNs, of each shape; a model that the peer refuses is named with why."""
    python, rows = environment_of(PEER), []
    with tempfile.TemporaryDirectory() as folder:
        for name, path in _checkpoints(Path(folder)):
            ours, ids, right, wrong = _ours(path)
            words = [str(python), "-c", THEIRS, str(path), *map(json.dumps, (ids, right, wrong))]
            offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(words, check=False, capture_output=True, text=True, env=offline)
            if done.returncode:
                why = done.stderr.strip().splitlines()[-1][:90]
                rows.append(Row(f"{name}: exact here, {PEER} refuses: {why}", len(ours), "direct parts"))
                continue
            heads, units = json.loads(done.stdout.splitlines()[-1])
            assert len(ours) == len(heads) + len(units)
            far = max(abs(a - b) for a, b in zip(ours, [*heads, *units], strict=True))
            rows.append(Row(f"{name}: direct parts of {len(ours)} heads and FFNs, to {PEER}", far, "logits", "<= 1e-4"))
    return rows


def _ours(path: Path) -> tuple[list[float], list[int], int, int]:
    """Direct parts of heads, then of FFNs; the prompt's token ids; the two tokens."""
    from transformers import AutoTokenizer

    words = [sys.executable, "-m", "duat_cli", "attribute", str(path), "--prompt", PROMPT, "--target", TARGET,
             "--against", AGAINST, "--json", "-q"]  # fmt: skip
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)["attribution"][0]
    ids = AutoTokenizer.from_pretrained(path)(PROMPT)["input_ids"]
    assert len(ids) == len(found["parts"]["tokens"])
    direct = [part["value"] for part in (*found["direct"]["heads"], *found["direct"]["units"])]
    return direct, ids, found["target"]["token"]["id"], found["target"]["against"]["id"]


def _checkpoints(folder: Path) -> Iterator[tuple[str, Path]]:
    """Random biases but those of the FFNs' outputs: the peer counts them with the FFN, duat among biases."""
    import torch
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    from duat_cli.zoo import tiny

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    torch.manual_seed(0)
    several = {"vocab_size": len(tokenizer), "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4}
    grouped = {**several, "intermediate_size": 96, "num_key_value_heads": 2}
    for name, model in (
        ("gpt2", GPT2LMHeadModel(GPT2Config(**several))),
        ("llama", LlamaForCausalLM(LlamaConfig(**grouped))),
    ):
        for key, value in model.named_parameters():
            if "mlp.c_proj.bias" not in key:
                value.data += 0.05 * torch.randn_like(value)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        yield name, folder / name
    for name in HYBRIDS:
        config = tiny.tiny_config(name)
        config.vocab_size = len(tokenizer)
        hybrid = tiny.model_class(config)(config)
        tiny.randomise(hybrid, 0)
        hybrid.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        yield name, folder / name
