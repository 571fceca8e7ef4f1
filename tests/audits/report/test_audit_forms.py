"""The forms of an audit beside its page: plots, pictures, tables, JSON, CSV, badge and model card."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from audit_makers import TRUST, make, make_bracket
from holdfast.attacks.core.indicators import Indicator
from holdfast.audits.report.card import badge, model_card, to_csv
from holdfast.audits.report.gallery import state
from holdfast.audits.report.page import schema
from holdfast.audits.report.plot import bracket_plot, range_bar
from holdfast.utils.png import data_uri, encode_png, is_picture


def test_plot_draws_the_bracket_and_can_be_read_without_a_mouse():
    root = ElementTree.fromstring(bracket_plot(make_bracket()))
    by_class = {(child.tag, child.get("class")): child for child in root}

    def points(element):
        return [tuple(map(float, pair.split(","))) for pair in element.get("points").split()]

    attacked = points(by_class["polyline", "line attacked"])
    certified = points(by_class["polyline", "line certified"])
    band = points(by_class["polygon", "band"])
    assert attacked[0] == certified[0]
    assert band == attacked + certified[::-1]
    assert all(a[1] < c[1] for a, c in zip(attacked[1:], certified[1:], strict=True))  # y grows downwards
    stops = [group for group in root if group.get("class") == "stop"]
    assert [stop.get("tabindex") for stop in stops] == ["0"] * 3
    assert stops[2].get("aria-label") == (
        "linf:0.2, 10 inputs; under attack: 60.0 % (26.2 to 87.8); certified: 30.0 % (6.7 to 65.2); undecided: 3"
    )
    # Without a style sheet the numbers stay hidden.
    assert {g.get("visibility") for g in root.iter("g") if g.get("class") == "tip"} == {"hidden"}
    texts = [text.text for text in root.iter("text")]
    for text in ("0.2", "75 %", "accuracy", "under attack", "certified", "budget: largest change of a value (linf)"):
        assert text in texts
    not_run = bracket_plot(make_bracket(proved=False))  # no curve at 0 % for what was not run
    assert "certified" not in not_run.replace("no certificate was run", "")
    assert 'class="band"' not in not_run


def test_plot_keeps_the_number_of_the_largest_budget():
    budgets = tuple(i / 100 for i in range(1, 31))
    wide = replace(make_bracket(), budgets=budgets, threats=tuple(f"linf:{b}" for b in budgets))
    texts = [text.text for text in ElementTree.fromstring(bracket_plot(wide)).findall("text")]
    assert "0.3" in texts
    assert len(texts) < 20


def test_range_bar_is_drawn_to_scale():
    bar = ElementTree.fromstring(range_bar(0.9, make_bracket().levels[-1]))
    band = next(part for part in bar if part.get("class") == "band")
    assert float(band.get("width")) == pytest.approx(160 * 0.3)
    assert float(band.get("x")) == pytest.approx(8 + 160 * 0.3)


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
    shapes = ((1, 2, 3), (3, 2, 2), (2, 2, 2), (4,), (1, 0, 3))
    assert [is_picture(s) for s in shapes] == [True, True, False, False, False]


def test_terminal_table():
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(make().table())
    text = console.export_text()
    headline = "Between 30 % and 60 % of the 10 test images keep their label when every pixel may change by up to 0.2."
    assert headline in " ".join(text.split())
    assert re.search(r"0\.1 .*40\.0 % .*12\.2 to 73\.8 .*70\.0 % .*34\.8 to 93\.3 .* 3 ", text)
    console.print(make(proved=False).table())
    without = console.export_text()
    assert without.count("not run") == 2
    assert " 0.0 %" not in without


def test_json_follows_its_schema():
    audit = make(groups={"site": tuple("abcdefghij")}, brackets=(make_bracket(trust=TRUST), make_bracket("l2:0.2")))
    body = json.loads(audit.to_json())
    known = schema()
    checker = jsonschema.Draft202012Validator(known)
    jsonschema.Draft202012Validator.check_schema(known)
    checker.validate(body)
    parts = known["$defs"]
    for found, described in (
        (body, known),
        (body["brackets"][0], parts["bracket"]),
        (body["brackets"][0]["levels"][0], parts["level"]),
        (body["brackets"][0]["records"][0], parts["record"]),
        (body["brackets"][0]["trust"][0], parts["indicator"]),
        (body["verdict"], parts["verdict"]),
    ):
        assert set(found) == set(described["properties"]) == set(described["required"])
        for key in found:  # each one counts, and no other is let in
            broken = {k: v for k, v in found.items() if k != key}
            assert not jsonschema.Draft202012Validator(described | {"$defs": parts}).is_valid(broken)
        assert not jsonschema.Draft202012Validator(described | {"$defs": parts}).is_valid(found | {"other": 1})
    assert not checker.is_valid(body | {"schema_version": 1})
    assert not checker.is_valid(body | {"brackets": []})


def test_csv_reads_back_as_the_records():
    audit = make(groups={"site": tuple("abcdefghij")}, brackets=(make_bracket(), make_bracket("l2:0.2", proved=False)))
    rows = list(csv.DictReader(io.StringIO(to_csv(audit))))
    assert len(rows) == 20
    for i, row in enumerate(rows):
        bracket = audit.brackets[i // 10]
        record = bracket.records[i % 10]
        read = {
            key: None if row[key] == "" and value is None else type(value)(row[key])
            for key, value in asdict(record).items()
        }
        assert read == asdict(record)
        assert row["threat"] == bracket.threat
        assert row["class"] == audit.classes[record.label]
        assert row["state"] == state(record, 0.2)
        assert row["gap"] == ("" if record.gap is None else repr(record.gap))
        assert row["group site"] == "abcdefghij"[i % 10]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", '=HYPERLINK("x")'])
def test_csv_holds_no_formulas(text):
    audit = make(classes=(text, "b"), groups={"site": (text,) * 10, text: ("x",) * 10})
    for cells in csv.reader(io.StringIO(to_csv(audit))):
        assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t"))]
    assert f"'{text}" in next(csv.DictReader(io.StringIO(to_csv(audit))))["group site"]


def test_badge_says_both_ends():
    root = ElementTree.fromstring(badge(make()))
    assert root.get("aria-label") == "robust @ linf:0.2, certified 30 %, attacked 60 %"
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["robust @ linf:0.2", "certified 30 %", "attacked 60 %"]
    fills = [rect.get("fill") for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.get("fill")]
    assert len(set(fills)) == 3
    assert "certified not run" in badge(make(proved=False))
    ElementTree.fromstring(badge(make(threat="box:<&>")))


@pytest.mark.parametrize("sign", ["huge-budget", "softmax", "stochastic", "random-noise"])
@pytest.mark.parametrize("place", [0, 1])
def test_whatever_shows_the_result_says_that_the_attack_is_unreliable(sign, place):
    """Every verdict but "reliable" is in the sentence that people copy, and on the badge, for any of the threats."""
    brackets = [make_bracket(trust=(Indicator("softmax", False, 0.0, "no"),)), make_bracket("l2:0.2")]
    sound = make(brackets=tuple(brackets))
    assert sound.verdict.level == "reliable"
    brackets[place] = replace(brackets[place], trust=(Indicator(sign, True, 1.0, "seen"),))
    doubtful = make(brackets=tuple(brackets))
    words = "is unreliable" if doubtful.verdict.level == "unreliable" else "may be unreliable"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(doubtful.table())
    body = json.loads(doubtful.to_json())
    shown = " ".join(console.export_text().split())
    seen = [doubtful.headline, shown, body["headline"], body["brackets"][place]["headline"]]
    seen += [brackets[place].headline, badge(doubtful), model_card(doubtful), bracket_plot(brackets[place])]
    assert all(f"the attack {words}" in text for text in seen)
    assert f"the attack {words}" in re.search(r"<h1>(.*?)</h1>", doubtful.to_html(), re.DOTALL)[1]
    quiet = (sound.headline, sound.to_json(), badge(sound), model_card(sound), body["brackets"][1 - place]["headline"])
    assert not any("unreliable" in text for text in quiet)
    ElementTree.fromstring(badge(doubtful))


def test_notes_are_in_every_form():
    audit = make()
    note = "The model draws <random> numbers."
    told = replace(audit, settings={**audit.settings, "notes": [note]})
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(told.table())
    assert note in console.export_text()
    assert note in json.loads(told.to_json())["settings"]["notes"]
    assert "draws &lt;random&gt; numbers" in told.to_html()
    assert "draws \\<random\\> numbers" in model_card(told)
    assert audit.notes == ()


def test_model_card_has_what_a_reader_needs():
    brackets = (make_bracket(trust=TRUST, skipped=("milp: no time",)), make_bracket("l2:0.2", proved=False))
    card = model_card(make("a|b", brackets=brackets))
    for text in (
        "![Of the 10 test images, between 30 % and 60 % keep their label when every pixel may change by up to 0.2",
        "](badge.svg)",
        "| linf:0.2 | 90.0 % | 30.0 % (6.7 to 65.2) | 60.0 % (26.2 to 87.8) | 3 |",
        "| l2:0.2 | 90.0 % | not run |",
        "**unreliable** (linf:0.2: fired: huge-budget)",
        "Not done, linf:0.2: milp: no time",
        f"sha256 of the model: `{'ab' * 32}`",
        "holdfast audit MODEL --data toy --threat linf:0.2 --threat l2:0.2 --n 10 --budget quick --seed 7",
    ):
        assert text in card, text
    assert "The attacks: not probed." in model_card(make())
    assert r"\<b\>" in model_card(make(skipped=("<b>",)))
