"""Prunes a checkpoint with torch-pruning, really, and writes what the smaller model gives; runs in its environment.

    python pruning_peer_child.py CHECKPOINT windows.pt 0.1,0.2 OUT

windows.pt holds `calibration` and `held_out`, (windows, tokens) each. As in torch-pruning's own example for language
models (examples/LLMs/prune_llm.py): heads as a whole, the same share of every layer, its group magnitude (p = 2); and
its first-order Taylor importance on the calibration windows. The hidden size stays, so that neurons and heads alone go.
Of attention with rotary positions no heads go: the group of torch-pruning 1.6.1 for its keys and values was not found
within minutes on the demo. OUT/IMPORTANCE-SHARE.pt holds `outputs` and `removed`, parameters.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch_pruning as tp
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

AT_ONCE = 16
LEAST = 1e-9  # share of the neurons: one of each layer; with 0 torch-pruning leaves the heads too


def main(checkpoint: str, windows: str, shares: str, out: str) -> None:
    given = torch.load(windows)
    config = AutoConfig.from_pretrained(checkpoint)
    language = any("CausalLM" in name for name in config.architectures or ())
    kind = AutoModelForCausalLM if language else AutoModel
    model = kind.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    importances = {"magnitude": tp.importance.GroupMagnitudeImportance(p=2, group_reduction="mean")}
    if language:
        importances["taylor"] = tp.importance.GroupTaylorImportance()
        for ids in given["calibration"].split(1):
            (cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:]) / len(given["calibration"])).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    size = sum(p.numel() for p in model.parameters())
    held = sum(p.numel() for p in blocks(model).parameters())
    neurons = sum(p.numel() for p in blocks(model).parameters() if config.intermediate_size in p.shape)
    like = given["held_out"][:1, :8]  # to trace the model on
    for name, importance in importances.items():
        for share in map(float, shares.split(",")):
            one = pruned(again(model, gradients), importance, heads=share, neurons=LEAST, like=like)
            lacking = (share * held - (size - sum(p.numel() for p in one.parameters()))) / neurons
            rest = lacking + 1 / config.intermediate_size
            found = pruned(again(model, gradients), importance, heads=share, neurons=rest, like=like)
            with torch.no_grad():
                given_out = [found(input_ids=ids) for ids in given["held_out"].split(AT_ONCE)]
            outputs = torch.cat([one.logits if language else one.last_hidden_state for one in given_out])
            removed = size - sum(p.numel() for p in found.parameters())
            torch.save({"outputs": outputs, "removed": removed}, Path(out) / f"{name}-{share:g}.pt")


def again(model, gradients):
    """A copy, with its gradients."""
    one = copy.deepcopy(model)
    for name, parameter in one.named_parameters():
        parameter.grad = None if gradients[name] is None else gradients[name].clone()
    return one


def blocks(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The longest list of modules."""
    return max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)


def pruned(model, importance, *, heads: float, neurons: float, like: torch.Tensor):
    """The model itself, smaller. heads, neurons: shares of every layer's."""
    config, num_heads, fixed = model.config, {}, []
    for name, module in model.named_modules():
        end = name.rpartition(".")[2]
        if end in ("query", "key", "value"):
            num_heads[module] = config.num_attention_heads
        elif end in ("q_proj", "k_proj", "v_proj"):
            fixed.append(module)
        elif end in ("o_proj", "down_proj", "lm_head", "dense") and not name.endswith("intermediate.dense"):
            fixed.append(module)  # what they put out is as wide as the hidden states
    pruner = tp.pruner.BasePruner(
        model, {"input_ids": like}, importance, pruning_ratio=neurons, ignored_layers=fixed, num_heads=num_heads,
        prune_num_heads=True, prune_head_dims=False, head_pruning_ratio=heads,
        output_transform=lambda found: found[0],
    )  # fmt: skip
    for group in pruner.step(interactive=True):
        group.prune()
    for module in model.modules():
        if hasattr(module, "attention_head_size"):
            module.num_attention_heads = module.query.out_features // module.attention_head_size
            module.all_head_size = module.query.out_features
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
