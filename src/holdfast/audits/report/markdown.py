"""Text from outside in Markdown: shown as it is, with no markup of its own."""

import re

_MARKS = "\\`*_[]<>|$~&"  # the first one first: it escapes the others


def plain(text: str) -> str:
    r"""Text that Markdown shows as it is, on one line: no markup, no end of a cell.

    >>> print(plain("a|b"))
    a\|b
    """
    for letter in _MARKS:
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.split())


def code(text: str) -> str:
    """Letters and digits as code; anything else as plain text."""
    return f"`{text}`" if text.isalnum() else plain(text)


def fenced(text: str) -> str:
    """A block of shell code that nothing in it can end: its fence is longer than any run of backticks inside."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}sh\n{text}\n{fence}"
