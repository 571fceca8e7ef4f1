"""The nearest input of another class, as an answer to "what would have to change?"."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.explanations.core.answers import rivals_at
from holdfast.results import Explanation


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """The nearest point found that the model puts into another class.

    Attributes:
        image: that point, the shape of one input; None where none was found.
        distance: l2, from the input; infinite where none was found.
        rival: name of its class; empty where none was found.
    """

    image: Tensor | None
    distance: float
    rival: str

    @property
    def title(self) -> str:
        """For a picture."""
        return f"{self.rival} at {self.distance:.3g}"


@torch.no_grad()
def counterfactuals(
    model: nn.Module, x: Tensor, found: Explanation, classes: Sequence[str], *, chunk: int = 256
) -> list[Counterfactual] | None:
    """One for each input x of an explanation by `bsm` or `big`; None for methods that look for no boundary."""
    if found.boundary is None or found.distance is None:
        return None
    own = torch.cat([model(part) for part in x.split(chunk)]).argmax(1)
    rivals = rivals_at(model, found.boundary, own, chunk).tolist()
    return [
        Counterfactual(point, distance, classes[rival])
        if math.isfinite(distance)
        else Counterfactual(None, distance, "")
        for point, distance, rival in zip(found.boundary, found.distance.tolist(), rivals, strict=True)
    ]
