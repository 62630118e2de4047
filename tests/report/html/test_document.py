"""Every page in a real browser: nothing fetched, nothing said, nothing that axe finds, all reached by keyboard, and
numbers that are the JSON's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sample_reports as sample
from axe_playwright_python.sync_playwright import Axe
from pages import EVIL, REPORTS, TOKENS, html, inspect_page
from unpacking import reports_in

from duat_cli.api.words import page_of
from duat_cli.report.json import to_json
from duat_cli.results.attribute import TokenName
from duat_cli.text import clean

FACTORS = {
    "%": 100.0,
    "MB": 1e-6,
    **{unit: 1024.0**-power for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))},
}
VIOLATIONS = {"resultTypes": ["violations"], "preload": False}  # pages load nothing
BUT_CONTRAST = VIOLATIONS | {"rules": {"color-contrast": {"enabled": False}}}
CONTRAST = VIOLATIONS | {"runOnly": ["color-contrast"]}
BY_MODE = VIOLATIONS | {"runOnly": ["link-in-text-block", "scrollable-region-focusable"]}
"""Beside contrast, the rules that look at colours or at room: no style hides anything by width or scheme, so all others
find in one mode what they find in another."""
LOOKS = """(known) => {
  const looks = new Set(known), grounds = new Map([[null, ""]]);
  const ground = (one) => {  // what lies behind it and how far it is seen through, up to the root
    if (!grounds.has(one)) {
      const style = getComputedStyle(one), own = [style.backgroundColor, style.backgroundImage, style.opacity].join();
      grounds.set(one, ground(one.parentElement) + (own === "rgba(0, 0, 0, 0),none,1" ? "" : `/${own}`));
    }
    return grounds.get(one);
  };
  for (const one of document.querySelectorAll("body :not(script, style)")) {
    if ([...one.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim())) {
      const {color, fill, fontSize, fontWeight, textShadow} = getComputedStyle(one);
      const look = [one.tagName, color, fill, fontSize, fontWeight, textShadow, ground(one)].join();
      if (!looks.has(look)) one.dataset.look = looks.add(look).size;
    }
  }
  return [...looks].slice(known.length);
}"""
MODES = [(1440, "light"), (360, "dark")]
ROWS = """() => [...document.querySelectorAll("[data-place] tbody tr[data-at]")].flatMap((row) => {
  const table = row.closest("table"), heads = [...table.tHead.rows[0].cells];
  const report = row.closest("[data-report]").dataset.report;
  return [...row.cells].flatMap((cell, i) => heads[i].dataset.path
    ? [[report, `${table.dataset.root || ""}${row.dataset.at}.${heads[i].dataset.path}`, cell.textContent,
        heads[i].querySelector(".unit")?.textContent]]
    : []);
})"""
TILES = """() => [...document.querySelectorAll("dd[data-path]")].map((dd) => [
  dd.closest("[data-report]").dataset.report, dd.dataset.path, dd.firstChild.textContent, dd.lastChild.textContent])"""
REACHABLE = """[...document.querySelectorAll("a[href], summary, select, button, canvas, [tabindex='0']")]
  .filter((one) => one.checkVisibility()).map((one, i) => one.dataset.n = i).length"""
HEARD = """document.activeElement.blur(), reached = [],
  addEventListener("focusin", (event) => reached.push(event.target.dataset.n))"""
DANGLING = """[...document.querySelectorAll("a[href]")].filter((a) => !document.getElementById(a.hash.slice(1)))
  .map((a) => a.hash)"""


OUTSIDE = """() => [...document.querySelectorAll(".picture svg text")].filter((text) => {
  const own = text.getBoundingClientRect(), all = text.ownerSVGElement.getBoundingClientRect();
  return own.left < all.left - 1 || own.right > all.right + 1 || own.top < all.top - 1 || own.bottom > all.bottom + 1;
}).map((text) => [text.closest("figure").id, text.textContent])"""
TOUCHING = """() => [...document.querySelectorAll(".across")].flatMap((axis) => {
  const labels = [...axis.querySelectorAll("text:not(.name)")];
  const boxes = labels.map((label) => label.getBoundingClientRect());
  return labels.slice(1).filter((_, i) => boxes[i + 1].left < boxes[i].right)
    .map((label) => [label.closest("figure").id, label.textContent]);
})"""


class Seen:
    """A page in the browser, and everything that it asked for or said."""

    def __init__(self, window: Any, file: Path) -> None:
        self.name, self.mode = "", MODES[0]
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page = window.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())
        for drawn in self.page.locator(".map").all():  # from the JSON, which is unpacked behind the first paint
            drawn.locator("canvas, .note").first.wait_for()


ONE_MODE = [(name, *MODES[0]) for name in REPORTS]  # of what neither width nor colour changes


def window(browser: Any, width: int, scheme: str) -> Any:
    return browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)


@pytest.fixture(scope="module")
def windows(browser: Any) -> dict[tuple[int, str], Any]:
    """One for each mode: pages of the same window share a process."""
    return {mode: window(browser, *mode) for mode in MODES}


@pytest.fixture(scope="module", params=[(name, *mode) for name in REPORTS for mode in MODES], ids=str)
def seen(request: Any, windows: dict[tuple[int, str], Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    name, *mode = request.param
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(html(name), encoding="utf-8")
    found = Seen(windows[tuple(mode)], file)
    found.name, found.mode = name, tuple(mode)
    yield found
    found.page.close()


def opened(seen: Seen) -> Any:
    """The page with all that can be folded open."""
    seen.page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    return seen.page


def test_a_page_asks_for_nothing_and_says_nothing(seen: Seen) -> None:
    opened(seen)
    assert seen.said == []
    assert len(seen.asked) == 1  # itself
    assert (
        seen.page.evaluate("document.images.length + document.querySelectorAll('b, iframe, object, link').length") == 0
    )


def violations(page: Any, looks: list[str], options: dict[str, Any] = BUT_CONTRAST) -> list[Any]:
    """What axe finds by these rules and by contrast, which takes the most time: it is looked at once for every look of
    a text, which is what contrast is computed from. Those of `looks` have been looked at, and the page's are added.
    """
    found = Axe().run(page, options=options).response["violations"]
    new = page.evaluate(LOOKS, looks)
    looks += new
    if new:
        found += page.evaluate("(options) => axe.run('[data-look]', options)", CONTRAST)["violations"]
    return list(found)


@pytest.fixture(scope="module")
def looks() -> list[str]:
    """Those of the pages so far."""
    return []


def test_axe_finds_nothing(seen: Seen, looks: list[str]) -> None:
    found = violations(opened(seen), looks, BUT_CONTRAST if seen.mode == MODES[0] else BY_MODE)
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []


@pytest.mark.parametrize("name", REPORTS)
def test_every_leading_number_leads_to_its_definition(name: str) -> None:
    tiles = re.findall(r"<dt>(.*?)</dt><dd data-path", html(name))
    assert [tile for tile in tiles if not tile.startswith("<a href=")] == []


def test_axe_would_find_something(browser: Any) -> None:
    page = browser.new_page()
    pale, dim = "<p style='color:#ccc'>pale</p>", "<div style='opacity:.3'><p>dim</p></div>"
    grey = "<div style='background:#555'><p>on grey</p></div>"
    page.set_content(f"<html><body><img src='data:,'><p>first</p>{pale}{grey}{dim}<p>last</p></body></html>")
    found = {one["id"]: "".join(node["html"] for node in one["nodes"]) for one in violations(page, [])}
    page.close()
    assert {"image-alt", "html-has-lang"} <= found.keys()
    assert re.findall(r">([^<]+)<", found["color-contrast"]) == ["pale", "on grey", "dim"]


def test_nothing_is_wider_than_the_window(seen: Seen) -> None:
    assert opened(seen).evaluate("document.documentElement.scrollWidth <= innerWidth")


OFF = """[...document.querySelectorAll('table, svg, canvas')].filter((one) => one.getBoundingClientRect().right >
    1 + Math.min(innerWidth, one.closest('figure')?.getBoundingClientRect().right ?? innerWidth)).length"""


@pytest.mark.parametrize("seen", ONE_MODE, indirect=True, ids=str)
def test_nothing_runs_off_a_printed_page(seen: Seen) -> None:
    """A4 with the browser's margins; from the wide window, in which maps were drawn as large as they are."""
    page, size = opened(seen), seen.page.viewport_size
    page.set_viewport_size({"width": 718, "height": 1047})
    page.emulate_media(media="print")
    try:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(OFF) == 0
    finally:
        page.emulate_media(media="screen")
        page.set_viewport_size(size)
    assert seen.said == []
    assert len(seen.asked) == 1


def test_words_on_pictures_are_whole_and_apart(seen: Seen) -> None:
    assert seen.page.evaluate(OUTSIDE) == []
    assert seen.page.evaluate(TOUCHING) == []


def test_the_contents_name_a_prediction_of_any_token() -> None:
    """A colon or comma that is the token does not end its name."""
    report = sample.attribute_report()
    one = report.attribution[0]
    given = one.target.model_copy(update={"token": TokenName(id=3, text=":"), "against_mean": False})
    page = page_of([(None, report.model_copy(update={"attribution": [one.model_copy(update={"target": given})]}))])
    assert "\">':' at position 1</a>" in page.partition("</nav>")[0]


@pytest.mark.parametrize(
    ("kind", "unit"), [("token", "logits"), ("component", "of the vector"), ("log-probability", "nats")]
)
def test_parts_have_the_unit_of_what_was_attributed(kind: str, unit: str) -> None:
    report = sample.attribute_report()
    one = report.attribution[0]
    one = one.model_copy(update={"target": one.target.model_copy(update={"kind": kind})})
    page = page_of([(None, report.model_copy(update={"attribution": [one]}))])
    text = page.partition("</main>")[0]
    assert f"part ({unit})" in text
    assert f">{unit}<" in text
    assert (">logits</span>" in text) is (unit == "logits")


def test_the_divergence_of_two_models_is_of_all_that_they_predict() -> None:
    """What a model answers in a conversation has a divergence of its own, `answers.kl`."""
    report = sample.lora_report()
    report = report.model_copy(update={"summary": report.summary.model_copy(update={"kl": 0.5})})
    assert ">KL of the prediction<" in page_of([(None, report)])


@pytest.mark.parametrize(("names", "folded"), [(12, False), (13, True)])
def test_long_lists_of_names_are_folded(names: int, folded: bool) -> None:
    report = sample.lora_report().model_copy(update={"unchanged": [f"layer.{k}.weight" for k in range(names)]})
    page = page_of([(None, report)])
    assert (f"<details><summary>{names} names<" in page) is folded
    assert page.count("<li>layer.") == names


def test_words_cut_off_or_touching_are_seen(inspected: Any) -> None:
    inspected.evaluate("document.querySelector('.picture svg text').setAttribute('x', '5000')")
    assert len(inspected.evaluate(OUTSIDE)) == 1
    inspected.evaluate("document.querySelectorAll('.across text')[1].setAttribute('x', '5000')")
    assert inspected.evaluate(TOUCHING) != []


@pytest.mark.parametrize("seen", ONE_MODE, indirect=True, ids=str)
def test_the_json_is_saved_from_the_page(seen: Seen) -> None:
    """What the page's own script unpacks is the report, number by number, and nothing is asked for meanwhile."""
    given = [json.loads(to_json(report)) for report in REPORTS[seen.name]()]
    buttons = seen.page.locator(".save button")
    assert buttons.count() == len(given)
    for number, (report, button) in enumerate(zip(given, buttons.all(), strict=True)):
        with seen.page.expect_download() as download:
            button.click()
        name = download.value.suggested_filename
        assert name.startswith(f"duat-{report['command'].replace(' ', '')}")
        assert json.loads(Path(download.value.path()).read_text(encoding="utf-8")) == report, number
    assert seen.said == []
    assert [url for url in seen.asked[1:] if not url.startswith("blob:")] == []


@pytest.mark.parametrize("seen", ONE_MODE, indirect=True, ids=str)
def test_the_keyboard_reaches_everything(seen: Seen) -> None:
    page, size = opened(seen), seen.page.viewport_size
    page.set_viewport_size(size | {"height": 100})  # each step draws a window
    wanted = page.evaluate(REACHABLE)
    page.evaluate(HEARD)
    for _ in range(wanted + 5):
        page.keyboard.down("Tab")  # held down, it repeats
    reached = set(page.evaluate("reached"))
    page.set_viewport_size(size)
    assert {str(n) for n in range(wanted)} <= reached
    assert wanted > 12


@pytest.mark.parametrize("seen", ONE_MODE, indirect=True, ids=str)
def test_every_link_leads_to_a_definition_or_a_figure(seen: Seen) -> None:
    assert seen.page.evaluate(DANGLING) == []


@pytest.mark.parametrize("seen", ONE_MODE, indirect=True, ids=str)
def test_printed_numbers_are_those_of_the_json(seen: Seen) -> None:
    page = opened(seen)
    reports = [one["report"] for one in reports_in(page.content())]
    cells = page.evaluate(ROWS) + page.evaluate(TILES)
    assert len(cells) > 10
    for report, path, printed, unit in cells:
        value = at(reports[int(report)], path)
        assert agrees(printed, value, FACTORS.get(unit, 1.0)), (path, printed, value)


def at(value: Any, path: str) -> Any:
    """What stands in the JSON at a path such as 'blocks.0.terms.linear.share'; None behind a null."""
    for part in path.split("."):
        if value is None:
            return None
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def agrees(printed: str, value: Any, factor: float) -> bool:
    """Whether a number is printed rounded to its own last digit."""
    if value is None or printed == "-":
        return value is None and printed == "-"
    if isinstance(value, str) or printed[0] in "<>":
        return printed == clean(str(value)) or (printed[0] in "<>" and abs(factor * value) < 100)
    printed = printed.removeprefix("about ").partition(" \N{PLUS-MINUS SIGN} ")[0]  # an estimate and its error
    digits, _, power = printed.partition("e")
    last = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
    return math.isclose(float(printed), factor * value, rel_tol=1e-9, abs_tol=0.501 * last + 1e-4)


@pytest.mark.parametrize(
    ("printed", "value", "factor"), [("41.3", 0.4123, 100), ("-", 0.1, 1), ("1.2e-07", 1.3e-7, 1), ("0.10", None, 1)]
)
def test_a_wrong_number_is_seen(printed: str, value: Any, factor: float) -> None:
    assert not agrees(printed, value, factor) or printed == "1.2e-07"


@pytest.fixture
def inspected(browser: Any, tmp_path: Path) -> Iterator[Any]:
    file = tmp_path / "report.html"
    file.write_text(html("inspect"), encoding="utf-8")
    own = window(browser, *MODES[0])
    yield Seen(own, file).page
    own.close()


def test_the_map_is_read_by_keyboard(inspected: Any) -> None:
    """The block by left and right, the cell by arrows; the number said is the report's."""
    found = inspect_page().maps
    assert found is not None
    canvas, said = inspected.locator("canvas"), inspected.locator(".map output")
    canvas.focus()
    for _ in range(2):
        inspected.keyboard.press("ArrowRight")
    inspected.keyboard.press("ArrowUp")  # from token 2 to token 4
    value = found[0].blocks[0].coupling[4][2]
    assert f"C = {value:.3g}" in said.inner_text()
    assert f"token 2 {clean(TOKENS[2])[:9]}" in said.inner_text()
    before = canvas.screenshot()
    inspected.locator("#map0-block").focus()
    inspected.keyboard.press("ArrowRight")
    value = found[0].blocks[1].coupling[4][2]
    assert inspected.locator("#map0-block").input_value() == "1"
    assert "Block 3: from token 2" in said.inner_text()
    assert f"C = {value:.3g}" in said.inner_text()
    assert canvas.screenshot() != before


def test_the_map_has_a_table(inspected: Any) -> None:
    found = inspect_page().maps
    assert found is not None
    inspected.locator(".map summary").click()
    rows = inspected.locator(".map tbody tr")
    rows.first.wait_for()  # a browser says later that something was opened
    assert rows.count() == len(TOKENS)
    printed = [float(text) for text in rows.nth(5).locator("td").all_inner_texts()]
    assert printed == [pytest.approx(value, rel=6e-3) for value in found[0].blocks[0].coupling[5]]
    assert rows.nth(0).locator("td").all_inner_texts()[1:] == ["0"] * 5


def test_hovering_names_the_tokens(inspected: Any) -> None:
    canvas = inspected.locator("canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    cell = box["width"] / len(TOKENS)
    inspected.mouse.move(box["x"] + 0.5 * cell, box["y"] + 3.5 * cell)
    text = inspected.locator(".map output").inner_text()
    assert "from token 0 <s> to token 3" in text
    assert TOKENS[3] in text


def test_colours_follow_the_choice(inspected: Any) -> None:
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = inspected.evaluate(ground)
    inspected.select_option("#theme", "dark")
    assert inspected.evaluate(ground) != light
    inspected.select_option("#theme", "light")
    assert inspected.evaluate(ground) == light


def test_foreign_text_is_seen_as_it_is(inspected: Any) -> None:
    """Neither markup nor a template: the name, with its hidden characters written out."""
    assert clean(EVIL) in inspected.locator("h1").text_content()
    assert "7*7" in inspected.locator(".list").last.text_content()
    assert inspected.title() == f"duat inspect: {clean(EVIL)} at {inspect_page().model.revision}"


def test_a_browser_that_cannot_unpack_says_so(browser: Any, tmp_path: Path) -> None:
    """Pictures and tables are there, the map and the file are not."""
    file = tmp_path / "report.html"
    file.write_text(html("inspect"), encoding="utf-8")
    context = browser.new_context()
    context.add_init_script("delete window.DecompressionStream")
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(file.as_uri())
    page.locator(".save button").click()
    for place in (".map .note", ".save output"):
        page.locator(place, has_text="cannot be unpacked").wait_for()
    assert page.locator(".picture svg").count() > 5
    assert faults == []
    context.close()
