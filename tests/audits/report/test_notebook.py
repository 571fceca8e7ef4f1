"""An audit in a notebook, a data frame and a paper: the same numbers as in the terminal."""

import xml.etree.ElementTree as ElementTree

from audit_makers import TRUST, make, make_bracket
from holdfast.audits.report.plot import bracket_plot

BOTH = (make_bracket(), make_bracket(threat="l2:0.2"))


def test_an_audit_prints_its_answer_in_a_few_lines():
    audit = make(name="net", brackets=BOTH)
    first, *rest = repr(audit).splitlines()
    assert first == f"Audit: {audit.headline}"
    assert [line.split()[0] for line in rest] == ["model", "data", "linf:0.2", "l2:0.2"]
    assert f"{audit.brackets[0].answer}; 90.0 % right unchanged" in rest[2]
    assert repr(make(trust=TRUST)).splitlines()[-1].split() == ["attack", make(trust=TRUST).verdict.level]
    assert repr(BOTH[0]) == f"Bracket: {BOTH[0].headline}"


def test_a_notebook_shows_picture_and_table_of_every_threat():
    page = make(brackets=BOTH)._repr_html_()
    assert page.count("<img ") == page.count("<table>") == 2
    assert page.count("<td>30.0 %</td>") == 2  # certified at the largest budget
    assert page.count("<td>60.0 %</td>") >= 2  # under attack


def test_the_picture_is_the_one_of_the_report_and_stands_alone():
    audit = make(brackets=BOTH)
    picture = str(audit.plot())
    root = ElementTree.fromstring(picture)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert bracket_plot(BOTH[0]).split(">", 1)[1] in picture
    assert "--attacked: #c44f00" in picture
    assert str(audit.brackets[1].plot()) != picture
    assert audit.plot().alt == BOTH[0].headline


def test_a_frame_has_a_row_for_each_threat_and_budget():
    frame = make(brackets=BOTH).to_pandas()
    assert frame["threat"].tolist() == ["linf:0.2"] * 3 + ["l2:0.2"] * 3
    assert frame["budget"].tolist() == [0.0, 0.1, 0.2] * 2
    assert frame["certified"].tolist() == list((0.9, 0.4, 0.3) * 2)
    assert frame["attacked"].tolist() == list((0.9, 0.7, 0.6) * 2)
    assert frame["undecided"].tolist() == [0, 3, 3] * 2
    assert all(frame["certified_low"] <= frame["certified"])
    assert all(frame["attacked"] <= frame["attacked_high"])


def test_a_frame_has_a_row_for_each_input_with_its_groups():
    frame = make(groups={"camera": tuple("ab" * 5)}).to_pandas("input")
    assert len(frame) == 10
    assert frame["camera"].tolist() == list("ab" * 5)
    assert frame["certified_by"].tolist().count("ibp") == 5
    assert frame["broken"].tolist()[1] == 0.08


def test_a_paper_gets_one_table_for_each_threat():
    text = make(name="my_net", brackets=BOTH).to_latex()
    assert text.count(r"\toprule") == 2
    assert r"Model my\_net on toy (test)" in text
    assert text.count(r"0.2 & 30.0 \% & 6.7 to 65.2 & 60.0 \% & 26.2 to 87.8 & 3 \\") == 2
