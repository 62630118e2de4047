"""Elements of HTML and SVG. Whatever text goes into one is escaped; numbers are written short."""

from __future__ import annotations

from markupsafe import Markup, escape

from duat_cli.text import clean

Content = str | Markup
_VOID = frozenset({"rect", "line", "circle", "path"})


def tag(name: str, /, *content: Content, **attributes: str | float) -> Markup:
    """One element. Markup is taken as it is; foreign text is escaped, with its controls and hidden characters in sight.
    attributes: class_ is class, a_b is a-b; one of 0, the default of all that are used here, is left out."""
    written = "".join(_attribute(key, value) for key, value in attributes.items() if value != 0)
    inner = Markup("").join(part if isinstance(part, Markup) else shown(part) for part in content)
    if not inner and name in _VOID:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{inner}</{name}>")


def shown(text: str) -> Markup:
    """Foreign text as markup that shows it. Attributes stand in double quotes, so single ones need no escape."""
    return Markup(str(escape(clean(text))).replace("&#39;", "'"))


def short(number: float) -> str:
    """A place on a picture, to a tenth of a pixel."""
    text = f"{number:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _attribute(key: str, value: str | float) -> str:
    text = value if isinstance(value, str) else short(value)
    return f' {key.removesuffix("_").replace("_", "-")}="{shown(text)}"'
