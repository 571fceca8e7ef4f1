"""One process or several: the same code under `python` and under `torchrun`.

Every process sees every global batch and takes its share of it. Gradients are averaged by torch's
DistributedDataParallel; the few numbers that all must agree on travel in one small sum per step.
"""

import atexit
import gc
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.training.context import Context, Metrics, Objective


@dataclass(frozen=True)
class Workers:
    """This process among the processes of the run: `rank` of `count`; only rank 0 writes files."""

    rank: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """True in the process that writes the files."""
        return self.rank == 0

    def share(self, batch: Tensor) -> tuple[Tensor, float]:
        """This process's part of a global batch of indices, and the fraction of the batch that it stands for.

        A batch smaller than the number of processes leaves some without work: they repeat one input with weight zero,
        because all of them must take part in the exchange of gradients.
        """
        own = batch[self.rank :: self.count]
        return (own, len(own) / len(batch)) if len(own) else (batch[:1], 0.0)

    def total(self, values: list[float]) -> list[float]:
        """Element-wise sum over the processes."""
        if self.count == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=_exchange_device())
        distributed.all_reduce(tensor)
        return [float(v) for v in tensor]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every process, in the order of the ranks."""
        if self.count == 1:
            return [tensor]
        own = tensor.to(_exchange_device())
        parts = [torch.empty_like(own) for _ in range(self.count)]
        distributed.all_gather(parts, own)
        return [part.to(tensor.device) for part in parts]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the processes, the same bits in each of them."""
        if self.count == 1:
            return tensor
        total = tensor.to(_exchange_device(), copy=True)
        distributed.all_reduce(total)
        return total.to(tensor.device)

    def wait(self) -> None:
        """Until every process is here: what rank 0 wrote is then on disk for all."""
        self.total([0.0])


def _exchange_device() -> torch.device:
    """NCCL moves GPU tensors only, gloo moves CPU tensors."""
    return torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")


def find_workers() -> Workers:
    """The processes that `torchrun` started (RANK and WORLD_SIZE in the environment), or only this one.

    The group lives as long as the process: torchrun's store does not let the same processes meet a second time.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return Workers()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(_leave)
    return Workers(distributed.get_rank(), count)


def current_workers() -> Workers:
    """The processes of the run under way, for an objective whose state is shared by all of them."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return Workers()
    return Workers(distributed.get_rank(), distributed.get_world_size())


def _leave() -> None:
    """Destroy the group before the interpreter ends.

    DistributedDataParallel sits in a reference cycle and keeps the group's threads running; without the collection
    one process in twenty aborted on its way out ("terminate called without an active exception").
    """
    gc.collect()
    distributed.destroy_process_group()


class _Step(nn.Module):
    """An objective as a module around the model.

    DistributedDataParallel wraps this and not the model, so that an objective may call the model several times, attack
    it, or walk its layers without calling it; gradients are exchanged in the one backward pass all the same.
    """

    def __init__(self, model: nn.Module, objective: Objective, options: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.objective, self.options = model, objective, options

    def forward(self, x: Tensor, y: Tensor, context: Context) -> tuple[Tensor, Metrics]:
        return self.objective(self.model, x, y, context, **self.options)


def make_step(model: nn.Module, objective: Objective, options: dict[str, Any], team: Workers) -> nn.Module:
    """The module (x, y, context) -> (loss, metrics); its backward pass averages gradients over the processes."""
    step = _Step(model, objective, options)
    return step if team.count == 1 else DistributedDataParallel(step)
