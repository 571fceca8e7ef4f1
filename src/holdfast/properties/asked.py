"""The network that a property speaks of, as operations in its own precision and in float64."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from holdfast.bounding.core.evaluation import doubled
from holdfast.bounding.core.region import Region
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace
from holdfast.certificates.complete.problem import Conditions
from holdfast.checks import PROVABLE, check_logits, check_model
from holdfast.errors import InputError, UnsupportedError
from holdfast.properties.points import hull
from holdfast.properties.property import Case, Property, stacked
from holdfast.threats import Box


@dataclass(eq=False)
class Subject:
    """A network that fits the property.

    Attributes:
        model: from (B, *shape) to (B, K).
        shape: of one input.
        dtype: in which it runs.
    """

    model: nn.Module
    shape: tuple[int, ...]
    dtype: torch.dtype
    _known: tuple[Graph, Graph] | None = field(default=None, repr=False)

    @cached_property
    def double(self) -> nn.Module:
        """The network in float64."""
        return copy.deepcopy(self.model).double()

    def box(self, cases: Sequence[Case]) -> tuple[Tensor, Tensor]:
        """The boxes of some cases, (B, *shape) in float64: what a proof covers."""
        ends = [hull(case, self.dtype) for case in cases]
        lower, upper = (torch.stack(end).view(-1, *self.shape) for end in zip(*ends, strict=True))
        return lower, upper

    def graphs(self, lower: Tensor, upper: Tensor) -> tuple[Graph, Graph]:
        """The network as operations, in float64 and in its own dtype; compared with the model over the boxes."""
        radius, (low, high) = (upper - lower) / 2, (float(lower.min()) - 1, float(upper.max()) + 1)
        x = ((lower + upper) / 2).to(self.dtype)
        own = trace(self.model, x, Box(radius.to(self.dtype), low=low, high=high, batched=True))
        if self._known is None or self._known[1] is not own:
            self._known = doubled(own), own
        return self._known

    def region(self, case: Case) -> Region:
        """The inputs of a case, (1, *shape) in float64."""
        lower, upper = self.box([case])
        x = (lower + upper) / 2 if case.centre is None else case.centre.view(1, *self.shape)
        return Region(lower, upper, x, case.ball)


def subject_of(model: nn.Module, prop: Property, input_shape: Sequence[int] | None) -> Subject:
    """The network, after all checks that it fits the property."""
    check_model(model)
    kinds = {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()} or {torch.float32}
    places = {t.device.type for t in (*model.parameters(), *model.buffers())} or {"cpu"}
    if len(kinds) > 1 or not kinds <= set(PROVABLE) or places != {"cpu"}:
        raise UnsupportedError(
            f"verify takes a network in float32 or float64 on the CPU; this one is in {sorted(map(str, kinds))} on "
            f"{sorted(places)}"
        )
    dtype = kinds.pop()
    shape = tuple(input_shape if input_shape is not None else getattr(model, "input_shape", (prop.inputs,)))
    if math.prod(shape) != prop.inputs:
        raise InputError(
            f"{prop.name} has {prop.inputs} inputs X, the network takes {math.prod(shape)} values {shape}; they must "
            "be the same"
        )
    middle = ((prop.cases[0].lower + prop.cases[0].upper) / 2).to(dtype).view(1, *shape)
    with torch.no_grad():
        outputs = check_logits(nn.Sequential(model, nn.Flatten()).eval(), middle).shape[1]
        flat = model(middle.clone()).ndim == 2
    model = model if flat else nn.Sequential(model, nn.Flatten()).eval()
    if prop.outputs is not None and prop.outputs != outputs:
        raise InputError(f"{prop.name} has {prop.outputs} outputs Y, the network {outputs}; they must be the same")
    return Subject(model, shape, dtype)


def conditions_of(case: Case) -> Conditions:
    """The conditions that a counter-example of the case meets; none if it has none, or if any output is one."""
    if not case.unsafe or any(not len(polytope.rows) for polytope in case.unsafe):
        return Conditions(torch.zeros(0, 1).double(), torch.zeros(0).double(), torch.zeros(0, dtype=torch.int64))
    return Conditions(*stacked(case.unsafe))
