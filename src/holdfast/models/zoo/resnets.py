"""Residual networks for small images: ResNet, pre-activation ResNet, wide ResNet, and one without batch norm."""

from typing import Literal

from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.models.catalog import Shape
from holdfast.models.catalog import add_architecture as add
from holdfast.models.zoo.plain import need_image
from holdfast.utils.options import Count

Stem = Literal["cifar", "imagenet"]


def _conv3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


class _Residual(nn.Module):
    """relu(body(x) + shortcut(x)); the shortcut is a 1x1 convolution where the shapes differ."""

    def __init__(self, body: nn.Sequential, inputs: int, outputs: int, stride: int, affine: bool) -> None:
        super().__init__()
        self.body = body
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs, affine=affine))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def basic_block(inputs: int, width: int, stride: int, affine: bool) -> _Residual:
    """Two 3x3 convolutions with batch norm around a shortcut (He et al., "Deep residual learning", 2016)."""
    body = nn.Sequential(
        _conv3(inputs, width, stride),
        nn.BatchNorm2d(width, affine=affine),
        nn.ReLU(),
        _conv3(width, width),
        nn.BatchNorm2d(width, affine=affine),
    )
    return _Residual(body, inputs, width, stride, affine)


def _bottleneck(inputs: int, width: int, stride: int, affine: bool) -> _Residual:
    body = nn.Sequential(
        nn.Conv2d(inputs, width, 1, bias=False),
        nn.BatchNorm2d(width, affine=affine),
        nn.ReLU(),
        _conv3(width, width, stride),
        nn.BatchNorm2d(width, affine=affine),
        nn.ReLU(),
        nn.Conv2d(width, 4 * width, 1, bias=False),
        nn.BatchNorm2d(4 * width, affine=affine),
    )
    return _Residual(body, inputs, 4 * width, stride, affine)


class _PreActivation(nn.Module):
    """Batch norm and ReLU come before each convolution, and before the shortcut where that is a convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.start = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU())
        self.body = nn.Sequential(
            _conv3(inputs, outputs, stride), nn.BatchNorm2d(outputs), nn.ReLU(), _conv3(outputs, outputs)
        )
        self.projection: nn.Conv2d | None = None
        if stride != 1 or inputs != outputs:
            self.projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        start = self.start(x)
        kept = x if self.projection is None else self.projection(start)
        out: Tensor = self.body(start) + kept
        return out


class _NoBatchNorm(nn.Module):
    """relu(conv(relu(conv(x))) + conv(x)), all with bias; 4x4 and 2x2 kernels where it halves the image."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3 if stride == 1 else 4, stride, 1),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, stride, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def resnet(
    input_shape: Shape,
    classes: int,
    *,
    blocks: tuple[Count, ...] = (2, 2, 2, 2),
    channels: tuple[Count, ...] = (64, 128, 256, 512),
    bottleneck: bool = False,
    stem: Stem = "cifar",
    affine: bool = True,
    head_bias: bool = True,
    last_batch_norm: bool = False,
) -> nn.Sequential:
    """ResNet; every stage but the first halves the image.

    Args:
        blocks: residual blocks in each stage.
        channels: width of each stage; bottleneck blocks give out four times that.
        bottleneck: blocks of 1x1, 3x3, 1x1 convolutions in place of two 3x3.
        stem: "cifar" is one 3x3 convolution; "imagenet" a strided 7x7 one and max pooling.
        affine: batch norms have a learnt scale and shift.
        head_bias: the last layer has a bias.
        last_batch_norm: batch norm without scale and shift on the logits, which random-weight networks need.
    """
    images, _, _ = need_image(input_shape)
    _check_stages(blocks, channels)
    make = _bottleneck if bottleneck else basic_block
    inputs = channels[0]
    large = stem == "imagenet"
    first = nn.Conv2d(images, inputs, 7, 2, 3, bias=False) if large else _conv3(images, inputs)
    modules: list[nn.Module] = [first, nn.BatchNorm2d(inputs, affine=affine), nn.ReLU()]
    modules += [nn.MaxPool2d(3, 2, 1)] if large else []
    for stage, (times, width) in enumerate(zip(blocks, channels, strict=True)):
        for index in range(times):
            modules.append(make(inputs, width, 2 if stage > 0 and index == 0 else 1, affine))
            inputs = 4 * width if bottleneck else width
    modules += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes, bias=head_bias)]
    if last_batch_norm:
        modules.append(nn.BatchNorm1d(classes, affine=False))
    return nn.Sequential(*modules)


def _check_stages(blocks: tuple[int, ...], channels: tuple[int, ...]) -> None:
    if not blocks or len(blocks) != len(channels):
        raise InputError(f"blocks and channels must have one entry per stage, got {blocks!r} and {channels!r}")


def preact_resnet(
    input_shape: Shape,
    classes: int,
    *,
    blocks: tuple[Count, ...] = (2, 2, 2, 2),
    channels: tuple[Count, ...] = (64, 128, 256, 512),
    stem_channels: Count = 64,
) -> nn.Sequential:
    """Pre-activation ResNet with a batch norm before the pooling; every stage but the first halves the image."""
    images, _, _ = need_image(input_shape)
    _check_stages(blocks, channels)
    inputs = stem_channels
    modules: list[nn.Module] = [_conv3(images, inputs)]
    for stage, (times, width) in enumerate(zip(blocks, channels, strict=True)):
        for index in range(times):
            modules.append(_PreActivation(inputs, width, 2 if stage > 0 and index == 0 else 1))
            inputs = width
    head = [nn.BatchNorm2d(inputs), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*modules, *head)


def wide_resnet(input_shape: Shape, classes: int, *, depth: Count = 28, width: Count = 10) -> nn.Sequential:
    """Pre-activation ResNet of three stages with 16, 32, 64 times `width` channels; depth is 6 n + 4."""
    if depth < 10 or (depth - 4) % 6:
        raise InputError(f"a wide ResNet needs depth = 6 n + 4 >= 10, got depth {depth}")
    blocks, channels = ((depth - 4) // 6,) * 3, (16 * width, 32 * width, 64 * width)
    return preact_resnet(input_shape, classes, blocks=blocks, channels=channels, stem_channels=16)


def resnet_wong(input_shape: Shape, classes: int, *, blocks: Count = 1, width: Count = 1) -> nn.Sequential:
    """Residual network without batch norm for certified training; the 4,214,850 parameters called WRN.

    Args:
        input_shape: (C, H, W); H and W divisible by 4.
        blocks: per stage; the first stage has one more.
        width: factor of the channels 16, 32, 64.
    """
    images, height, image_width = need_image(input_shape)
    if height % 4 or image_width % 4:
        raise InputError(f"resnet-wong needs an image height and width divisible by 4, got {tuple(input_shape)}")
    modules: list[nn.Module] = [nn.Conv2d(images, 16, 3, 1, 1), nn.ReLU()]
    inputs = 16
    for stage in range(3):
        for index in range(blocks + (stage == 0)):
            outputs = 16 * 2**stage * width
            modules.append(_NoBatchNorm(inputs, outputs, 2 if stage > 0 and index == 0 else 1))
            inputs = outputs
    features = inputs * (height // 4) * (image_width // 4)
    head = [nn.Flatten(), nn.Linear(features, 1000), nn.ReLU(), nn.Linear(1000, classes)]
    return nn.Sequential(*modules, *head)


_HE = "He et al., Deep residual learning for image recognition, 2016"
_PREACT = "He et al., Identity mappings in deep residual networks, 2016"
_WRN = "Zagoruyko and Komodakis, Wide residual networks, 2016"
_WONG = "Wong et al., Scaling provable adversarial defenses, 2018"
_SUBNET = "Liu et al., Robust binary models by pruning randomly-initialized networks, 2022"
_CIFAR = (3, 32, 32)
_RN34 = (3, 4, 6, 3)

add("resnet18", resnet, "ResNet-18; 3x3 stem, or stem='imagenet'", _HE, input_shape=_CIFAR)
add("resnet34", resnet, "ResNet-34; 3x3 stem, or stem='imagenet'", _HE, input_shape=_CIFAR, blocks=_RN34)
add(
    *("resnet50", resnet, "ResNet-50 for ImageNet", _HE),
    input_shape=(3, 224, 224),
    classes=1000,
    blocks=_RN34,
    bottleneck=True,
    stem="imagenet",
)
add(
    *("rn34", resnet, "ResNet-34 for random weights: no learnt scale or shift, no bias", _SUBNET),
    input_shape=_CIFAR,
    blocks=_RN34,
    affine=False,
    head_bias=False,
)
for _gamma, _channels in (("0.1", (23, 25, 27, 29)), ("1.0", (6, 13, 26, 51))):
    add(
        *(f"small-rn34-{_gamma}", resnet, f"thin ResNet-34, dense twin of an rn34 pruned with gamma {_gamma}", _SUBNET),
        input_shape=_CIFAR,
        blocks=_RN34,
        channels=_channels,
        head_bias=False,
    )
add("preact-resnet18", preact_resnet, "pre-activation ResNet-18", _PREACT, input_shape=_CIFAR)
add("wrn", wide_resnet, "wide ResNet; choose depth and width", _WRN, input_shape=_CIFAR)
add("wrn-28-10", wide_resnet, "wide ResNet, depth 28, width 10", _WRN, input_shape=_CIFAR)
add("wrn-34-10", wide_resnet, "wide ResNet, depth 34, width 10", _WRN, input_shape=_CIFAR, depth=34)
add("resnet-wong", resnet_wong, "residual network without batch norm", _WONG, input_shape=_CIFAR)
