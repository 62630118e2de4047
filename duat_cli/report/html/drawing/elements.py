"""Elements of HTML and SVG. Text in them is escaped, and numbers are written short."""

from __future__ import annotations

from markupsafe import Markup, escape

from duat_cli.text import clean

Content = str | Markup
_VOID = frozenset({"rect", "line", "circle", "path"})


def tag(name: str, /, *content: Content, **attributes: str | float) -> Markup:
    """One element. Markup is inserted as it is; foreign text is escaped, with control and hidden characters visible.
    attributes: class_ is class, a_b is a-b; values of 0, the default of all that are used here, are left out."""
    written = "".join(_attribute(key, value) for key, value in attributes.items() if value != 0)
    inner = Markup("").join(part if isinstance(part, Markup) else shown(part) for part in content)
    if not inner and name in _VOID:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{inner}</{name}>")


def shown(text: str) -> Markup:
    """Foreign text as markup. Single quotes need no escape, as attributes are in double quotes."""
    return Markup(str(escape(clean(text))).replace("&#39;", "'"))


def short(number: float) -> str:
    """A coordinate on a picture, to a tenth of a pixel."""
    text = f"{number:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _attribute(key: str, value: str | float) -> str:
    text = value if isinstance(value, str) else short(value)
    return f' {key.removesuffix("_").replace("_", "-")}="{shown(text)}"'
