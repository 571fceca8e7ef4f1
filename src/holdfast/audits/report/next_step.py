"""One thing to do next."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One thing to do: why, in a sentence or two, the command, and what it costs if that is known.

    MODEL in the command stands for the file of the model where that is not known.
    """

    text: str
    command: str
    cost: str = ""
