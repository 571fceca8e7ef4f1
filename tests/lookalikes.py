"""Networks built like those of TorchVision and its kin, and what is asked of every one of them."""

import importlib
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import holdfast as hf

X = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def convolution(inputs: int, outputs: int, activation: nn.Module, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, bias=False, **options), nn.BatchNorm2d(outputs), activation)


class Residual(nn.Module):
    """A ResNet as TorchVision writes it: in-place ReLU, a shortcut that is added in place, torch.flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, 4, nn.ReLU(inplace=True), stride=2, padding=1), nn.MaxPool2d(3, 2, 1))
        self.one, self.two = nn.Conv2d(4, 6, 3, 2, 1), nn.Conv2d(6, 6, 3, 1, 1)
        self.norm, self.relu = nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        self.shortcut = nn.Conv2d(4, 6, 1, 2)
        self.pool, self.head = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out = self.norm(self.two(self.relu(self.one(x))))
        out += self.shortcut(x)
        return self.head(torch.flatten(self.pool(self.relu(out)), 1))


class Stacked(nn.Module):
    """A VGG: stacked convolutions, max pooling, adaptive pooling, view by the size of the batch, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            convolution(3, 4, nn.ReLU(True), padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.AvgPool2d(2)
        )
        self.pool = nn.AdaptiveAvgPool2d(3)
        self.classifier = nn.Sequential(nn.Linear(36, 8), nn.ReLU(True), nn.Dropout(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).view(x.size(0), -1))


class Mobile(nn.Module):
    """A MobileNetV2: a convolution for each channel, ReLU6 or hardswish, a linear bottleneck, a mean over the image."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU6) -> None:
        super().__init__()
        self.stem = convolution(3, 4, activation(), stride=2, padding=1)
        self.depthwise = convolution(4, 4, activation(), padding=1, groups=4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.depthwise(x)).mean([2, 3]))


class ConvNext(nn.Module):
    """A block of ConvNeXt: large kernels, layer norm over the channels, GELU, a learnt scale of the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 4, 4, 4), nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.gamma, self.head = nn.Parameter(torch.full((4,), 0.5)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(F.gelu(self.up(y)))
        return self.head((x + y.permute(0, 3, 1, 2)).mean((-2, -1)))


class Transformer(nn.Module):
    """A vision transformer with one block and scaled dot-product attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(tokens)).chunk(3, -1)
        return self.head((tokens + F.scaled_dot_product_attention(q, k, v)).mean(1))


def ready(model: nn.Module) -> nn.Module:
    """Statistics and weights as if it were trained, in eval mode."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, generator=generator)
            nn.init.uniform_(module.running_var, 0.5, 2, generator=generator)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0, parameter[0].numel() ** -0.5, generator=generator)
    return model.eval()


def export(model: nn.Module, path: Path, *, dynamo: bool, x: Tensor = X) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both exporters warn about their own insides
        if dynamo:
            shapes = ({0: torch.export.Dim("batch")},)
            torch.onnx.export(model, (x[:2],), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
        else:
            axes = {"x": {0: "batch"}}
            torch.onnx.export(model, (x[:2],), path, dynamo=False, dynamic_axes=axes, input_names=["x"])
    return path


def bracket(model: nn.Module, x: Tensor = X, method: str = "crown") -> None:
    """Certify and attack at two budgets: nothing proved breaks, all examples are real, the smaller proves something."""
    y = model(x).argmax(1)
    for eps in (1e-4, 0.3):
        proved = hf.certify(model, x, y, hf.Linf(eps), method).certified
        found = hf.attack(model, x, y, hf.Linf(eps), "pgd", steps=5)
        assert not bool((proved & found.success).any())
        assert bool((model(found.x_adv).argmax(1) != y)[found.success].all())
        if eps < 0.01:
            assert bool(proved.any())


def optional(name: str) -> ModuleType:
    """The package, or a skip; a TorchVision that was built for another torch fails with a RuntimeError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name} cannot be imported: {error}")
