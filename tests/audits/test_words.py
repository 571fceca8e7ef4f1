"""The answer in plain words: each kind of threat, shares, and what is said where nothing is proved."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast as hf
from audit_makers import TRUST, make, make_bracket
from holdfast.audits.inputs import exact_text
from holdfast.audits.words import condition, parts_of, rounded_down, share, sized


@pytest.mark.parametrize(
    ("threat", "words"),
    [
        ("linf:2/255", "when every pixel may change by up to 2/255"),
        ("l2:0.5", "when all pixels together may change by a Euclidean distance of up to 0.5"),
        ("l1:10", "when the changes of all pixels may add up to 10"),
        ("patch:5x5", "when a patch of 5 x 5 pixels, anywhere in the image, may show anything"),
        ("sparse:10", "when any 10 pixels may take any value"),
        ("sparse:1", "when any one pixel may take any value"),
        ("box:[0.1, 0.2]", "when every pixel may change by up to a limit of its own"),
        ("linf:0.1@-1:1", "when every pixel may change by up to 0.1 (values lie between -1 and 1)"),
        (
            "l2:0.5, smoothed with noise 0.25",
            "when all pixels together may change by a Euclidean distance of up to 0.5, in the model smoothed with "
            "noise 0.25",
        ),
    ],
)
def test_each_threat_has_its_words(threat, words):
    assert condition(threat) == words
    assert "pixel" not in condition(threat, images=False) or threat.startswith("patch")
    shown = make(brackets=(make_bracket(threat),))
    assert shown.headline == f"Between 30 % and 60 % of the 10 test images keep their label {words}."
    assert words in shown.to_html()


def test_a_headline_names_the_split_and_what_the_inputs_are():
    assert "10 training images keep" in replace(make(), data="toy (train)").headline
    assert "of the 10 images keep" in replace(make(), data="photos").headline
    values = make(shape=(4,))
    assert "10 test inputs keep their label when every value may change" in values.headline


def proved(bracket, radius):
    records = (r if r.certified is None else replace(r, certified=radius) for r in bracket.records)
    return replace(bracket, records=tuple(records))


def test_where_nothing_is_proved_the_upper_end_is_the_answer():
    none = proved(make_bracket(), 0.0)
    assert none.nothing_proved
    assert none.headline == (
        "At most 60 % of the 10 images keep their label when every pixel may change by up to 0.2; nothing is proved."
    )
    not_run = make_bracket(proved=False)
    assert not not_run.nothing_proved
    assert not_run.headline.endswith("by up to 0.2; no certificate was run.")
    both = make(brackets=(none, make_bracket("l2:0.2")))
    assert "by up to 0.2 (nothing is proved); between 30 % and 60 % when all pixels" in both.headline


def test_an_unreliable_attack_is_in_the_headline_of_each_threat():
    doubtful = make(brackets=(make_bracket(trust=TRUST), make_bracket("l2:0.2")))
    assert "by up to 0.2 (the attack is unreliable); between" in doubtful.headline


@given(count=st.integers(0, 100_000), inputs=st.integers(1, 100_000))
def test_a_share_is_all_or_nothing_only_where_it_is(count, inputs):
    text = share(min(count, inputs) / inputs)
    assert (text == "100 %") == (count >= inputs)
    assert (text == "0 %") == (count == 0)
    assert abs(float(text.split()[0]) - 100 * min(count, inputs) / inputs) <= 0.05 + 1e-9


@given(value=st.floats(1e-6, 1e3))
def test_a_radius_is_rounded_down_to_two_digits(value):
    found = rounded_down(value)
    assert found <= value * (1 + 1e-9)
    assert found > value * 0.9
    assert float(f"{found:.2g}") == pytest.approx(found)
    assert float(sized(value, "l2:0.5")) <= value * (1 + 1e-9)


def test_an_audit_goes_on_however_its_threat_is_written(tmp_path):
    model, x = nn.Linear(2, 2).eval(), torch.rand(4, 2)
    how = {"budgets": 1, "attack": "fgsm", "certify": "ibp", "progress": False, "out": tmp_path}
    first = hf.audit(model, (x, model(x).argmax(1)), "linf:0.0625", **how)
    again = hf.audit(model, (x, model(x).argmax(1)), "linf:1/16", **how)
    assert exact_text(hf.threat("linf:1/16")) == exact_text(hf.Linf(0.0625)) == "linf:0.0625"
    assert (first.threat, again.threat) == ("linf:0.0625", "linf:1/16")
    assert again.brackets[0].seconds == first.brackets[0].seconds  # nothing was run again
    assert again.records == first.records


def test_the_parts_of_a_threat():
    assert parts_of("l2:0.5@-1:1, smoothed with noise 0.25") == ("l2", "0.5", "-1:1", "0.25")
    assert parts_of("box") == ("box", "", "", "")
