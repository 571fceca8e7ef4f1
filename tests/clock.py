"""A test that would hang fails instead."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class TookTooLong(BaseException):
    """No `except Exception` in the code under test can take it for an error of its own."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Stops what runs inside, in the main thread, after so many seconds."""

    def stop(*_: object) -> None:
        raise TookTooLong(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
