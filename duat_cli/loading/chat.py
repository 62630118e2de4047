"""Conversations as the text that a model reads, by the chat template of its checkpoint."""

from __future__ import annotations

import json
from typing import Any

from duat_cli.compat.transformers import stopped_clock
from duat_cli.errors import CheckpointError, InputError
from duat_cli.loading.quiet import calling_tokenizer
from duat_cli.loading.texts import MESSAGES, TOOLS, PromptText

ANSWER = "assistant"  # the role of a model's own messages


def written(by: Any, text: PromptText, pictures: int = 0) -> str:
    """A conversation as the checkpoint's template writes it out, special tokens included; a text as it is.

    by: a tokenizer, or a processor. Behind a message that is not the model's own stands what opens its answer. A
    template that asks for the date is told a fixed one, so that two runs read the same. pictures: how many stand in
    front of the user's first message, unless messages name their own.
    """
    if not text.conversation:
        return text.text
    if not getattr(by, "chat_template", None):
        raise CheckpointError(
            f"{text.where}: the checkpoint has no chat template (chat_template.jinja), so it says nowhere how a "
            "conversation is written; give texts, without --chat"
        )
    said = json.loads(text.text)
    messages = _with_pictures(said[MESSAGES], pictures)
    opened = messages[-1]["role"] != ANSWER
    tools = {TOOLS: said[TOOLS]} if TOOLS in said else {}
    with calling_tokenizer(f"{text.where}: the chat template fails", InputError), stopped_clock():
        return str(by.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened, **tools))


def _with_pictures(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    if not count or any(isinstance(part, dict) and part.get("type") == "image" for part in parts):
        return messages
    first = next((k for k, message in enumerate(messages) if message["role"] == "user"), 0)
    content = messages[first].get("content") or ""
    said = content if isinstance(content, list) else [{"type": "text", "text": content}]
    shown = {**messages[first], "content": [*({"type": "image"} for _ in range(count)), *said]}
    return [*messages[:first], shown, *messages[first + 1 :]]
