"""Where the batches of an audit are worked on: in this process, or on a cluster that gives the same answers."""

from collections.abc import Callable, Iterable, Iterator

from torch import nn

from holdfast.audits.task import Found, Task, work

Engine = Callable[[nn.Module, Iterable[Task]], Iterator[tuple[Task, Found]]]
"""Do every task and yield it with its result as soon as it is done, in any order.

The caller stores each result before it asks for the next, and may stop asking: what is not yielded is not done.
"""


def local(model: nn.Module, tasks: Iterable[Task]) -> Iterator[tuple[Task, Found]]:
    """One task after the other, here."""
    for task in tasks:
        yield task, work(model, task)
