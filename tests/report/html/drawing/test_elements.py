"""Elements: text is never markup."""

from __future__ import annotations

import html.parser

from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from duat_cli.report.html.drawing.elements import short, tag
from duat_cli.text import clean


class Reader(html.parser.HTMLParser):
    """What a parser of HTML sees: the tags, their attributes, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= dict(attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(), st.text())
def test_any_text_comes_back_as_text(inner: str, attribute: str) -> None:
    reader = Reader()
    reader.feed(tag("p", inner, title=attribute))
    reader.close()
    assert reader.tags == ["p"]
    assert reader.attributes == {"title": clean(attribute)}
    assert reader.text == clean(inner)


def test_names_and_numbers() -> None:
    assert tag("path", d="M0 0", class_="a", stroke_width=1.26, x=0.0) == (
        '<path d="M0 0" class="a" stroke-width="1.3"/>'
    )
    assert tag("svg", viewBox="0 0 1 1") == '<svg viewBox="0 0 1 1"></svg>'
    assert [short(n) for n in (0.04, -0.04, 12, -3.25, 1e3)] == ["0", "0", "12", "-3.2", "1000"]


def test_markup_stays_markup() -> None:
    assert tag("p", "<", Markup("<b>"), "&") == "<p>&lt;<b>&amp;</p>"
