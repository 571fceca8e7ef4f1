"""What the report looks like: the first screen of a phone and of a desk, light and dark, and facts about the layout.

The pictures are compared at a coarse scale in grey, since letters differ from machine to machine. After a change that
is meant, write them anew: HOLDFAST_PICTURES=write pytest tests/audits/report/test_pictures.py
"""

import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from holdfast.audits.report.page import render
from holdfast.audits.rows import Ran

from audits.browser import launch  # isort: skip
from audits.report.test_report_browser import make  # isort: skip

PICTURES = Path(__file__).parent / "pictures"
SCREENS = {390: (844, 13), 1280: (900, 20)}
"""Width: height, and pixels of the screen to one of a picture."""
TOLERANCE = 9.0  # mean difference, of 255: another font gives up to 6, the other colour scheme 150


def unproved(audit):
    """The audit at its first threat, with nothing proved, and what its steps did."""
    bracket = audit.brackets[0]
    records = tuple(
        replace(r, certified=None if r.certified is None else 0.0, certified_by="") for r in bracket.records
    )
    steps = (Ran(1, "certify", "auto", 1.5, 55, 0, 0), Ran(2, "attack", "cascade", 2.0, 55, 25, 0))
    found = replace(bracket, threat="linf:25.5/255", records=records, steps=steps, reach=0.004, skipped=())
    found = replace(found, threats=("linf:12.75/255", "linf:25.5/255"))
    return replace(audit, brackets=(found,))


@pytest.fixture(scope="module")
def browser():
    with launch() as running:
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    audit = make()
    for name, shown in (("several", audit), ("unproved", unproved(audit))):
        (folder / f"{name}.html").write_text(render([shown]), encoding="utf-8")
    return folder


@pytest.fixture
def opened(browser, pages):
    contexts = []

    def open_page(name, width, scheme="light"):
        size = {"width": width, "height": SCREENS[width][0]}
        contexts.append(browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce"))
        page = contexts[-1].new_page()
        page.goto((pages / f"{name}.html").as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()


def coarse(content, scale):
    """The picture in grey, each pixel the mean of a square of the screen."""
    with Image.open(io.BytesIO(content)) as image:
        return image.convert("L").resize((image.width // scale, image.height // scale), Image.Resampling.BOX)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", SCREENS)
@pytest.mark.parametrize("name", ["several", "unproved"])
def test_the_first_screen_looks_as_it_did(opened, name, width, scheme):
    seen = coarse(opened(name, width, scheme).screenshot(), SCREENS[width][1])
    path = PICTURES / f"{name}-{width}-{scheme}.png"
    if os.environ.get("HOLDFAST_PICTURES") == "write":
        PICTURES.mkdir(exist_ok=True)
        seen.save(path, optimize=True)
    with Image.open(path) as known:
        assert seen.size == known.size
        difference = np.abs(np.asarray(seen, float) - np.asarray(known, float)).mean()
    assert difference < TOLERANCE, f"the picture differs from {path.name} by {difference:.1f} of 255"


def test_the_comparison_sees_what_is_missing(opened):
    """A header without its numbers is another picture."""
    page = opened("unproved", 390)
    with Image.open(PICTURES / "unproved-390-light.png") as image:
        known = np.asarray(image, float)
    page.evaluate("document.querySelectorAll('.figures, h1').forEach((e) => e.remove())")
    broken = np.asarray(coarse(page.screenshot(), 13), float)
    assert np.abs(broken - known).mean() > TOLERANCE


@pytest.mark.parametrize("name", ["several", "unproved"])
def test_both_ends_of_the_bracket_are_on_the_first_screen_of_a_phone(opened, name):
    page = opened(name, 390)
    for text in ("Certified", "Under attack") if name == "unproved" else ("certified", "under attack"):
        box = page.get_by_text(text, exact=True).first.bounding_box()
        assert box["y"] + box["height"] < 844
        assert box["x"] + box["width"] <= 390
    for value in page.locator(".figure .value, header td").all()[:4]:
        assert value.bounding_box()["y"] < 800


@pytest.mark.parametrize("width", SCREENS)
@pytest.mark.parametrize("name", ["several", "unproved"])
def test_nothing_is_cut(opened, name, width):
    """No element is wider than the screen, but in a region that scrolls."""
    page = opened(name, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.evaluate(
        """() => [...document.querySelectorAll('main *')].filter((e) => {
            if (e.closest('.scroll, dialog, noscript, [hidden], thead') || e instanceof SVGElement) return false;
            const box = e.getBoundingClientRect();
            const hides = e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX === 'hidden';
            return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1 || hides);
        }).map((e) => e.outerHTML.slice(0, 120))"""
    )
    assert cut == []


@pytest.mark.parametrize("width", SCREENS)
def test_ticks_and_legend_are_inside_the_plot_and_apart(opened, width):
    page = opened("unproved", width)
    plot = page.locator(".plot").first
    frame = plot.bounding_box()
    boxes = plot.evaluate(
        "e => [...e.querySelectorAll(':scope > text')].map((t) => [t.textContent, t.getBoundingClientRect().toJSON()])"
    )
    assert {"25.5/255", "under attack", "certified", "undecided", "clean"} <= {text for text, _ in boxes}
    for text, box in boxes:
        assert box["left"] >= frame["x"] - 0.5, text
        assert box["right"] <= frame["x"] + frame["width"] + 0.5, text
    for i, (text, a) in enumerate(boxes):
        for other, b in boxes[:i]:
            apart = (
                a["right"] < b["left"] or b["right"] < a["left"] or a["bottom"] <= b["top"] or b["bottom"] <= a["top"]
            )
            assert apart, (text, other)


def test_words_lead_to_the_glossary(opened):
    page = opened("unproved", 1280)
    for link in page.locator("a.term").all():
        assert page.locator(link.get_attribute("href").replace(":", r"\:")).count() == 1, link.inner_text()
    page.get_by_role("link", name="certificate", exact=True).click()
    assert page.locator("#term-certificate").bounding_box()["y"] < 900


def test_steps_stack_on_a_phone_with_their_headings(opened):
    page = opened("unproved", 390)
    row = page.locator(".ran tbody tr").nth(1)
    label = "getComputedStyle(e, '::before').content"
    assert row.locator("td").first.evaluate(f"e => {label}") == '"looked at: "'
    assert "25 broken" in row.inner_text()
    desk = opened("unproved", 1280).locator(".ran tbody td").first
    assert desk.evaluate(f"e => {label}") == "none"


def test_paper_has_margins(opened):
    page = opened("unproved", 1280)
    assert "@page { margin: 16mm 14mm; }" in page.content()
    margin = page.evaluate(
        "[...document.styleSheets[0].cssRules].find((rule) => rule instanceof CSSPageRule).style.margin"
    )
    assert margin == "16mm 14mm"
