"""What is asked of a network: regions of inputs, and which outputs must not occur there.

A property lists its counter-examples, as VNN-LIB does: it holds if no input of any case leads to an output in one of
the polytopes of that case. Conditions are not strict, so an output on the edge of a polytope is a counter-example.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.threats import L1, L2, Box, Linf, Threat


def _numbers(value: Any, axes: int, what: str) -> Tensor:
    tensor = torch.as_tensor(value, dtype=torch.float64).cpu()
    if tensor.ndim != axes:
        raise InputError(f"{what}: expected {axes} dimension{'s' * (axes > 1)}, got the shape {tuple(tensor.shape)}")
    if bool(tensor.isnan().any()):
        raise InputError(f"{what} holds NaN")
    return tensor


@dataclass(frozen=True, eq=False)
class Polytope:
    """The outputs z with rows @ z <= limits: `rows` (M, K), `limits` (M,), float64. All outputs if M = 0."""

    rows: Tensor
    limits: Tensor

    def __post_init__(self) -> None:
        rows, limits = _numbers(self.rows, 2, "the rows of a polytope"), _numbers(self.limits, 1, "its limits")
        if len(rows) != len(limits) or not bool(rows.isfinite().all()):
            raise InputError(
                f"a polytope needs finite rows and one limit for each: got {len(rows)} rows, {len(limits)} limits"
            )
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "limits", limits)

    def excess(self, outputs: Tensor) -> Tensor:
        """By how much outputs (B, K) miss the polytope, (B,), in float64: at most 0 for the outputs inside."""
        if not len(self.rows):
            return torch.full((len(outputs),), -torch.inf, dtype=torch.float64)
        return (outputs.double() @ self.rows.T - self.limits).amax(1)


@dataclass(frozen=True, eq=False)
class Case:
    """A box of inputs, and the outputs that are counter-examples there.

    Attributes:
        lower: (n,) float64, the inputs in the order in which the network's input holds them.
        upper: (n,) float64.
        unsafe: polytopes; an output in any of them is a counter-example.
        ball: L2 or L1, if the inputs are only the ones within its radius of `centre`.
        centre: (n,) float64, of the ball.
    """

    lower: Tensor
    upper: Tensor
    unsafe: tuple[Polytope, ...]
    ball: L2 | L1 | None = None
    centre: Tensor | None = None

    def __post_init__(self) -> None:
        lower, upper = _numbers(self.lower, 1, "the lower end of a box"), _numbers(self.upper, 1, "its upper end")
        if len(lower) != len(upper):
            raise InputError(f"a box needs as many lower as upper ends: got {len(lower)} and {len(upper)}")
        for name, end in (("lower", lower), ("upper", upper)):
            if not bool(end.isfinite().all()):
                index = int((~end.isfinite()).nonzero()[0, 0])
                raise InputError(f"input {index} has no {name} bound; a region must be bounded")
        object.__setattr__(self, "lower", lower)
        object.__setattr__(self, "upper", upper)
        object.__setattr__(self, "unsafe", tuple(self.unsafe))
        if (self.ball is None) != (self.centre is None):
            raise InputError("a ball needs a centre, and a centre a ball")
        if self.centre is not None:
            object.__setattr__(self, "centre", _numbers(self.centre, 1, "the centre of a ball"))

    @property
    def empty(self) -> bool:
        """True if no input lies in the box."""
        return bool((self.lower > self.upper).any())


@dataclass(frozen=True, eq=False)
class Property:
    """Cases that must not occur; see the module. The text of `name` appears in messages.

    Example:
        >>> never = Polytope([[1.0, -1.0]], [0.0])                       # z_0 <= z_1 is a counter-example
        >>> asked = Property((Case([0.0, 0.0], [1.0, 0.5], (never,)),))
        >>> asked.inputs, asked.outputs
        (2, 2)
    """

    cases: tuple[Case, ...]
    name: str = "property"

    def __post_init__(self) -> None:
        object.__setattr__(self, "cases", tuple(self.cases))
        if not self.cases:
            raise InputError("a property needs at least one case")
        for what, sizes in (
            ("inputs", {len(case.lower) for case in self.cases}),
            ("outputs", {p.rows.shape[1] for case in self.cases for p in case.unsafe}),
        ):
            if len(sizes) > 1:
                raise InputError(f"the cases of a property differ in their number of {what}: {sorted(sizes)}")

    @property
    def inputs(self) -> int:
        """Number of values of an input."""
        return len(self.cases[0].lower)

    @property
    def outputs(self) -> int | None:
        """Number of outputs; None if there is no condition on them."""
        return next((p.rows.shape[1] for case in self.cases for p in case.unsafe), None)


def robust(x: Tensor, y: int, threat: Threat, classes: int) -> Property:
    """The property that no perturbation of `threat` moves the input x from class y; a tie counts as moved.

    Args:
        x: one input, without a batch.
        y: its class.
        threat: Linf, L2, L1 or Box.
        classes: number of classes.
    """
    if not isinstance(threat, Linf | L2 | L1 | Box):
        raise InputError(f"the threat {threat} is no box and no ball; use Linf, L2, L1 or Box")
    lower, upper = (end[0].flatten().double() for end in threat.box(x[None]))
    others = [j for j in range(classes) if j != y]
    one_hot = torch.eye(classes, dtype=torch.float64)
    unsafe = tuple(Polytope((one_hot[y] - one_hot[j])[None], torch.zeros(1)) for j in others)
    if isinstance(threat, L2 | L1):
        return Property((Case(lower, upper, unsafe, threat, x.flatten().double()),), f"robust to {threat}")
    return Property((Case(lower, upper, unsafe),), f"robust to {threat}")


def stacked(polytopes: Sequence[Polytope]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (M, K) and limits (M,) of several polytopes, and the number of the polytope of each row, (M,)."""
    sizes = torch.tensor([len(p.rows) for p in polytopes])
    group = torch.arange(len(polytopes)).repeat_interleave(sizes)
    return torch.cat([p.rows for p in polytopes]), torch.cat([p.limits for p in polytopes]), group
