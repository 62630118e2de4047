"""A checkpoint that follows a chat template: the short demo with one, which states the date as Llama 3's do."""

from __future__ import annotations

from pathlib import Path

from short_demo import short_demo

CHAT_TEMPLATE = """\
{{- bos_token }}
{{- "Today is " + strftime_now("%d %b %Y") + ".\\n" }}
{%- if tools %}{{- "Tools: " + tools | tojson + "\\n" }}{%- endif %}
{%- for message in messages %}
{{- "<|" + message.role + "|>\\n" }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{{- "<image>" if part.type == "image" else " " + part.text }}
{%- endfor %}{%- endif %}
{{- eos_token + "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|>\\n" }}{%- endif %}
"""
HELLO = "<s>Today is 26 Jul 2024.\n<|user|>\nHello</s>\n<|assistant|>\n"


def with_chat_template(folder: Path, template: str = CHAT_TEMPLATE) -> Path:
    """The short demo with a template."""
    short_demo(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
