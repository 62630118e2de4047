"""Breakages of config, tokenizer and generation config against a baseline: the cause is named, and named first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import pytest
import torch
from running_checks import Duat
from safetensors.torch import save_file
from short_demo import short_demo
from transformers import AutoConfig

from duat_cli.checks.rule import Evidence
from duat_cli.checks.rules.declared import RULES, config_changes, generation_changes
from duat_cli.cli.main import run
from duat_cli.loading.declared.embedder import Embedder
from duat_cli.loading.declared.facts import Declared

GEN = "generation_config.json"
QUICK = ("--prompt", "The cat sat on the mat.", "-q")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_demo(tmp_path_factory.mktemp("sound") / "demo")


@pytest.fixture
def demo(sound: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "demo"))


@pytest.fixture(scope="module")
def baseline(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("baseline") / "b.json"
    assert run(["check", str(sound), *QUICK, "--baseline", str(file), "--update-baseline"]) == 0
    return file


def config(drop: tuple[str, ...] = (), **fields: Any) -> Callable[[Path], None]:
    return lambda folder: bad.jedit(folder / bad.CFG, drop, **fields)


def rope(**fields: Any) -> Callable[[Path], None]:
    return config(rope_parameters={"rope_theta": 10000.0, "rope_type": "default", **fields})


def tokenizer(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return edit


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (rope(rope_type="linear", factor=4.0), "rope_parameters.rope_type default → linear"),
        (config(("rms_norm_eps",), num_key_value_heads=2), None),  # the class's default is what the file said
        (config(max_position_embeddings=4), "config.json: max_position_embeddings 512 → 4"),
        (config(sliding_window=2), "config.json: sliding_window none → 2"),
        (config(layer_types=["full_attention"] * 2), "config.json: layer_types none → "),
        (config(num_attention_heads=12, head_dim=16, num_key_value_heads=4), "num_attention_heads 6 → 12"),
        (config(eos_token_id=0), "config.json: eos_token_id 1 → 0"),
    ],
)
def test_a_field_of_the_config_stands_first(
    breakage: Any, words: str | None, demo: Path, baseline: Path, duat: Duat
) -> None:
    breakage(demo)
    done = duat("check", demo, *QUICK, "--baseline", baseline, "--json")
    if words is None:
        assert (done.code, done.findings()) == (0, [])
        return
    assert done.code == 1
    drift = [o for o in done.findings() if o["rule"].startswith("drift.")]
    assert drift[0]["rule"] == "drift.config"
    assert any(words in o["message"] for o in drift if o["rule"] == "drift.config")
    assert "another prompt set" not in done.text


def test_untied_by_the_config_alone_is_refused_or_named(demo: Path, baseline: Path, duat: Duat) -> None:
    """The files hold no output matrix, so that the load asks for one."""
    bad.jedit(demo / bad.CFG, tie_word_embeddings=False)
    duat("check", demo, *QUICK, "--baseline", baseline).refused("lm_head.weight", "missing")


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_model_that_gains_an_output_matrix(tied: bool, demo: Path, baseline: Path, duat: Duat) -> None:
    torch.manual_seed(0)
    bad.wedit(demo, lambda s: {**s, "lm_head.weight": torch.randn(2048, 192).to(torch.bfloat16)})
    bad.jedit(demo / bad.CFG, tie_word_embeddings=tied)
    done = duat("check", demo, *QUICK, "--baseline", baseline, "--json")
    assert done.code == 1
    (new,) = (o for o in done.findings() if o["rule"] == "drift.new")
    assert new["message"] == "1 tensor that the baseline lacks: 'weights.lm_head.weight'"
    assert ("drift.config" in done.rules()) != tied


def test_a_copy_of_the_tied_matrix_is_storage(demo: Path, baseline: Path, duat: Duat) -> None:
    bad.wedit(demo, lambda s: {**s, "lm_head.weight": s["model.embed_tokens.weight"].clone()})
    done = duat("check", demo, *QUICK, "--baseline", baseline, "--json")
    assert (done.code, done.rules("warned")) == (0, {"drift.new"})
    policy = demo / "p.toml"
    policy.write_text('extends = "strict"\n[bounds]\n"certificate.relative_error" = { level = "off" }\n')
    assert "drift.new" in duat("check", demo, *QUICK, "--baseline", baseline, "--json", "--policy", policy).rules()


def test_a_policy_of_ones_own_may_let_a_new_tensor_pass(demo: Path, baseline: Path, duat: Duat) -> None:
    bad.wedit(demo, lambda s: {**s, "lm_head.weight": torch.ones(2048, 192, dtype=torch.bfloat16)})
    policy = demo / "p.toml"
    policy.write_text('[rules]\n"drift.new" = "warn"\n"integrity.unexpected" = "warn"\n')
    done = duat("check", demo, "--weights-only", "-q", "--baseline", baseline, "--json", "--policy", policy)
    assert (done.code, "drift.new" in done.rules("warned")) == (0, True)


# --- tokenizer and generation -----------------------------------------------------------------------------------


def _swap(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    one, other = (token for token, number in vocabulary.items() if number in (700, 900))
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


def _special(content: dict[str, Any]) -> None:
    """A token of the vocabulary becomes a special one."""
    token = next(token for token, number in content["model"]["vocab"].items() if number == 2047)
    content["added_tokens"].append({**content["added_tokens"][0], "id": 2047, "content": token})


CUT = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
PADDED = {
    "strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1, "pad_type_id": 0,
    "pad_token": "</s>",
}  # fmt: skip


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (tokenizer(_swap), "tokenizer: vocabulary: 2048 ids, other tokens among ids 700-703, 900-903"),
        (tokenizer(lambda c: c["model"].update(merges=[])), "the same prompts are read otherwise: "),
        (tokenizer(_special), "tokenizer: added tokens changed"),
        (tokenizer(lambda c: c.update(normalizer={"type": "Lowercase"})), "tokenizer: normaliser added"),
        (tokenizer(lambda c: c.update(post_processor=None)), "tokenizer: post-processor "),
        (lambda d: bad.jedit(d / "tokenizer_config.json", chat_template="{{ x }}"), "tokenizer: chat template added"),
        (lambda d: (d / "chat_template.jinja").write_text("{{ x }}"), "tokenizer: chat template added"),
        (lambda d: bad.jedit(d / "tokenizer_config.json", padding_side="left"), "padding_side right → left"),
        (lambda d: bad.jedit(d / "tokenizer_config.json", truncation_side="left"), "truncation_side right → left"),
        (
            lambda d: bad.jedit(d / "tokenizer_config.json", model_input_names=["input_ids"]),
            "model_input_names input_ids, attention_mask → input_ids",
        ),
        (tokenizer(lambda c: c.update(truncation=CUT)), "tokenizer: truncation added"),
        (tokenizer(lambda c: c.update(padding=PADDED)), "tokenizer: padding added"),
        (
            lambda d: bad.jedit(d / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tok.T", None]}),
            'auto_map none → {"AutoTokenizer": ["tok.T", null]}',
        ),
        (lambda d: bad.jedit(d / GEN, temperature=0.3), "generation_config.json: temperature 1 → 0.3"),
        (lambda d: bad.jedit(d / GEN, eos_token_id=[1, 0]), "generation_config.json: eos_token_id 1 → [1, 0]"),
        (lambda d: (d / GEN).unlink(), "generation_config.json: bos_token_id 0 → none; eos_token_id 1 → none"),
    ],
)
def test_the_tokenizer_and_how_texts_are_made(
    breakage: Any, words: str, demo: Path, baseline: Path, duat: Duat
) -> None:
    breakage(demo)
    done = duat("check", demo, *QUICK, "--baseline", baseline, "--json")
    assert done.code == 1
    found = [o for o in done.findings() if o["rule"] == "drift.tokenizer"]
    assert any(words in o["message"] for o in found), found
    assert not words.startswith("the same prompts") or any("merges changed" in o["message"] for o in found)
    assert not any("update-baseline" in (o["advice"] or "") for o in found)
    assert not done.rules() & {"drift.weights", "drift.coupling", "drift.operator", "drift.summary"}


def test_an_older_baseline_knows_nothing_of_truncation_and_code(
    demo: Path, baseline: Path, tmp_path: Path, duat: Duat
) -> None:
    content, file = json.loads(baseline.read_text()), tmp_path / "old.json"
    for name in ("parts.truncation", "parts.padding", "fields.auto_map"):
        assert content["declared"].pop(f"tokenizer.{name}") == "none"
    for name in ("truncation_side", "model_input_names"):
        assert content["declared"].pop(f"tokenizer.fields.{name}")
    file.write_text(json.dumps(content))
    tokenizer(lambda c: c.update(truncation=CUT))(demo)
    bad.jedit(demo / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tok.T", None]}, truncation_side="left")
    assert duat("check", demo, *QUICK, "--baseline", file).code == 0


def test_the_same_texts_with_other_options_are_no_finding(demo: Path, baseline: Path, duat: Duat) -> None:
    done = duat("check", demo, *QUICK, "--max-tokens", "3", "--baseline", baseline)
    done.refused("another prompt set", "--max-tokens")


def test_own_prompts_beyond_positions_that_were_cut_fail(demo: Path, baseline: Path, duat: Duat) -> None:
    """Without a baseline nothing but the prompt itself is at fault."""
    bad.jedit(demo / bad.CFG, max_position_embeddings=4)
    duat("check", demo, *QUICK).refused("too long")
    done = duat("check", demo, *QUICK, "--baseline", baseline, "--json")
    assert (done.code, done.rules()) == (1, {"drift.config"})


# --- storage ----------------------------------------------------------------------------------------------------


def _written_out(folder: Path) -> None:
    """config.json and generation_config.json with all their defaults, in another order, by another release."""
    content = AutoConfig.from_pretrained(folder).to_dict() | {"transformers_version": "4.1.0"}
    (folder / bad.CFG).write_text(json.dumps(dict(sorted(content.items(), reverse=True)), default=str))
    bad.jedit(folder / GEN, temperature=1.0, do_sample=False, top_p=1.0, transformers_version="4.1.0")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: bad.wedit(d, lambda s: {n: t.float() for n, t in s.items()}),
        _written_out,
        tokenizer(lambda c: c.update(version="1.0")),
        config(dtype="float32", use_cache=False, attention_dropout=0.5),
    ],
    ids=["float32", "defaults", "tokenizer", "ignored fields"],
)
def test_changes_of_storage_pass(change: Any, demo: Path, baseline: Path, duat: Duat) -> None:
    """More of them are in test_breakages.py, among what is no breakage."""
    change(demo)
    done = duat("check", demo, *QUICK, "--baseline", baseline, "--json")
    assert (done.code, done.findings()) == (0, [])


# --- what can be told without the load --------------------------------------------------------------------------


def test_weights_only_compares_the_fields_that_the_file_states(demo: Path, baseline: Path, duat: Duat) -> None:
    plain = duat("check", demo, "--weights-only", "-q", "--baseline", baseline, "--json")
    assert (plain.code, "drift.config" in plain.rules("passed")) == (0, True)
    rope(rope_theta=1000000.0)(demo)
    done = duat("check", demo, "--weights-only", "-q", "--baseline", baseline, "--json")
    assert done.rules() == {"drift.config"}
    assert "rope_parameters.rope_theta 10000 → 1000000" in done.findings()[0]["message"]
    assert "drift.tokenizer" in done.rules("skipped")


def test_a_baseline_of_weights_only_names_a_field_too(demo: Path, tmp_path: Path, duat: Duat) -> None:
    file = tmp_path / "b.json"
    assert duat("check", demo, "--weights-only", "-q", "--baseline", file, "--update-baseline").code == 0
    assert duat("check", demo, *QUICK, "--baseline", file).code == 0
    config(rms_norm_eps=1e-3)(demo)
    for options in (QUICK, ("--weights-only", "-q")):
        done = duat("check", demo, *options, "--baseline", file, "--json")
        assert done.rules() == {"drift.config"}


def test_a_field_that_a_baseline_without_a_load_did_not_state_warns(demo: Path, tmp_path: Path, duat: Duat) -> None:
    file = tmp_path / "b.json"
    assert duat("check", demo, "--weights-only", "-q", "--baseline", file, "--update-baseline").code == 0
    config(("rms_norm_eps",), rope_scaling={"type": "linear", "factor": 2.0})(demo)
    for options in (QUICK, ("--weights-only", "-q")):
        done = duat("check", demo, *options, "--baseline", file, "--json")
        [found] = [o for o in done.findings("warned") if o["rule"] == "drift.config"]
        assert done.code == 0
        assert "rope_scaling.factor none → 2" in found["message"]
        assert "rms_norm_eps" in found["message"]


RESOLVED = {"resolved_by": "transformers x", "config.a": 1}


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        # another release: a default that came or went is no change, one that is another is
        ({"resolved_by": "transformers 4", "config.a": 1}, Declared({}, {}, {"a": 1, "b": 2}, "5"), []),
        ({"resolved_by": "transformers 4", "config.a": 1, "config.c": 1}, Declared({}, {}, {"a": 2}, "5"), ["a"]),
        ({"resolved_by": "transformers 4", "config.a": 1}, Declared({"b": 2}, {}, {"a": 1, "b": 2}, "5"), ["b"]),
        # the same release: every field counts
        ({"resolved_by": "transformers 5", "config.a": 1}, Declared({}, {}, {"b": 2}, "5"), ["a", "b"]),
        # legacy names in the file, which the resolved config has elsewhere
        ({"config.r.t": 5.0, "file.t": 5.0, "resolved_by": "x"}, Declared({"t": 5.0}, {}), []),
        ({"config.r.t": 5.0, "file.t": 5.0, "resolved_by": "x"}, Declared({"t": 6.0}, {}), ["t"]),
        # what a resolved baseline has under no name is no default of the class
        ({"config.a": 1, "resolved_by": "x"}, Declared({"a": 1, "b": 2}, {}), ["b"]),
        # settings of generation, which are not resolved, unless another file has them
        ({**RESOLVED, "file.top_k": 5}, Declared({"top_k": 6}, {}, {"a": 1}, "x", {"top_k": 50}), ["top_k"]),
        ({**RESOLVED, "file.top_k": 5}, Declared({}, {}, {"a": 1}, "x", {"top_k": 50}), ["top_k"]),
        ({**RESOLVED, "file.top_k": 50}, Declared({}, {}, {"a": 1}, "x", {"top_k": 50}), []),
        (RESOLVED, Declared({"sequence_bias.7": 9}, {}, {"a": 1}, "x", {"sequence_bias": None}), ["sequence_bias.7"]),
        (RESOLVED, Declared({"top_k": 6}, {"top_p": 0.5}, {"a": 1}, "x", {"top_k": 50}), []),
        ({**RESOLVED, "file.t": 5.0}, Declared({}, {}, {"a": 1}, "x", {"top_k": 50}), []),
        ({"file.a": 1}, Declared({"a": 1, "b": 2}, {}, {"a": 1, "b": 2}, "5"), []),
    ],
)
def test_which_fields_are_compared(old: dict[str, Any], new: Declared, names: list[str]) -> None:
    assert [name for name, *_ in config_changes(old, new)] == names


def test_settings_of_generation_in_the_config(demo: Path, tmp_path: Path, duat: Duat) -> None:
    (demo / GEN).unlink()
    file = tmp_path / "b.json"
    assert duat("check", demo, *QUICK, "--baseline", file, "--update-baseline").code == 0
    config(begin_suppress_tokens=[3])(demo)
    for options in (QUICK, ("--weights-only", "-q")):
        done = duat("check", demo, *options, "--baseline", file, "--json")
        assert [one["message"] for one in done.findings()] == ["config.json: begin_suppress_tokens none → [3]"]
    assert duat("check", demo, *QUICK, "--baseline", file, "--update-baseline").code == 0
    config(begin_suppress_tokens=[4])(demo)
    assert duat("check", demo, *QUICK, "--baseline", file).code == 1


def test_generation_fields_and_their_defaults() -> None:
    new = Declared({}, {"temperature": 1.0, "top_k": 5}, generation_defaults={"temperature": 1.0, "top_k": 50})
    assert list(generation_changes({}, new)) == [("top_k", 50, 5)]
    assert list(generation_changes({"top_k": 5, "top_p": 0.5}, new)) == [("top_p", 0.5, None)]


def test_lists_say_where_they_differ(tmp_path: Path, duat: Duat) -> None:
    bad.llama(tmp_path / "m")
    bad.jedit(tmp_path / "m" / bad.CFG, layer_kinds=["a"] * 9)
    file = tmp_path / "b.json"
    assert duat("check", tmp_path / "m", *QUICK, "--baseline", file, "--update-baseline").code == 0
    bad.jedit(tmp_path / "m" / bad.CFG, layer_kinds=["a", "b", "a", "b", *"aaaaa"])
    done = duat("check", tmp_path / "m", *QUICK, "--baseline", file, "--json")
    assert done.findings()[0]["message"] == "config.json: layer_kinds [1] a → b and 1 more of 9"


def test_a_baseline_without_them_finds_nothing_and_says_so_once(
    demo: Path, baseline: Path, tmp_path: Path, duat: Duat
) -> None:
    content = json.loads(baseline.read_text())
    del content["declared"], content["prompts"]["texts"], content["prompts"]["ids"]
    content["metrics"] = {key: value for key, value in content["metrics"].items() if not key.startswith("behaviour.")}
    old = tmp_path / "old.json"
    old.write_text(json.dumps({**content, "schema_version": 2, "answers": None}))
    done = duat("check", demo, *QUICK, "--baseline", old, "--json")
    assert (done.code, done.findings(), done.findings("warned")) == (0, [], [])
    assert {"drift.config", "drift.tokenizer"} <= done.rules("skipped")
    assert len([w for w in done.json["warnings"] if "schema version 2" in w]) == 1
    tokenizer(lambda c: c["model"].update(merges=[]))(demo)
    refused = duat("check", demo, *QUICK, "--baseline", old)
    refused.refused("another prompt set", "the tokenizer or the model's positions changed")
    assert "update-baseline" not in refused.stderr


def test_renewing_names_what_changed(demo: Path, baseline: Path, tmp_path: Path, duat: Duat) -> None:
    file = tmp_path / "b.json"
    shutil.copy(baseline, file)
    bad.jedit(demo / GEN, temperature=0.3)
    done = duat("check", demo, *QUICK, "--baseline", file, "--update-baseline", "--json")
    assert done.code == 0
    assert done.json["baseline"]["changes"] == [{"key": "generation.temperature", "old": None, "new": "0.3"}]


# --- an embedder's files --------------------------------------------------------------------------------------


POOLING = "1_Pooling/config.json"


def dense(folder: Path, factor: float = 1, dtype: torch.dtype = torch.float32) -> None:
    """A layer behind the pooling."""
    save_file({"linear.weight": (torch.eye(4) * factor).to(dtype)}, folder / "3_Dense" / "model.safetensors")


def without_normalising(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([one for one in modules if "Normalize" not in one["type"]]))


def of_another_type(folder: Path) -> None:
    text = (folder / "modules.json").read_text()
    (folder / "modules.json").write_text(text.replace("sentence_transformers.models.Pooling", "other.Pooling"))


def pooling_elsewhere(folder: Path) -> None:
    (folder / "pool").mkdir()
    (folder / "pool" / "config.json").write_text((folder / POOLING).read_text())
    (folder / "modules.json").write_text((folder / "modules.json").read_text().replace("1_Pooling", "pool"))


def embedder(folder: Path) -> None:
    """The files that sentence-transformers puts beside a model."""
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    chain = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "3_Dense"}
    modules = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in chain.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "3_Dense").mkdir()
    dense(folder)
    (folder / POOLING).write_text(json.dumps(modes))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"__version__": {"pytorch": "2.0"}}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda f: bad.jedit(f / POOLING, pooling_mode_mean_tokens=False, pooling_mode_cls_token=True),
            f"{POOLING}: pooling_mode_cls_token false → true; pooling_mode_mean_tokens true → false",
        ),
        (lambda f: shutil.rmtree(f / "1_Pooling"), f"{POOLING}: pooling_mode_cls_token false → none"),
        (without_normalising, "modules.json: "),
        (of_another_type, "modules.json: types [1] sentence_transformers.models.Pooling → other.Pooling"),
        (pooling_elsewhere, "1_Pooling/config.json: pooling_mode_cls_token false → none"),
        (lambda f: dense(f, -3), "3_Dense: weights "),
        (
            lambda f: bad.jedit(f / "sentence_bert_config.json", max_seq_length=8),
            "sentence_bert_config.json: max_seq_length 256 → 8",
        ),
        (
            lambda f: bad.jedit(f / "config_sentence_transformers.json", default_prompt_name="query"),
            "config_sentence_transformers.json: default_prompt_name none → query",
        ),
    ],
    ids=[
        "pooling",
        "without pooling",
        "without normalising",
        "type",
        "pooling elsewhere",
        "weights",
        "length",
        "prompt",
    ],
)
def test_files_that_make_another_vector_of_the_same_outputs(
    change: Callable[[Path], object], said: str, demo: Path, tmp_path: Path, duat: Duat
) -> None:
    embedder(demo)
    args = ("check", demo, "--weights-only", "-q", "--baseline", tmp_path / "b.json")
    assert duat(*args, "--update-baseline").code == 0
    bad.jedit(demo / "config_sentence_transformers.json", __version__={"pytorch": "3.0"})
    dense(demo, dtype=torch.bfloat16)
    assert duat(*args).code == 0
    change(demo)
    done = duat(*args, "--json")
    assert done.rules() == {"drift.config"}
    assert any(said in finding["message"] for finding in done.findings())


def test_a_layer_behind_the_pooling_that_is_not_finite(demo: Path, duat: Duat) -> None:
    embedder(demo)
    dense(demo, float("nan"))
    [finding] = duat("check", demo, "--weights-only", "-q", "--json").findings()
    assert (finding["rule"], finding["where"]) == ("integrity.nonfinite", "3_Dense/model.safetensors")


def test_an_older_baseline_knows_modules_by_the_last_part_of_their_types() -> None:
    types, paths = ["a.Transformer", "a.Dense"], [".", "2_Dense"]
    now = {"modules.json.types": types, "modules.json.paths": paths, "2_Dense.weights": "0", "x.json.length": 8}
    evidence = Evidence(None, None, declared=Declared({}, {}, embedder=Embedder(now)))  # type: ignore[arg-type]
    rule = next(rule for rule in RULES if rule.id == "drift.config")

    def found(old: dict[str, object]) -> list[str]:
        entries = {f"embedder.{name}": value for name, value in old.items()}
        return [one.text for one in rule.measure(replace(evidence, old=entries), None)]  # type: ignore[arg-type]

    assert found({"modules.json.modules": ["Transformer", "Dense"], "x.json.length": 8}) == []
    other = found({"modules.json.modules": ["Transformer", "Pooling"], "x.json.length": 8})
    assert other == ["modules.json: modules [1] Pooling → Dense"]


def test_a_baseline_that_knows_nothing_of_an_embedder(demo: Path, baseline: Path, duat: Duat) -> None:
    embedder(demo)
    assert duat("check", demo, "--weights-only", "-q", "--baseline", baseline).code == 0
    (demo / "modules.json").write_text("{}")
    duat("check", demo, "--weights-only", "-q").refused("modules.json", "expected a JSON list")


# --- a model that cannot run -----------------------------------------------------------------------------------


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    bad.build("good_moe_per_expert", tmp_path / "m")
    return tmp_path / "m"


def test_a_config_that_the_forward_pass_fails_on_is_one_line(experts: Path, duat: Duat) -> None:
    bad.jedit(experts / bad.CFG, num_experts_per_tok=9)
    duat("check", experts, "--prompt", "hello", "-q").refused(str(experts), "forward pass fails", "config.json")


def test_and_a_finding_where_the_baseline_tells_which_field(experts: Path, tmp_path: Path, duat: Duat) -> None:
    options = ("--prompt", "hello", "-q", "--baseline", tmp_path / "b.json")
    assert duat("check", experts, *options, "--update-baseline").code == 0
    bad.jedit(experts / bad.CFG, num_experts_per_tok=9)
    done = duat("check", experts, *options, "--json")
    assert (done.code, done.rules()) == (1, {"drift.config"})
    assert "num_experts_per_tok 2 → 9" in done.findings()[0]["message"]
    skipped = next(o for o in done.json["outcomes"] if o["rule"] == "exactness.certificate")
    assert "forward pass fails" in skipped["message"]
    written = (tmp_path / "b.json").read_bytes()
    duat("check", experts, *options, "--update-baseline").refused("forward pass fails")
    assert (tmp_path / "b.json").read_bytes() == written
