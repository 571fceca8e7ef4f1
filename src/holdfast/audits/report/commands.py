"""Shell lines that a reader can paste, whatever the data or the threat is called."""

import shlex
from collections.abc import Sequence

from holdfast.audits.result import Audit
from holdfast.errors import InputError
from holdfast.threats import threat as read_threat


def command(verb: str, audit: Audit, threats: Sequence[str], *options: str, model: str = "MODEL") -> str:
    """A command for the audited model and data; each part is one word for the shell.

    Args:
        verb: such as "audit".
        threats: of the audit; one that cannot be written as text, such as a box of radii, is left out.
        options: further words.
        model: file of the model; the word MODEL stands for it.
    """
    words = ["holdfast", verb, model]
    if audit.data != "tensors":
        words += ["--data", data_name(audit)]
    for text in threats:
        if readable(text):
            words += ["--threat", text]
    return shlex.join([*words, *options])


def data_name(audit: Audit) -> str:
    """Name of the data without the split."""
    return audit.data.rpartition(" (")[0] or audit.data


def readable(text: str) -> bool:
    """Whether the command line can be given the threat."""
    try:
        read_threat(text)
    except InputError:
        return False
    return True
