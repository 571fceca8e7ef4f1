"""A switch for code that only saves time: with it off, the plain code runs and gives the same answers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_REFERENCE = ContextVar("reference", default=os.environ.get("HOLDFAST_REFERENCE", "0") not in ("", "0"))


def is_reference() -> bool:
    """True where fast paths must not be taken."""
    return _REFERENCE.get()


@contextmanager
def reference() -> Iterator[None]:
    """Run the plain code only: every fast path is off inside, as with HOLDFAST_REFERENCE=1.

    Example:
        >>> with reference():
        ...     is_reference()
        True
    """
    token = _REFERENCE.set(True)
    try:
        yield
    finally:
        _REFERENCE.reset(token)
