"""Prompts: where they come from, what is refused, and that the token ids fit the model."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import pytest
import torch
import transformers

from duat_cli.errors import InputError
from duat_cli.loading import prompts
from duat_cli.loading.model.tokenizer import load_tokenizer
from duat_cli.loading.prompts import default_prompts, encode, limits, open_prompts, read_prompts
from duat_cli.loading.texts import PromptText
from duat_cli.text import clean


def texts(*args: Any) -> list[str]:
    return [p.text for p in read_prompts(*args)]


def refusal(*args: Any) -> str:
    with pytest.raises(InputError) as caught:
        read_prompts(*args)
    message = str(caught.value)
    assert message == clean(message)
    return message


def stream(raw: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(raw), encoding="ascii")


# --- the bundled set ------------------------------------------------------------------------------------


def test_the_bundled_set_is_varied_and_holds_the_paper_prompts() -> None:
    bundled = [p.text for p in default_prompts()]
    assert read_prompts([], None, None) == default_prompts()
    assert bundled[-2:] == ["Nui zi created Nui zi dynamics", "Nui zi created gravitation and relativity theory"]
    assert len(set(bundled)) == len(bundled) >= 12
    words = [len(text.split()) for text in bundled[:-2] if text.isascii()]
    assert min(words) >= 20
    assert max(words) <= 90


def test_the_bundled_set_fits_a_model_of_512_positions_by_bytes() -> None:
    assert max(len(p.text.encode()) for p in default_prompts()) < 512


# --- reading --------------------------------------------------------------------------------------------


def test_options_then_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b'\xef\xbb\xbfone\r\n\n  two \n{"text": "three"}\nfour')
    read = read_prompts(["zero"], str(file), None)
    assert [p.text for p in read] == ["zero", "one", "  two ", '{"text": "three"}', "four"]
    assert [p.line for p in read] == [1, 1, 3, 4, 5]
    assert read[2].where == f"{file} line 3"


def test_a_jsonl_file_is_json_on_every_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.JSONL"
    file.write_text('{"text": "th\\nree", "id": 3}\n')
    assert texts([], str(file), None) == ["th\nree"]
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "a"}\nplain\n')
    assert "prompts.jsonl line 2: not JSON" in refusal([], str(file), None)


def test_a_brace_makes_no_json_of_a_text(tmp_path: Path) -> None:
    """Code and LaTeX begin with braces; only the file's name says that its lines are JSON."""
    lines = ["{nope", '{"text": 3}', '{"txt": "a"}']
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(lines))
    assert texts([], str(file), None) == lines
    assert texts([], "-", stream("\n".join(lines).encode())) == lines
    for name in ("prompts.json", "prompts.NDJSON"):
        (tmp_path / name).write_text('{"text": "a"}\n')
        assert "ends in .jsonl" in refusal([], str(tmp_path / name), None)


def test_standard_input_is_one_prompt_or_a_file() -> None:
    assert texts(["-"], None, stream(b"one\ntwo\n")) == ["one\ntwo"]
    assert texts(["-"], None, stream(b"\xef\xbb\xbfone\n")) == ["one"]  # with the mark that some editors put there
    assert texts([], "-", stream("one\nzwei ü\n".encode())) == ["one", "zwei ü"]
    assert texts([], "-", io.StringIO("one\n")) == ["one"]
    assert "standard input can be read once" in refusal(["-"], "-", stream(b"x"))
    assert "standard input line 2: not UTF-8" in refusal(["-"], None, stream(b"one\n\xff"))
    assert "standard input: empty" in refusal([], "-", stream(b""))
    assert "standard input: cannot be read" in refusal([], "-", None)
    closed = io.StringIO()
    closed.close()
    assert "standard input: cannot be read" in refusal([], "-", closed)


@pytest.mark.parametrize("text", ["", "  ", "\n"])
def test_an_empty_option(text: str) -> None:
    assert refusal(["fine", text], None, None).startswith("--prompt 2: empty prompt")


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"", "empty, no prompts"),
        (b"\n  \n\t\n", "only blank lines, no prompts"),
        (b"fine\ncaf\xe9\n", "line 2: not UTF-8 (byte 0xe9 at offset 3)"),
        ("text".encode("utf-16"), "line 1: not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used(raw: bytes, part: str, tmp_path: Path) -> None:
    _refused_file(tmp_path / "prompts.txt", raw, part)


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b'{"text": "fine"}\n{nope\n', "line 2: not JSON"),
        (b'{"txt": "a"}\n', 'line 1: expected an object with a "text"'),
        (b'{"text": 3}\n', 'line 1: expected a string in "text", got int'),
        (b'{"text": " "}\n', "line 1: empty prompt"),
        (b'{"text": "\\ud800"}\n', "line 1: character 1 has no UTF-8 form"),
        (b'{"a":' + b"[" * 100_000, "line 1: not JSON"),
    ],
)
def test_json_lines_that_cannot_be_used(raw: bytes, part: str, tmp_path: Path) -> None:
    _refused_file(tmp_path / "prompts.jsonl", raw, part)


def _refused_file(file: Path, raw: bytes, part: str) -> None:
    file.write_bytes(raw)
    message = refusal([], str(file), None)
    assert message.startswith(f"{file}")
    assert part in message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refusal([], str(tmp_path / "nope.txt"), None)
    assert "Is a directory" in refusal([], str(tmp_path), None)
    assert "cannot be read" in refusal([], "a\0b", None)


def test_a_file_is_read_anew_in_each_pass(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n")
    opened = open_prompts(["zero"], str(file), None)
    assert [list(opened), list(opened)] == [read_prompts(["zero"], str(file), None)] * 2
    file.write_bytes(b"one\n\xff\n")
    passing = iter(opened)
    assert [next(passing).text, next(passing).text] == ["zero", "one"]
    with pytest.raises(InputError, match="line 2: not UTF-8"):
        next(passing)


def test_what_can_be_read_once_is_held() -> None:
    opened = open_prompts([], "-", stream(b"one\ntwo\n"))
    assert [t.text for t in opened] == [t.text for t in opened] == ["one", "two"]
    assert open_prompts([], None, None) == default_prompts()


def test_texts_that_are_held_are_of_a_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_BYTES", 8)
    file = tmp_path / "prompts.txt"
    file.write_text("four\n" * 3)
    assert "more than 8 bytes" in refusal([], str(file), None)
    assert len(list(open_prompts([], str(file), None))) == 3


# --- token ids ------------------------------------------------------------------------------------------


def text(content: str) -> PromptText:
    return PromptText(content, "prompts.txt line 3", 3)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One token a byte, no special tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    bad.tokenizer(folder)
    return load_tokenizer(folder)


def test_a_prompt_is_encoded_alone(byte_tokenizer: Any) -> None:
    first, second = encode(byte_tokenizer, [text("abc"), text("é")], None, 64, bad.VOCAB)
    assert first.input_ids.shape == (1, 3)
    assert second.input_ids.shape == (1, 2)
    assert first.input_ids.dtype == torch.long
    assert (first.text, first.line) == ("abc", 3)
    assert first.sha256 == hashlib.sha256(b"abc").hexdigest()


@pytest.mark.parametrize("count", [1, 2, 64])
def test_max_tokens_keeps_the_beginning(count: int, byte_tokenizer: Any) -> None:
    (whole,) = encode(byte_tokenizer, [text("abcdefgh" * 20)], None, None, bad.VOCAB)
    (cut,) = encode(byte_tokenizer, [text("abcdefgh" * 20)], count, 64, bad.VOCAB)
    assert torch.equal(cut.input_ids, whole.input_ids[:, :count])


def test_odd_characters_are_only_text(byte_tokenizer: Any) -> None:
    assert encode(byte_tokenizer, [text(f"a\x00b{bad.ESC}\u202e\U0001f600")], None, 64, bad.VOCAB)


def encoding_refusal(tokenizer: Any, content: str, positions: int | None = 64, vocab: int = bad.VOCAB) -> str:
    with pytest.raises(InputError) as caught:
        encode(tokenizer, [text("fine"), text(content)], None, positions, vocab)
    message = str(caught.value)
    assert message.startswith("prompts.txt line 3: ")
    assert message == clean(message)
    return message


def test_a_prompt_longer_than_the_positions(byte_tokenizer: Any) -> None:
    message = encoding_refusal(byte_tokenizer, "x" * 65)
    assert "65 tokens" in message
    assert "--max-tokens 64" in message


def test_a_token_id_that_the_embedding_lacks(tmp_path: Path) -> None:
    bad.build("tok_ids_out_of_range", tmp_path / "m")
    message = encoding_refusal(load_tokenizer(tmp_path / "m"), "word39")
    assert f"token id {260 + 39} is out of the vocabulary, vocab_size {bad.VOCAB}" in message


def test_a_prompt_without_tokens() -> None:
    def silent(text: str, **settings: Any) -> Any:
        return {"input_ids": [1] if text == "fine" else []}

    assert "makes no tokens" in encoding_refusal(silent, "x")


def test_a_tokenizer_that_fails_or_panics() -> None:
    panic = type("PanicException", (BaseException,), {})

    def failing(text: str, **settings: Any) -> Any:
        if text == "fine":
            return {"input_ids": [1]}
        raise panic("no entry\nfound") if text == "panic" else KeyError("added")

    assert "the tokenizer fails: PanicException: no entry found" in encoding_refusal(failing, "panic")
    assert "the tokenizer fails: KeyError" in encoding_refusal(failing, "x")


def test_what_a_tokenizer_file_asks_for_is_not_done(tmp_path: Path) -> None:
    """tokenizer.json may hold padding and truncation of its own, and a side to cut from."""
    bad.tokenizer(tmp_path, truncation_side="left", padding_side="left")
    file = tmp_path / "tokenizer.json"
    cut = {"direction": "Left", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    pad = {
        "strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 259, "pad_type_id": 0, "pad_token": "<pad>",
    }  # fmt: skip
    bad.jedit(file, truncation=cut, padding=pad)
    tokenizer = load_tokenizer(tmp_path)
    (whole,) = encode(tokenizer, [text("abcdefgh")], None, 64, bad.VOCAB)
    (short,) = encode(tokenizer, [text("abcdefgh")], 2, 64, bad.VOCAB)
    assert whole.input_ids.shape == (1, 8)
    assert torch.equal(short.input_ids, whole.input_ids[:, :2])


# --- what a model can read ------------------------------------------------------------------------------


def tiny(name: str, **fields: Any) -> Any:
    small = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = getattr(transformers, f"{name}Config")(**{**small, "num_attention_heads": 2, **fields})
    return getattr(transformers, f"{name}Model")(config).eval()


@pytest.mark.parametrize(
    ("name", "fields", "tokens"),
    [("Bert", {}, 20), ("Roberta", {"pad_token_id": 1}, 18), ("OPT", {"ffn_dim": 16, "word_embed_proj_dim": 16}, 20)],
)
def test_the_longest_prompt_runs_and_a_longer_one_cannot(name: str, fields: dict[str, int], tokens: int) -> None:
    model = tiny(name, max_position_embeddings=20, **fields)
    assert limits(model).max_positions == tokens
    assert limits(model).vocab_size == 50
    ids = torch.full((1, tokens + 1), 7)
    assert torch.isfinite(model(ids[:, :-1]).last_hidden_state).all()
    with pytest.raises((IndexError, RuntimeError)):
        model(ids)


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        ({"rope_type": "default"}, 20),
        ({"rope_type": "linear", "factor": 4.0}, 80),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10}, 20),
        ({"rope_type": "dynamic", "factor": 4.0}, 20),
    ],
)
def test_positions_that_are_scaled_linearly_are_more_than_are_stated(scaling: dict[str, Any], tokens: int) -> None:
    model = tiny("Llama", max_position_embeddings=20, rope_parameters={"rope_theta": 1e4, **scaling})
    assert limits(model).max_positions == tokens
    assert torch.isfinite(model(torch.full((1, tokens), 7)).last_hidden_state).all()


def test_dynamic_positions_past_what_is_stated_depend_on_what_ran_before(byte_tokenizer: Any) -> None:
    scaling = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}
    model = tiny("Llama", max_position_embeddings=20, rope_parameters=scaling)
    ids = torch.arange(30)[None]
    model(ids)
    alone = model.rotary_emb.inv_freq.clone()
    model(torch.full((1, 40), 7))
    model(ids)
    assert not torch.allclose(model.rotary_emb.inv_freq, alone, rtol=1e-2)
    room = limits(model)
    with pytest.raises(InputError, match="20 positions before its dynamic rotary frequencies begin to depend on"):
        encode(byte_tokenizer, [text("x" * 21)], None, room.max_positions, room.vocab_size, room.why)


def test_a_model_without_positions_has_no_limit() -> None:
    model = tiny("Bloom", n_head=2, n_layer=1)
    assert limits(model).max_positions is None


def test_the_rows_of_codebooks_count_and_not_what_the_config_states() -> None:
    """MusicGen's have one more, for where nothing is said yet."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MusicgenDecoderConfig(**sizes, num_codebooks=2, bos_token_id=50, pad_token_id=50)
    model = transformers.MusicgenForCausalLM(config)
    assert limits(model).vocab_size == 51
    assert torch.isfinite(model(torch.full((2, 3), 50)).logits).all()
