"""Networks built like those of TorchVision and its kin, and what is asked of every one of them."""

import importlib
import warnings
from collections.abc import Callable
from functools import partial
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


class Block(nn.Module):
    """A block of a ResNet as TorchVision and timm write it: two convolutions, or a bottleneck of three."""

    def __init__(
        self, inputs: int, width: int, stride: int, *, bottleneck: bool, average: bool, activation: type[nn.Module]
    ) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        for i, (before, after, kernel, step) in enumerate(shapes, start=1):
            self.add_module(f"conv{i}", nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(after))
        self.count, self.act = len(shapes), activation(inplace=True)
        self.downsample: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            average &= stride > 1
            pool = [nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False)] if average else []
            conv = nn.Conv2d(inputs, outputs, 1, 1 if average else stride, bias=False)
            self.downsample = nn.Sequential(*pool, conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out, identity = x, x
        for i in range(1, self.count + 1):
            out = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(out))
            out = self.act(out) if i < self.count else out
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.act(out)


class ResNet(nn.Module):
    """A whole ResNet: strided stem and max pooling, three stages, adaptive pooling. timm's options change its parts.

    `deep` has three small convolutions in the stem (ResNet-D, "resnet10t"), `average` pools before the convolution of
    a shortcut (avg_down).
    """

    def __init__(
        self,
        *,
        bottleneck: bool = False,
        deep: bool = False,
        average: bool = False,
        activation: type[nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        self.conv1: nn.Module = nn.Conv2d(3, 4, 7, 2, 3, bias=False)
        if deep:
            small = [convolution(3, 2, activation(inplace=True), stride=2, padding=1)]
            small += [convolution(2, 2, activation(inplace=True), padding=1), nn.Conv2d(2, 4, 3, 1, 1, bias=False)]
            self.conv1 = nn.Sequential(*small)
        self.bn1, self.act1, self.maxpool = nn.BatchNorm2d(4), activation(inplace=True), nn.MaxPool2d(3, 2, 1)
        inputs, options = 4, {"bottleneck": bottleneck, "average": average, "activation": activation}
        for stage, (width, stride) in enumerate(((2, 1), (3, 2), (4, 2)), start=1):
            first = Block(inputs, width, stride, **options)
            inputs = 4 * width if bottleneck else width
            self.add_module(f"layer{stage}", nn.Sequential(first, Block(inputs, width, 1, **options)))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(inputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.act1(self.bn1(self.conv1(x))))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class NormAct(nn.BatchNorm2d):
    """timm's batch norm with an activation: a forward() of its own, by functions."""

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return F.relu(x)


class StandardConv(nn.Conv2d):
    """timm's convolution with standardised weights."""

    def forward(self, x: Tensor) -> Tensor:
        flat = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True)
        return F.conv2d(x, flat.reshape_as(self.weight), self.bias, self.stride, self.padding)


class PreActBlock(nn.Module):
    """A block of timm's ResNetV2: norm and activation first, which the shortcut shares."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = NormAct(inputs), StandardConv(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = NormAct(outputs), StandardConv(outputs, outputs, 3, 1, 1, bias=False)
        self.downsample = StandardConv(inputs, outputs, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        pre = self.norm1(x)
        shortcut = x if self.downsample is None else self.downsample(pre)
        return self.conv2(self.norm2(self.conv1(pre))) + shortcut


class PreAct(nn.Module):
    """A pre-activation ResNet of timm: it ends with a norm, and pools by a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = StandardConv(3, 4, 3, 2, 1), nn.MaxPool2d(3, 2, 1)
        self.stages = nn.Sequential(PreActBlock(4, 4, 1), PreActBlock(4, 6, 2), PreActBlock(6, 6, 1))
        self.norm, self.head = NormAct(6), nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stages(self.pool(self.stem(x))))
        return self.head(x.mean((2, 3), keepdim=True)).flatten(1)


class Cifar(nn.Module):
    """The first ResNets for CIFAR: their shortcuts take every second pixel and pad the channels with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        self.one = convolution(4, 8, nn.ReLU(), stride=2, padding=1)
        self.two, self.bn2 = nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2), "constant", 0)
        x = F.relu(self.bn2(self.two(self.one(x))) + shortcut)
        return self.linear(F.avg_pool2d(x, x.size()[3]).view(x.size(0), -1))


RESIDUAL: dict[str, Callable[[], nn.Module]] = {
    "residual": Residual,
    "basic": ResNet,
    "bottleneck": partial(ResNet, bottleneck=True),
    "deep-stem": partial(ResNet, deep=True, average=True),
    "bottleneck-avg-down": partial(ResNet, bottleneck=True, average=True),
    "pre-activation": PreAct,
    "cifar": Cifar,
}
"""Residual networks whose shortcuts change the shape, in all the ways that are in use."""


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


def settled(model: nn.Module, size: int = 16) -> nn.Module:
    """Like `ready`, but batch norms have the statistics of 64 images, so that no layer of a deep network dies."""
    model = ready(model).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0  # those of the last batch
    with torch.no_grad():
        model(torch.rand(64, 3, size, size, generator=torch.Generator().manual_seed(2)))
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
