"""The report in a browser: filter, sort, open an input, compare; light, dark, phone, paper, keyboard, no script."""

from dataclasses import replace

import numpy as np
import pytest

from holdfast.attacks.core.indicators import Indicator
from holdfast.audits.bracket import Bracket, Record
from holdfast.audits.report.page import render
from holdfast.audits.result import Audit
from holdfast.audits.rows import Example

from audits.browser import axe, launch, no_console_errors  # isort: skip

CLASSES = ("cat", "dog", "horse")


def make(name="net") -> Audit:
    """Sixty inputs at two threats: five are wrong, 25 break, ten are undecided, twenty are proved."""
    draw = np.random.default_rng(0)
    brackets = []
    for threat, budget in (("linf:0.1", 0.1), ("l2:0.5", 0.5)):
        records, examples = [], []
        for i in range(60):
            label = i % 3
            x = draw.random((1, 8, 8), dtype=np.float32)
            if i < 5:
                records.append(Record(i, label, (label + 1) % 3, None, "", 0.0, "clean", None))
            elif i < 30:
                size = budget * (40 - i) / 40
                by = "apgd-ce" if i % 2 else "square"
                records.append(Record(i, label, label, size / 2, "ibp", size, by, (label + 1) % 3))
                x_adv = np.clip(x + size * np.sign(x - 0.5), 0, 1).astype(np.float32)
                examples.append(Example(i, x, x_adv, x - x_adv))
            else:
                proved = i >= 40
                radius = budget if proved else budget / 3
                records.append(Record(i, label, label, radius, "crown" if proved else "ibp", None, "", None))
                examples.append(Example(i, x))
        brackets.append(
            Bracket(
                threat=threat,
                threats=(f"{threat[:-1]}05", threat),
                budgets=(budget / 2, budget),
                valid_range=(0.0, 1.0),
                records=tuple(records),
                seconds={"clean": 0.1, "attack cascade": 2.0},
                trust=(Indicator("huge-budget", threat == "l2:0.5", 0.5, "5 of 10 inputs held"),),
                skipped=("certify milp: no time for 3 inputs",),
                examples=tuple(sorted(examples, key=lambda e: (e.x_adv is None, -e.position))),
            )
        )
    return Audit(
        name=name,
        data="toy (test)",
        classes=CLASSES,
        brackets=tuple(brackets),
        settings={"plan": "10m", "steps": [{"stage": "attack", "method": "cascade", "options": {"steps": 50}}]},
        versions={"holdfast": "0.1.0"},
        hashes={"model": "ab" * 32, "data": "cd" * 32},
        created="2030-01-01T00:00:00+00:00",
        groups={"site": tuple("north" if i % 4 else "south" for i in range(60))},
    )


@pytest.fixture(scope="module")
def browser():
    with launch() as running:
        yield running


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    first, second = make("first"), make("second")
    weaker = tuple(
        replace(r, certified=0.0, certified_by="", broken=0.05, broken_by="fab", prediction_adv=0)
        if r.position == 50
        else r
        for r in second.records
    )
    second = replace(second, brackets=(replace(second.brackets[0], records=weaker), second.brackets[1]))
    (folder / "report.html").write_text(render([first]), encoding="utf-8")
    (folder / "compare.html").write_text(render([first, second]), encoding="utf-8")
    return folder


@pytest.fixture
def open_page(browser, files):
    """Opens a page by its name, with options of the browser's context; any complaint of the browser is an error."""
    opened = []

    def opener(name="report", **options):
        context = browser.new_context(**options)
        page = context.new_page()
        watch = no_console_errors(page)
        watch.__enter__()
        opened.append((context, watch))
        page.goto((files / f"{name}.html").as_uri())
        return page

    yield opener
    for context, watch in opened:
        try:
            watch.__exit__(None, None, None)
        finally:
            context.close()


def entries(gallery):
    return gallery.locator(".entry small").all_inner_texts()


def positions(gallery):
    return [int(text.split(",")[0].removeprefix("input ")) for text in entries(gallery)]


def control(gallery, name):
    """By the name that a screen reader gives it."""
    return gallery.get_by_role("combobox", name=name, exact=True)


def test_filter_and_sort(open_page):
    page = open_page()
    gallery = page.locator("[data-gallery='0']")
    assert (
        "Of the 60 test images, between 33.3 % and 50 % keep their label when every pixel may change by up to 0.1"
        in page.locator("h1").inner_text()
    )
    # It starts with what broke, the smallest example first.
    assert positions(gallery) == list(range(29, 5, -1))
    assert gallery.locator(".count").inner_text() == "Inputs 1 to 24 of 25 (of 60 in all)"
    gallery.get_by_role("button", name="Next").click()
    assert positions(gallery) == [5]
    assert gallery.get_by_role("button", name="Next").is_disabled()
    control(gallery, "Broken by").select_option("square")
    assert positions(gallery) == list(range(28, 5, -2))  # and back on the first page
    control(gallery, "Class").select_option(label="dog (20)")
    assert positions(gallery) == [28, 22, 16, 10]
    control(gallery, "Order").select_option("falling")
    assert positions(gallery) == [10, 16, 22, 28]
    control(gallery, "Broken by").select_option("")
    control(gallery, "Class").select_option("")
    control(gallery, "State").select_option("undecided")
    control(gallery, "Sort by").select_option("position")
    control(gallery, "Order").select_option("rising")
    assert positions(gallery) == list(range(30, 40))
    control(gallery, "State").select_option("")
    control(gallery, "Proved by").select_option("crown")
    assert positions(gallery) == list(range(40, 60))
    control(gallery, "Proved by").select_option("")
    gallery.get_by_label("Find").fill("South hor")
    assert positions(gallery) == [4, 8, 16, 20, 28, 32, 44, 56]  # by label, prediction or example
    gallery.get_by_label("Find").fill("7")
    assert positions(gallery) == [7]
    control(gallery, "Sort by").select_option("gap")
    gallery.get_by_label("Find").fill("")
    control(gallery, "Order").select_option("falling")
    assert positions(gallery)[:3] == [5, 6, 7]  # those without a gap come last either way
    gallery.get_by_label("Find").fill("zebra")
    assert gallery.locator(".count").inner_text() == "No input fits; widen the filter."
    # The other threat has a gallery of its own.
    assert len(positions(page.locator("[data-gallery='1']"))) == 24


def test_open_an_input_by_keyboard(open_page):
    page = open_page()
    gallery, dialog = page.locator("[data-gallery='0']"), page.locator("dialog")
    assert not dialog.is_visible()
    gallery.locator(".entry").nth(1).focus()
    page.keyboard.press("Enter")
    assert dialog.get_by_role("heading").inner_text() == "Input 28"
    words = " ".join(dialog.inner_text().split())
    for text in ("label dog", "taken for horse", "certified radius 0.015 by ibp", "smallest example 0.03 by square"):
        assert text in words
    assert "gap 0.015" in words
    assert "site south" in words
    captions = dialog.locator("figcaption").all_inner_texts()
    assert captions == ["original", "attacked", "difference, 16.7 times", "what decides"]
    loaded = "pictures => pictures.every(picture => picture.complete && picture.naturalWidth === 8)"
    page.wait_for_function(f"() => ({loaded})([...document.querySelectorAll('dialog img')])")
    page.keyboard.press("ArrowRight")
    assert dialog.get_by_role("heading").inner_text() == "Input 27"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert dialog.get_by_role("heading").inner_text() == "Input 29"
    assert dialog.get_by_role("button", name="Input before").is_disabled()
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    assert page.evaluate("document.activeElement.className") == "entry"
    control(gallery, "State").select_option("misclassified")
    gallery.locator(".entry").first.click()
    assert "There is no adversarial example to show." in dialog.inner_text()
    dialog.get_by_role("button", name="Close").click()
    assert not dialog.is_visible()


def test_the_plot_gives_its_numbers_to_pointer_and_keyboard(open_page):
    page = open_page()
    stops = page.locator(".plot").first.locator(".stop")
    tips = [stop.locator(".tip") for stop in stops.all()]
    assert [tip.is_visible() for tip in tips] == [False] * 3
    stops.nth(1).locator(".strip").hover()
    assert [tip.is_visible() for tip in tips] == [False, True, False]
    stops.nth(2).focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    assert tips[2].is_visible()
    assert "certified: 33.3 %" in tips[2].text_content()
    box = tips[2].locator("rect").bounding_box()
    for line in tips[2].locator("text").all():
        text = line.bounding_box()
        assert box["x"] < text["x"]
        assert text["x"] + text["width"] < box["x"] + box["width"]


@pytest.mark.parametrize("name", ["report", "compare"])
def test_axe_finds_nothing_serious_in_light_and_dark(open_page, name):
    page = open_page(name, color_scheme="light")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    assert axe(page) == []
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(colour) != light
    if name == "report":  # the colours are the same in both pages: the dark one is looked at with an input open
        assert axe(page) == []
        page.locator(".entry").first.click()
        assert axe(page, within="dialog") == []


@pytest.mark.parametrize("name", ["report", "compare"])
def test_a_phone_scrolls_one_way_only(open_page, name):
    page = open_page(name, viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    if name == "report":
        page.locator(".entry").first.click()
        assert page.locator("dialog").bounding_box()["width"] <= 360
        assert page.evaluate(
            "document.querySelector('dialog').scrollWidth <= document.querySelector('dialog').clientWidth"
        )


def test_paper_has_no_controls_and_is_light(open_page):
    page = open_page(color_scheme="dark")
    assert page.locator(".controls").first.is_visible()
    page.emulate_media(media="print")
    for hidden in (".controls", ".pager", ".contents"):
        assert not page.locator(hidden).first.is_visible()
    assert page.locator(".plot").first.is_visible()
    ink, paper = page.evaluate(
        "(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))"
    )
    assert (ink, paper) == ("rgb(27, 33, 48)", "rgb(255, 255, 255)")
    assert len(page.pdf()) > 10_000


def test_compare_shows_models_side_by_side(open_page):
    page = open_page("compare")
    assert page.locator("h1").inner_text() == "2 models, one bracket each"
    assert page.locator(".plot").count() == 4
    table = page.get_by_role("region", name="Inputs on which the models differ at linf:0.1")
    assert " ".join(table.inner_text().split()).endswith("50 horse certified broken")


def test_without_script_the_rest_is_there(open_page):
    page = open_page(java_script_enabled=False)
    assert not page.locator(".gallery").first.is_visible()
    table = page.get_by_role("region", name="First inputs of linf:0.1")
    assert table.is_visible()
    assert table.locator("tbody tr").count() == 50
    assert page.locator(".plot").first.is_visible()
