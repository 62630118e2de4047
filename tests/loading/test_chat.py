"""Conversations are written as transformers writes them, and become the tokens that it gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chatting import HELLO, with_chat_template
from picture_texts import KINDS, MARK, save_llava
from PIL import Image

import duat_cli
from duat_cli.errors import CheckpointError, InputError
from duat_cli.loading.chat import as_written, written
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.inputs.within import with_pictures
from duat_cli.loading.model.lengths import token_counter
from duat_cli.loading.model.tokenizer import load_tokenizer
from duat_cli.loading.prompts import encode, read_prompts
from duat_cli.loading.texts import PromptText, asked, conversation
from duat_cli.text import clean

USER = {"role": "user", "content": "Where is Paris?"}
TOOL = {"type": "function", "function": {"name": "map", "parameters": {}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(tmp_path_factory.mktemp("chat") / "model")


def talk(*messages: dict[str, Any], tools: Any = None) -> PromptText:
    return conversation(list(messages), "here", 1, tools)


@pytest.mark.parametrize("answered", [False, True])
def test_the_tokens_are_those_of_transformers(folder: Path, answered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "system", "content": "Be brief: é 🙂."}, USER]
    messages += [{"role": "assistant", "content": "In France."}] if answered else []
    [prompt] = encode(tokenizer, [talk(*messages, tools=[TOOL])], None, None, 1 << 20)
    tokenizer.chat_template = tokenizer.chat_template.replace('strftime_now("%d %b %Y")', '"26 Jul 2024"')
    expected = tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=not answered)
    assert prompt.input_ids[0].tolist() == expected["input_ids"]
    assert prompt.input_ids[0].tolist().count(tokenizer.bos_token_id) == 1
    assert prompt.text.endswith("In France.</s>\n" if answered else "</s>\n<|assistant|>\n")
    assert prompt.spans is not None
    assert prompt.text[slice(*prompt.spans[-1])] == "\n"
    assert prompt.messages == talk(*messages, tools=[TOOL]).text
    assert token_counter(folder, None)([talk(*messages, tools=[TOOL])]) == [len(expected["input_ids"])]


def test_a_text_is_what_a_user_says_and_a_conversation_stays(folder: Path) -> None:
    text = asked(PromptText("Hello", "--prompt 1", 1))
    assert written(load_tokenizer(folder), text) == HELLO
    assert asked(text) is text
    plain = PromptText("{{ bos_token }}", "--prompt 1", 1)
    assert written(None, plain) == plain.text
    assert [p.conversation for p in read_prompts(["Hello"], None, None, chat=True)] == [True]
    with pytest.raises(InputError, match="--prompt 1: token ids; a chat template writes out texts"):
        asked(PromptText("#5", "--prompt 1", 1, (5,)))


def test_where_there_is_no_template_or_it_fails(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="here: the checkpoint has no chat template") as caught:
        written(load_tokenizer(demo_path()), talk(USER))
    assert str(caught.value).endswith("give plain texts, not messages or --chat")
    with pytest.raises(CheckpointError, match="no chat template"):
        token_counter(demo_path(), None)([talk(USER)])
    refusing = with_chat_template(tmp_path / "refusing", "{{ raise_exception('roles must alternate\x1b[2J') }}")
    with pytest.raises(CheckpointError, match=r"here: the chat template fails: .*roles must alternate") as caught:
        written(load_tokenizer(refusing), talk(USER))
    assert str(caught.value) == clean(str(caught.value))


class Parts:
    """A processor that gives the content of each message back; `refused`: a type of content."""

    chat_template = "given"

    def __init__(self, refused: type = bytes) -> None:
        self._refused = refused

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> str:
        if any(isinstance(message["content"], self._refused) for message in messages):
            raise TypeError("such content")
        return json.dumps([message["content"] for message in messages], ensure_ascii=False)


def test_pictures_stand_in_front_of_what_the_user_says_first() -> None:
    def parts(text: str) -> dict[str, str]:
        return {"type": "text", "text": text}

    said: list[dict[str, Any]] = [{"role": "system", "content": "Look."}, USER, {"role": "assistant", "content": "?"}]
    image, words = {"type": "image"}, parts(USER["content"])
    expected = [[parts("Look.")], [image, image, words], [parts("?")]]
    assert json.loads(written(Parts(), talk(*said), 2)) == expected
    placed = [{"role": "user", "content": [words, image]}]
    assert json.loads(written(Parts(), talk(*placed), 1)) == [[words, image]]  # where the messages say
    assert json.loads(written(Parts(), talk({"role": "user", "content": [words]}), 1)) == [[image, words]]


def test_the_form_of_contents_is_that_in_which_the_user_is_heard(tmp_path: Path) -> None:
    assert json.loads(written(Parts(), talk(USER))) == [USER["content"]]
    odd = {"role": "user", "content": [{"type": "text"}, "bare", {"type": "image", "text": None}]}
    assert json.loads(written(Parts(), talk(odd))) == [odd["content"]]
    assert json.loads(written(Parts(str), talk(USER))) == [[{"type": "text", "text": USER["content"]}]]
    with pytest.raises(CheckpointError, match="here: the chat template fails: TypeError: such content"):
        written(Parts(object), talk(USER))
    typed = (
        "{% for m in messages %}{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}"
    )
    listing = load_tokenizer(with_chat_template(tmp_path / "listing", typed + "{% endfor %}"))
    assert written(listing, talk(USER)) == USER["content"]
    cleaning = load_tokenizer(
        with_chat_template(tmp_path / "clean", "{{ messages[-1].content | replace('Paris', 'P') }}")
    )
    assert written(cleaning, talk(USER)) == "Where is P?"
    deaf = load_tokenizer(with_chat_template(tmp_path / "deaf", "{{ bos_token }}answer:"))
    with pytest.raises(CheckpointError, match="here: the chat template leaves out what the user says"):
        written(deaf, talk(USER))


TALK = [
    USER,
    {"role": "assistant", "content": "In  France. "},
    USER,
    {"role": "assistant", "content": "There, I said."},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ SAID }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {  # name -> what stands for a message's content, and what the model is then seen to say
    "whole": ("m.content", ["In  France. ", "There, I said."]),
    "trimmed": ("m.content | trim", ["In  France.", "There, I said."]),
    "last one thinks": (  # as Qwen 3 does
        "('<think>\n\n</think>\n\n' if loop.last and m.role == 'assistant' else '') + m.content",
        ["In  France. ", "There, I said."],
    ),
    "only the last": ("m.content if loop.last or m.role == 'user' else ''", ["There, I said."]),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_model_itself_says_is_found(name: str, tmp_path: Path) -> None:
    said, expected = TEMPLATES[name]
    tokenizer = load_tokenizer(with_chat_template(tmp_path / "model", CHATML.replace("SAID", said)))
    spans = as_written(tokenizer, talk(*TALK)).answered()
    assert spans is not None
    text = written(tokenizer, talk(*TALK))
    assert [text[slice(*span)] for span in spans] == expected
    [prompt] = encode(tokenizer, [talk(*TALK)], None, None, 1 << 20)
    assert prompt.answered is not None
    read = tokenizer.decode(prompt.input_ids[0, list(prompt.answered)])
    assert read.replace("<", "") == "".join(expected)  # this tokenizer joins a blank with what stands behind it
    [cut] = encode(tokenizer, [talk(*TALK)], prompt.answered[3] + 1, None, 1 << 20)
    assert cut.answered == prompt.answered[:4]


def test_thoughts_that_a_template_keeps_are_said_by_the_model(tmp_path: Path) -> None:
    keeps = "{% set parts = m.content.split('</think>') %}{% if parts[1:] %}{{ parts[0] }}</think>\n{% endif %}"
    template = CHATML.replace("{{ SAID }}", keeps + "{{ parts[-1] }}")
    tokenizer = load_tokenizer(with_chat_template(tmp_path / "model", template))
    said = talk(USER, {"role": "assistant", "content": "<think>Hm.</think>There."})
    [span] = as_written(tokenizer, said).answered() or []
    assert written(tokenizer, said)[slice(*span)] == "<think>Hm.</think>\nThere."


def test_what_the_model_says_is_not_guessed(tmp_path: Path) -> None:
    for number, said in enumerate(("m.content + m.content", "raise_exception('no') if '\ue000' in m.content else 'x'")):
        tokenizer = load_tokenizer(with_chat_template(tmp_path / str(number), CHATML.replace("SAID", said)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("duat_cli.loading.chat._hears", lambda *_: True)
            assert as_written(tokenizer, talk(*TALK)).answered() is None
            [prompt] = encode(tokenizer, [talk(*TALK)], None, None, 1 << 20)
        assert prompt.answered is None
    parts = [{"type": "text", "text": "There."}]
    assert json.loads(written(Parts(str), talk(USER, {"role": "assistant", "content": "There."})))[1] == parts
    [span] = as_written(Parts(str), talk(USER, {"role": "assistant", "content": "There."})).answered() or []
    assert written(Parts(str), talk(USER, {"role": "assistant", "content": "There."}))[slice(*span)] == "There."
    assert as_written(Parts(), talk(USER)).answered() == []
    assert as_written(Parts(), talk(USER, {"role": "assistant", "content": ""})).answered() == []
    [plain] = encode(load_tokenizer(demo_path()), [PromptText("a text", "here", 1)], None, None, 1 << 20)
    assert plain.answered == ()


@pytest.mark.parametrize("begins", ["<s>", ""])
def test_a_text_with_a_picture_begins_once(begins: str, tmp_path: Path) -> None:
    save_llava(tmp_path)
    turn = begins + "{% for part in messages[0].content %}{{ part.text or '<image>' }} {% endfor %}USER"
    (tmp_path / "chat_template.jinja").write_text(turn, encoding="utf-8")
    picture = Image.new("RGB", (20, 20), (200, 80, 10))
    [made] = with_pictures(
        [asked(PromptText("What is a cat ?", "here", 1))], [picture], tmp_path, False, KINDS["llava"]()
    )
    ids = made.tensors["input_ids"][0].tolist()
    assert ids[:2].count(1) == ids.count(1) == (1 if begins else 0)  # this tokenizer adds none by itself
    assert MARK in ids
    assert made.text.text == f"{begins}<image> What is a cat ? USER"


def test_python_takes_messages_and_chat(folder: Path) -> None:
    say = [{"role": "user", "content": "Hello"}]
    for report in (
        duat_cli.verify(folder, prompts=[say]),
        duat_cli.verify(folder, prompts=say),
        duat_cli.verify(folder, prompts="Hello", chat=True),
    ):
        ids = load_tokenizer(folder)(HELLO, add_special_tokens=False)["input_ids"]
        plain = duat_cli.verify(folder, prompts=[torch.tensor(ids)])
        assert [p.tokens for p in report.prompts] == [len(ids)]
        assert report.blocks == plain.blocks
    with pytest.raises(InputError, match=r"prompts\[0\]: message 1: expected an object with a \"role\""):
        duat_cli.verify(folder, prompts=[[{"content": "Hello"}]])
    with pytest.raises(InputError, match=r"prompts\[0\]: token ids"):
        duat_cli.verify(folder, prompts=[[5, 6]], chat=True)
