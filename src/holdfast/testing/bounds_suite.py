"""The contract of bounds, as checks that anyone can run on bounds of their own."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.bounding import bounds
from holdfast.errors import HoldfastError, SoundnessError, UnsupportedError
from holdfast.random import Noise
from holdfast.registry import Bound, Method
from holdfast.results import Bounds
from holdfast.testing.networks import Task, chain_task, images_task
from holdfast.testing.subject import Subject, refuses, require, run_checks, subjects_of, untouched
from holdfast.testing.traps import CENTRE, RADIUS, THREATS, exact, is_chain, some_traps
from holdfast.threats import Threat

CHAIN = (2, 7, 5)


def check_bounds(method: str | Method, *, threats: Sequence[Threat] | None = None, **options: Any) -> None:
    """Check that bounds keep their contract; raise an AssertionError that says which part is broken.

    They meet random and extreme points of the threat set, and networks that round badly in rational arithmetic.

    Example:
        >>> from holdfast import L1
        >>> check_bounds("ibp", threats=[L1(0.05)])
    """
    with subjects_of(Bound, method, options, threats=threats, shape=CHAIN, scale=0.1) as subjects:
        for subject in subjects:
            run_checks("check_bounds", subject, CHECKS)


def _bounds(s: Subject, model: nn.Module, x: Tensor, threat: Threat | None = None, **more: Any) -> Bounds:
    return bounds(model, x, threat or s.given, s.name, **s.options | more)


def sample(threat: Threat, x: Tensor, draws: int = 20) -> list[Tensor]:
    """Points of the threat set around x: x itself, random ones, and points on its border, shape of x each."""
    points = [threat.random_start(x, Noise.for_batch(draw, len(x))) for draw in range(draws)]
    return [x, *points, *(threat.project(x + 50 * (point - x), x) for point in points)]


def returns_a_pair_for_each_logit(s: Subject) -> None:
    """`lower` and `upper` have the shape (B, K) and the dtype of x, with lower <= upper."""
    model, x, _ = chain_task(CHAIN)
    for dtype in (torch.float32, torch.float64):
        for count in (len(x), 1):
            found = _bounds(s, model.to(dtype), x[:count].to(dtype))
            require(isinstance(found, Bounds), f"the function returned {type(found).__name__}, not Bounds.")
            for name in ("lower", "upper"):
                value = getattr(found, name)
                right = value.shape == (count, 3) and value.dtype == dtype
                require(right, f"{name} is {value.dtype} {tuple(value.shape)}.")
            require((found.lower <= found.upper).all(), "lower > upper for some logit of chain_task().")


def contains_the_logits(s: Subject) -> None:
    """The logits at every sampled point of the threat set lie between `lower` and `upper`."""
    tasks: list[Task] = [chain_task(CHAIN), images_task()]
    for i, (model, x, _) in enumerate(tasks):
        try:
            found = _bounds(s, model, x)
        except UnsupportedError:
            require(i > 0, "it refuses a chain of dense layers and ReLUs, chain_task().")
            continue
        for point in sample(s.given, x):
            logits = model(point)
            inside = (found.lower <= logits) & (logits <= found.upper)
            require(inside.all(), f"the inputs {(~inside.all(1)).nonzero()[:, 0].tolist()} have logits outside.")


def depends_on_no_chunk(s: Subject) -> None:
    """The answer for an input does not depend on the rest of the batch."""
    model, x, _ = chain_task(CHAIN)
    whole, pieces = _bounds(s, model, x), [_bounds(s, model, part) for part in x.split(5)]
    for name in ("lower", "upper"):
        other = torch.cat([getattr(piece, name) for piece in pieces])
        require(torch.allclose(getattr(whole, name), other, atol=1e-5), f"{name} differs in batches of five.")


def leaves_everything_as_it_came(s: Subject) -> None:
    """The model, the tensors of the caller and the global random states are left as they were."""
    model, x, _ = chain_task(CHAIN)
    with untouched(model, x):
        _bounds(s, model, x)


def refuses_bad_input(s: Subject) -> None:
    """NaN, values out of range, a model in training mode and unknown options are refused with an InputError."""
    model, x, _ = chain_task(CHAIN)
    refuses(lambda: _bounds(s, model, x * torch.nan), "an input with NaN")
    refuses(lambda: _bounds(s, model, x + 1), "an input outside the valid range")
    refuses(lambda: _bounds(s, model, x, no_such_option=1), "an option that the method does not have")
    refuses(lambda: _bounds(s, model.half(), x.half()), "half precision", UnsupportedError)
    refuses(lambda: _bounds(s, model.float().train(), x), "a model in training mode")


def hold_in_rational_arithmetic(s: Subject) -> None:
    """On networks that round badly they contain the logits as run, and the logits in rational arithmetic."""
    met = 0
    if s.given.name not in THREATS:
        return
    for dtype in (torch.float32, torch.float64):
        for one in some_traps(s.given.name, dtype, s.given.name == s.method.threats[0]):
            try:
                found = _bounds(s, one.model, one.x, THREATS[s.given.name])
            except SoundnessError:
                raise
            except HoldfastError:
                continue
            met += 1
            for value in (CENTRE - RADIUS, CENTRE, CENTRE + RADIUS):
                logits: list[Any] = one.model(torch.full_like(one.x, value))[0].tolist()
                truth = exact(one.model, value) if is_chain(one.model) else logits
                for a, b, *values in zip(found.lower[0].tolist(), found.upper[0].tolist(), logits, truth, strict=True):
                    inside = all(Fraction(a) <= z <= Fraction(b) for z in values)
                    require(inside, f"the network '{one.name}' ({dtype}) leaves its bounds at the pixel {value}.")
    require(met > 20, f"it refused all but {met} networks of holdfast.testing.traps.")


CHECKS = (
    leaves_everything_as_it_came,
    returns_a_pair_for_each_logit,
    contains_the_logits,
    depends_on_no_chunk,
    refuses_bad_input,
    hold_in_rational_arithmetic,
)
