"""What the adversary may do. Attacks, certificates and training all take the same frozen object.

A threat is a set of inputs around x, intersected with the valid input range [low, high] that it carries. Tensors have
the shape (B, ...); every method treats the inputs of the batch independently.
"""

from fractions import Fraction

from holdfast.errors import InputError, did_you_mean
from holdfast.threats.balls import L1, L2, Ball, Box, Linf
from holdfast.threats.base import Threat, norm_2, per_input, written_as
from holdfast.threats.placed import Patch, PatchShape, Placed
from holdfast.threats.sparse import Sparse

__all__ = [
    "L1",
    "L2",
    "Box",
    "Linf",
    "Patch",
    "PatchShape",
    "Placed",
    "Sparse",
    "Threat",
    "norm_2",
    "per_input",
    "threat",
]

_BALLS: dict[str, type[Ball]] = {"linf": Linf, "l2": L2, "l1": L1}
NAMES: tuple[str, ...] = (*_BALLS, "patch", "sparse")


def threat(text: str | Threat) -> Threat:
    """Read a threat from text: `linf:8/255`, `l2:0.5`, `patch:5x5`, `sparse:10`; `@low:high` sets the valid range.

    `patch:diamond:13` is a patch of another shape; `holdfast.threats.patch_shapes.SHAPES` lists the shapes. A threat is
    returned as it is, so that every function takes both. `str` gives the size as it is written here.

    >>> threat("linf:8/255") == Linf(8 / 255), str(threat("linf:1/64"))
    (True, 'linf:1/64')
    >>> threat("l2:0.5@-1:1")
    L2(low=-1.0, high=1.0, eps=0.5)
    """
    if isinstance(text, Threat):
        return text
    if not isinstance(text, str):
        raise InputError(f"the threat must be one of hf.Linf, hf.L2, ..., or a text such as 'linf:8/255', got {text!r}")
    body, _, valid = text.strip().lower().partition("@")
    name, _, size = body.partition(":")
    if name not in NAMES:
        raise InputError(f"unknown threat '{name}' in '{text}'. " + did_you_mean(name, NAMES))
    try:
        low, high = (float(Fraction(v)) for v in valid.split(":")) if valid else (0.0, 1.0)
        if name in _BALLS:
            return written_as(_BALLS[name](_parse_number(size), low=low, high=high), size.strip())
        if name == "sparse":
            return Sparse(int(size), low=low, high=high)
        shape, colon, pixels = size.partition(":")
        if colon:
            return PatchShape(shape, int(pixels), low=low, high=high)
        height, width = (int(side) for side in size.split("x"))
        return Patch(height, width, low=low, high=high)
    except InputError:
        raise
    except (ValueError, ZeroDivisionError):
        raise InputError(
            f"cannot read the threat '{text}'. Examples: linf:8/255, l2:0.5, l1:10, patch:5x5, patch:diamond:13, "
            "sparse:10; add @low:high for a valid range other than 0 to 1, such as linf:0.1@-1:1."
        ) from None


def _parse_number(text: str) -> float:
    """`0.1`, `1e-3` or the fraction `8/255`, which is divided in floating point like the Python expression."""
    top, slash, bottom = text.partition("/")
    return float(top) / float(bottom) if slash else float(top)
