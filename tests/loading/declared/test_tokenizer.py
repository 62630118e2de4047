"""What a tokenizer is: the same for the same tokenizer in other bytes, and another one for each part that changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.declared.tokenizer import (
    DIGITS,
    TokenizerFacts,
    range_length,
    texts_hash,
    tokenizer_facts,
    tokens_hash,
)
from duat_cli.loading.model.tokenizer import load_tokenizer
from duat_cli.loading.prompts import default_prompts

TEXTS = ["the cat", " two  spaces\n", "größer 漢字 🙂"]
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in demo_path().glob("*token*"):
        shutil.copy(file, tmp_path)
    return tmp_path


def facts(folder: Path, texts: list[str] = TEXTS) -> TokenizerFacts:
    return tokenizer_facts(load_tokenizer(folder), folder, texts)


def changed(folder: Path, change: Change, name: str = "tokenizer.json") -> TokenizerFacts:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    return facts(folder)


def test_the_demo(folder: Path) -> None:
    found = facts(folder, [p.text for p in default_prompts()])
    assert found.size == len(found.vocabulary) == 2048
    assert found.roles == {"bos_token": 0, "eos_token": 1}
    assert found.special == {0, 1}
    assert (found.starts_with_bos, found.lost, found.template) == (True, (), "")


def test_other_bytes_of_the_same_tokenizer_are_the_same(folder: Path) -> None:
    before = facts(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]  # as older files have them
    (folder / "tokenizer.json").write_text(json.dumps(dict(reversed(content.items())), indent=7))
    assert facts(folder) == before
    assert facts(folder).ranges(2048) == before.ranges(2048)


def _swap(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    one, other = (token for token, number in vocabulary.items() if number in (700, 900))
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (_swap, {"vocabulary"}),
        (lambda c: c["model"].update(merges=c["model"]["merges"][:-1]), {"merges"}),
        (lambda c: c.update(normalizer={"type": "Lowercase"}), {"normaliser"}),
        (lambda c: c["pre_tokenizer"].update(add_prefix_space=True), {"pre-tokenizer"}),
        (lambda c: c.update(post_processor=None), {"post-processor"}),
        (lambda c: c.update(decoder=None), {"decoder"}),
        (lambda c: c["model"].update(ignore_merges=True), {"model"}),
        (lambda c: c["added_tokens"][1].update(lstrip=True), {"added tokens"}),
        (
            lambda c: c["added_tokens"].append({**c["added_tokens"][0], "id": 2048, "content": "<x>"}),
            {"added tokens", "vocabulary"},
        ),
    ],
)
def test_each_part_on_its_own(change: Change, parts: set[str], folder: Path) -> None:
    before, after = facts(folder).parts, changed(folder, change).parts
    assert {name for name in before if before[name] != after[name]} == parts


def test_ranges_say_where_two_vocabularies_differ(folder: Path) -> None:
    before, after = facts(folder).ranges(2048), changed(folder, _swap).ranges(2048)
    pairs = range(0, len(before), DIGITS)
    differ = [at // DIGITS for at in pairs if before[at : at + DIGITS] != after[at : at + DIGITS]]
    step = range_length(2048)
    assert differ == [700 // step, 900 // step]


def test_a_template_and_settings(folder: Path) -> None:
    before = facts(folder)
    after = changed(folder, lambda c: c.update(chat_template="{{ x }}", padding_side="left"), "tokenizer_config.json")
    assert (before.template, after.template) == ("", "{{ x }}")
    assert before.parts["chat template"] != after.parts["chat template"]
    assert (before.fields["padding_side"], after.fields["padding_side"]) == ("right", "left")


def test_placeholders_of_other_modalities(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    extended = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", extra_special_tokens={"image_token": "<image>"}
    )
    found = tokenizer_facts(extended, folder, [])
    assert [found.vocabulary[i] for i in found.placeholders] == ["<image>"]
    assert extended.convert_tokens_to_ids("<turn>") not in found.placeholders


# --- the round trip ---------------------------------------------------------------------------------------------


def made(model: Any, **parts: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def test_a_word_piece_tokenizer_claims_nothing(tmp_path: Path) -> None:
    words = models.WordPiece({"[UNK]": 0, "the": 1, "cat": 2}, unk_token="[UNK]")
    lower = made(words, normalizer=normalizers.BertNormalizer(), pre_tokenizer=pre_tokenizers.BertPreTokenizer())
    assert tokenizer_facts(lower, tmp_path, ["The Cat!"]).lost == ()


def _bytes(normaliser: Any = None, *, missing: str = "") -> PreTrainedTokenizerFast:
    alphabet = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c != missing]
    model = models.BPE({c: n for n, c in enumerate([*alphabet, "[UNK]"])}, [])
    parts = {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False), "decoder": decoders.ByteLevel()}
    return made(model, **parts, **({"normalizer": normaliser} if normaliser else {}))


def test_bytes_come_back_and_what_the_normaliser_changes_is_meant(tmp_path: Path) -> None:
    for tokenizer in (_bytes(), _bytes(normalizers.Lowercase()), _bytes(normalizers.NFC())):
        assert tokenizer_facts(tokenizer, tmp_path, ["The Cat!", "e\u0301", *TEXTS]).lost == ()
        tokenizer.backend_tokenizer.decoder = decoders.Fuse()
        assert tokenizer_facts(tokenizer, tmp_path, TEXTS).lost == tuple(TEXTS)


def test_without_all_256_bytes_nothing_is_claimed(tmp_path: Path) -> None:
    assert tokenizer_facts(_bytes(missing="a"), tmp_path, ["a"]).lost == ()


def test_texts_that_are_lost_are_found(folder: Path) -> None:
    found = changed(folder, lambda c: c.update(decoder=None))
    assert found.lost == tuple(TEXTS)


def test_marks_for_spaces_come_back(tmp_path: Path) -> None:
    """As sentencepiece has them: a mark in front and for each space, bytes where there is no token."""
    vocabulary = {token: n for n, token in enumerate(["[UNK]", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", "a"])}
    model = models.BPE(vocabulary, [], byte_fallback=True, unk_token="[UNK]")
    tokenizer = made(
        model,
        normalizer=normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        decoder=decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )
    texts = ["a a", "größer 漢字"]
    assert tokenizer_facts(tokenizer, tmp_path, texts).lost == ()
    tokenizer.backend_tokenizer.decoder = decoders.ByteFallback()
    assert tokenizer_facts(tokenizer, tmp_path, texts).lost == tuple(texts)


def test_truncation_of_an_earlier_call_changes_nothing(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer(TEXTS[0], truncation=True, max_length=1)
    assert tokenizer_facts(tokenizer, folder, TEXTS) == facts(folder)


def test_hashes_of_texts_and_tokens() -> None:
    assert texts_hash(["a", "b"], None) != texts_hash(["b", "a"], None)
    assert texts_hash(["a"], None) != texts_hash(["a"], 5)
    assert tokens_hash([[1, 2], [3]]) != tokens_hash([[1], [2, 3]])
    assert tokens_hash([[1, 2]]) == tokens_hash([(1, 2)])
