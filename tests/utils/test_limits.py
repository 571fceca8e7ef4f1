"""Values and archives from outside: what is beyond the limits is a ValueError, soon."""

import json
import zipfile
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clock import TookTooLong, within
from holdfast.utils.limits import DEPTH, check_values, load_tensors, parse_json, read_text, shortened

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(plain)
def test_what_json_holds_comes_back(value):
    assert parse_json(json.dumps(value)) == json.loads(json.dumps(value))


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("times", [DEPTH + 1, 1_000, 100_000])
def test_deep_nesting_is_a_value_error_at_any_depth_of_the_caller(opening, times):
    closing = {"[": "]", '{"a":': "}", '[{"a":': "}]"}[opening]
    for text in (opening * times, opening * times + "1" + closing * times):
        with within(5), pytest.raises(ValueError, match=r"nested deeper than 32 levels|Expecting"):
            parse_json(text)
    with pytest.raises(ValueError, match="nested deeper than 32 levels"):
        parse_json(opening * times + "1" + closing * times)


def test_the_deepest_value_that_is_allowed():
    value = 1
    for _ in range(DEPTH - 1):
        value = [value]
    check_values(value)
    with pytest.raises(ValueError, match="nested"):
        check_values([value])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' twice"),
        ('[{"b": {"a": 1, "a": 1}}]', "the key 'a' twice"),
        ("NaN", "nan"),
        ("[1, -Infinity]", "-inf"),
        ("1e999", "inf"),
        ('{"a": [0.5, 1e400]}', "inf"),
        ("1" + "0" * 30, "more than 64 bits"),
        ("1" * 10_000, "digits"),
        ("{", "Expecting"),
        (b"\xff\xfe\x00", "codec can't decode"),
    ],
)
def test_what_is_no_plain_value_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_json(text)


def test_infinite_numbers_are_let_through_where_that_is_asked_for():
    assert parse_json("[1e999, -Infinity]", finite=False) == [float("inf"), float("-inf")]


def test_a_small_object_that_would_take_for_ever_to_write_out_is_refused_at_once():
    value = [1]
    for _ in range(25):
        value = [value, value]
    with within(10), pytest.raises(ValueError, match="more than 1,000 values"):
        check_values(value, most=1_000)


@pytest.mark.parametrize("value", [{1: 2}, [b"a"], {"a": {1, 2}}, [object()], {(1, 2): 3}])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(ValueError, match="expected"):
        check_values(value)


def test_long_values_are_cut_in_messages():
    assert shortened([1, 2]) == "[1, 2]"
    assert len(shortened(list(range(10_000)))) < 210


def test_a_large_file_is_not_read_whole(tmp_path):
    (tmp_path / "large").write_bytes(b"a" * 1001)
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        read_text(tmp_path / "large", 1000)
    assert read_text(tmp_path / "large", 1001) == "a" * 1001


def test_a_packed_archive_is_refused_before_it_is_unpacked(tmp_path):
    content = {"weight": torch.zeros(10_000_000)}
    torch.save(content, tmp_path / "plain.pt")
    assert load_tensors(tmp_path / "plain.pt")["weight"].shape == (10_000_000,)
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as whole,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    assert (tmp_path / "packed.pt").stat().st_size < 100_000
    with pytest.raises(ValueError, match="unpack to 40,0"):
        load_tensors(tmp_path / "packed.pt")


def test_the_clock_of_these_tests_stops_what_hangs_even_where_every_exception_is_caught():
    def hang():
        while True:
            with suppress(Exception):
                sum(range(1000))

    with pytest.raises(TookTooLong), within(0.2):
        hang()
