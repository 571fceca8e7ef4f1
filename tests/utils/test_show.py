"""Values show themselves: counts and ranges in place of tensors, tables that escape what they are given."""

import base64
import builtins
import re
from dataclasses import dataclass

import pytest
import torch

from holdfast.errors import InputError
from holdfast.utils.show import Shown, Svg, data_frame, html_table, latex_table, latex_text, lines, words


@dataclass(frozen=True, eq=False, repr=False)
class Toy(Shown):
    right: torch.Tensor
    size: torch.Tensor | None
    by: tuple[str, ...]
    inner: "Toy | None" = None


def toy(inner=None):
    return Toy(torch.tensor([True, False, True]), None, ("a", "", "a"), inner)


def test_a_result_is_a_line_for_each_field_that_it_has():
    assert repr(toy()) == "Toy\n  right  2 of 3 (66.7 %)\n  by     a 2, none 1"
    assert repr(toy(toy())).splitlines()[-1] == "  inner  right: 2 of 3 (66.7 %); by: a 2, none 1"


def test_a_notebook_shows_the_same_as_a_table():
    page = toy()._repr_html_()
    assert page.count("<tr>") == 2
    assert "<thead>" not in page
    assert ">right</td><td>2 of 3 (66.7 %)</td>" in page


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.tensor([1.0, 4.0, 2.0]), "1 to 4, median 2"),
        (torch.tensor([1.0, float("inf"), float("nan")]), "1 to 1, median 1, 2 not finite"),
        (torch.tensor([float("nan")]), "no value, 1 not finite"),
        (torch.tensor([3, 5], dtype=torch.int64), "3 to 5, median 3"),
        (torch.tensor([1.0, 2.0], dtype=torch.float16, requires_grad=True), "1 to 2, median 1"),
        (torch.zeros(0), "no value"),
        (torch.zeros(0, dtype=torch.bool), "no value"),
        (torch.tensor(0.25), "0.25"),
        (torch.linspace(-1, 1, 6).reshape(2, 3), "float32 (2, 3), -1 to 1"),
        (torch.tensor([[True], [False]]), "bool (2, 1), 0 to 1"),
        (torch.nn.Linear(3, 2), "Linear, 8 parameters"),
        (("cat", "dog"), "cat, dog"),
        (("cat",), "cat 1"),
        ((), "()"),
        (0.123456, "0.1235"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_values_in_words(value, text):
    assert words(value) == text


def test_long_lists_of_names_are_cut():
    names = tuple(f"method-{i % 9}" for i in range(90))
    assert words(names).endswith(", others 40")
    assert len(words(tuple(f"a rather long name {i}" for i in range(1000)))) <= 110


def test_nothing_is_read_as_markup():
    assert "<b>" not in html_table("<b>", ("<b>", "c"), [("<b>", "<b>")])
    assert latex_text(r"a_b & 5 % of #1 {x} ~^ \ <$>") == (
        r"a\_b \& 5 \% of \#1 \{x\} \textasciitilde{}\textasciicircum{} \textbackslash{} \textless{}\$\textgreater{}"
    )


def test_a_latex_table_has_the_rules_of_booktabs():
    table = latex_table("50 %", ("run", "a", "b"), [("x_1", 1, 2), ("y", 3, 4)])
    inside = table[table.index(r"\begin{tabular}") : table.index(r"\end{tabular}")]
    assert inside.splitlines() == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"run & a & b \\",
        r"\midrule",
        r"x\_1 & 1 & 2 \\",
        r"y & 3 & 4 \\",
        r"\bottomrule",
    ]
    assert r"\caption{50 \%}" in table
    assert table.startswith("% needs \\usepackage{booktabs}")


def test_pandas_gets_the_values_as_they_are():
    frame = data_frame([{"a": 1, "b": 0.5}, {"a": 2}])
    assert list(frame.columns) == ["a", "b"]
    assert frame["a"].tolist() == [1, 2]
    assert frame["b"].isna().tolist() == [False, True]


def test_without_pandas_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **options):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InputError, match=r"pip install 'holdfast\[pandas\]'"):
        data_frame([{"a": 1}])


def test_a_picture_shows_itself_and_can_be_saved(tmp_path):
    picture = Svg("<svg>ü</svg>", 'says "50 %"')
    (data,) = re.findall(r"base64,([^\"]*)\"", picture._repr_html_())
    assert base64.b64decode(data).decode() == str(picture) == "<svg>ü</svg>"
    assert 'alt="says &quot;50 %&quot;"' in picture._repr_html_()
    assert repr(picture).startswith('picture: says "50 %" (')
    path = picture.save(tmp_path / "a.svg")
    assert path.read_text(encoding="utf-8") == "<svg>ü</svg>"
    with pytest.raises(InputError, match=r"ends in \.svg, got 'a\.png'"):
        picture.save(tmp_path / "a.png")


def test_lines_are_aligned():
    assert lines("T", {"a": "1", "long": "2"}) == "T\n  a     1\n  long  2"
    assert lines("T", {}) == "T"
