"""Which inputs of a batch are still unbroken, the best point of each so far, and what it cost."""

import math

import torch
from torch import Tensor

from holdfast.results import AttackResult


def group_size(count: int) -> int:
    """Size of the groups in which inputs leave a batch of `count`: a power of two, a sixteenth to an eighth of it."""
    return 1 << max(0, count.bit_length() - 4)


def survivors(done: Tensor, group: int) -> Tensor | None:
    """Rows to go on with, the unbroken ones first and in their order; None if it does not pay to shrink the batch.

    Inputs leave in groups, so that few batch sizes occur: the backend builds new kernels for each new size, which costs
    more than to carry some inputs along. An attack must neither change nor count the inputs that it carries along.

    Args:
        done: (B,) bool.  group: from `group_size` of the batch at the start.
    """
    size = group * math.ceil((len(done) - int(done.sum())) / group)
    return done.byte().argsort(stable=True)[:size] if size < len(done) else None


def broken_by(name: str, success: Tensor) -> tuple[str, ...]:
    """`name` for each input that `success` (B,) calls broken, "" for the others."""
    return tuple(name if broken else "" for broken in success.tolist())


class Survivors:
    """Follow the inputs of a batch through the runs of an attack; broken inputs leave the run with their group.

    Attributes:
        row: (R,) positions in the batch of the inputs in the run.  x, y: their inputs (R, ...) and labels (R,).
        x_adv: (B, ...) the best point of each input: the first misclassified one, else the one of largest loss.
        loss: (B,) its loss.  success: (B,) bool, whether it is misclassified.
        gradients, queries: (B,) int64, what was spent on each input while it was unbroken.
    """

    def __init__(self, x: Tensor, y: Tensor, x_start: Tensor | None = None) -> None:
        self.all_x, self.all_y = self.x, self.y = x, y
        self.x_adv = (x if x_start is None else x_start).clone()
        self.loss = x.new_full((len(x),), -torch.inf)
        self.success = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        self.gradients = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        self.queries = torch.zeros_like(self.gradients)
        self.row = torch.arange(len(x), device=x.device)
        self._group = group_size(len(x))

    def resume(self, chosen: Tensor | None = None) -> bool:
        """Begin a new run on the unbroken inputs among the `chosen` (B,) bool; return False if there are none."""
        going = ~self.success
        self.row = (going if chosen is None else going & chosen).nonzero()[:, 0]
        self.x, self.y = self.all_x[self.row], self.all_y[self.row]
        self._group = group_size(len(self.row))
        return len(self.row) > 0

    @property
    def going(self) -> Tensor:
        """Which inputs of the run are unbroken, (R,) bool."""
        return ~self.success[self.row]

    @property
    def over(self) -> bool:
        """True if every input of the run is broken."""
        return not bool(self.going.any())

    def count(self, gradients: int = 0, queries: int = 1) -> None:
        """Count evaluations of the unbroken inputs."""
        going = self.going
        self.queries.index_add_(0, self.row, queries * going)
        if gradients:
            self.gradients.index_add_(0, self.row, gradients * going)

    def better(self, values: Tensor, wrong: Tensor | None = None) -> Tensor:
        """Rows of the run whose new points beat the best ones, (N,); their loss and success are noted.

        Args:
            values: (R,) loss of the new points.
            wrong: (R,) bool, whether they are misclassified; None for a run that cannot break an input.
        """
        self.loss = self.loss.to(values.dtype)
        chosen = values > self.loss[self.row]
        if wrong is not None:
            chosen = (chosen | wrong) & self.going
        rows = chosen.nonzero()[:, 0]
        at = self.row[rows]
        self.loss[at] = values[rows]
        if wrong is not None:
            self.success[at] = wrong[rows]
        return rows

    def keep(self, x_adv: Tensor, values: Tensor, wrong: Tensor | None = None) -> Tensor:
        """Take the points (R, ...) that beat the best ones; return their rows as `better` does."""
        rows = self.better(values, wrong)
        self.x_adv.index_copy_(0, self.row[rows], x_adv.index_select(0, rows))
        return rows

    def drop(self) -> Tensor | None:
        """Let broken inputs leave the run; return the rows that stay, None if all do."""
        stay = survivors(~self.going, self._group)
        if stay is not None:
            self.row, self.x, self.y = self.row[stay], self.x[stay], self.y[stay]
        return stay

    def leave(self, *state: Tensor) -> tuple[Tensor, ...]:
        """Let broken inputs leave the run; the tensors `state`, with one row for each input of the run, follow it."""
        stay = self.drop()
        return state if stay is None else tuple(tensor[stay] for tensor in state)

    def result(self, name: str) -> AttackResult:
        """The best points of the batch; what is broken is broken by `name`."""
        return AttackResult(self.x_adv, self.success, broken_by(name, self.success), self.gradients, self.queries)
