"""The answer of an audit in plain words: what the adversary may do, and which share of the inputs holds."""

import math
from typing import NamedTuple

SMOOTHED = ", smoothed with noise "
"""Stands between the threat and the noise in the name of a bracket of a smoothed model."""
EXACT = "nothing is undecided: the answer is exact on these inputs, and does not depend on the attack"
"""What is said of a bracket whose two ends meet."""
_WORDS = {
    "linf": "every {value} may change by up to {size}",
    "l2": "all {value}s together may change by a Euclidean distance of up to {size}",
    "l1": "the changes of all {value}s may add up to {size}",
    "patch": "a patch of {size} pixels, anywhere in the image, may show anything",
    "sparse": "any {size} {value}s may take any value",
    "box": "every {value} may change by up to a limit of its own",
}


class Parts(NamedTuple):
    """A threat as text, taken apart: `linf:2/255@-1:1` is linf, 2/255 and -1:1; `noise` is for a smoothed model."""

    kind: str
    size: str
    valid: str
    noise: str


def parts_of(threat: str) -> Parts:
    """The parts of a threat's text; empty where it has none.

    >>> parts_of("linf:2/255@-1:1").size
    '2/255'
    """
    body, _, noise = threat.partition(SMOOTHED)
    kind, _, rest = body.partition(":")
    size, _, valid = rest.partition("@")
    return Parts(kind, size, valid, noise)


def condition(threat: str, *, images: bool = True) -> str:
    """What the adversary may do, as the end of a sentence.

    >>> condition("linf:2/255")
    'when every pixel may change by up to 2/255'
    >>> condition("patch:5x5")
    'when a patch of 5 x 5 pixels, anywhere in the image, may show anything'
    """
    kind, size, valid, noise = parts_of(threat)
    value = "pixel" if images else "value"
    words = _WORDS.get(kind, "the input may change as {threat} allows")
    text = words.format(value=value, size=size.replace("x", " x "), threat=threat)
    if (kind, size) == ("sparse", "1"):
        text = f"any one {value} may take any value"
    scale = f" (values lie between {' and '.join(valid.split(':'))})" if valid and kind in ("linf", "l2", "l1") else ""
    smoothed = f", in the model smoothed with noise {noise}" if noise else ""
    return f"when {text}{scale}{smoothed}"


def share(value: float) -> str:
    """A share for a sentence: no digit that says nothing, and 100 % or 0 % only where it is all or nothing.

    >>> share(0.47), share(0.7125), share(0.9999), share(1.0)
    ('47 %', '71.2 %', '99.99 %', '100 %')
    """
    for digits in range(1, 7):
        text = f"{100 * value:.{digits}f}"
        if value in (0.0, 1.0) or float(text) not in (0.0, 100.0):
            break
    return f"{text.rstrip('0').rstrip('.')} %"


def counted(count: int, noun: str) -> str:
    """The inputs with their number.

    >>> counted(2000, "test images"), counted(1, "inputs")
    ('2,000 test images', '1 input')
    """
    return f"{count:,} {noun if count != 1 else noun.removesuffix('s')}"


def rounded_down(value: float) -> float:
    """Two digits, never above the value, which may be a radius that was proved.

    Audited budgets have twelve digits: one of 3.2/255 is a trace below it, and still reads 3.2/255.

    >>> rounded_down(0.0019876), rounded_down(0.1), rounded_down(0.0125490196078 * 255)
    (0.0019, 0.1, 3.2)
    """
    if value <= 0:
        return 0.0
    scale = 10.0 ** (1 - math.floor(math.log10(value)))
    return math.floor(value * scale * (1 + 1e-10)) / scale


def denominator(threat: str) -> str:
    """What the size of a threat is written in parts of; empty where it is no fraction.

    >>> denominator("linf:2/255"), denominator("linf:0.1")
    ('255', '')
    """
    bottom = parts_of(threat).size.partition("/")[2]
    return bottom if bottom.isascii() and bottom.isdigit() and int(bottom) else ""


def sized(value: float, threat: str) -> str:
    """A size in the form in which the threat is written, rounded down.

    >>> sized(0.00146, "linf:2/255"), sized(0.0146, "l2:0.5")
    ('0.37/255', '0.014')
    """
    bottom = denominator(threat)
    return f"{rounded_down(value * float(bottom)):g}/{bottom}" if bottom else f"{rounded_down(value):g}"


def like(value: float, threat: str) -> str:
    """A radius in the form in which the threat is written, to four digits.

    >>> like(0.0054902, "linf:2/255"), like(0.05, "linf:0.1")
    ('1.4/255', '0.05')
    """
    bottom = denominator(threat)
    return f"{value * float(bottom):.4g}/{bottom}" if bottom else f"{value:.4g}"


def about(seconds: float) -> str:
    """A time that is only estimated.

    >>> about(0.2), about(43), about(1000), about(20_000)
    ('a second', 'about 45 s', 'about 17 min', 'about 5.6 h')
    """
    if seconds < 1:
        return "a second"
    if seconds < 90:
        return f"about {max(1, round(seconds / 5) * 5 if seconds > 10 else round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.2g} h"
