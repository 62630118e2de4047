"""Conversations as the text that a model reads, written by the chat template of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from duat_cli.compat.transformers import stopped_clock
from duat_cli.errors import CheckpointError, needed
from duat_cli.loading.quiet import calling_tokenizer
from duat_cli.loading.texts import MESSAGES, TOOLS, PromptText

Message = dict[str, Any]
USER, ANSWER = "user", "assistant"  # roles
_PLACE = "\ue000"  # a character that no language uses, in the place of what was said


def written(by: Any, text: PromptText, pictures: int = 0) -> str:
    """A conversation as the checkpoint's template writes it, special tokens included; a plain text unchanged.

    by: a tokenizer, or a processor. If the last message is not the model's own, the opening of its answer follows. A
    template that asks for the date gets a fixed one, so that two runs read the same. pictures: number of pictures in
    front of the user's first message, unless messages name their own. Some templates take contents as texts, some as
    lists of parts: the form is used in which the user's message appears in the result.
    """
    return as_written(by, text, pictures).text


@dataclass(frozen=True)
class Written:
    """A conversation as it was written out, or a plain text."""

    text: str
    _form: list[Message]
    """The messages, in the form in which the user's text appears in the result; empty for a plain text."""
    _render: Callable[[Sequence[Message]], str]

    def answered(self) -> list[tuple[int, int]] | None:
        """Spans of the model's own messages in the text, (first character, one behind the last): contents of assistant
        messages, without what the template puts around them. None where the template does not show them."""
        form, found, spans = self._form, self.text, []
        for place, message in enumerate(form):
            if message["role"] != ANSWER or not message.get("content"):
                continue
            own: Any = _PLACE if isinstance(message["content"], str) else [{"type": "text", "text": _PLACE}]
            try:
                shown = self._render([*form[:place], {**message, "content": own}, *form[place + 1 :]])
            except CheckpointError:
                return None
            if shown == found:  # the template leaves it out, as some do with earlier answers
                continue
            if shown.count(_PLACE) != 1:
                return None
            before, after = shown.split(_PLACE)
            start, end = _common(found, before), len(found) - _common(found[::-1], after[::-1])
            if start < end:
                spans.append((start, end))
        return spans


def _common(a: str, b: str) -> int:
    """Length of the common prefix of two texts."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def as_written(by: Any, text: PromptText, pictures: int = 0) -> Written:
    """The text of `written`, with what is needed to find the model's own messages in it."""
    if not text.conversation:
        return Written(text.text, [], lambda _: text.text)
    if not getattr(by, "chat_template", None):
        raise CheckpointError(
            f"{text.where}: the checkpoint has no chat template (chat_template.jinja), so it says nowhere how a "
            "conversation is written; give plain texts, not messages or --chat"
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
            return Written(found, form, render)
        fault = CheckpointError(f"{text.where}: the chat template leaves out what the user says; give a text")
    raise needed(fault)


def _forms(messages: list[Message], pictures: int) -> list[list[Message]]:
    """The messages in two forms: contents as they are, and as lists of parts. Pictures come in front of the user's
    first text."""
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
    """Whether the user's last message is in the written text. A template that alters contents counts too, if another
    content gives another text."""
    place = max((k for k, message in enumerate(form) if message["role"] == USER), default=None)
    if place is None:
        return True
    texts = [part.get("text") for part in _parts(form[place]) if isinstance(part, dict)]
    if all(text.strip() in found for text in texts if isinstance(text, str)):
        return True
    own = form[place]["content"]
    other = f"{own} {ANSWER}" if isinstance(own, str) else [*own, {"type": "text", "text": ANSWER}]
    return render([*form[:place], {**form[place], "content": other}, *form[place + 1 :]]) != found
