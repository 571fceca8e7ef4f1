"""Holdfast's errors: every expected failure is one of these, and the command line prints it without a traceback."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


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


class OutOfTime(HoldfastError):
    """A deadline passed before the work had anything to return; whoever set the deadline handles it."""


class Interrupted(HoldfastError):
    """A run was stopped by a signal after it saved what it had; the message says how to go on."""


Spell = Callable[[str], str]
"""From the name of an argument in Python to the option of the command line that sets it, such as `--method`."""

_SPELL: ContextVar[Spell | None] = ContextVar("spell", default=None)
_NO_VALUE = object()


@contextmanager
def on_command_line(spell: Spell) -> Iterator[None]:
    """Let the errors that are made inside name options of the command line in place of arguments."""
    token = _SPELL.set(spell)
    try:
        yield
    finally:
        _SPELL.reset(token)


def either(python: str, command: str) -> str:
    """Advice for the reader of an error: `python`, or `command` if the error will be shown on the command line."""
    return python if _SPELL.get() is None else command


def argument(name: str, value: object = _NO_VALUE) -> str:
    """An argument as the reader of an error has to write it, with or without a value.

    >>> argument("method", "ibp"), argument("out")
    ("method='ibp'", 'out=')
    >>> with on_command_line(lambda name: f"--{name}"):
    ...     argument("method", "ibp"), argument("out"), argument("force", True), argument("certify", None)
    ('--method ibp', '--out', '--force', '--certify none')
    """
    spell = _SPELL.get()
    if spell is None:
        return f"{name}=" + ("" if value is _NO_VALUE else repr(value))
    if value is _NO_VALUE or value is True:
        return spell(name)
    return f"{spell(name)} {'none' if value is None else value}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Sentence that suggests the nearest known name, and lists all of them.

    >>> did_you_mean("pdg", ["fgsm", "pgd"])
    "Did you mean 'pgd'? Known: fgsm, pgd."
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    return f"{hint}Known: {', '.join(names) or 'none'}."
