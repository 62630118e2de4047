"""Texts to run: what stands behind what, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from duat_cli.analysis.compare.request import behind, texts_of
from duat_cli.errors import InputError
from duat_cli.loading.inputs.request import InputFiles


def of(**given: Any) -> Any:
    files, chat = given.pop("files", None), given.pop("chat", False)
    texts = (given.get(name) for name in ("prompts", "file", "shared", "prefixes", "answer"))
    return texts_of(*texts, files=files, chat=chat)


def test_the_first_prompt_is_compared_with_every_other() -> None:
    found = of(prompts=["a", "b", "c"])
    assert [text.text for text in found.texts] == ["a", "b", "c"]
    assert (found.runs, found.pairs, found.alone) == (3, [(0, 1), (0, 2)], None)


def test_of_pictures_their_names_stand_for_them() -> None:
    found = of(files=InputFiles(images=("a.png", "b.png"), tensors=("c.safetensors",)))
    assert [text.where for text in found.texts] == ["--image a.png", "--image b.png", "--inputs c.safetensors"]
    assert (found.runs, found.pairs, found.made_up) == (3, [(0, 1), (0, 2)], False)


def test_one_prompt_is_the_text_of_every_picture() -> None:
    found = of(prompts=["What is <image>?"], files=InputFiles(images=("a.png", "b.png")))
    assert [text.where for text in found.texts] == ["--image a.png", "--image b.png"]
    assert [text.text for text in found.question] == ["What is <image>?"]


def test_without_prompts_the_papers_own_two_run() -> None:
    assert [text.text for text in of().texts] == [
        "Nui zi created Nui zi dynamics",
        "Nui zi created gravitation and relativity theory",
    ]


def test_pairs_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"a": "x", "b": "y"}\n\n{"b": "w", "a": "z"}\n', encoding="utf-8")
    found = of(file=str(file))
    assert [text.text for text in found.texts] == ["x", "y", "z", "w"]
    assert found.pairs == [(0, 1), (2, 3)]
    assert found.texts[3].where == f"{file} line 3, b"


def test_one_context_is_compared_with_none_and_several_with_the_first() -> None:
    one = of(shared="S", prefixes=["P"])
    assert [text.text for text in one.texts] == ["S", "P\nS"]
    assert (one.runs, one.pairs, one.alone) == (2, [(0, 1)], 0)
    two = of(shared="S", prefixes=["P", "Q "])
    assert [text.text for text in two.texts] == ["P\nS", "Q S", "S"]
    assert (two.runs, two.pairs, two.alone) == (2, [(0, 1)], 2)
    bare = of(shared="S", prefixes=["", "Q"])
    assert [text.text for text in bare.texts] == ["S", "Q\nS", "S"]


def test_white_space_is_left_as_it_is() -> None:
    assert behind("", "S") == "S"
    assert behind("P", " S") == "P S"
    assert behind("P\t", "S") == "P\tS"
    assert behind("P", "S", " ") == "P S"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompts": ["a"]}, "one prompt has nothing to be compared with"),
        ({"prompts": ["a", " "]}, "empty prompt"),
        ({"prompts": ["a", "b"], "shared": "S"}, "--prompt and --shared"),
        ({"file": "x.jsonl", "prompts": ["a"]}, "--prompt and --prompts"),
        ({"prefixes": ["P"]}, "--prefix: stands beside --shared"),
        ({"prompts": ["a", "b"], "answer": "x"}, "--answer: stands beside --shared"),
        ({"shared": "S"}, "--shared: give a --prefix"),
        ({"shared": " ", "prefixes": ["P"]}, "--shared: empty"),
        ({"shared": "S", "prefixes": ["P"], "answer": ""}, "--answer: empty"),
        ({"shared": "S", "prefixes": [""], "answer": "x"}, "--prefix: empty"),
        ({"file": "pairs.txt"}, "pairs of prompts are read from JSON lines"),
        ({"file": "nowhere.jsonl"}, "cannot be read"),
        ({"files": InputFiles(images=("a.png",))}, r"--image a\.png: one input has nothing to be compared with"),
        ({"files": InputFiles(images=("a", "b")), "prompts": ["a", "b"]}, "--image and --prompt: compare reads texts"),
        ({"files": InputFiles(sounds=("a", "b")), "prompts": ["a"]}, "--audio and --prompt: compare reads texts, or"),
        ({"files": InputFiles(sounds=("a", "b")), "shared": "S"}, "--audio and --shared: compare reads texts, or"),
        ({"files": InputFiles(sounds=("a", "b")), "file": "x.jsonl"}, "--audio and --prompts: compare reads texts"),
        ({"files": InputFiles(images=("a", "b")), "chat": True}, "--chat: a template stands around a text"),
    ],
)
def test_what_cannot_be_compared_is_one_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        of(**given)
    assert "\n" not in str(refused.value)
