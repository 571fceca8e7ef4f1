"""The clock and its deadline."""

import itertools
import math

import pytest

from holdfast.errors import OutOfTime
from holdfast.utils import clock


@pytest.fixture
def ticks():
    """A clock that goes on by one second with each look."""
    seconds = itertools.count()
    with clock.timed_by(lambda: float(next(seconds))):
        yield


def test_without_a_deadline_nobody_looks_at_the_clock(ticks):
    assert clock.left() == math.inf
    assert not clock.over()
    clock.check_time()
    assert clock.now() == 0.0


def test_a_deadline_holds_inside_and_nowhere_else(ticks):
    with clock.until(2.0):
        assert [clock.over() for _ in range(4)] == [False, False, True, True]
        with pytest.raises(OutOfTime):
            clock.check_time()
    assert not clock.over()


def test_an_inner_deadline_cannot_be_later_than_an_outer_one(ticks):
    with clock.until(10.0), clock.until(100.0):
        assert clock.left() == 10.0
        with clock.until(5.0):
            assert clock.left() == 4.0
        assert clock.left() == 8.0


def test_a_deadline_ends_with_an_error_that_leaves_it(ticks):
    with pytest.raises(RuntimeError), clock.until(0.0):
        raise RuntimeError
    assert not clock.over()
