"""Conversations as the text that a model reads, by the chat template of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from duat_cli.compat.transformers import stopped_clock
from duat_cli.errors import CheckpointError
from duat_cli.loading.quiet import calling_tokenizer
from duat_cli.loading.texts import MESSAGES, TOOLS, PromptText

Message = dict[str, Any]
USER, ANSWER = "user", "assistant"  # roles


def written(by: Any, text: PromptText, pictures: int = 0) -> str:
    """A conversation as the checkpoint's template writes it out, special tokens included; a text as it is.

    by: a tokenizer, or a processor. Behind a message that is not the model's own stands what opens its answer. A
    template that asks for the date is told a fixed one, so that two runs read the same. pictures: how many stand in
    front of the user's first message, unless messages name their own. Some templates take contents as texts, some as
    lists of parts: the form is taken in which what the user says is written.
    """
    if not text.conversation:
        return text.text
    if not getattr(by, "chat_template", None):
        raise CheckpointError(
            f"{text.where}: the checkpoint has no chat template (chat_template.jinja), so it says nowhere how a "
            "conversation is written; give texts, without --chat"
        )
    said = text.said
    messages, tools = said[MESSAGES], said.get(TOOLS)
    opened = messages[-1]["role"] != ANSWER
    asked = {"tokenize": False, "add_generation_prompt": opened} | ({} if tools is None else {TOOLS: tools})

    def render(form: Sequence[Message]) -> str:
        with calling_tokenizer(f"{text.where}: the chat template fails"), stopped_clock():
            return str(by.apply_chat_template(list(form), **asked))

    fault = None
    for form in _forms(messages, pictures):
        try:
            found = render(form)
        except CheckpointError as error:
            fault = fault or error
            continue
        if _hears(render, form, found):
            return found
        fault = CheckpointError(f"{text.where}: the chat template leaves out what the user says; give a text")
    assert fault is not None
    raise fault


def _forms(messages: list[Message], pictures: int) -> list[list[Message]]:
    """Contents as they are, and as lists of parts; pictures in front of what the user says first."""
    parts = [{**message, "content": _parts(message)} for message in messages]
    named = any(isinstance(part, dict) and part.get("type") == "image" for one in parts for part in one["content"])
    if not pictures or named:
        return [messages, parts]
    first = next((k for k, message in enumerate(messages) if message["role"] == USER), 0)
    shown = {**parts[first], "content": [*({"type": "image"} for _ in range(pictures)), *parts[first]["content"]]}
    return [[*some[:first], shown, *some[first + 1 :]] for some in (parts, messages)]


def _parts(message: Message) -> list[Any]:
    content = message.get("content") or ""
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _hears(render: Callable[[Sequence[Message]], str], form: list[Message], found: str) -> bool:
    """Whether what the user says last is in the text that was written; a template that cleans contents writes another
    text of another content."""
    place = max((k for k, message in enumerate(form) if message["role"] == USER), default=None)
    if place is None:
        return True
    texts = [part.get("text") for part in _parts(form[place]) if isinstance(part, dict)]
    if all(text.strip() in found for text in texts if isinstance(text, str)):
        return True
    own = form[place]["content"]
    other = f"{own} {ANSWER}" if isinstance(own, str) else [*own, {"type": "text", "text": ANSWER}]
    return render([*form[:place], {**form[place], "content": other}, *form[place + 1 :]]) != found
