"""Tiny networks with known shapes, one of each kind of layer, and tasks made of them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from holdfast.models import make_model

Task = tuple[nn.Module, Tensor, Tensor]
"""A model in eval mode, inputs (B, ...) and the labels (B,) that the model gives them."""


class Residual(nn.Module):
    """Residual, concatenating, normalising network for images of 2 x 7 x 5."""

    mean: Tensor

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.6]).view(1, 2, 1, 1))
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv((x - self.mean) / 0.5)))
        h = torch.cat([h + self.inner(h), h - torch.tanh(self.inner(h))], 1)
        logits: Tensor = self.head(h.mean((2, 3)).view(x.size(0), -1))
        return logits


class Head(nn.Module):
    """A linear layer on flat inputs, between two functions of the caller's choice."""

    def __init__(
        self, size: int, classes: int, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.linear, self.before, self.after = nn.Linear(size, classes), before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.linear(self.before(x.flatten(1))))


def settle(model: nn.Module) -> nn.Module:
    """Give batch norm statistics other than 0 and 1, then switch to eval mode."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.3, 0.3)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 2.0)  # type: ignore[arg-type]
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model.eval()


def tiny_nets() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Name -> (network in eval mode, shape of one input); the weights are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return draw_nets()


def draw_nets() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """The same with weights from torch's global generator."""
    nets: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "linear": (nn.Linear(6, 4), (6,)),
        "mlp": (nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)), (6,)),
        "smooth": (nn.Sequential(nn.Linear(5, 12), nn.Sigmoid(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2)), (5,)),
        "cnn": (
            nn.Sequential(
                *(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.LeakyReLU(0.1)),
                *(nn.AvgPool2d(2, ceil_mode=True, padding=1), nn.Conv2d(4, 6, 2, bias=False), nn.ReLU()),
                *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 5)),
            ),
            (2, 7, 5),
        ),
        "pooled": (
            nn.Sequential(
                *(nn.Conv2d(1, 4, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2, padding=1)),
                *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)),
            ),
            (1, 6, 5),
        ),
        "residual": (Residual(), (2, 7, 5)),
    }
    return {name: (settle(net), shape) for name, (net, shape) in nets.items()}


def images_task(batch: int = 12, dtype: torch.dtype = torch.float32) -> Task:
    """A convolutional network whose five classes are all within reach of some of the inputs (B, 2, 7, 5)."""
    net, shape = tiny_nets()["cnn"]
    model, x = net.to(dtype), _inputs(batch, shape, dtype)
    with torch.no_grad():
        model[-1].bias -= model(x).mean(0)  # type: ignore[index]
        return model, x, model(x).argmax(1)


def chain_task(shape: tuple[int, ...] = (2, 5, 4), *, batch: int = 16, architecture: str = "") -> Task:
    """A chain of dense layers and ReLUs, or a named architecture, with inputs (B, *shape)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if architecture:
            model = make_model(architecture, input_shape=shape, classes=3, seed=0).eval()
        else:
            size = torch.Size(shape).numel()
            model = nn.Sequential(nn.Flatten(), nn.Linear(size, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    x = _inputs(batch, shape, torch.float32)
    with torch.no_grad():
        if not architecture:
            model[-1].bias -= model(x).mean(0)  # type: ignore[index]
        return model, x, model(x).argmax(1)


def linear_task(
    classes: int = 3,
    dtype: torch.dtype = torch.float32,
    *,
    shape: tuple[int, ...] = (1, 4, 4),
    before: Callable[[Tensor], Tensor] = lambda x: x,
    after: Callable[[Tensor], Tensor] = lambda z: z,
) -> Task:
    """A linear model of six small inputs (6, *shape), between two functions of the caller's choice."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = Head(torch.Size(shape).numel(), classes, before, after).to(dtype).eval()
        x = torch.rand(6, *shape, dtype=dtype)
        return model, x, model(x).argmax(1).detach()


def _inputs(batch: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.rand(batch, *shape, dtype=dtype, generator=torch.Generator().manual_seed(5))
