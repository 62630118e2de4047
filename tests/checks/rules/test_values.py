"""Each rule on weights finds its fault, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import bad_checkpoints as bad
import pytest
import torch
import transformers
from running_checks import Duat
from safetensors.torch import load_file, save_file

from duat_cli.checks.registry import all_rules
from duat_cli.checks.rule import Evidence, Settings
from duat_cli.checks.weights import weight_facts
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.zoo.tiny import tiny_model

State = dict[str, torch.Tensor]


def zero_rows(name: str, low: int, high: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[name][low:high] = 0

    return change


def zero_columns(name: str, low: int, high: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[name][:, low:high] = 0

    return change


def read_twice(state: State) -> None:
    state["model.layers.1.mlp.up_proj.weight"] = state["model.layers.0.mlp.up_proj.weight"].clone()


def copied(state: State) -> None:
    for name in [n for n in state if "layers.0." in n]:
        state[name.replace("layers.0.", "layers.1.")] = state[name].clone()


def emptied(state: State) -> None:
    for name in [n for n in state if "layers.1." in n]:
        state[name].zero_()


def untied(state: State) -> None:
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1e-3


RULES: list[tuple[str, Callable[[State], object], str, int | None]] = [
    ("integrity.nonfinite", lambda s: s["lm_head.weight"][0].fill_(float("inf")), "lm_head.weight", None),
    ("integrity.zero_matrices", lambda s: s["lm_head.weight"].zero_(), "lm_head.weight", None),
    ("integrity.equal_matrices", read_twice, "model.layers.1.mlp.up_proj.weight", 1),
    ("integrity.zero_blocks", emptied, "model.layers", 1),
    ("integrity.duplicate_blocks", copied, "model.layers", 1),
    (
        "integrity.dead_neurons",
        zero_rows("model.layers.1.mlp.up_proj.weight", 3, 5),
        "model.layers.1.mlp.up_proj.weight",
        1,
    ),
    (
        "integrity.dead_neurons",
        zero_columns("model.layers.0.mlp.down_proj.weight", 9, 10),
        "model.layers.0.mlp.down_proj.weight",
        0,
    ),
    (
        "integrity.constant_heads",
        zero_columns("model.layers.1.self_attn.o_proj.weight", 8, 16),
        "model.layers.1.self_attn.o_proj.weight",
        1,
    ),
    (
        "integrity.constant_heads",
        zero_rows("model.layers.0.self_attn.v_proj.weight", 0, 8),
        "model.layers.0.self_attn.v_proj.weight",
        0,
    ),
    ("integrity.zero_rows", zero_rows("model.embed_tokens.weight", 100, 180), "model.embed_tokens.weight", None),
    (
        "integrity.zero_rows",
        zero_rows("model.layers.0.self_attn.o_proj.weight", 0, 9),
        "model.layers.0.self_attn.o_proj.weight",
        0,
    ),
    ("integrity.quantised", lambda s: s.update(q=torch.ones(4, 4, dtype=torch.int8)), "q", None),
    ("integrity.mixed_dtypes", lambda s: s.update(h=torch.ones(4).half()), "", None),
    ("integrity.dtype", lambda s: s.update(h=torch.ones(4).half()), "h", None),
    ("integrity.tied_weights", untied, "lm_head.weight", None),
    ("integrity.layers", lambda s: None, "config.json", None),
    ("integrity.files", lambda s: s.update({"a\x1b[2J": torch.ones(1)}), "", None),
]


@pytest.mark.parametrize("kind", ["dory", "efficientnet", "hrm_text", "lxmert"])
def test_a_depth_that_is_no_number_of_blocks_promises_none(kind: str, tmp_path: Path, duat: Duat) -> None:
    tiny_model(kind).save_pretrained(tmp_path / "m")
    done = duat("check", tmp_path / "m", "--weights-only", "-q", "--json", "--select", "integrity.layers")
    assert done.json["counts"] == {"passed": 1, "failed": 0, "warned": 0, "skipped": 0}


@pytest.mark.parametrize("name", [f"model.{'x' * 300}.weight", "/etc/hostname", "../config.json", "tokenizer.a.weight"])
def test_the_name_of_a_tensor_is_no_path(name: str, tmp_path: Path, duat: Duat) -> None:
    bad.llama(tmp_path / "m", tok=False)
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    bad.wedit(tmp_path / "m", lambda s: s.update({name: torch.zeros(4, 4)}))
    done = duat("check", tmp_path / "m", "--weights-only", "-q", "--json", "--select", "integrity.zero_matrices")
    [found] = done.json["outcomes"]
    assert (found["where"], found["location"]["file"]) == (name, str(tmp_path / "m" / bad.CFG))


LATENT = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 14, "head_dim": 4}
WIDE = "as wide as the queries, keys or values of a head"
HEADS: list[tuple[str, tuple[int, int], str, tuple[int, int], str | None]] = [
    ("latent_attn.o_proj", (32, 56), "columns", (14, 28), "columns 14-27, head 1 of 4"),
    ("latent_attn.kv_b_proj", (80, 12), "rows", (0, 60), "rows 0-59, head 0, 1, 2 of 4"),
    ("latent_attn.q_b_proj", (40, 12), "rows", (30, 40), "rows 30-39, head 3 of 4"),
    ("latent_attn.kv_a_proj_with_mqa", (16, 32), "rows", (0, 8), None),
    ("attn.c_attn", (32, 96), "columns", (8, 16), f"columns 8-15, {WIDE}"),
    ("attn.c_attn", (32, 96), "columns", (24, 40), f"columns 24-31, {WIDE}, and 1 other run of that width"),
    ("attn.c_attn", (32, 96), "rows", (8, 16), None),  # the stream's
    ("attn.c_attn", (48, 32), "rows", (40, 48), f"rows 40-47, {WIDE}"),  # a linear layer's, of one key and value
    ("attn.c_proj", (32, 32), "rows", (8, 16), "rows 8-15, head 1 of 4"),
    ("attn.c_proj", (32, 32), "columns", (8, 16), None),
    ("self_attn.q_proj", (32, 32), "columns", (8, 16), None),
    ("self_attn.k_proj", (16, 32), "rows", (8, 16), "rows 8-15, head 1 of 2"),
    ("self_attn.q_proj", (64, 32), "rows", (0, 32), None),  # twice the heads, and no output that says why
    ("linear_attn.out_proj", (32, 48), "columns", (12, 24), "columns 12-23, head 1 of 4"),
    ("linear_attn.out_proj", (32, 48), "columns", (8, 16), None),
]
LINEAR = {"linear_value_head_dim": 12, "linear_num_value_heads": 4}


@pytest.mark.parametrize(("layer", "shape", "side", "zero", "expected"), HEADS)
def test_a_head_is_looked_for_along_its_own_side_and_width(
    layer: str, shape: tuple[int, int], side: str, zero: tuple[int, int], expected: str | None, tmp_path: Path
) -> None:
    name = f"h.0.{layer}.weight"
    state = {name: torch.ones(shape)}
    if layer == "attn.c_proj":
        state["h.0.attn.c_attn.weight"] = torch.ones(32, 96)
    state[name][slice(*zero) if side == "rows" else (slice(None), slice(*zero))] = 0
    save_file(state, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}
    (tmp_path / bad.CFG).write_text(json.dumps(config | LINEAR | (LATENT if layer.startswith("latent") else {})))
    assert constant_heads(tmp_path) == ([] if expected is None else [f"zero in '{name}': {expected}"])


def constant_heads(folder: Path) -> list[str]:
    files = inspect_folder(folder)
    rule = all_rules()["integrity.constant_heads"]
    evidence = Evidence(files, weight_facts(files, lambda *_: None))
    return [m.text for m in rule.measure(evidence, Settings(rule, "warn", 0.0, None))]


@pytest.mark.parametrize(
    ("layer", "zero", "expected"),
    [
        ("q_proj", (16, 24), "rows 16-23, head 1 of 4"),  # the query of a head, whose gate stands behind it
        ("q_proj", (16, 32), "rows 16-23, head 1 of 4"),
        ("q_proj", (24, 32), None),  # a gate of zeros opens the head half way, whatever it reads
        ("k_proj", (8, 16), "rows 8-15, head 1 of 2"),
        ("o_proj", (8, 16), "columns 8-15, head 1 of 4"),
    ],
)
@pytest.mark.parametrize("heads", [4, 2])
def test_a_gate_beside_each_query_is_known_by_what_the_output_reads(
    layer: str, zero: tuple[int, int], expected: str | None, heads: int, tmp_path: Path
) -> None:
    """With two heads in the config the same shapes are of heads twice as wide, such as some layers of Gemma 4 have."""
    shapes = {"q_proj": (64, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    state = {f"layers.0.self_attn.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    name = f"layers.0.self_attn.{layer}.weight"
    state[name][(slice(None), slice(*zero)) if layer == "o_proj" else slice(*zero)] = 0
    save_file(state, tmp_path / "model.safetensors")
    config = {"model_type": "qwen3_next", "hidden_size": 32, "num_attention_heads": heads, "head_dim": 8}
    (tmp_path / bad.CFG).write_text(json.dumps(config))
    known = expected is not None and heads == 4
    assert constant_heads(tmp_path) == ([f"zero in '{name}': {expected}"] if known else [])


@pytest.mark.parametrize(("rule", "change", "where", "block"), RULES)
def test_a_rule_finds_its_fault_and_nothing_else(
    rule: str, change: Callable[[State], None], where: str, block: int | None, tmp_path: Path, duat: Duat
) -> None:
    bad.llama(tmp_path / "m", tok=False)
    if rule == "integrity.tied_weights":
        bad.jedit(tmp_path / "m" / bad.CFG, tie_word_embeddings=True)
    policy = tmp_path / "p.toml"
    policy.write_text(
        'extends = "strict"\n[rules]\n"integrity.mixed_dtypes" = "error"\n'
        '"integrity.layers" = "error"\n"integrity.dtype" = { allowed = ["F32"] }\n'
    )
    args = ("check", tmp_path / "m", "--weights-only", "-q", "--policy", policy, "--json")
    if rule == "integrity.tied_weights":
        bad.wedit(tmp_path / "m", lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"].clone()}))
    assert duat(*args).code == 0
    if rule == "integrity.layers":
        bad.jedit(tmp_path / "m" / bad.CFG, num_hidden_layers=3)

    def once(state: State) -> None:
        change(state)

    bad.wedit(tmp_path / "m", once)
    done = duat(*args)
    assert done.code == 1
    found = [o for o in done.findings() if o["rule"] == rule]
    assert found, done.rules()
    assert not where or where in {o["where"] for o in found}
    assert block is None or {o["block"] for o in found} == {block}
    related = {
        "integrity.zero_blocks": {"integrity.zero_matrices"},
        "integrity.mixed_dtypes": {"integrity.dtype"},
        "integrity.dtype": {"integrity.mixed_dtypes"},
    }
    assert done.rules() <= {rule} | related.get(rule, set())


def test_an_output_matrix_that_the_class_ties_by_default_is_held_against_the_embedding(
    tmp_path: Path, duat: Duat
) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path / "m")
    bad.jedit(tmp_path / "m" / bad.CFG, drop=("tie_word_embeddings",))
    (tmp_path / "p.jsonl").write_text('{"input_ids": [5, 6, 7]}')
    head, table = "lm_head.weight", "transformer.wte.weight"
    for factor, found in ((1.0, set()), (1.5, {"integrity.tied_weights"})):
        bad.wedit(tmp_path / "m", lambda state, by=factor: state.update({head: state[table] * by}))
        done = duat("check", tmp_path / "m", "--prompts", tmp_path / "p.jsonl", "-q", "--json")
        assert (done.code, done.rules("warned") - {"behaviour.loss"}) == (0, found)
    [said] = [one for one in done.findings("warned") if one["rule"] == "integrity.tied_weights"]
    assert said["message"].endswith("are tied by the default of its class and differ by 0.5")


def test_labels_that_contradict_each_other_warn(tmp_path: Path, duat: Duat) -> None:
    bad.llama(tmp_path / "m", tok=False)
    names = {"0": "bad", "1": "good", "2": "so"}
    for numbers, found in (
        ({"bad": 0, "good": 1, "so": "2"}, []),
        ({"LABEL_0": 0, "LABEL_1": 1}, []),  # a default, which nobody reads
        ({"bad": 1, "good": 0, "so": 2}, ["in 2 labels: 'bad' is 0 and 1, 'good' is 1 and 0"]),
    ):
        bad.jedit(tmp_path / "m" / bad.CFG, id2label=names, label2id=numbers)
        done = duat("check", tmp_path / "m", "--weights-only", "--select", "integrity.labels", "-q", "--json")
        said = [o["message"] for o in done.findings("warned")]
        assert (done.code, len(said)) == (0, len(found))
        assert all(word in one for word, one in zip(found, said, strict=True))


@pytest.mark.parametrize(
    ("stored", "stated", "said"),
    [
        (torch.bfloat16, "float16", "stored in bfloat16: transformers rounds them, and what is larger than 65,504"),
        (
            torch.float32,
            "bfloat16",
            "config.json says bfloat16, most weights are stored in float32: transformers rounds",
        ),
        (torch.float16, "bfloat16", "rounds them"),
        (torch.bfloat16, "float32", None),
        (torch.float16, "float16", None),
        (torch.float32, None, None),
    ],
)
def test_a_dtype_that_cannot_hold_what_is_stored_warns(
    stored: torch.dtype, stated: str | None, said: str | None, tmp_path: Path, duat: Duat
) -> None:
    bad.llama(tmp_path / "m", tok=False)
    bad.wedit(tmp_path / "m", lambda state: {name: tensor.to(stored) for name, tensor in state.items()})
    bad.jedit(tmp_path / "m" / bad.CFG, dtype=stated)
    done = duat("check", tmp_path / "m", "--weights-only", "--select", "integrity.stated_dtype", "-q", "--json")
    found = [one["message"] for one in done.findings("warned")]
    assert (done.code, len(found)) == (0, int(said is not None))
    assert all((said or "") in one for one in found)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").model.embed_tokens.weight.detach()
    kept = load_file(tmp_path / "m" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(loaded.double(), kept.double()) == (said is None)


def test_what_is_no_fault(tmp_path: Path, duat: Duat) -> None:
    """An embedding may have unused rows, equal norms are no copies, one shared block stands for all."""
    bad.llama(tmp_path / "m", tok=False)
    bad.wedit(tmp_path / "m", zero_rows("model.embed_tokens.weight", 3, 9))
    assert duat("check", tmp_path / "m", "--weights-only", "-q", "--policy", "strict").code == 0
