"""The report: what it says, that it stands alone, and that nothing in it can run."""

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from scipy.stats import binomtest

import holdfast as hf
from holdfast.attacks.trust import Indicator
from holdfast.audit import Audit, Record, render
from holdfast.audit.plot import bracket_plot
from holdfast.audit.result import clopper_pearson
from holdfast.audit.store import Example
from holdfast.png import data_uri, encode_png, is_picture

DOCS = Path(__file__).parents[2] / "docs" / "audit.md"


def make(name="net", shape=(1, 5, 4), certify="auto", classes=("zero", "one"), examples=True, trust=()) -> Audit:
    """Ten inputs, two budgets: one is wrong, two break at 0.1, one at 0.2; four are proved at 0.1, three at 0.2."""
    proved = [None, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.2, 0.2, 0.2] if certify else [None] + [0.0] * 9
    broken = [0.0, 0.1, 0.1, 0.2, *[None] * 6]
    records = tuple(
        Record(i, 0, int(b == 0), c, "ibp" if c else "", b, "clean" if b == 0 else "pgd" if b else "", 1 if b else None)
        for i, (c, b) in enumerate(zip(proved, broken, strict=True))
    )
    draw = np.random.default_rng(0)
    x = draw.random((3, *shape), dtype=np.float32)
    found = tuple(Example(i + 1, x[i], np.clip(x[i] + 0.1, 0, 1)) for i in range(3)) if examples else ()
    return Audit(
        name=name,
        threat="linf:0.2",
        threats=("linf:0.1", "linf:0.2"),
        budgets=(0.1, 0.2),
        valid_range=(0.0, 1.0),
        data="toy (test)",
        classes=classes,
        records=records,
        settings={
            "attack": "cascade",
            "certify": certify,
            "attack_options": {"steps": 3},
            "certify_options": {},
            "n": 10,
        },
        versions={"holdfast": "0.1.0"},
        hashes={"model": "ab" * 32, "data": "cd" * 32},
        seconds={"clean": 0.25, "attack": 61.0},
        created="2030-01-01T00:00:00+00:00",
        trust=trust,
        examples=found,
    )


TRUST = (
    Indicator("huge-budget", True, 0.5, "5 of 10 inputs: held & held"),
    Indicator("softmax", False, 0.0, "the model returns logits"),
)


class Page(HTMLParser):
    """Collects tags, attributes and text, and insists on balanced tags."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.open, self.text = [], [], [], ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_numbers_follow_from_the_records():
    result = make()
    assert [(level.budget, level.certified, level.attacked) for level in result.levels] == [
        (0.0, 9, 9),
        (0.1, 4, 7),
        (0.2, 3, 6),
    ]
    assert (result.clean, result.attacked, result.certified) == (0.9, (0.7, 0.6), (0.4, 0.3))
    assert result.headline == "Between 30.0 % and 60.0 % of 10 inputs hold at linf:0.2."
    assert make(certify=None).headline == "At most 60.0 % of 10 inputs hold at linf:0.2; no certificate was run."


def test_page_says_the_verdict_and_the_numbers():
    page = Page(make().to_html())
    for text in (
        "Between 30.0 % and 60.0 % of 10 inputs hold at linf:0.2.",
        "6.7 to 65.2",  # 3 of 10, by Clopper-Pearson
        "26.2 to 87.8",  # 6 of 10
        "with 95 % confidence",
        "3 of 3 broken inputs",
        "zero → one",
        "input 3, label zero; broken at 0.2 by pgd",
        "steps=3",
        "1 min 1 s",
        "ab" * 32,
    ):
        assert text in page.text.replace("\n", " "), text


def test_page_stands_alone_and_runs_nothing():
    for html in (make().to_html(), render([make("a"), make("b")])):
        page = Page(html)
        assert not {"script", "link", "iframe", "object"} & set(page.tags)
        addresses = [value for key, value in page.attributes if key in ("src", "href")]
        assert addresses
        assert all(value.startswith("data:image/png;base64,") for value in addresses)
        assert not [key for key, _ in page.attributes if key.startswith("on")]
        assert "http" not in re.sub(r"http-equiv", "", html)
        assert "url(" not in html
        assert "prefers-color-scheme: dark" in html
        assert 'name="viewport"' in html


def test_names_cannot_inject_markup():
    evil = '<script>alert("x")</script>'
    html = render([make(evil, classes=(evil, "b")), make(evil)])
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert Page(html).text.count("alert") >= 3


def test_gallery_shows_three_pictures_per_image():
    assert Page(make().to_html()).tags.count("img") == 9
    assert Page(make(shape=(3, 2, 7)).to_html()).tags.count("img") == 9


def test_gallery_shows_what_decides_where_it_is_known():
    plain = make()
    known = tuple(replace(example, attribution=example.x - example.x_adv) for example in plain.examples)
    page = Page(replace(plain, examples=known[:1] + plain.examples[1:]).to_html())
    assert page.tags.count("img") == 10
    assert "orange speaks for the label" in page.text
    assert "orange" not in Page(plain.to_html()).text


@pytest.mark.parametrize("shape", [(6,), (2, 4, 4), (5, 5)])
def test_what_is_no_image_has_a_gallery_without_pictures(shape):
    page = Page(make(shape=shape).to_html())
    assert "img" not in page.tags
    assert page.tags.count("figure") == 3


def test_gallery_of_nothing():
    assert "3 inputs were broken; their examples are not part of this file" in make(examples=False).to_html()
    base = make(examples=False)
    held = tuple(r for r in base.records if r.broken is None)
    intact = Audit(**{**base.__dict__, "records": held})
    assert "no input that is classified right was broken" in intact.to_html()


def test_class_without_a_name_has_its_number():
    assert "class 0 → class 1" in Page(make(classes=()).to_html()).text


def test_several_models_share_one_page():
    page = Page(render([make("first"), make("second", certify=None), make("third")]))
    assert page.tags.count("svg") == 3
    assert page.tags.count("article") == 3
    assert "3 models" in page.text
    with pytest.raises(hf.InputError, match="at least one audit"):
        render([])


def test_plot_draws_the_bracket():
    root = ElementTree.fromstring(bracket_plot(make()))
    by_class = {(child.tag, child.get("class")): child for child in root}

    def points(element):
        return [tuple(map(float, pair.split(","))) for pair in element.get("points").split()]

    attacked = points(by_class["polyline", "line attacked"])
    certified = points(by_class["polyline", "line certified"])
    band = points(by_class["polygon", "band"])
    assert attacked[0] == certified[0]
    assert band == attacked + certified[::-1]
    assert all(a[1] < c[1] for a, c in zip(attacked[1:], certified[1:], strict=True))  # y grows downwards
    titles = [title.text for title in root.iter("title")]
    assert "Under attack: 6 of 10 inputs at linf:0.2 = 60.0 % (95 % interval 26.2 to 87.8)" in titles
    texts = [text.text for text in root.iter("text")]
    for text in ("0.2", "75 %", "accuracy", "under attack", "certified", "budget: largest change of a value (linf)"):
        assert text in texts
    assert "certified (not run)" in bracket_plot(make(certify=None))


def test_plot_keeps_the_number_of_the_largest_budget():
    base = make()
    budgets = tuple(i / 100 for i in range(1, 31))
    many = Audit(**{**base.__dict__, "budgets": budgets, "threats": tuple(f"linf:{b}" for b in budgets)})
    texts = [text.text for text in ElementTree.fromstring(bracket_plot(many)).iter("text")]
    assert "0.3" in texts
    assert len(texts) < 20


@given(count=st.integers(0, 60), more=st.integers(0, 60), confidence=st.sampled_from([0.9, 0.95, 0.99]))
def test_interval_is_the_exact_one(count, more, confidence):
    total = max(count + more, 1)
    expected = binomtest(count, total).proportion_ci(confidence, method="exact")
    assert clopper_pearson(count, total, confidence=confidence) == pytest.approx(
        (expected.low, expected.high), abs=1e-9
    )


@given(
    channels=st.sampled_from([1, 3]), height=st.integers(1, 9), width=st.integers(1, 9), seed=st.integers(0, 2**32 - 1)
)
def test_png_is_read_back_by_another_library(channels, height, width, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (channels, height, width))
    with Image.open(io.BytesIO(encode_png((pixels / 255).astype(np.float32)))) as image:
        image.load()
        assert image.size == (width, height)
        read = np.asarray(image)
    expected = pixels[0] if channels == 1 else pixels.transpose(1, 2, 0)
    np.testing.assert_array_equal(read, expected)


def test_png_scales_and_clips_to_the_range():
    image = np.array([[[-3.0, -1.0, 0.0, 1.0, 9.0]]])
    with Image.open(io.BytesIO(encode_png(image, low=-1, high=1))) as read:
        assert np.asarray(read).tolist() == [[0, 0, 128, 255, 255]]
    assert data_uri(image).startswith("data:image/png;base64,iVBOR")
    assert [is_picture(s) for s in ((1, 2, 3), (3, 2, 2), (2, 2, 2), (4,), (1, 0, 3))] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_terminal_table():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(make().table())
    text = console.export_text()
    assert "Between 30.0 % and 60.0 % of 10 inputs hold at linf:0.2." in text
    assert re.search(r"0\.1 .*40\.0 % .*12\.2 to 73\.8 .*70\.0 % .*34\.8 to 93\.3 .* 3 ", text)


@pytest.mark.parametrize("trust", [TRUST, TRUST[1:]])
def test_page_and_table_say_whether_the_attack_can_be_trusted(trust):
    result = make(trust=trust)
    page = Page(result.to_html())
    text = " ".join(page.text.split())
    verdict = "unreliable: fired: huge-budget" if len(trust) == 2 else "reliable: no indicator fired"
    assert f"The attack is {verdict}." in text
    assert result.to_html().count('<strong class="fired">yes') == len(trust) - 1
    for indicator in trust:
        assert indicator.name in text
        assert indicator.detail in text
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(result.table())
    assert f"the attack is {verdict}" in " ".join(console.export_text().split())


def test_page_and_table_without_indicators():
    result = make()
    assert result.verdict is None
    assert "It was not probed" in Page(result.to_html()).text
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(result.table())
    assert "the attack is" not in console.export_text()


def test_json_keys_are_documented():
    body = json.loads(make(trust=TRUST).to_json())
    assert body["verdict"] == {"level": "unreliable", "reason": "fired: huge-budget"}
    assert body["trust"][1] == {"name": "softmax", "fired": False, "value": 0.0, "detail": "the model returns logits"}
    assert json.loads(make().to_json())["verdict"] is None
    assert body["schema_version"] == 1
    assert body["levels"][2]["certified_accuracy"] == 0.3
    assert body["records"][0] == {
        "position": 0,
        "label": 0,
        "prediction": 1,
        "certified": None,
        "certified_by": "",
        "broken": 0.0,
        "broken_by": "clean",
        "prediction_adv": None,
    }
    docs = DOCS.read_text(encoding="utf-8")
    for key in {*body, *body["levels"][0], *body["records"][0]}:
        assert f"`{key}`" in docs, key
