"""Breakages of a checkpoint as they happen in practice, and what of `duat check` catches each.

A breakage changes a copy of the demo. What is expected of it is written as the documentation has it (gate.md):

    passes                 exit code 0, no warning of its own
    warns RULE             exit code 0, the first cause is that rule's
    RULE                   exit code 1, the first cause is that rule's
    refused WORDS          exit code 2, and the error has these words

`since` says what holds once a rule exists, and what held before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quantising import quantise
from safetensors.torch import load_file, save_file

from duat_cli.checks.registry import all_rules
from duat_cli.loading.checkpoint.source import demo_adapter_path

State = dict[str, torch.Tensor]
Change = Callable[[Path], None]
FILE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
BLOCKS = range(6)
VOCABULARY, FEWER_ROWS = 2048, 2000


@dataclass(frozen=True)
class Breakage:
    """What is done to the demo, and what is expected without a baseline and with one."""

    kind: str
    change: Change
    alone: str
    against: str
    adapter: Change | None = None
    """What is done to a copy of the demo's adapter, which is then checked as well."""


def since(rule: str, then: str, before: str) -> str:
    """What is expected once there is such a rule, and until then."""
    return then if rule in all_rules() else before


# -- changes ------------------------------------------------------------------------------------------------------


def weights(change: Callable[[State], object]) -> Change:
    def on(folder: Path) -> None:
        state = {name: tensor.clone() for name, tensor in load_file(folder / FILE).items()}
        change(state)
        save_file({n: t.contiguous() for n, t in state.items()}, folder / FILE, metadata={"format": "pt"})

    return on


def fields(file: str = "config.json", **new: Any) -> Change:
    """Fields set; None removes one."""

    def on(folder: Path) -> None:
        old = json.loads((folder / file).read_text(encoding="utf-8"))
        kept = {key: value for key, value in (old | new).items() if value is not None}
        (folder / file).write_text(json.dumps(kept), encoding="utf-8")

    return on


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Change:
    def on(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")

    return on


def both(*changes: Change) -> Change:
    def on(folder: Path) -> None:
        for change in changes:
            change(folder)

    return on


def nothing(folder: Path) -> None:
    pass


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def permutation(count: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def block(index: int, name: str) -> str:
    return f"model.layers.{index}.{name}.weight"


def of_each(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """The tensors of that name in every block."""
    return weights(lambda s: s.update({block(i, name): change(s[block(i, name)]) for i in BLOCKS}))


def one(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return weights(lambda s: s.update({name: change(s[name]).to(s[name].dtype)}))


def swapped(one_name: str, other: str) -> Change:
    def change(state: State) -> None:
        for i in BLOCKS:
            a, b = block(i, one_name), block(i, other)
            state[a], state[b] = state[b], state[a]

    return weights(change)


def noise(state: State) -> None:
    """As large as each weight's own root mean square."""
    for number, (name, tensor) in enumerate(sorted(state.items())):
        size = tensor.float().square().mean().sqrt()
        extra = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)) * size
        state[name] = (tensor.float() + extra).to(tensor.dtype)


def scaled_norms(shift: float) -> Callable[[State], None]:
    def change(state: State) -> None:
        for name in state:
            if "norm" in name:
                state[name] = state[name] + shift

    return change


def exchanged(first: int, second: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        for name in [n for n in state if f".layers.{first}." in n]:
            other = name.replace(f".{first}.", f".{second}.")
            state[name], state[other] = state[other], state[name]

    return change


def copied(source: int, to: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        for name in [n for n in state if f".layers.{source}." in n]:
            state[name.replace(f".{source}.", f".{to}.")] = state[name].clone()

    return change


def zero_block(state: State) -> None:
    for name in [n for n in state if ".layers.3." in n]:
        state[name] = torch.zeros_like(state[name])


def zero_head(state: State) -> None:
    state[block(2, "self_attn.o_proj")][:, 32:64] = 0


def merged(times: float) -> Callable[[State], None]:
    """B A of the demo's adapter, times its scaling lora_alpha / r = 2."""

    def change(state: State) -> None:
        adapter = load_file(demo_adapter_path() / "adapter_model.safetensors")
        for name in (n for n in adapter if n.endswith("lora_A.weight")):
            up, down = adapter[name.replace("lora_A", "lora_B")].float(), adapter[name].float()
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            state[target] = (state[target].float() + times * 2.0 * up @ down).to(state[target].dtype)

    return change


def rounded_to(dtype: torch.dtype) -> Callable[[State], None]:
    def change(state: State) -> None:
        state.update({name: tensor.to(dtype).to(tensor.dtype) for name, tensor in state.items()})

    return change


def four_bits(state: State) -> None:
    """Fifteen levels a row, as a naive quantisation leaves them."""
    for name, tensor in state.items():
        if tensor.ndim == 2:
            scale = tensor.float().abs().amax(dim=1, keepdim=True) / 7
            state[name] = ((tensor.float() / scale).round() * scale).to(tensor.dtype)


def head_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The halves of each head interleaved: the other convention of rotary positions."""
    heads = tensor.reshape(-1, 2, 16, tensor.shape[-1])
    return heads.transpose(1, 2).reshape(tensor.shape)


def fewer_rows(state: State) -> None:
    state[EMBEDDING] = state[EMBEDDING][:FEWER_ROWS]


def sharded(folder: Path) -> None:
    """Two files and an index."""
    state = load_file(folder / FILE)
    (folder / FILE).unlink()
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[:20], "model-00002-of-00002.safetensors": names[20:]}
    for file, inside in parts.items():
        save_file({name: state[name] for name in inside}, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.numel() * t.element_size() for t in state.values())},
        "weight_map": {name: file for file, inside in parts.items() for name in inside},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def another_order(folder: Path) -> None:
    """The same tensors, written from the last to the first."""
    raw = (folder / FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    meta = header.pop("__metadata__", None)
    new: dict[str, Any] = {} if meta is None else {"__metadata__": meta}
    out = b""
    for name in sorted(header, reverse=True):
        start, end = header[name]["data_offsets"]
        new[name] = header[name] | {"data_offsets": [len(out), len(out) + end - start]}
        out += data[start:end]
    text = json.dumps(new).encode()
    text += b" " * (-len(text) % 8)
    (folder / FILE).write_bytes(len(text).to_bytes(8, "little") + text + out)


def float_norms(state: State) -> None:
    state.update({name: tensor.float() for name, tensor in state.items() if "norm" in name})


def trainer_files(folder: Path) -> None:
    (folder / "trainer_state.json").write_text('{"global_step": 100}', encoding="utf-8")
    (folder / "optimizer.pt").write_bytes(b"\0" * 64)


def quantised(change: Callable[[State], object]) -> Change:
    """The blocks' matrices in FP8 with a scale for each 16 x 16, and what goes wrong with that."""

    def on(folder: Path) -> None:
        quantise(folder, "fp8")
        weights(change)(folder)

    return on


def scale(value: Callable[[torch.Tensor], object]) -> Change:
    """One scale of the second block's up_proj."""

    def change(state: State) -> None:
        scales = state[block(1, "mlp.up_proj") + "_scale_inv"]
        scales[2, 3] = value(scales[2, 3])

    return quantised(change)


def without_scales(state: State) -> None:
    del state[block(1, "mlp.up_proj") + "_scale_inv"]


def fewer_scales(state: State) -> None:
    name = block(1, "mlp.up_proj") + "_scale_inv"
    state[name] = state[name][1:]


def truncated(folder: Path) -> None:
    raw = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(raw[:-1000])


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def added_token(identity: int) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["added_tokens"].append({**content["added_tokens"][1], "id": identity, "content": "<|new|>"})

    return change


def other_vocabulary(content: dict[str, Any]) -> None:
    """The ids of all tokens but the special ones in the reverse order."""
    vocabulary = content["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.__getitem__)
    ordered = [*names[:2], *reversed(names[2:])]
    content["model"]["vocab"] = {name: at for at, name in enumerate(ordered)}


def fewer_merges(content: dict[str, Any]) -> None:
    content["model"]["merges"] = content["model"]["merges"][:600]


def lower_case(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Lowercase"}


def no_start(content: dict[str, Any]) -> None:
    content["post_processor"] = None


def larger_factors(times: float) -> Change:
    """B of every pair, so that B A grows by as much."""

    def on(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        state = {n: t * times if "lora_B" in n else t for n, t in load_file(file).items()}
        save_file(state, file)

    return on


def saved_head(folder: Path) -> None:
    """modules_to_save on a base whose output matrix is its embedding."""
    file = folder / "adapter_model.safetensors"
    state = load_file(file)
    state["base_model.model.lm_head.weight"] = random(VOCABULARY, 192) * 0.02
    save_file(state, file)
    fields("adapter_config.json", modules_to_save=["lm_head"])(folder)


def half_exchanged(state: State) -> None:
    for name in [n for n in state if ".layers.1.mlp." in n]:
        other = name.replace(".1.", ".4.")
        state[name], state[other] = state[other], state[name]


def backwards(state: State) -> None:
    for first in range(3):
        exchanged(first, 5 - first)(state)


def one_head_for_all(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:32].repeat(6, 1)


def other_heads(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of each head in the place of the one before it."""
    return tensor.reshape(6, 32, -1).roll(-1, 0).reshape(tensor.shape)


def one_value(value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed[3, 5] = value(tensor[3, 5])
        return changed

    return change


def other_shard(folder: Path) -> None:
    """The second of two is of a checkpoint of the same shapes."""
    sharded(folder)
    file = folder / "model-00002-of-00002.safetensors"
    state = {n: (random(*t.shape) * t.float().std()).to(t.dtype) for n, t in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})


def index(change: Callable[[dict[str, str]], object]) -> Change:
    """Of two shards, with a change of the weight_map."""

    def on(folder: Path) -> None:
        sharded(folder)
        file = folder / "model.safetensors.index.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        change(content["weight_map"])
        file.write_text(json.dumps(content), encoding="utf-8")

    return on


def without_prefix(state: State) -> None:
    for name in list(state):
        state[name.removeprefix("model.")] = state.pop(name)


def special_tokens(**names: str) -> Change:
    return lambda folder: (folder / "special_tokens_map.json").write_text(json.dumps(names), encoding="utf-8") and None


def shifted_vocabulary(content: dict[str, Any]) -> None:
    """Every token but the special ones has the id of the next."""
    model = content["model"]
    model["vocab"] = {t: i if i < 2 else 2 + (i - 1) % (VOCABULARY - 2) for t, i in model["vocab"].items()}


def reversed_merges(content: dict[str, Any]) -> None:
    content["model"]["merges"].reverse()


def files_of_vocabulary(folder: Path) -> None:
    """vocab.json and merges.txt, as a slow tokenizer has them, beside the tokenizer.json that they are of."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(m if isinstance(m, str) else " ".join(m) for m in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def made(source: Path, folder: Path, change: Change) -> Path:
    """A copy with the change."""
    shutil.copytree(source, folder)
    change(folder)
    return folder


# -- the table ----------------------------------------------------------------------------------------------------

LOSS = since("behaviour.loss", "behaviour.loss", "passes")
MOVED = "drift.weights"
UNIGRAM = since("behaviour.loss", "warns behaviour.loss", "passes")
IDS = since("integrity.tokenizer", "integrity.tokenizer", "passes")
TOKENS = since("drift.tokenizer", "drift.tokenizer", "refused made with another prompt set")
VOCABULARY_MOVED = since("drift.tokenizer", "drift.tokenizer", "drift.operator")
STORED = since("drift.config", "passes", "refused another dtype")
PER_LAYER = since("integrity.per_layer_config", "integrity.per_layer_config", "passes")
MAGNITUDE = since("adapter.magnitude", "adapter.magnitude", "passes")
HEAD = since("adapter.behaviour", "adapter.behaviour", "passes")
MAKE = "weights in the wrong place"
DAMAGE = "weights damaged"
STEPS = "a step of training or compression too many"
FIELDS = "config.json"
TEXTS = "tokenizer and generation"
FILES = "files"
ADAPTERS = "adapters"
QUANTISED = "quantised"
SCALES = "integrity.scales"
SOUND = "no breakage"


def config(before: str) -> str:
    """With a baseline: the field itself, and before that rule what moved first."""
    return since("drift.config", "drift.config", before)


BREAKAGES: dict[str, Breakage] = {
    "vocabulary shuffled": Breakage(MAKE, one(EMBEDDING, lambda t: t[permutation(len(t))]), LOSS, MOVED),
    "k_proj and v_proj swapped": Breakage(MAKE, swapped("self_attn.k_proj", "self_attn.v_proj"), LOSS, MOVED),
    "gate_proj and up_proj swapped": Breakage(MAKE, swapped("mlp.gate_proj", "mlp.up_proj"), "passes", MOVED),
    "o_proj transposed": Breakage(MAKE, of_each("self_attn.o_proj", lambda t: t.T), LOSS, MOVED),
    "rotary halves interleaved in q_proj": Breakage(MAKE, of_each("self_attn.q_proj", head_rows), LOSS, MOVED),
    "two blocks swapped": Breakage(MAKE, weights(exchanged(1, 4)), "passes", MOVED),
    "norm gains minus 1": Breakage(MAKE, weights(scaled_norms(-1)), UNIGRAM, MOVED),
    "every weight with 100 % noise": Breakage(DAMAGE, weights(noise), LOSS, MOVED),
    "a random lm_head, untied": Breakage(
        MAKE,
        both(
            weights(lambda s: s.update({"lm_head.weight": random(VOCABULARY, 192).bfloat16()})),
            fields(tie_word_embeddings=False),
        ),
        LOSS,
        config(since("drift.behaviour", "drift.behaviour", "warns drift.new")),
    ),
    "the FFNs of two blocks swapped": Breakage(MAKE, weights(half_exchanged), "passes", MOVED),
    "blocks in the reverse order": Breakage(MAKE, weights(backwards), LOSS, MOVED),
    "one o_proj transposed": Breakage(MAKE, one(block(0, "self_attn.o_proj"), lambda t: t.T), LOSS, MOVED),
    "the heads of q_proj in another order": Breakage(MAKE, of_each("self_attn.q_proj", other_heads), UNIGRAM, MOVED),
    "the neurons of up_proj in another order": Breakage(
        MAKE, of_each("mlp.up_proj", lambda t: t[permutation(len(t))]), LOSS, MOVED
    ),
    "the embedding's rows one further": Breakage(MAKE, one(EMBEDDING, lambda t: t.roll(1, 0)), LOSS, MOVED),
    "the two norms of each block swapped": Breakage(
        MAKE, swapped("input_layernorm", "post_attention_layernorm"), "passes", MOVED
    ),
    "one of two shards of another checkpoint": Breakage(MAKE, other_shard, UNIGRAM, MOVED),
    "one head of q_proj in place of all": Breakage(DAMAGE, of_each("self_attn.q_proj", one_head_for_all), LOSS, MOVED),
    "q_proj negated": Breakage(DAMAGE, of_each("self_attn.q_proj", lambda t: -t), LOSS, MOVED),
    "the embedding negated": Breakage(DAMAGE, one(EMBEDDING, lambda t: -t), LOSS, MOVED),
    "the embedding zero": Breakage(
        DAMAGE, one(EMBEDDING, torch.zeros_like), "integrity.zero_matrices", "integrity.zero_matrices"
    ),
    "one value 10000": Breakage(
        DAMAGE, one(block(0, "mlp.down_proj"), one_value(lambda v: torch.full_like(v, 1e4))), LOSS, MOVED
    ),
    "one value negated": Breakage(DAMAGE, one(block(0, "mlp.down_proj"), one_value(lambda v: -v)), "passes", MOVED),
    "NaN in one tensor": Breakage(
        DAMAGE,
        one(block(1, "mlp.down_proj"), lambda t: t.index_fill(0, torch.tensor([3]), torch.nan)),
        "integrity.nonfinite",
        "integrity.nonfinite",
    ),
    "infinity in one norm": Breakage(
        DAMAGE,
        one(block(5, "input_layernorm"), lambda t: t.index_fill(0, torch.tensor([3]), torch.inf)),
        "integrity.nonfinite",
        "integrity.nonfinite",
    ),
    "a finite value that overflows": Breakage(
        DAMAGE,
        one(block(0, "mlp.gate_proj"), one_value(lambda v: v * 0 + 3e38)),
        "integrity.nonfinite",
        "integrity.nonfinite",
    ),
    "one block zero": Breakage(DAMAGE, weights(zero_block), "integrity.zero_blocks", "integrity.zero_blocks"),
    "one matrix zero": Breakage(
        DAMAGE, one(block(0, "mlp.up_proj"), torch.zeros_like), "warns integrity.zero_matrices", MOVED
    ),
    "one block copied over the next": Breakage(
        DAMAGE, weights(copied(3, 4)), "integrity.duplicate_blocks", "integrity.duplicate_blocks"
    ),
    "one head's output zero": Breakage(DAMAGE, weights(zero_head), "warns integrity.constant_heads", MOVED),
    "one matrix read twice": Breakage(
        DAMAGE,
        weights(lambda s: s.update({block(4, "mlp.up_proj"): s[block(3, "mlp.up_proj")].clone()})),
        "warns integrity.equal_matrices",
        MOVED,
    ),
    "half of the embedding's rows zero": Breakage(
        DAMAGE,
        one(EMBEDDING, lambda t: torch.cat([t[:1024], torch.zeros_like(t[1024:])])),
        "warns integrity.zero_rows",
        MOVED,
    ),
    "half an FFN zero": Breakage(
        DAMAGE,
        one(block(3, "mlp.up_proj"), lambda t: torch.cat([t[:192], torch.zeros_like(t[192:])])),
        "warns integrity.dead_neurons",
        MOVED,
    ),
    "one matrix times 100": Breakage(DAMAGE, one(block(2, "self_attn.v_proj"), lambda t: t * 100), LOSS, MOVED),
    "one norm gain doubled": Breakage(DAMAGE, one(block(1, "input_layernorm"), lambda t: t * 2), "passes", MOVED),
    "the last norm negated": Breakage(DAMAGE, one("model.norm.weight", lambda t: -t), LOSS, MOVED),
    "embedding of another seed": Breakage(
        DAMAGE, one(EMBEDDING, lambda t: random(*t.shape) * t.float().std()), LOSS, MOVED
    ),
    "its LoRA merged once": Breakage(STEPS, weights(merged(1)), "passes", MOVED),
    "its LoRA merged twice": Breakage(STEPS, weights(merged(2)), "passes", MOVED),
    "rounded to float8": Breakage(STEPS, weights(rounded_to(torch.float8_e4m3fn)), "passes", MOVED),
    "rounded to four bits": Breakage(STEPS, weights(four_bits), "passes", MOVED),
    "rope_theta 10000 to 1000000": Breakage(
        FIELDS, fields(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}), "passes", config("drift.operator")
    ),
    "rope scaled by 8": Breakage(
        FIELDS,
        fields(rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 8.0}),
        "passes",
        config("drift.operator"),
    ),
    "norm epsilon 1e-6 to 1e-2": Breakage(FIELDS, fields(rms_norm_eps=1e-2), "passes", config("drift.operator")),
    "activation silu to gelu": Breakage(FIELDS, fields(hidden_act="gelu"), "passes", config("drift.terms")),
    "num_hidden_layers 5 of 6": Breakage(
        FIELDS,
        fields(num_hidden_layers=5),
        since("drift.config", "integrity.unexpected", "warns integrity.unexpected"),
        since("drift.config", "integrity.unexpected", "drift.vanished"),
    ),
    "num_hidden_layers 7 of 6": Breakage(FIELDS, fields(num_hidden_layers=7), "refused missing", "refused missing"),
    "num_attention_heads 6 to 3": Breakage(FIELDS, fields(num_attention_heads=3), "refused q_proj", "refused q_proj"),
    "num_key_value_heads 2 to 1": Breakage(FIELDS, fields(num_key_value_heads=1), "refused k_proj", "refused k_proj"),
    "head_dim 32 to 16": Breakage(FIELDS, fields(head_dim=16), "refused q_proj", "refused q_proj"),
    "12 heads of 16 for 6 of 32": Breakage(
        FIELDS, fields(num_attention_heads=12, num_key_value_heads=4, head_dim=16), "passes", config("drift.operator")
    ),
    "vocab_size 2048 to 2100": Breakage(
        FIELDS, fields(vocab_size=2100), "refused embed_tokens", "refused embed_tokens"
    ),
    "attention_bias without biases": Breakage(
        FIELDS, fields(attention_bias=True), "refused missing", "refused missing"
    ),
    "untied without an lm_head": Breakage(
        FIELDS, fields(tie_word_embeddings=False), "refused lm_head", "refused lm_head"
    ),
    "max_position_embeddings 512 to 100": Breakage(
        FIELDS, fields(max_position_embeddings=100), "passes", config("refused made with another prompt set")
    ),
    "eos_token_id 1 to 7": Breakage(FIELDS, fields(eos_token_id=7), IDS, config("passes")),
    "bos_token_id 99999": Breakage(FIELDS, fields(bos_token_id=99999), IDS, config(IDS)),
    "pad_token_id 99999": Breakage(
        FIELDS, fields(pad_token_id=99999), "refused pad_token_id 99999", "refused pad_token_id 99999"
    ),
    "pad_token_id none to 5": Breakage(FIELDS, fields(pad_token_id=5), "passes", config("passes")),
    "an unknown activation": Breakage(
        FIELDS, fields(hidden_act="swoosh"), "refused hidden_act 'swoosh'", "refused hidden_act 'swoosh'"
    ),
    "an unknown kind of rope": Breakage(
        FIELDS,
        fields(rope_parameters={"rope_theta": 1e4, "rope_type": "spiral"}),
        "refused rope_parameters.rope_type 'spiral'",
        "refused rope_parameters.rope_type 'spiral'",
    ),
    "mlp_bias without biases": Breakage(
        FIELDS, fields(mlp_bias=True), "refused mlp_bias true", "refused mlp_bias true"
    ),
    "24 heads of 8 for 6 of 32": Breakage(
        FIELDS, fields(num_attention_heads=24, num_key_value_heads=8, head_dim=8), LOSS, config("drift.operator")
    ),
    "model_type mistral": Breakage(
        FIELDS,
        fields(model_type="mistral", architectures=["MistralForCausalLM"]),
        "passes",
        "refused belongs to another model",
    ),
    "an FFN declared as skipped": Breakage(
        FIELDS, fields(per_layer_config={"3": {"skip": ["mlp"]}}), PER_LAYER, PER_LAYER
    ),
    "an FFN declared narrower than it is": Breakage(
        FIELDS,
        fields(per_layer_config={"3": {"intermediate_size": 256}}, allow_global_per_layer_attribute_access=True),
        PER_LAYER,
        PER_LAYER,
    ),
    "a field that the class does not know": Breakage(FIELDS, fields(scaling=2), "passes", config("passes")),
    "a token with id 2100": Breakage(TEXTS, tokenizer(added_token(2100)), IDS, IDS),
    "generation_config: bos_token_id 99999": Breakage(
        TEXTS, fields("generation_config.json", bos_token_id=99999), IDS, IDS
    ),
    "generation_config: eos_token_id 7": Breakage(TEXTS, fields("generation_config.json", eos_token_id=7), IDS, IDS),
    "another chat template": Breakage(
        TEXTS,
        fields("tokenizer_config.json", chat_template="{{ messages }}"),
        "passes",
        since("drift.tokenizer", "drift.tokenizer", "passes"),
    ),
    "a chat template with a syntax error": Breakage(
        TEXTS, fields("tokenizer_config.json", chat_template="{% for m in messages %}{{ m.content }"), IDS, IDS
    ),
    "a chat template that calls what is not there": Breakage(
        TEXTS,
        fields("tokenizer_config.json", chat_template="{{ later() }}{{ messages[0].content }}"),
        "warns integrity.tokenizer",
        "drift.tokenizer",
    ),
    "generation_config: max_new_tokens 0": Breakage(
        TEXTS, fields("generation_config.json", max_new_tokens=0), IDS, IDS
    ),
    "generation_config: sampling at temperature 0": Breakage(
        TEXTS, fields("generation_config.json", do_sample=True, temperature=0), IDS, IDS
    ),
    "generation_config: an unknown key": Breakage(
        TEXTS, fields("generation_config.json", frobnicate=3), "passes", "drift.tokenizer"
    ),
    "special_tokens_map: bos and eos swapped": Breakage(
        TEXTS, special_tokens(bos_token="</s>", eos_token="<s>"), IDS, IDS
    ),
    "a pad token that the embedding lacks": Breakage(
        TEXTS, fields("tokenizer_config.json", pad_token="[PAD]"), IDS, IDS
    ),
    "tokenizer_config.json lost": Breakage(TEXTS, without("tokenizer_config.json"), "passes", TOKENS),
    "the decoder lost": Breakage(TEXTS, tokenizer(lambda c: c.update(decoder=None)), IDS, IDS),
    "padding on the other side": Breakage(
        TEXTS, fields("tokenizer_config.json", padding_side="left"), "passes", "drift.tokenizer"
    ),
    "the vocabulary's ids one further": Breakage(TEXTS, tokenizer(shifted_vocabulary), LOSS, VOCABULARY_MOVED),
    "merges in the reverse order": Breakage(TEXTS, tokenizer(reversed_merges), UNIGRAM, TOKENS),
    "another vocabulary": Breakage(
        TEXTS, tokenizer(other_vocabulary), LOSS, since("drift.tokenizer", "drift.tokenizer", "drift.operator")
    ),
    "two thirds of the merges lost": Breakage(TEXTS, tokenizer(fewer_merges), "passes", TOKENS),
    "a normaliser that lowers": Breakage(TEXTS, tokenizer(lower_case), "passes", TOKENS),
    "no <s> in front": Breakage(TEXTS, tokenizer(no_start), "passes", TOKENS),
    "tokenizer.json lost": Breakage(TEXTS, without("tokenizer.json"), "refused tokenizer", "refused tokenizer"),
    "embedding cut to 2000 rows": Breakage(
        FILES, both(weights(fewer_rows), fields(vocab_size=FEWER_ROWS)), IDS, config(MOVED)
    ),
    "an unused tensor": Breakage(
        FILES,
        weights(lambda s: s.update({"model.layers.0.mlp.router.weight": random(8, 192).bfloat16()})),
        "warns integrity.unexpected",
        since("drift.config", "drift.new", "warns integrity.unexpected"),
    ),
    "biases of a model without them": Breakage(
        FILES,
        weights(
            lambda s: s.update({f"model.layers.{i}.self_attn.q_proj.bias": random(192).bfloat16() for i in BLOCKS})
        ),
        "warns integrity.unexpected",
        "drift.new",
    ),
    "names without their prefix": Breakage(FILES, weights(without_prefix), "passes", "drift.vanished"),
    "an index that seeks a tensor in the wrong shard": Breakage(
        FILES,
        index(lambda at: at.update({EMBEDDING: "model-00002-of-00002.safetensors"})),
        "integrity.files",
        "integrity.files",
    ),
    "an index without one of the tensors": Breakage(
        FILES, index(lambda at: at.pop(EMBEDDING)), "integrity.files", "integrity.files"
    ),
    "an index that names a shard too many": Breakage(
        FILES, index(lambda at: at.update({EMBEDDING: "model-00003.safetensors"})), "refused 00003", "refused 00003"
    ),
    "a tensor lost": Breakage(
        FILES, weights(lambda s: s.pop(block(3, "mlp.up_proj"))), "refused up_proj", "refused up_proj"
    ),
    "file truncated": Breakage(FILES, truncated, "refused truncated", "refused truncated"),
    "config.json lost": Breakage(FILES, without("config.json"), "refused config.json", "refused config.json"),
    "an adapter of 50 times its size": Breakage(ADAPTERS, nothing, MAGNITUDE, MAGNITUDE, larger_factors(50)),
    "an adapter with a head, on a tied base": Breakage(ADAPTERS, nothing, HEAD, HEAD, saved_head),
    "float32 norms": Breakage(SOUND, weights(float_norms), "passes", STORED),
    "tensors in another order": Breakage(SOUND, another_order, "passes", "passes"),
    "two shards and an index": Breakage(SOUND, sharded, "passes", "passes"),
    "fields that change no result": Breakage(
        SOUND, fields(use_cache=False, attention_dropout=0.5, initializer_range=1.0), "passes", "passes"
    ),
    "FP8 with a scale for each 16 x 16, as it should be": Breakage(
        QUANTISED, quantised(lambda s: None), "passes", MOVED
    ),
    "one scale zero": Breakage(QUANTISED, scale(lambda s: 0), SCALES, SCALES),
    "one scale NaN": Breakage(QUANTISED, scale(lambda s: float("nan")), SCALES, SCALES),
    "one scale infinite": Breakage(QUANTISED, scale(lambda s: float("inf")), SCALES, SCALES),
    "one scale 1e37": Breakage(QUANTISED, scale(lambda s: 1e37), SCALES, SCALES),
    "one scale 16 times as large": Breakage(QUANTISED, scale(lambda s: 16 * s), "passes", MOVED),
    "the scales of one matrix missing": Breakage(
        QUANTISED, quantised(without_scales), "refused is missing", "refused is missing"
    ),
    "the scales of one matrix of another shape": Breakage(
        QUANTISED, quantised(fewer_scales), "refused does not fit the quantised", "refused does not fit the quantised"
    ),
    "quant_method of a format that is not read": Breakage(
        QUANTISED,
        both(quantised(lambda s: None), fields(quantization_config={"quant_method": "hqq"})),
        "refused quant_method 'hqq'",
        "refused quant_method 'hqq'",
    ),
    "defaults left out": Breakage(
        SOUND, fields(rope_parameters=None, mlp_bias=None, pretraining_tp=None), "passes", "passes"
    ),
    "vocab.json and merges.txt beside tokenizer.json": Breakage(SOUND, files_of_vocabulary, "passes", "passes"),
    "trainer files beside the weights": Breakage(SOUND, trainer_files, "passes", "passes"),
    "nothing at all": Breakage(SOUND, nothing, "passes", "passes"),
}
HEADER = "| kind | breakage of the demo | without a baseline | with one |"


def table() -> str:
    """As the page about the gate has it."""
    lines = [HEADER, "|---|---|---|---|"]
    said = ""
    kinds = list(dict.fromkeys(breakage.kind for breakage in BREAKAGES.values()))
    for name, breakage in sorted(BREAKAGES.items(), key=lambda pair: kinds.index(pair[1].kind)):
        kind = breakage.kind if breakage.kind != said else ""
        said = breakage.kind
        cells = (_cell(text) for text in (breakage.alone, breakage.against))
        lines.append(f"| {kind} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    if text.startswith("refused "):
        return "exit code 2"
    rule = text.removeprefix("warns ")
    return text if text == "passes" else f"`{rule}`" if rule == text else f"passes, warns `{rule}`"
