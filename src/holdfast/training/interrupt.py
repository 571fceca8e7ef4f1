"""Ctrl-C during a run: finish the step, save, leave."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """Set once a signal asked the run to stop."""

    def __init__(self) -> None:
        self.is_set = False


@contextmanager
def stop_on_signal() -> Iterator[StopFlag]:
    """Inside, SIGINT and SIGTERM set the flag; a second one interrupts at once, as without this.

    Python delivers signals only to the main thread: in another thread the flag is never set.
    """
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if flag.is_set:
            raise KeyboardInterrupt
        flag.is_set = True

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
