"""Which inputs of a batch are still unbroken, the best point of each so far, and what it cost."""

import math

import torch
from torch import Tensor

from holdfast.results import AttackResult
from holdfast.utils import clock


def group_size(count: int) -> int:
    """Size of the groups in which inputs leave a batch of `count`: a power of two, a sixteenth to an eighth of it."""
    return 1 << max(0, count.bit_length() - 4)


def survivors(going: Tensor, left: int, group: int) -> Tensor | None:
    """Rows to go on with, the unbroken ones first and in their order; None if it does not pay to shrink the batch.

    Inputs leave in groups, so that few batch sizes occur: the backend builds new kernels for each new size, which costs
    more than to carry some inputs along. An attack must neither change nor count the inputs that it carries along.

    Args:
        going: (B,) bool, `left` of them true.  group: from `group_size` of the batch at the start.
    """
    size = group * math.ceil(left / group)
    return (~going).byte().argsort(stable=True)[:size] if size < len(going) else None


def broken_by(name: str, success: Tensor) -> tuple[str, ...]:
    """`name` for each input that `success` (B,) calls broken, "" for the others."""
    return tuple(name if broken else "" for broken in success.tolist())


class Survivors:
    """Follow the inputs of a batch through the runs of an attack; broken inputs leave the run with their group.

    A step of an attack must cost few small operations: what the run knows of its own inputs is kept in their order, and
    evaluations are counted in two integers, which are added to the batch's tensors when an input breaks.

    Attributes:
        row: (R,) positions in the batch of the inputs in the run.  x, y: their inputs (R, ...) and labels (R,).
        going: (R,) bool, which of them are unbroken.  best: (R,) the loss of their best points.
        x_adv: (B, ...) the best point of each input: the first misclassified one, else the one of largest loss.
        success: (B,) bool, whether it is misclassified.
    """

    def __init__(self, x: Tensor, y: Tensor, x_start: Tensor | None = None) -> None:
        self.all_x, self.all_y = self.x, self.y = x, y
        self.x_adv = (x if x_start is None else x_start).clone()
        self.success = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        self._loss = self.best = x.new_full((len(x),), -torch.inf)
        self._spent = torch.zeros(2, len(x), dtype=torch.int64, device=x.device)
        self._begin(torch.arange(len(x), device=x.device))

    def _begin(self, row: Tensor) -> None:
        self.row, self.going = row, torch.ones_like(row, dtype=torch.bool)
        self._group, self._left = group_size(len(row)), len(row)
        self._uncounted = (0, 0)

    def resume(self, chosen: Tensor | None = None) -> bool:
        """Begin a new run on the unbroken inputs among the `chosen` (B,) bool; return False if there are none.

        No run is begun after the deadline.
        """
        if clock.over():
            return False
        loss, going = self.loss, ~self.success
        self._count_up()
        self._begin((going if chosen is None else going & chosen).nonzero()[:, 0])
        self.x, self.y, self.best = self.all_x[self.row], self.all_y[self.row], loss[self.row]
        return self._left > 0

    @property
    def over(self) -> bool:
        """True if every input of the run is broken, or the time is over."""
        return self._left == 0 or clock.over()

    @property
    def loss(self) -> Tensor:
        """Loss of the best point of each input, (B,)."""
        self._loss = self._loss.to(self.best.dtype).index_copy(0, self.row, self.best)
        return self._loss

    @property
    def gradients(self) -> Tensor:
        """Gradient evaluations spent on each input while it was unbroken, (B,) int64."""
        return self._count_up()[0]

    @property
    def queries(self) -> Tensor:
        """Forward passes spent on each input while it was unbroken, (B,) int64."""
        return self._count_up()[1]

    def count(self, gradients: int = 0, queries: int = 1) -> None:
        """Count evaluations of the unbroken inputs."""
        self._uncounted = (self._uncounted[0] + gradients, self._uncounted[1] + queries)

    def _count_up(self) -> Tensor:
        """Add what was counted to the unbroken inputs; return what was spent on each, (2, B)."""
        if any(self._uncounted):
            self._spent[:, self.row] += self.going * self._spent.new_tensor(self._uncounted)[:, None]
            self._uncounted = (0, 0)
        return self._spent

    def settle(self, going: Tensor) -> None:
        """Take note that of the inputs of the run only those `going`, (R,) bool, are unbroken from here on."""
        left = int(going.sum())
        if left < self._left:
            self._count_up()
            self.success[self.row] = ~going
            self.going, self._left = going, left

    def better(self, values: Tensor, wrong: Tensor | None = None) -> Tensor:
        """Rows of the run whose new points beat the best ones, (N,); their loss and success are noted.

        Args:
            values: (R,) loss of the new points.
            wrong: (R,) bool, whether they are misclassified; None for a run that cannot break an input.
        """
        chosen = values > self.best
        if wrong is not None:
            chosen = (chosen | wrong) & self.going
        self.best = torch.where(chosen, values, self.best.to(values.dtype))
        if wrong is not None:
            self.settle(self.going & ~wrong)
        return chosen.nonzero()[:, 0]

    def keep(self, x_adv: Tensor, values: Tensor, wrong: Tensor | None = None) -> Tensor:
        """Take the points (R, ...) that beat the best ones; return their rows as `better` does."""
        rows = self.better(values, wrong)
        self.x_adv.index_copy_(0, self.row[rows], x_adv.index_select(0, rows))
        return rows

    def drop(self) -> Tensor | None:
        """Let broken inputs leave the run; return the rows that stay, None if all do."""
        stay = survivors(self.going, self._left, self._group)
        if stay is not None:
            self._count_up()
            self._loss = self.loss
            self.row, self.x, self.y = self.row[stay], self.x[stay], self.y[stay]
            self.going, self.best = self.going[stay], self.best[stay]
        return stay

    def leave(self, *state: Tensor) -> tuple[Tensor, ...]:
        """Let broken inputs leave the run; the tensors `state`, with one row for each input of the run, follow it."""
        stay = self.drop()
        return state if stay is None else tuple(tensor[stay] for tensor in state)

    def result(self, name: str) -> AttackResult:
        """The best points of the batch; what is broken is broken by `name`."""
        return AttackResult(self.x_adv, self.success, broken_by(name, self.success), self.gradients, self.queries)
