"""What minimum-norm attacks share: the closest misclassified point so far, and the planes that they linearise to."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.core.forms import Task, on_task, with_options
from holdfast.attacks.core.gradients import frozen
from holdfast.attacks.core.losses import margin
from holdfast.attacks.core.survivors import Survivors, broken_by
from holdfast.errors import InputError, UnsupportedError, did_you_mean
from holdfast.random import Noise
from holdfast.results import AttackResult
from holdfast.threats import L1, L2, Linf, Threat, norm_2
from holdfast.utils.show import Shown

BALLS: dict[str, type[Linf] | type[L2] | type[L1]] = {"linf": Linf, "l2": L2, "l1": L1}


@dataclass(frozen=True, eq=False, repr=False)
class Nearest(Shown):
    """The closest misclassified points that were found: an upper end for the robust radius of each input.

    Attributes:
        x_adv: the closest misclassified point found; x itself where there is none, or where x is misclassified already.
        distance: (B,) its distance from x; infinity where none was found, 0 where x is misclassified already.
        by: name of the method that found it; "clean" where x is misclassified already, "" where none was found.
        gradients: (B,) int64, gradient evaluations spent on each input.
        queries: (B,) int64, forward passes spent on each input, including the ones for gradients.
    """

    x_adv: Tensor
    distance: Tensor
    by: tuple[str, ...]
    gradients: Tensor
    queries: Tensor


NearestForm = Callable[..., Nearest]
"""A function `(model, x, y, norm, low, high, *, noise, goal, options)` that finds the closest misclassified points."""


def check_norm(norm: str) -> str:
    """`norm` itself, or an error that lists those there are."""
    if norm not in BALLS:
        raise InputError(f"unknown norm '{norm}'. " + did_you_mean(str(norm), BALLS))
    return norm


def check_handled(norm: str, method: str, handled: tuple[str, ...]) -> str:
    """`norm` itself, or an error if the method does not minimise it."""
    if check_norm(norm) not in handled:
        raise UnsupportedError(f"method '{method}' minimises {', '.join(handled)}, not '{norm}'; 'fmn' takes all norms")
    return norm


def norm_of(d: Tensor, norm: str) -> Tensor:
    """Norm of each input of a batch, (B, ...) -> (B,)."""
    flat = d.flatten(1)
    if norm == "linf":
        return flat.abs().amax(1)
    return flat.abs().sum(1) if norm == "l1" else norm_2(flat)


def dual_norm_of(d: Tensor, norm: str) -> Tensor:
    """Dual norm of each input of a batch, (B, ...) -> (B,)."""
    return norm_of(d, {"linf": "l1", "l2": "l2", "l1": "linf"}[norm])


def annealed(first: float, last: float, step: int, steps: int) -> float:
    """Cosine annealing from `first` at step 0 to `last` at the last step."""
    return last + (first - last) * (1 + math.cos(math.pi * step / max(1, steps - 1))) / 2


def unit(gradient: Tensor) -> Tensor:
    """The gradient with Euclidean norm one."""
    return gradient / per_input(norm_2(gradient).clamp(min=torch.finfo(gradient.dtype).tiny ** 0.5), gradient)


def per_input(values: Tensor, like: Tensor) -> Tensor:
    """(B,) -> (B, 1, 1, ...), to broadcast against `like`."""
    return values.view(-1, *[1] * (like.ndim - 1))


class Search(Survivors):
    """Keep the closest misclassified point of each input in `x_adv`; an input is done once it lies within `goal`.

    Attributes:
        distance: (B,) of the closest point; infinity if none is known.
        norm: "linf", "l2" or "l1".  low, high: the valid range.  goal: a distance.
        noise: source of all random choices, one for each input; the one of seed 0 if none is given.
    """

    def __init__(
        self, x: Tensor, y: Tensor, norm: str, low: float, high: float, goal: float = 0.0, noise: Noise | None = None
    ) -> None:
        super().__init__(x, y)
        self.norm, self.low, self.high, self.goal = check_norm(norm), low, high, goal
        self.noise = noise or Noise.for_batch(0, len(x), x.device)
        self.distance = x.new_full((len(x),), torch.inf)
        self._by = torch.zeros_like(self.gradients)
        self._names = ["", "clean", ""]

    def start(self, name: str, chosen: Tensor | None = None) -> bool:
        """Begin a run of `name` on the `chosen` inputs that are not done; return False if there are none."""
        self._names.append(name)
        return self.resume(chosen)

    @property
    def nearest(self) -> Tensor:
        """Distance of the closest point of each input of the run, (R,)."""
        return self.distance[self.row]

    def note(self, x_adv: Tensor, logits: Tensor, *, gradients: int = 0, queries: int = 1) -> Tensor:
        """Take the logits at points in the range; return which of them are misclassified, (R,) bool."""
        self.count(gradients, queries)
        wrong = logits.argmax(1) != self.y
        distance = norm_of(x_adv - self.x, self.norm)
        # Iterates on one sphere have the same distance up to rounding, which must not choose between them.
        clear = self.nearest * (1 - 64 * torch.finfo(distance.dtype).eps)
        better = self.going & wrong & (distance < clear)
        at = self.row[better]
        self.x_adv[at], self.distance[at] = x_adv[better], distance[better]
        self._by[at] = torch.where(distance[better] > 0, len(self._names) - 1, 1)
        self.settle(self.going & ~(better & (distance <= self.goal)))
        return wrong

    def clip(self, x: Tensor) -> Tensor:
        """`x` clipped to the valid range."""
        return x.clamp(self.low, self.high)

    def closest(self) -> Nearest:
        """The closest points of the batch."""
        by = tuple(self._names[i] for i in self._by.tolist())
        return Nearest(self.x_adv, self.distance, by, self.gradients, self.queries)


def by_search(run: Callable[..., None]) -> NearestForm:
    """The search `run(model, search, *, options)`, with the parameters frozen, as a `NearestForm`."""

    @torch.no_grad()
    def nearest(
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        norm: str,
        low: float = 0.0,
        high: float = 1.0,
        *,
        noise: Noise | None = None,
        goal: float = 0.0,
        **options: Any,
    ) -> Nearest:
        search = Search(x, y, norm, low, high, goal, noise)
        with frozen(model):
            run(model, search, **options)
        return search.closest()

    return with_options(nearest, run, run.__name__)


def in_threat(name: str, nearest: NearestForm) -> Callable[..., AttackResult]:
    """The form for a threat of a minimum-norm attack: it succeeds if the closest point fits the budget.

    The attack has the options of `nearest` but `goal`: an input is done once a point within the budget is known.
    """

    def attack(task: Task, **options: Any) -> AttackResult:
        model, x, y, threat, noise = task
        ball = (threat.name, threat.low, threat.high)
        found = nearest(model, x, y, *ball, noise=noise, goal=threat.budget, **options)
        return within(model, x, y, threat, found, name)

    return with_options(on_task(attack), nearest, name.replace("-", "_"), without=("noise", "goal"))


@torch.no_grad()
def within(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, found: Nearest, name: str) -> AttackResult:
    """Answer for a threat: the closest point if it lies in the set, else its projection, which is looked at.

    A point found just outside often projects onto a misclassified one; the look at it is counted.
    """
    success = (found.distance <= threat.budget) & threat.contains(found.x_adv, x)
    x_adv, queries = found.x_adv.clone(), found.queries.clone()
    far = (~success & torch.isfinite(found.distance)).nonzero()[:, 0]
    if len(far) > 0:
        x_adv[far] = threat.project(x_adv[far], x[far])
        success[far] = model(x_adv[far]).argmax(1) != y[far]
        queries[far] += 1
    return AttackResult(x_adv, success, broken_by(name, success), found.gradients, queries)


def line_search(model: nn.Module, search: Search, *, steps: int, name: str) -> None:
    """Go back from each closest point towards x as far as it stays misclassified, by interpolation of the margin.

    The bracket [a, b] of the segment has a right and a wrong end; the next point lies just behind the zero of the
    margin's secant (on it, rounding would decide), and a tenth away from either end, so that the bracket shrinks.
    """
    if not search.start(name, torch.isfinite(search.distance)):
        return
    x_adv = search.x_adv[search.row]
    a, b = torch.zeros_like(search.nearest), torch.ones_like(search.nearest)
    logits = model(search.x)
    search.note(search.x, logits)
    f_a = margin(logits, search.y)
    logits = model(x_adv)
    search.note(x_adv, logits)
    f_b, d = margin(logits, search.y), x_adv - search.x
    for _ in range(steps):
        if search.over:
            return
        d, a, b, f_a, f_b = search.leave(d, a, b, f_a, f_b)
        zero = f_a / (f_a - f_b).clamp(max=-1e-30)
        t = a + (b - a) * (zero + 0.02).clamp(0.1, 0.9)
        x_adv = search.clip(search.x + per_input(t, d) * d)
        logits = model(x_adv)
        wrong = search.note(x_adv, logits)
        f = margin(logits, search.y)
        a, f_a = torch.where(wrong, a, t), torch.where(wrong, f_a, f)
        b, f_b = torch.where(wrong, t, b), torch.where(wrong, f, f_b)
