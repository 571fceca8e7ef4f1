"""Holdfast's errors: every expected failure is one of these, and the command line prints it without a traceback."""

import difflib
from collections.abc import Iterable


class HoldfastError(Exception):
    """Base class of every error that Holdfast raises on purpose."""


class InputError(HoldfastError, ValueError):
    """The caller gave something that cannot be used: a bad tensor, option, name, file or recipe."""


class UnsupportedError(HoldfastError, NotImplementedError):
    """A layer, activation or threat that the chosen method has no sound rule for."""


class StorageError(HoldfastError, OSError):
    """A file could not be read or written: corrupt, missing, no permission, disk full."""


class SoundnessError(HoldfastError):
    """A proof contradicts itself or the model: a certified input was broken, or a lower bound lies above an upper one.

    This is always a bug in Holdfast.
    """


class Interrupted(HoldfastError):
    """A run was stopped by a signal after it saved what it had; the message says how to go on."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Sentence that suggests the nearest known name, and lists all of them.

    >>> did_you_mean("pdg", ["fgsm", "pgd"])
    "Did you mean 'pgd'? Known: fgsm, pgd."
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    return f"{hint}Known: {', '.join(names) or 'none'}."
