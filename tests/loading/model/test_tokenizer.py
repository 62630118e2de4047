"""The chat template of another folder stands in for one that is missing, and for no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from chatting import HELLO, with_chat_template

from duat_cli.errors import CheckpointError
from duat_cli.loading.chat import written
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.model.lengths import token_counter
from duat_cli.loading.model.tokenizer import template_of, templated_tokenizer
from duat_cli.loading.texts import PromptText, asked

SAID = asked(PromptText("Hello", "--prompt 1", 1))


def test_another_folder_lends_its_template_where_there_is_none(tmp_path: Path) -> None:
    folder = with_chat_template(tmp_path / "other")
    tokenizer = templated_tokenizer(demo_path(), folder)
    assert written(tokenizer, SAID) == HELLO
    expected = len(tokenizer(HELLO, add_special_tokens=False)["input_ids"])
    assert token_counter(demo_path(), None, template=folder)([SAID]) == [expected]
    own = with_chat_template(tmp_path / "own", "own: {{ messages[0].content }}")
    assert written(templated_tokenizer(own, folder), SAID) == "own: Hello"
    assert templated_tokenizer(demo_path(), tmp_path).chat_template is None  # nor has that folder one


def test_a_folder_needs_no_tokenizer_to_lend_its_template(tmp_path: Path) -> None:
    assert template_of(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ 1 }}"}', encoding="utf-8")
    assert template_of(tmp_path) == "{{ 1 }}"
    several = '{"chat_template": [{"name": "default", "template": "{{ 2 }}"}, {"name": "tool_use", "template": "t"}]}'
    (tmp_path / "tokenizer_config.json").write_text(several, encoding="utf-8")
    assert template_of(tmp_path) == {"default": "{{ 2 }}", "tool_use": "t"}
    assert templated_tokenizer(demo_path(), tmp_path).get_chat_template() == "{{ 2 }}"
    (tmp_path / "chat_template.jinja").write_text("{{ 3 }}", encoding="utf-8")
    assert template_of(tmp_path) == "{{ 3 }}"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read as UTF-8"):
        template_of(tmp_path)
