"""VNN-LIB files: what is read is what was written, and what is wrong is said with line and token."""

import gzip

import pytest
import torch

import holdfast as hf
from holdfast.errors import InputError, StorageError, UnsupportedError
from holdfast.properties import Case, Polytope, Property, parse_property, robust, save_property
from holdfast.properties.save import to_vnnlib

HEAD = """; a comment (assert (<= X_0 -9.0))
(declare-const X_0 Real)
(declare-const X_1 Real)
(declare-const Y_0 Real)
(declare-const Y_1 Real)
(assert (>= X_0 -1.5))
(assert (<= X_0 1e-3))
(assert (>= X_1 0))
(assert (<= X_1 2))
"""


def same(a: Property, b: Property) -> bool:
    def flat(prop):
        for case in prop.cases:
            yield from (case.lower, case.upper)
            for polytope in case.unsafe:
                yield from (polytope.rows, polytope.limits)

    left, right = list(flat(a)), list(flat(b))
    return len(left) == len(right) and all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


def test_bounds_and_conditions_are_read():
    asked = parse_property(HEAD + "(assert (<= Y_1 Y_0))\n(assert (>= (+ Y_0 (* 2 Y_1)) 3.5))")
    (case,) = asked.cases
    assert case.lower.tolist() == [-1.5, 0.0]
    assert case.upper.tolist() == [1e-3, 2.0]
    (polytope,) = case.unsafe
    assert polytope.rows.tolist() == [[-1.0, 1.0], [-1.0, -2.0]]
    assert polytope.limits.tolist() == [0.0, -3.5]


def test_the_tightest_of_several_bounds_counts():
    asked = parse_property(HEAD + "(assert (<= X_0 -0.5))(assert (>= X_0 -3))(assert (<= Y_0 0))")
    assert (asked.cases[0].lower[0], asked.cases[0].upper[0]) == (-1.5, -0.5)


def test_disjunctions_over_inputs_become_several_boxes():
    asked = parse_property(
        HEAD + "(assert (or (and (<= X_0 -1) (<= Y_0 0)) (and (>= X_0 -0.5) (<= Y_1 0)) (and (<= X_0 -1) (>= Y_1 5))))"
    )
    assert [(c.lower[0].item(), c.upper[0].item(), len(c.unsafe)) for c in asked.cases] == [
        (-1.5, -1.0, 2),
        (-0.5, 1e-3, 1),
    ]


def test_and_of_ors_is_multiplied_out():
    asked = parse_property(
        HEAD + "(assert (or (<= Y_0 0) (<= Y_1 0)))(assert (or (>= Y_0 -1) (>= Y_1 -1)))(assert (= Y_0 Y_1))"
    )
    assert [len(p.rows) for p in asked.cases[0].unsafe] == [4] * 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(assert (<= Y_0 Y_7))", r"prop, line 10: 'Y_7' is not declared; there are 2 of Y"),
        ("(assert (<= X_5 1.0))", r"line 10: 'X_5' is not declared"),
        ("(assert (<= Y_0 abc))", r"line 10: 'abc' is no variable and no number"),
        ("\n\n(assert (<= Y_0 1.0)", r"the file ends early; expected '\)'"),
        ("(assert\n (less Y_0 1))", r"line 11: unknown condition 'less'"),
        ("(assert (< Y_0 1))", r"line 10: '<' is not part of VNN-LIB 1.0"),
        ("(assert (<= Y_0 1 2))", r"line 10: expected '\)', got '2'"),
        ("(check-sat)", r"line 10: unknown command 'check-sat'"),
        ("(assert (or))", r"line 10: 'or' without conditions"),
        ("(assert (<= (* Y_0 Y_1) 1))", r"line 10: a product of two variables"),
        ("(assert (<= (/ Y_0 Y_1) 1))", r"line 10: unknown term '/'"),
        (")", r"line 10: expected '\(', got '\)'"),
        ("(assert " + "(and " * 300, "nested more than 200 deep"),
    ],
)
def test_malformed_text_is_refused_with_its_line_and_token(text, words):
    with pytest.raises(InputError, match=words):
        parse_property(HEAD + text, "prop")


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(UnsupportedError, match="line 10: a condition on several inputs at once"):
        parse_property(HEAD + "(assert (<= X_0 X_1))(assert (<= Y_0 0))")
    with pytest.raises(UnsupportedError, match="on inputs and outputs at once"):
        parse_property(HEAD + "(assert (<= X_0 Y_1))")
    with pytest.raises(InputError, match="input 1 has no upper bound"):
        parse_property(HEAD.replace("(assert (<= X_1 2))", "") + "(assert (<= Y_0 0))")
    with pytest.raises(InputError, match="no outputs Y_0"):
        parse_property("(declare-const X_0 Real)")
    with pytest.raises(InputError, match="Y_2 is declared, Y_0 is not"):
        parse_property("(declare-const X_0 Real)(declare-const Y_1 Real)(declare-const Y_2 Real)")
    with pytest.raises(UnsupportedError, match="more than 100,000 cases"):
        parse_property(HEAD + "(assert (or (<= Y_0 0) (<= Y_1 0)))" * 17)


def test_files_are_read_packed_or_not(tmp_path):
    asked = parse_property(HEAD + "(assert (or (<= Y_0 0.1) (and (<= Y_1 1e-30) (>= Y_0 -0.3))))")
    for name in ("a.vnnlib", "a.vnnlib.gz"):
        assert same(hf.load_property(save_property(asked, tmp_path / name)), asked)
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"(")[:-4])
    with pytest.raises(StorageError, match="cannot be read"):
        hf.load_property(tmp_path / "bad.gz")
    with pytest.raises(StorageError, match="cannot be read"):
        hf.load_property(tmp_path / "none.vnnlib")


def test_properties_of_several_boxes_survive_a_round_trip():
    asked = Property(
        (
            Case([0.1, -1 / 3], [0.3, 2.0], (Polytope([[1.0, -1.0], [0.5, 0.0]], [0.0, 1e-9]),)),
            Case([0.2, 0.0], [0.2, 1.0], (Polytope([[0.0, 3.0]], [-7.0]), Polytope([[1.0, 0.0]], [2.0]))),
        )
    )
    assert same(parse_property(to_vnnlib(asked)), asked)


def test_a_ball_has_no_text():
    with pytest.raises(UnsupportedError, match="no balls"):
        to_vnnlib(robust(torch.full((3,), 0.5), 0, hf.L2(0.1), 2))


def test_version_2_reads_like_version_1():
    pytest.importorskip("vnnlib")
    text = """(vnnlib-version <2.0>)
    (declare-network f (declare-input X float32 [1,2]) (declare-output Y float32 [1,2]))
    (assert (and (<= X[0,0] 1.0) (>= X[0,0] -1.0) (<= X[0,1] 2.0) (>= X[0,1] 0.0)))
    """
    asked = parse_property(text + "(assert (or (<= Y[0,0] Y[0,1]) (>= (* 2.0 Y[0,1]) 3.0)))")
    assert asked.cases[0].upper.tolist() == [1.0, 2.0]
    assert [p.rows.tolist() for p in asked.cases[0].unsafe] == [[[1.0, -1.0]], [[0.0, -2.0]]]
    with pytest.raises(UnsupportedError, match="is strict"):
        parse_property(text + "(assert (< Y[0,0] 0.0))")
    with pytest.raises(InputError, match=r"^prop, line 4: Undeclared variable 'Z'$"):
        parse_property(text + "(assert (<= Z[0,0] 0.0))", "prop")
    with pytest.raises(InputError, match=r"^prop: Parse error: .* line 4, column 23"):
        parse_property(text + "(assert (<= Y[0,0] ))", "prop")
