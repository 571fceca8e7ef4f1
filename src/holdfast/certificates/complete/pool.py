"""Open sub-problems of a search, held so that taking out and putting in cost what is moved, not what is there."""

import torch
from torch import Tensor

from holdfast.certificates.complete.parts import FIELDS, Parts

FIRST = 64
"""Places to begin with."""


class Pool:
    """Parts in numbered places; a place that was taken is used again."""

    def __init__(self, parts: Parts) -> None:
        self._rows = parts.select(parts.task[:0])
        self._open = torch.zeros(0, dtype=torch.bool, device=parts.task.device)
        self.put(parts)

    def __len__(self) -> int:
        return int(self._open.sum())

    @property
    def bytes(self) -> int:
        """Memory of the open parts."""
        rows = [getattr(self._rows, name)[:1] for name in FIELDS]
        return int(len(self) * sum(row.numel() * row.element_size() for row in rows))

    def light(self) -> tuple[Tensor, Tensor, Tensor]:
        """Places, tasks and bounds of the open parts, (N,) each."""
        places = self._open.nonzero()[:, 0]
        return places, self._rows.task[places], self._rows.bound[places]

    def take(self, places: Tensor) -> Parts:
        """Remove the parts at some places."""
        self._open[places] = False
        return self._rows.select(places)

    def put(self, parts: Parts) -> None:
        """Add parts."""
        free = (~self._open).nonzero()[:, 0]
        if len(free) < len(parts):
            self._grow(len(parts) - len(free))
            free = (~self._open).nonzero()[:, 0]
        places = free[: len(parts)]
        for name in FIELDS:
            getattr(self._rows, name)[places] = getattr(parts, name)
        self._open[places] = True

    def _grow(self, least: int) -> None:
        """Make room for at least so many more, and for as many as there are."""
        more = max(least, len(self._open), FIRST)
        grown = []
        for name in FIELDS:
            old = getattr(self._rows, name)
            grown.append(torch.cat([old, old.new_zeros(more, *old.shape[1:])]))
        self._rows = Parts(*grown)
        self._open = torch.cat([self._open, self._open.new_zeros(more)])
