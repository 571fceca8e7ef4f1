"""What a complete method decides: can the outputs over a region meet linear conditions?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from holdfast.bounding.core.region import Region
from holdfast.bounding.graph.ops import Graph
from holdfast.utils import clock

Status = Literal["holds", "violated", "unknown"]


@dataclass(frozen=True, eq=False)
class Conditions:
    """Linear conditions rows @ z <= limits in groups; a counter-example meets all conditions of one group.

    `rows` (M, K), `limits` (M,), `group` (M,) the number of each row's group, all in float64.
    """

    rows: Tensor
    limits: Tensor
    group: Tensor

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return int(self.group.max()) + 1 if len(self.group) else 0

    def worst(self, excess: Tensor) -> Tensor:
        """From excesses of the rows over their limits, (B, M), to excesses of the groups, (B, groups).

        A group is impossible where its excess is positive: one of its rows stays above its limit.
        """
        start = excess.new_full((len(excess), self.groups), -torch.inf)
        return start.scatter_reduce(1, self.group.expand_as(excess), excess, "amax")

    def least(self, outputs: Tensor) -> Tensor:
        """How far outputs (B, K) are from a counter-example, (B,); at most 0 for counter-examples."""
        return self.worst(outputs.double() @ self.rows.T - self.limits).amin(1)


@dataclass(frozen=True, eq=False)
class Problem:
    """A network, the inputs, and the conditions on its outputs.

    Attributes:
        graph: the network in float64.
        own: the network in `dtype`.
        region: the inputs, one region (1, *shape), in float64.
        conditions: what a counter-example meets.
        dtype: in which the network is run; answers hold for every evaluation in it.
        check: from points (N, *shape) in float64, best first, to one that the network itself confirms, or None.
    """

    graph: Graph
    own: Graph
    region: Region
    conditions: Conditions
    dtype: torch.dtype
    check: Callable[[Tensor], Tensor | None]


@dataclass(frozen=True, eq=False)
class Answer:
    """What a complete method found out.

    Attributes:
        status: "holds" (no input of the region meets the conditions), "violated" (`point` does) or "unknown".
        point: (*shape), what `Problem.check` returned.
        bound: a lower bound of the least excess of a group over the region: positive where it holds.
        splits: sub-problems that were bounded.
        late: the time ran out.
        note: why it is unknown, where the reason is known.
    """

    status: Status
    bound: float
    splits: int = 0
    point: Tensor | None = None
    late: bool = False
    note: str = ""


def is_late(deadline: float) -> bool:
    """True from the deadline on, or from the one that is set around the call."""
    return clock.now() >= deadline or clock.over()
