"""The pages in a real browser: runs that move, a report, a drawn digit; no errors, and accessible in both schemes."""

import re
import shlex
import threading

import pytest

import holdfast as hf
from audits.browser import axe, launch, missing, no_console_errors
from holdfast.serve import Subject, serve
from serve.made_runs import fill, progress, small_model, write

Image = pytest.importorskip("PIL.Image")
if missing():
    pytest.skip(missing(), allow_module_level=True)
from playwright.sync_api import expect  # noqa: E402

SCHEMES = ["light", "dark"]
expect.set_options(timeout=20_000)  # for machines that do more than this


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("browser") / "runs")


@pytest.fixture(scope="module")
def site(folder):
    """Address of a server, with short searches."""
    told, known = [], threading.Event()

    def announce(text):
        told.append(text)
        known.set()

    subject = Subject("given", small_model(), hf.load_data("mnist-mini"))
    with pytest.MonkeyPatch.context() as patch:
        for name, cost in (("STEPS", 20), ("TARGETS", 1), ("TRIES", 2)):
            patch.setattr(f"holdfast.serve.predict.{name}", cost)
        options = {"port": 0, "subject": subject, "announce": announce}
        threading.Thread(target=lambda: serve(folder, **options), daemon=True).start()
        assert known.wait(10)
        yield told[0].rstrip("/")


@pytest.fixture(scope="module")
def browser():
    with launch() as found:
        yield found


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1000, "height": 900})
    context.set_default_timeout(20_000)
    tab = context.new_page()
    with no_console_errors(tab):
        yield tab
    context.close()


def draw(page):
    """A vertical stroke."""
    box = page.locator("#canvas").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"]
    page.mouse.move(x, y + 40)
    page.mouse.down()
    page.mouse.move(x + 5, y + 120, steps=4)
    page.mouse.move(x, y + 220, steps=4)
    page.mouse.up()


def answered(page, text):
    expect(page.locator("#status")).to_contain_text(f"About {text}")
    expect(page.locator(".verdict")).to_contain_text("It is “")
    expect(page.locator(".pictures img")).to_have_count(4)
    assert page.locator(".pictures img").evaluate_all("images => images.every(i => i.naturalWidth > 0)")
    expect(page.locator("#trouble")).to_be_hidden()


def test_a_live_run_moves(site, folder, page):
    page.goto(site)
    card = page.locator("article", has_text="group/live")
    expect(page.locator("article")).to_have_count(8)
    expect(page.locator("#summary")).to_contain_text("8 runs")
    expect(card.locator(".pill")).to_have_text("running")
    expect(card).to_contain_text("30 of 200")
    expect(card).to_contain_text("certified 60.0 % · under attack 75.0 % · clean 95.0 % · 200 inputs")
    width = card.locator(".sure").bounding_box()["width"]
    bracket = progress()["brackets"][0]
    write(folder / "group" / "live" / "progress.json", progress(done=180, brackets=[bracket | {"certified": 140}]))
    expect(card).to_contain_text("180 of 200")
    expect(card).to_contain_text("certified 70.0 %")
    page.wait_for_function(
        "w => document.querySelector('article .sure').getBoundingClientRect().width > w + 10", arg=width
    )
    write(folder / "new <b>one</b>" / "progress.json", progress())
    expect(page.locator("h2", has_text="new <b>one</b>")).to_be_visible()  # text stays text
    (folder / "new <b>one</b>" / "progress.json").unlink()
    expect(page.locator("article")).to_have_count(8)
    write(folder / "group" / "live" / "progress.json", progress(state="finished"))
    expect(card.locator(".pill")).to_have_text("finished")
    expect(page.locator("#status")).to_have_text("group/live: finished")


@pytest.mark.parametrize("width", [390, 1000])
def test_a_training_run_shows_its_curves(site, page, width):
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(site)
    card = page.locator("article", has=page.get_by_role("heading", name="trained", exact=True))
    expect(card.locator("figure.curves svg")).to_have_count(2)
    label = card.locator("svg").first.get_attribute("aria-label")
    assert label == (
        "Accuracy over epochs 1 to 3; at the end: training 90 %, validation, clean 80 %, "
        "validation, under attack 40 %, validation, certified 25 %"
    )
    points = card.locator("polyline.certified").get_attribute("points").split()
    heights = [float(point.split(",")[1]) for point in points]
    assert len(points) == 3
    assert heights[0] > heights[1] > heights[2]  # it rises
    expect(card.locator("figcaption").nth(1)).to_contain_text("training loss 0.5")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("article", has=page.get_by_role("heading", name="first")).locator("svg").count() == 0


def test_a_report_opens_with_its_script_and_no_access(site, page):
    page.goto(site)
    link = page.locator("article", has=page.get_by_role("heading", name="first")).get_by_text("Open the report")
    # In a tab of its own: leaving the page would cut off a look at the runs, which counts as an error.
    with page.context.expect_page() as opened:
        link.click(modifiers=["ControlOrMeta"])
    report = opened.value
    expect(report.locator("h1")).to_have_text("Report of first")
    expect(report.locator("#p")).to_have_text("script ran")
    assert report.evaluate("origin") == "null"


def test_a_digit_is_drawn(site, page):
    page.goto(f"{site}/try")
    expect(page.locator("#inputs button")).to_have_count(24)
    page.get_by_role("button", name="Try the drawing").click()
    expect(page.locator("#trouble")).to_have_text("Draw something first.")
    draw(page)
    page.get_by_role("button", name="Try the drawing").click()
    answered(page, "the drawing")
    radii = page.locator(".radii .value").all_text_contents()
    assert 0 < float(radii[0]) <= float(radii[1])
    expect(page.locator(".scores .name")).to_have_count(10)


def test_a_test_input_by_keyboard(site, page):
    page.goto(f"{site}/try?model=trained")
    expect(page.locator("#model")).to_have_value("trained")
    page.locator("#norm").select_option("l2")
    expect(page.get_by_role("button", name="After")).to_be_enabled()
    page.get_by_role("button", name="After").focus()
    page.keyboard.press("Enter")
    button = page.get_by_role("button", name="Test input 24,")
    button.focus()
    page.keyboard.press("Enter")
    answered(page, "test input 24")
    expect(page.locator(".verdict small")).to_contain_text(re.compile("Right|Wrong"))
    expect(page.locator("#answer h3").first).to_contain_text("l2")


def test_a_picture_is_uploaded(site, page, tmp_path):
    page.goto(f"{site}/try")
    Image.linear_gradient("L").save(tmp_path / "seven.png")
    page.locator("#upload").set_input_files(tmp_path / "seven.png")
    answered(page, "seven.png")
    page.locator("#upload").set_input_files({"name": "big.png", "mimeType": "image/png", "buffer": b"x" * (2**20 + 1)})
    expect(page.locator("#trouble")).to_contain_text("1 MB")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_accessible(site, browser, scheme):
    context = browser.new_context(color_scheme=scheme, viewport={"width": 400, "height": 800})
    runs, tries = context.new_page(), context.new_page()
    with no_console_errors(runs), no_console_errors(tries):
        tries.goto(f"{site}/try")
        tries.get_by_role("button", name="Test input 0,").click()
        runs.goto(site)
        expect(runs.locator("article")).to_have_count(8)
        answered(tries, "test input 0")
        for page in (runs, tries):
            assert axe(page) == []
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "fits a phone"
    context.close()


def test_the_command_on_the_page_is_quoted_as_python_quotes_it(page, site):
    names = ["runs/first", "two words", "$(touch x)", "`x`", "it's", "'", 'a"b', "a\nb", "ü", "a;b", "*", "~/x"]
    page.goto(site)
    for name in names:
        found = page.evaluate("(name) => import('/static/common.js').then((common) => common.word(name))", name)
        assert shlex.split(found) == [name]
        assert found == shlex.quote(name)
