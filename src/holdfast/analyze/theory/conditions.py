"""The check that a theorem applies."""

from holdfast.errors import InputError


def require(holds: bool, theorem: str, condition: str) -> None:
    """Refuse to apply a theorem outside its conditions.

    >>> require(1 > 2, "Theorem 1", "1 > 2")
    Traceback (most recent call last):
    holdfast.errors.InputError: Theorem 1 does not apply: it needs 1 > 2
    """
    if not holds:
        raise InputError(f"{theorem} does not apply: it needs {condition}")
