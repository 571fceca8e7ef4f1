"""Figures of a training from the log of its updates."""

import pytest

from holdfast.analyze.landscape.updates import course, updates_svg
from holdfast.errors import InputError


def rows(norms, dead=()):
    each = [{"gradient_norm": g, "distance": float(i), "dead": ""} for i, g in enumerate(norms)]
    for i, name in dead:
        each[i]["dead"] = name
    return each


def test_start_end_and_the_first_dead_layer():
    found = course(rows([1.0, 3.0, 5.0, 7.0, 9.0], [(2, "1 3"), (4, "1")]), window=2)
    assert (found.first, found.last, found.distance, found.updates) == (2.0, 8.0, 4.0, 5)
    assert (found.dead, found.layers) == (3, ("1", "3"))
    assert course(rows([1.0]), window=500).dead is None


def test_a_window_longer_than_the_run_takes_all_of_it():
    assert course(rows([2.0, 4.0]), window=9).first == course(rows([2.0, 4.0]), window=9).last == 3.0


def test_pictures_of_runs_of_any_length():
    assert updates_svg({"a": rows([1.0]), "b": rows([0.5] * 2500, [(9, "2")])}).count("<polyline") >= 4
    for bad in ({}, {"a": []}, {str(i): rows([1.0]) for i in range(9)}):
        with pytest.raises(InputError, match="at least one update"):
            updates_svg(bad)
    with pytest.raises(InputError, match="at least one update"):
        course([])
