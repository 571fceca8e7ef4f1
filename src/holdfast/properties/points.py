"""Counter-examples as the network takes them: inside the box, in its own precision, confirmed by a run."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from holdfast.certificates.complete.problem import Conditions
from holdfast.properties.property import Case

Run = Callable[[Tensor], Tensor]
"""From inputs (1, *shape) to outputs (1, K)."""
TRIED = 16
"""Points of a batch that are replayed one by one before the search goes on."""


def representable(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The ends of the box (n,) in `dtype`, inside the box; the nearest number where the box holds none of them."""
    ends = []
    for end, outward, way in ((case.lower, torch.lt, torch.inf), (case.upper, torch.gt, -torch.inf)):
        near = end.to(dtype)
        inside = torch.nextafter(near, torch.full_like(near, way))
        ends.append(torch.where(outward(near.double(), end), inside, near))
    low, high = ends
    none = low > high
    middle = ((case.lower + case.upper) / 2).to(dtype)
    return torch.where(none, middle, low), torch.where(none, middle, high)


def hull(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The box together with the inputs that `representable` gives, (n,) in float64: what a proof covers."""
    low, high = representable(case, dtype)
    return torch.minimum(case.lower, low.double()), torch.maximum(case.upper, high.double())


@dataclass(eq=False)
class Judge:
    """Confirms counter-examples of one case by running the network on each by itself.

    Attributes:
        model: the network.  case: where its inputs come from.  conditions: what a counter-example meets.
        shape: of one input.
        replays: other ways to run the network, which have to agree.
        output: (K,), what the network returned for the counter-example.
        rejected: how many points the model accepted and a replay did not.
    """

    model: nn.Module
    case: Case
    conditions: Conditions
    shape: tuple[int, ...]
    dtype: torch.dtype
    replays: tuple[Run, ...] = ()
    output: Tensor | None = None
    rejected: int = field(default=0)

    def __post_init__(self) -> None:
        self.low, self.high = representable(self.case, self.dtype)

    def place(self, points: Tensor) -> Tensor:
        """Points (N, *shape) as the network takes them: in its dtype and inside the region."""
        flat = points.flatten(1).to(self.dtype).clamp(self.low, self.high)
        if self.case.ball is not None and self.case.centre is not None:
            centre = self.case.centre.to(self.dtype).expand_as(flat)
            flat = self.case.ball.project(flat, centre).clamp(self.low, self.high)
            outside = ~self.case.ball.contains(flat, centre)
            flat = torch.where(outside[:, None], centre.clamp(self.low, self.high), flat)
        return flat.view(-1, *self.shape)

    @torch.no_grad()
    def check(self, points: Tensor) -> Tensor | None:
        """The first of the points (N, *shape), best first, that the network confirms, as it takes it; or None."""
        for point in self.place(points[:TRIED]).split(1):
            output = self.model(point.clone())
            if not bool(self.conditions.least(output) <= 0):
                continue
            if all(bool(self.conditions.least(run(point)) <= 0) for run in self.replays):
                self.output = output[0]
                found: Tensor = point[0]
                return found
            self.rejected += 1
        return None
