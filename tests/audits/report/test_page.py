"""The report: what it says, that it stands alone, and that nothing foreign in it can run."""

import base64
import hashlib
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from audit_makers import TRUST, make, make_bracket
from holdfast.audits.bracket import NO_TIME_TO_PROBE, Record
from holdfast.audits.report.gallery import PICTURE_BYTES, gallery, island
from holdfast.audits.report.page import render
from holdfast.audits.result import Audit
from holdfast.audits.rows import Example
from holdfast.errors import InputError


def many(inputs, shape, threats=1) -> Audit:
    """Synthetic images of one size, every second one broken: smooth as photographs are, with noise that is not."""
    draw = np.random.default_rng(0)
    coarse = draw.random((inputs, shape[0], shape[1] // 4, shape[2] // 4), dtype=np.float32)
    x = coarse.repeat(4, 2).repeat(4, 3)
    brackets = []
    for k in range(threats):
        x_adv = np.clip(x + 0.1 * draw.choice([-1.0, 1.0], x.shape), 0, 1).astype(np.float32)
        broken = [0.05 if i % 2 else None for i in range(inputs)]
        records = tuple(
            Record(i, i % 10, i % 10, 0.01, "ibp", b, "pgd" if b else "", (i + 1) % 10 if b else None)
            for i, b in enumerate(broken)
        )
        pictures = [Example(i, x[i], x_adv[i], x[i] - x_adv[i]) for i in range(1, inputs, 2)]
        pictures += [Example(i, x[i]) for i in range(0, inputs, 2)]
        base = make_bracket(f"linf:0.{k + 2}")
        brackets.append(replace(base, records=records, examples=tuple(pictures)))
    return make(brackets=tuple(brackets), classes=tuple("abcdefghij"), groups={"site": ("north",) * inputs})


class Page(HTMLParser):
    """Collects tags, attributes and text, and insists on balanced tags."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.open, self.text = [], [], [], ""
        self.feed(html)
        self.close()
        assert self.open == []
        self.words = " ".join(self.text.split())

    def handle_starttag(self, tag, attributes):
        self.text += " " * (tag in ("td", "th", "tr", "small", "dt", "dd", "h2", "h3", "span"))
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "img", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def data_of(html):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(text)


def test_page_says_the_verdict_and_the_numbers():
    words = Page(make(skipped=("milp: no time for 3 inputs",)).to_html()).words
    for text in (
        "Between 30 % and 60 % of the 10 test images keep their label when every pixel may change by up to 0.2.",
        "6.7 to 65.2",  # 3 of 10, by Clopper-Pearson
        "26.2 to 87.8",  # 6 of 10
        "with 95 % confidence",
        "lies between 6.7 % and 87.8 %",
        "The attack was not judged: there are no probes",
        "not broken by pgd: no more",
        "proved by ibp: no fewer",
        "3 of 9 inputs that are classified right were broken",
        "milp: no time for 3 inputs",
        "What to do next",
        "holdfast train --list",
        "certify ibp 9 3 proved, 2 at a smaller budget 2.0 s defaults",
        "attack pgd 9 3 broken 1 min 1 s steps=3",
        "broken by pgd 3",
        "certified by ibp 5",
        "ab" * 32,
    ):
        assert text in words, text
    order = [
        words.index(text) for text in ("keep their label", "The attack was", "Accuracy against", "Input by", "sha256")
    ]
    assert order == sorted(order)


def test_an_attack_that_there_was_no_time_to_judge_is_not_said_to_have_no_probes():
    words = Page(make(skipped=(NO_TIME_TO_PROBE,)).to_html()).words
    assert "The attack was not judged: there was no time for the probes." in words
    assert "It was not probed: there was no time for the probes." in words
    assert "there are no probes" not in words


def test_tables_by_class_and_by_each_column():
    audit = make(groups={"site": ("north",) * 4 + ("south",) * 6, "same": ("x",) * 10})
    html = audit.to_html()
    words = Page(html).words
    assert "By class, at linf:0.2" in words
    assert "By site, at linf:0.2" in words
    assert "By same" not in words  # a table of one group says nothing
    # Of the first four inputs one is wrong and three break; of the others none is, and three are proved.
    assert "north 4 0.0 % 0.0 to 60.2 0.0 % 0.0 to 60.2 75.0 % 19.4 to 99.4" in words
    assert "south 6 50.0 % 11.8 to 88.2 100.0 % 54.1 to 100.0 100.0 %" in words
    assert words.index("zero 5") < words.index("one 5")  # in the order of their numbers
    wide = make(groups={"each": tuple(f"g{i}" for i in range(10))}, brackets=make().brackets)
    assert "By each" in Page(wide.to_html()).words


def test_classes_keep_the_order_of_their_numbers():
    records = tuple(replace(r, label=r.position, prediction=r.position) for r in make().records)
    eleven = (*records, replace(records[-1], position=10, label=10))
    words = Page(make(classes=(), brackets=(replace(make_bracket(), records=eleven),)).to_html()).words
    assert words.index("class 2 1 ") < words.index("class 10 1 ")


def test_several_threats_have_a_summary_and_a_part_each():
    brackets = (make_bracket(trust=TRUST), make_bracket("l2:0.2", proved=False), make_bracket("patch:5x5"))
    page = Page(make(brackets=brackets).to_html())
    assert page.tags.count("noscript") == 3
    assert "All threats" in page.words
    assert "linf:0.2 30.0 % 6.7 to 65.2 60.0 % 26.2 to 87.8 3 of 10 unreliable" in page.words
    assert "l2:0.2 \N{EN DASH} not run 60.0 % 26.2 to 87.8 6 of 10 not judged" in page.words
    assert "The attack is unreliable: linf:0.2: fired: huge-budget." in page.words
    anchors = {value for key, value in page.attributes if key == "href"}
    assert {"#threat-1", "#threat-2", "#threat-3", "#next", "#run"} <= anchors
    ids = [value for key, value in page.attributes if key == "id"]
    assert {anchor[1:] for anchor in anchors} <= set(ids)
    assert len(ids) == len(set(ids))


def test_page_stands_alone_and_allows_its_own_script_only():
    for html in (make().to_html(), render([make("a"), make("b")])):
        page = Page(html)
        assert not {"link", "iframe", "object", "form"} & set(page.tags)
        addresses = [value for key, value in page.attributes if key in ("src", "href")]
        assert all(value.startswith("#") for value in addresses)
        assert not [key for key, _ in page.attributes if key.startswith("on") or key == "style"]
        assert set(re.findall(r"https?:[^\"' ]*", html)) <= {"http://www.w3.org/2000/svg"}
        assert "url(" not in html
        assert "prefers-color-scheme: dark" in html
        (policy,) = re.findall(r'Security-Policy" content="([^"]*)"', html)
        assert "unsafe" not in policy
        for tag, text in re.findall(r"<(style|script)>(.*?)</\1>", html, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{tag}-src '{'sha256-' + digest}'" in policy
    assert "eval(" not in html
    assert "innerHTML" not in make().to_html()


def test_names_cannot_inject_markup():
    evil = '</script><script>alert("x")</script><!--'
    brackets = (make_bracket(skipped=(evil,), trust=(replace(TRUST[0], detail=evil),)),)
    for html in (
        make(evil, classes=(evil, "b"), groups={evil: (evil, *"abcdefghi")}, brackets=brackets).to_html(),
        render([make(evil, classes=(evil, "b")), make(evil, classes=(evil, "b"))]),
    ):
        page = Page(html)
        assert html.count("<script") == (2 if "json" in html else 0)
        assert "<!--" not in html
        assert "&lt;script&gt;" in html
        assert page.text.count("alert") >= 3
    assert json.loads(island({"a": evil + "\u2028"})) == {"a": evil + "\u2028"}


def test_gallery_holds_every_input_and_its_pictures():
    found = data_of(make(groups={"site": tuple("abcdefghij")}).to_html())
    (bracket,) = found["brackets"]
    assert [row["at"] for row in bracket["rows"]] == list(range(10))
    assert [row["state"] for row in bracket["rows"]] == [
        *("misclassified", "broken", "broken", "broken"),
        *("undecided",) * 3,
        *("certified",) * 3,
    ]
    broken = bracket["rows"][3]
    assert (broken["low"], broken["proof"], broken["high"], broken["attack"]) == (0.05, "ibp", 0.2, "pgd")
    assert (broken["label"], broken["becomes"], broken["gap"]) == (1, 0, pytest.approx(0.15))
    assert found["classes"] == {"0": "zero", "1": "one"}
    assert found["columns"] == ["site"]
    assert found["groups"][3] == ["d"]
    with Image.open(io.BytesIO(base64.b64decode(broken["adv"]))) as image:
        assert image.size == (4, 5)
    assert set(found["originals"]) == {"1", "2", "3", "4"}  # also of an input that holds
    assert [row["at"] for row in bracket["rows"] if "adv" in row] == [1, 2, 3]
    assert not any("why" in row for row in bracket["rows"])
    assert bracket["left"] == 0


def test_gallery_shows_what_decides_where_it_is_known():
    plain = make_bracket()
    known = tuple(replace(e, attribution=None if e.x_adv is None else e.x - e.x_adv) for e in plain.examples)
    rows = data_of(make(brackets=(replace(plain, examples=known),)).to_html())["brackets"][0]["rows"]
    assert [row["at"] for row in rows if "why" in row] == [1, 2, 3]


@pytest.mark.parametrize("shape", [(6,), (2, 4, 4), (5, 5)])
def test_what_is_no_image_has_a_gallery_without_pictures(shape):
    found = gallery(make(shape=shape))
    assert found["originals"] == {}
    assert not any("adv" in row for row in found["brackets"][0]["rows"])
    assert found["brackets"][0]["left"] == 0


def test_an_infinite_radius_is_a_number_in_the_page():
    records = make().records
    endless = (*records[:-1], replace(records[-1], certified=float("inf")))
    found = data_of(make(brackets=(replace(make_bracket(), records=endless),)).to_html())
    assert found["brackets"][0]["rows"][-1]["low"] > 1e300


def test_large_pictures_are_averaged_down():
    audit = make(shape=(3, 200, 130))
    with Image.open(io.BytesIO(base64.b64decode(gallery(audit)["originals"][1]))) as image:
        assert image.size == (43, 66)
        corner = np.asarray(image)[0, 0] / 255
    np.testing.assert_allclose(corner, audit.examples[0].x[:, :3, :3].mean((1, 2)), atol=3e-3)


@pytest.mark.parametrize(("shape", "threats"), [((1, 28, 28), 1), ((3, 32, 32), 3)])
def test_a_thousand_inputs_stay_below_five_megabytes(shape, threats):
    html = render([many(1000, shape, threats)])
    assert len(html.encode()) < 5_000_000
    found = data_of(html)
    for bracket in found["brackets"]:
        assert len(bracket["rows"]) == 1000
        shown = sum(
            "adv" in row or (row["state"] == "undecided" and str(row["at"]) in found["originals"])
            for row in bracket["rows"]
        )
        if threats == 1:
            assert (shown, bracket["left"]) == (1000, 0)
        else:
            assert shown > 50
            assert bracket["left"] >= 1000 - shown
            assert f"{bracket['left']} inputs are left out" in Page(html).words


@settings(max_examples=8)
@given(room=st.integers(0, 6000))
def test_pictures_keep_to_their_room(room):
    found = gallery(make(), picture_bytes=room)
    (bracket,) = found["brackets"]
    sizes = [len(row[key]) for row in bracket["rows"] for key in ("adv", "diff", "times", "why") if key in row]
    assert sum(sizes) + sum(map(len, found["originals"].values())) <= room
    shown = sum("adv" in row for row in bracket["rows"]) + (4 in found["originals"])
    assert shown + bracket["left"] == 4
    assert PICTURE_BYTES < 5_000_000


def test_models_side_by_side():
    differing = make_bracket()
    swapped = tuple(
        replace(r, certified=0.0, certified_by="", broken=0.1, broken_by="fab", prediction_adv=0)
        if r.position == 8
        else r
        for r in differing.records
    )
    worse = make("second", brackets=(replace(differing, records=swapped), make_bracket("l2:0.2")))
    page = Page(render([make("first"), worse, make("third", proved=False)]))
    assert "3 models, one bracket each" in page.words
    assert "All were audited on the same 10 inputs of toy (test)." in page.words
    assert "l2:0.2 Euclidean" not in page.words  # only one has it
    assert "1 inputs are broken or misclassified in one model and certified in another." in page.words
    assert "8 zero certified broken undecided" in page.words
    assert "second 10 20.0 % 2.5 to 55.6 50.0 % 18.7 to 81.3 90.0 % 55.5 to 99.7 not judged" in page.words
    assert page.tags.count("svg") == 2 * 3
    with pytest.raises(InputError, match="at least one audit"):
        render([])


def test_models_that_share_less():
    other = replace(make("net"), hashes={"model": "ab" * 32, "data": "ef" * 32})
    words = Page(render([make("net"), other])).words
    assert "They were audited on different inputs" in words
    assert "Inputs on which" not in words
    assert "net (1)" in words  # one name for two models would tell nothing
    assert "net (2)" in words
    apart = Page(render([make("a"), make("b", brackets=(make_bracket("l2:0.2"),))])).words
    assert "linf:0.2 largest change" in apart  # no threat is shared: each has its own part
    assert "l2:0.2 Euclidean" in apart


@pytest.mark.parametrize("trust", [TRUST, TRUST[1:]])
def test_page_and_table_say_whether_the_attack_can_be_trusted(trust):
    result = make(trust=trust)
    words = Page(result.to_html()).words
    verdict = "unreliable: fired: huge-budget" if len(trust) == 2 else "reliable: no indicator fired"
    assert f"The attack is {verdict}." in words
    assert "The evaluation" not in words
    aside = "Fewer inputs may hold" if len(trust) == 2 else "That is a word about the attack, not about the model."
    assert f"The attack is {verdict}. {aside}" in words
    assert result.to_html().count('<strong class="fired">yes') == len(trust) - 1
    for indicator in trust:
        assert indicator.name in words
        assert indicator.detail in words
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(result.table())
    assert f"the attack is {verdict}" in " ".join(console.export_text().split())
