"""Elements of HTML and SVG. Whatever text goes into one is escaped; numbers are written short."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape

from duat_cli.text import clean

Content = str | Markup
_VOID = frozenset({"rect", "line", "circle", "path", "use", "polyline", "img", "input", "col"})


def tag(name: str, /, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """One element. Text is escaped, markup is taken as it is; attributes: class_ is class, a_b is a-b, None and False
    are left out."""
    written = "".join(_attribute(key, value) for key, value in attributes.items() if value not in (None, False))
    inner = joined(content)
    if not inner and name in _VOID:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{inner}</{name}>")


def joined(parts: Iterable[Content]) -> Markup:
    """Parts one behind the other; foreign text is escaped, with its controls and hidden characters in sight."""
    return Markup("").join(part if isinstance(part, Markup) else shown(part) for part in parts)


def shown(text: str) -> Markup:
    """Foreign text as markup that shows it. Attributes stand in double quotes, so single ones need no escape."""
    return Markup(str(escape(clean(text))).replace("&#39;", "'"))


def short(number: float) -> str:
    """A place on a picture, to a tenth of a pixel."""
    text = f"{number:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _attribute(key: str, value: object) -> str:
    name = key.removesuffix("_").replace("_", "-") if key != "viewBox" else key
    if value is True:
        return f" {name}"
    text = short(value) if isinstance(value, (int, float)) else str(value)
    return f' {name}="{shown(text)}"'
