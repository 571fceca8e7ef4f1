"""How many weights each layer of a sub-network keeps."""

from collections.abc import Mapping
from fractions import Fraction as Ratio

from holdfast.errors import InputError
from holdfast.utils.options import Fraction, Share, Unit, convert


def keep_counts(sizes: Mapping[str, int], *, rate: Fraction, gamma: Unit = 0.1, cap: Share = 1.0) -> dict[str, int]:
    """Weights m_i that each layer keeps, with sum m_i = floor((1 - rate) sum n_i) and m_i ~ n_i^gamma.

    gamma = 1 prunes every layer at the same rate, which nearly maximises the number of sub-networks; gamma = 0 keeps
    the same number in every layer, which maximises the bound prod m_i of the number of paths. A layer whose share would
    exceed its size is kept whole, and what it leaves goes to the others.

    Args:
        sizes: number of weights n_i of each layer, by name.
        rate: share of all weights that is pruned.
        gamma: exponent of the layer size.
        cap: largest share of a layer that is kept. A layer that is kept whole cannot be learned; below 1 there is none.

    >>> keep_counts({"small": 10, "large": 1000}, rate=0.9, gamma=0.0)
    {'small': 10, 'large': 91}
    """
    rate, gamma, cap = convert(rate, Fraction, "rate"), convert(gamma, Unit, "gamma"), convert(cap, Share, "cap")
    budget = int((1 - _exact(rate)) * sum(sizes.values()))
    room = {name: int(_exact(cap) * size) for name, size in sizes.items()}
    _check_room(budget, room, rate, cap)
    counts, left = {}, budget
    waiting = sorted(sizes, key=lambda name: (sizes[name], name))
    total = sum(float(sizes[name]) ** gamma for name in waiting)
    for name in waiting:  # from the smallest layer, so that what a full one leaves is shared by the rest
        weight = float(sizes[name]) ** gamma
        counts[name] = min(room[name], int(left * weight / total), left)
        left, total = left - counts[name], total - weight
    for name in reversed(waiting):  # what rounding left, to the largest
        extra = min(left, room[name] - counts[name])
        counts[name], left = counts[name] + extra, left - extra
    _check_empty(counts, sizes, rate, gamma)
    return {name: counts[name] for name in sizes}


def _exact(value: float) -> Ratio:
    """The number as it is written: 0.99 is 99/100, not the double next to it."""
    return Ratio(repr(value))


def _check_room(budget: int, room: Mapping[str, int], rate: float, cap: float) -> None:
    if budget > sum(room.values()):
        raise InputError(
            f"rate {rate:g} keeps {budget:,} weights, but cap {cap:g} leaves room for {sum(room.values()):,}; raise one"
        )


def _check_empty(counts: Mapping[str, int], sizes: Mapping[str, int], rate: float, gamma: float) -> None:
    empty = [name for name, count in counts.items() if count == 0]
    if empty:
        raise InputError(
            f"rate {rate:g} with gamma {gamma:g} leaves no weight of layer '{empty[0]}' ({sizes[empty[0]]:,} weights); "
            "lower the rate, or lower gamma to keep more of the small layers"
        )
