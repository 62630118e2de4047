"""The chat template of another folder stands in for one that is missing, and for no other."""

from __future__ import annotations

from pathlib import Path

from chatting import HELLO, with_chat_template

from duat_cli.loading.chat import written
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.model.lengths import token_counter
from duat_cli.loading.model.templated import templated_tokenizer
from duat_cli.loading.texts import PromptText, asked

SAID = asked(PromptText("Hello", "--prompt 1", 1))


def test_another_folder_lends_its_template_where_there_is_none(tmp_path: Path) -> None:
    folder = with_chat_template(tmp_path / "other")
    tokenizer = templated_tokenizer(demo_path(), folder)
    assert written(tokenizer, SAID) == HELLO
    expected = len(tokenizer(HELLO, add_special_tokens=False)["input_ids"])
    assert token_counter(demo_path(), None, template=folder)([SAID]) == [expected]
    own = with_chat_template(tmp_path / "own", "{{ 'own' }}")
    assert written(templated_tokenizer(own, folder), SAID) == "own"
    assert templated_tokenizer(demo_path(), tmp_path).chat_template is None  # nor has that folder one
