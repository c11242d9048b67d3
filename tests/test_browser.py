"""Pages in a headless Chromium: what is seen, and what clicks, keys and fingers do.

``make browser`` installs Playwright, which drives the Chromium of the system.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from lieattn import compare, viz
from lieattn.certify import certify
from lieattn.groups import cyclic
from lieattn.testing import randomize
from lieattn_datasets import Digits
from tests.test_microscope import cloud, framewise, gsa

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make browser")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the path")

RECORDS = Path(__file__).parent.parent / "docs" / "records"
# Texts that are seen, with the ratio of the luminances of text and ground (WCAG 2), and their edges.
TEXTS = """() => {
  const part = (x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4);
  const parsed = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const color = parsed(getComputedStyle(one).backgroundColor);
      if (color[3] !== 0) return color;
    }
    return [255, 255, 255];
  };
  const own = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  return [...document.body.querySelectorAll("*")].filter((one) => own(one) && one.checkVisibility()).map((one) => {
    const [a, b] = [light(parsed(getComputedStyle(one).color)), light(ground(one))], box = one.getBoundingClientRect();
    return { text: one.textContent, contrast: (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), right: box.right };
  });
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Addresses of the pages: an image, points of a surface in space, a comparison, a certificate."""
    folder = tmp_path_factory.mktemp("pages")
    viz.Microscope(randomize(gsa(cyclic(4), blocks=(2,))), Digits("test")[0]).save(folder / "image.html", point=9)
    ball = cloud(points=40)
    ball.pos = ball.normal = torch.nn.functional.normalize(ball.pos)
    viz.Microscope(randomize(framewise()), ball, turns=3).save(folder / "ball.html")
    report = json.loads((RECORDS / "compare_forces.json").read_text())
    viz.save(viz.comparison(report), folder / "picture.png")
    (folder / "comparison.html").write_text(compare.page(report, (folder / "picture.png").read_bytes()))
    (folder / "certificate.html").write_text(certify(framewise().double(), [cloud()], continuity=False).to_html())
    return {path.stem: path.as_uri() for path in folder.glob("*.html")}


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as found:
        browser = found.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium, pages):
    """Yield a function that opens a page. At the end nothing may have been written to the console."""
    opened, told = [], []

    def open_page(name, width=1280, height=800, **options):
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        opened.append(context)
        page = context.new_page()
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.goto(pages[name])
        return page

    yield open_page
    for context in opened:
        context.close()
    assert not told


def until(page, told, *given):
    """Wait until an expression is true. Pages do not allow Playwright's own way, which evaluates texts."""
    for _ in range(100):
        if page.evaluate(told, *given):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never true: {told}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["image", "ball", "comparison", "certificate"])
def test_all_texts_can_be_read(visit, name, width, scheme):
    page = visit(name, width, color_scheme=scheme)
    views = page.locator("#view option").evaluate_all("(all) => all.map((one) => one.value)") or [None]
    for view in views:
        if view:
            page.select_option("#view", view)
        found = page.evaluate(TEXTS)
        assert len(found) > 5
        assert {one["text"]: one["contrast"] for one in found if one["contrast"] < 4.5} == {}
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if name in ("image", "ball"):  # tables of the others scroll
            assert {one["text"]: one["right"] for one in found if one["right"] > width} == {}
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")


def test_all_columns_of_a_comparison_are_seen(visit):
    page = visit("comparison")
    tables = page.locator("table")
    assert [table.locator("tr").first.locator("th").count() for table in tables.all()] == [7, 5, 8, 5]
    assert max(tables.evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().right)")) <= 1280
    narrow = visit("comparison", 390).locator("table").last
    narrow.locator("th").last.scroll_into_view_if_needed()
    assert narrow.locator("th").last.bounding_box()["x"] < 390


@pytest.mark.parametrize("name", ["image", "ball"])
def test_menus_and_sliders(visit, name):
    """Each entry of each menu shows something, and all texts are those of the view."""
    page = visit(name)
    assert "class 2" in page.inner_text("#result") or name == "ball"
    for view in ("attention", "rollout", "field"):
        page.select_option("#view", view)
        for menu in page.locator("select:visible").all()[1:]:
            entries = menu.locator("option").evaluate_all("(all) => all.map((one) => one.value)")
            assert len(entries) > 1
            for entry in entries:
                menu.select_option(entry)
                assert page.evaluate("scene().panels.every((one) => one.values.every(Number.isFinite))")
        assert ("transformed" in page.inner_text("#help")) == (view == "field")
        assert ("query" in page.inner_text("#help")) == (view != "field")
        assert page.inner_text("#scale").splitlines()[-1].startswith("channel" if view == "field" else "weight")
        slider = page.locator("input:visible")
        slider.fill("1")
        told = "2 of" if view == "field" else "point 1, of 0 to"
        assert page.inner_text("output:visible").startswith(told)
        assert slider.get_attribute("aria-valuetext").startswith(told)


def test_arrow_keys_go_to_the_pixel_in_their_direction(visit):
    page = visit("image")
    page.locator("#layer").select_option(index=0)
    page.focus("#left")
    place = "page.places[layer().places].pos[state.point]"
    start = page.evaluate(place)
    for key, (right, up) in {
        "ArrowDown": (0, -1),
        "ArrowRight": (1, 0),
        "ArrowUp": (0, 1),
        "ArrowLeft": (-1, 0),
    }.items():
        before = page.evaluate(place)
        page.keyboard.press(key)
        assert page.evaluate(place) == [before[0] + right, before[1] + up], key
    assert page.evaluate(place) == start
    for _ in range(9):
        page.keyboard.press("ArrowDown")  # stays at the border
    assert page.evaluate(place) == [start[0], min(y for _, y in page.evaluate("page.places[layer().places].pos"))]
    page.select_option("#view", "field")
    page.focus("#right")
    page.keyboard.press("ArrowDown")
    assert page.input_value("#turn") == "2"


def test_clicks_and_drags(visit):
    page = visit("ball")
    camera = page.evaluate("state.camera")
    x, y = page.evaluate("find('left').hits.at[7].slice(0, 2)")
    page.hover("#left", position={"x": x, "y": y})
    assert page.inner_text("#told").startswith("point ")
    page.click("#left", position={"x": x, "y": y})
    chosen = page.evaluate("state.point")
    near = page.evaluate("find('left').hits.at.map((p) => p.slice(0, 2))")[chosen]
    assert abs(near[0] - x) + abs(near[1] - y) < 30
    assert page.input_value("#point") == str(chosen)
    assert page.evaluate("state.camera") == camera
    page.keyboard.press("Shift+ArrowRight")
    turned = page.evaluate("state.camera")
    assert turned != camera
    box = page.locator("#left").bounding_box()
    page.mouse.move(box["x"] + 50, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 80, steps=4)
    page.mouse.up()
    assert page.evaluate("state.camera") != turned
    assert page.evaluate("state.point") == chosen
    flat = visit("image")
    flat.select_option("#view", "rollout")
    x, y = flat.evaluate("find('input').hits.at[0].slice(0, 2)")
    flat.click("#input", position={"x": x, "y": y})
    assert flat.evaluate("state.point") == 0


def swipe(page, start, by):
    """Move a finger, as the browser sees it, in steps."""
    session = page.context.new_cdp_session(page)
    for step in range(9):
        kind = "touchStart" if step == 0 else "touchMove"
        place = {"x": start[0] + step / 8 * by[0], "y": start[1] + step / 8 * by[1]}
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [place]})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


@pytest.mark.parametrize("name", ["image", "ball"])
def test_fingers_scroll_over_pictures(visit, name):
    """A finger that moves up scrolls the page, one that moves sideways rotates clouds in space, and a tap selects."""
    page = visit(name, 390, 600, has_touch=True, is_mobile=True)
    camera, query = page.evaluate("[state.camera, state.point]")
    page.locator("#left").scroll_into_view_if_needed()
    box, top = page.locator("#left").bounding_box(), page.evaluate("scrollY")
    swipe(page, (box["x"] + 100, box["y"] + 200), (0, -150))
    until(page, f"scrollY > {top + 50}")
    assert page.evaluate("[state.camera, state.point]") == [camera, query]
    box = page.locator("#left").bounding_box()
    swipe(page, (box["x"] + 60, box["y"] + 150), (120, 0))
    assert (page.evaluate("state.camera") != camera) == (name == "ball")
    assert page.evaluate("state.point") == query
    nearest = page.evaluate("find('left').hits.at.reduce((best, p, i, all) => (p[2] > all[best][2] ? i : best), 0)")
    x, y = page.evaluate(f"find('left').hits.at[{nearest}].slice(0, 2)")
    page.tap("#left", position={"x": x, "y": y})
    assert page.evaluate("state.point") == nearest != query


def test_the_scheme_can_change(visit):
    page = visit("image", color_scheme="light")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    drawn = page.evaluate("find('left').toDataURL()")
    page.emulate_media(color_scheme="dark")
    until(page, "(drawn) => find('left').toDataURL() !== drawn", drawn)  # lines have the other color
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.click("#play")
    until(page, "state.point !== 9")
    page.click("#play")
