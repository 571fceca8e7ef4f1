"""The two toys, asked: does width hurt on the wedge, and how much volume have the two ways to fit the slabs?"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from holdfast.analyze.volume.family import Family
from holdfast.analyze.volume.fitting import ANY, make_fitting
from holdfast.analyze.volume.guess_and_check import guess_and_check
from holdfast.analyze.volume.poison import poison
from holdfast.analyze.volume.slab import UNITS, Kinds, kinds, slab_points
from holdfast.analyze.volume.volume_estimate import Volume, volume
from holdfast.analyze.volume.wedge import accuracy_of, one_hidden_layer, wedge_points, wedge_task
from holdfast.data import Split
from holdfast.utils.clock import check_time
from holdfast.utils.options import Count
from holdfast.utils.show import Shown

WIDTHS = (2, 4, 10, 15, 20)
_BLOCK = 4096  # guesses at a time: the networks of the toys are tiny
_FRESH = 2000  # new points of the wedge to test on


@dataclass(frozen=True, eq=False, repr=False)
class Wedge(Shown):
    """Networks of one width that fit the training points of one wedge.

    Attributes:
        units: hidden units.
        volume: of the networks that fit.
        guessed: networks that guess and check found, (k, P).
        accuracy: their accuracy on fresh points, (k,) float64.
        poisoned: networks that fit after poisoned training, (j, P), the worst first.
        poisoned_accuracy: their accuracy on the test points of the poison, (j,) float64.
        family: of both.
    """

    units: int
    volume: Volume
    guessed: Tensor
    accuracy: Tensor
    poisoned: Tensor
    poisoned_accuracy: Tensor
    family: Family


@dataclass(frozen=True, eq=False, repr=False)
class Slab(Shown):
    """Volumes of the networks that fit the slabs, of the linear and of the robust ones among them.

    Attributes:
        fits, linear, robust: volumes, all from the same guesses.
        weights: networks that fit, (k, P).  kinds: what they are.
        family, points: what was fitted.
    """

    fits: Volume
    linear: Volume
    robust: Volume
    weights: Tensor
    kinds: Kinds
    family: Family
    points: Split


def wedge_study(
    widths: Sequence[int] = WIDTHS, *, guesses: Count = 200_000, runs: Count = 8, epochs: Count = 1500, seed: int = 0
) -> list[Wedge]:
    """Guess and poison networks of each width on one draw of the wedge: 11 points to fit, 5 to poison with.

    When a deadline is over, the widths that were not begun are left out; raises `OutOfTime` where that is all.
    """
    train, test = wedge_task(seed=seed)
    fresh = wedge_points(_FRESH, seed=seed + 1_000_003)
    found = []
    for units in widths:
        fitting = make_fitting(one_hidden_layer(units), train.x, train.y, divisor=1.0)
        guessed = guess_and_check(
            fitting, ANY, limit=guesses, keep=guesses, stop=False, block=_BLOCK, chunk=1024, seed=seed
        )
        if not guessed.tried:
            break
        poisoned = poison(fitting, test, runs=runs, epochs=epochs, seed=seed)
        accuracy = accuracy_of(fitting.family.logits(guessed.weights, fresh.x), fresh.y)
        share = volume(guessed.accepted, guessed.tried)
        found.append(
            Wedge(units, share, guessed.weights, accuracy, poisoned.weights, poisoned.accuracy, fitting.family)
        )
    if not found:
        check_time()
    return found


def slab_study(*, guesses: Count = 1_000_000, units: Count = UNITS, seed: int = 0) -> Slab:
    """Guess networks, keep those that fit the slabs, and sort them by their boundary."""
    points = slab_points(seed=seed)
    fitting = make_fitting(one_hidden_layer(units), points.x, points.y, divisor=1.0)
    found = guess_and_check(fitting, ANY, limit=guesses, keep=guesses, stop=False, block=_BLOCK, chunk=512, seed=seed)
    if not found.tried:
        check_time()
    sorts = kinds(fitting.family, found.weights)
    counts = (found.accepted, int(sorts.linear.sum()), int(sorts.robust.sum()))
    fits, linear, robust = (volume(count, found.tried) for count in counts)
    return Slab(fits, linear, robust, found.weights, sorts, fitting.family, points)
