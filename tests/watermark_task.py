"""A tiny task with a watermark in it, which the tests of watermarks share."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from holdfast.apps.watermark import EmbedOptions, TriggerSet, content_triggers, embed
from holdfast.data import Split


@dataclass(frozen=True, eq=False)
class Task:
    """Three classes of images 1 x 8 x 8, a bright third each, and 24 triggers of class 2."""

    x: Tensor
    y: Tensor
    triggers: TriggerSet

    def net(self, *, norm: bool = False, seed: int = 0) -> nn.Sequential:
        """A new network, in training mode."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = [nn.Conv2d(1, 6, 4, 2, 1), *([nn.BatchNorm2d(6)] if norm else []), nn.ReLU(), nn.MaxPool2d(2)]
            return nn.Sequential(*layers, nn.Flatten(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3))


@cache
def make_task() -> Task:
    """The task."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(400) % 3
    x = 0.3 * torch.rand(400, 1, 8, 8, generator=generator)
    rows = torch.arange(8) * 3 // 8
    x += 0.6 * (rows[None] == y[:, None]).float()[:, None, :, None]
    triggers = content_triggers(Split(x, y), 3, label=2, count=24, text="W", level=1.0)
    return Task(x[:376], y[:376], triggers)


@cache
def make_marked() -> tuple[Task, nn.Module, nn.Module]:
    """The task, a network with a mark learnt under noise, and one with the usual backdoor."""
    task = make_task()
    how = {"epochs": 10, "batch_size": 47, "drop_every": 8, "trigger_batch": 8, "clip_norm": 1.0, "warm_up": 2}
    noisy = EmbedOptions(noise=0.4, levels=3, samples=2, step_per_level=True, **how)
    nets = [embed(task.net(), task.x, task.y, task.triggers, o)[0] for o in (noisy, EmbedOptions(noise=0.0, **how))]
    return task, nets[0], nets[1]
