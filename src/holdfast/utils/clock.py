"""The clock that long work looks at, and the moment at which it has to end.

A deadline is set once, around the work, and every long loop inside looks at it: an attack returns the best that it has,
a certificate proves nothing that it has not proved. Without a deadline nothing changes.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from holdfast.errors import OutOfTime

_clock: ContextVar[Callable[[], float]] = ContextVar("clock", default=time.perf_counter)
_end: ContextVar[float] = ContextVar("end", default=math.inf)


def now() -> float:
    """Seconds by the clock in use; only differences have a meaning."""
    return _clock.get()()


def left() -> float:
    """Seconds that are left; infinite without a deadline, negative after it."""
    end = _end.get()
    return math.inf if end == math.inf else end - now()


def over() -> bool:
    """Whether the time is over."""
    return left() <= 0


def check_time() -> None:
    """Raise `OutOfTime` if the time is over: for work that has nothing to return before its end."""
    if over():
        raise OutOfTime("the time is over")


@contextmanager
def until(moment: float) -> Iterator[None]:
    """Let all that runs inside end at this moment, or at an earlier one that was set around it.

    >>> with until(now() - 1):
    ...     over()
    True
    >>> over()
    False
    """
    token = _end.set(min(moment, _end.get()))
    try:
        yield
    finally:
        _end.reset(token)


@contextmanager
def timed_by(clock: Callable[[], float]) -> Iterator[None]:
    """Measure time by another clock inside, such as `time.process_time`."""
    token = _clock.set(clock)
    try:
        yield
    finally:
        _clock.reset(token)
