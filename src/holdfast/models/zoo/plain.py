"""Networks without skip connections: multi-layer perceptrons and stacks of convolutions, then dense layers."""

import math
from typing import Literal

from torch import nn

from holdfast.errors import InputError
from holdfast.models.catalog import Shape
from holdfast.models.catalog import add_architecture as add
from holdfast.models.layers import make_activation
from holdfast.utils.options import Count, Positive

Conv = tuple[int, ...]
"""(channels, kernel size, stride, padding); an activation follows."""
Layer = Conv | Literal["max", "avg"]
"""A convolution, or max or average pooling with a 2x2 window and stride 2."""


def mlp(
    input_shape: Shape, classes: int, *, hidden: tuple[Count, ...] = (256, 256), activation: str = "relu"
) -> nn.Sequential:
    """Flatten, dense layers of `hidden` widths with an activation after each, dense layer to the logits."""
    return nn.Sequential(nn.Flatten(), *_dense(math.prod(input_shape), hidden, classes, activation))


def cnn(
    input_shape: Shape,
    classes: int,
    *,
    layers: tuple[Layer, ...] = ((16, 4, 2, 1), (32, 4, 2, 1)),
    hidden: tuple[Count, ...] = (100,),
    activation: str = "relu",
    batch_norm: bool = False,
) -> nn.Sequential:
    """Convolutions and pools, flatten, dense layers; an activation after every layer but the last.

    Args:
        layers: convolutions (channels, kernel size, stride, padding), "max" and "avg" for 2x2 pooling.
        hidden: widths of the dense layers before the last.
        activation: see `make_activation`.
        batch_norm: between each convolution and its activation.
    """
    channels, height, width = need_image(input_shape)
    modules: list[nn.Module] = []
    for index, layer in enumerate(layers):
        if isinstance(layer, str):
            modules.append(nn.MaxPool2d(2) if layer == "max" else nn.AvgPool2d(2))
            height, width = height // 2, width // 2
        else:
            out, kernel, stride, padding = check_conv(layer)
            modules.append(nn.Conv2d(channels, out, kernel, stride, padding))
            if batch_norm:
                modules.append(nn.BatchNorm2d(out))
            modules.append(make_activation(activation))
            channels = out
            height, width = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
        need_room(input_shape, height, width, f"layer {index} ({layer})")
    return nn.Sequential(*modules, nn.Flatten(), *_dense(channels * height * width, hidden, classes, activation))


def lenet(input_shape: Shape, classes: int, *, width: Positive = 1.0) -> nn.Sequential:
    """LeNet-5 with ReLU and max pooling, every layer `width` times as wide as the original."""
    widths = tuple(int(size * width) for size in (6, 16, 120, 84))
    first, second = ((channels, 5, 1, 0) for channels in widths[:2])
    return cnn(input_shape, classes, layers=(first, "max", second, "max"), hidden=widths[2:])


def padded_lenet(input_shape: Shape, classes: int, *, width: Count = 16) -> nn.Sequential:
    """Two padded 5x5 convolutions with 2w and 4w channels, a dense layer of 64w."""
    layers: tuple[Layer, ...] = ((2 * width, 5, 1, 2), "max", (4 * width, 5, 1, 2), "max")
    return cnn(input_shape, classes, layers=layers, hidden=(64 * width,))


def vgg16(input_shape: Shape, classes: int, *, width: Count = 16) -> nn.Sequential:
    """The thirteen convolutions of VGG-16 with batch norm and one dense layer; 4w channels at first, 32w at last."""
    layers: list[Layer] = []
    for times, channels in ((2, 4 * width), (2, 8 * width), (3, 16 * width), (3, 32 * width), (3, 32 * width)):
        layers += [(channels, 3, 1, 1)] * times + ["max"]
    return cnn(input_shape, classes, layers=tuple(layers), hidden=(), batch_norm=True)


def need_image(input_shape: Shape) -> tuple[int, int, int]:
    """(C, H, W), or an error for a flat shape."""
    if len(input_shape) != 3:
        raise InputError(f"this architecture needs images; input_shape must be (C, H, W), got {tuple(input_shape)}")
    return input_shape[0], input_shape[1], input_shape[2]


def need_room(input_shape: Shape, height: int, width: int, after: str) -> None:
    """Refuse an image of which nothing is left."""
    if min(height, width) < 1:
        raise InputError(
            f"input_shape {tuple(input_shape)} is too small: nothing is left of the image after {after}; give a larger "
            "image or fewer layers"
        )


def check_conv(layer: Conv) -> tuple[int, int, int, int]:
    """Channels, kernel size, stride and padding, or an error."""
    if len(layer) != 4 or min(layer[:3]) < 1 or layer[3] < 0:
        raise InputError(f"a layer must be (channels, kernel size, stride, padding), got {layer!r}")
    return layer[0], layer[1], layer[2], layer[3]


def _dense(features: int, hidden: tuple[int, ...], classes: int, activation: str) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for width in hidden:
        modules += [nn.Linear(features, width), make_activation(activation)]
        features = width
    return [*modules, nn.Linear(features, classes)]


_WONG = (
    "Wong and Kolter, Provable defenses against adversarial examples via the convex outer adversarial polytope, 2018"
)
_GOWAL = "Gowal et al., On the effectiveness of interval bound propagation for training verifiably robust models, 2018"
_BCP = "Lee, Lee and Park, Lipschitz-certifiable training with a tight outer bound, 2020"
_LEE = "Lee et al., Towards better understanding of training certifiably robust models against adversaries, 2021"
_CHIANG = "Chiang et al., Certified defenses for adversarial patches, 2020"
_GRADDIV = "Lee et al., GradDiv: adversarial robustness of randomized neural networks, 2022"
_LENET = "LeCun et al., Gradient-based learning applied to document recognition, 1998"
_LIU = "Liu et al., On the loss landscape of adversarial training, 2020"
_VGG = "Simonyan and Zisserman, Very deep convolutional networks for large-scale image recognition, 2015"

_SMALL = ((16, 4, 2, 1), (32, 4, 1, 1))
_MEDIUM = ((32, 3, 1, 1), (32, 4, 2, 1), (64, 3, 1, 1), (64, 4, 2, 1))
_LARGE = ((64, 3, 1, 1), (64, 3, 1, 1), (128, 3, 2, 1), (128, 3, 1, 1), (128, 3, 1, 1))
_NARROW_2 = ((4, 4, 2, 1), (8, 4, 2, 1))
_NARROW_4 = ((4, 3, 1, 1), (4, 4, 2, 1), (8, 3, 1, 1), (8, 4, 2, 1))
_SIX = ((32, 3, 1, 1), (32, 3, 1, 1), (32, 4, 2, 1), (64, 3, 1, 1), (64, 3, 1, 1), (64, 4, 2, 1))
# The three strided convolutions have no padding: only so does the network have its published 4,342,984 parameters.
_EIGHT_1 = ((64, 3, 1, 1), (64, 3, 1, 1), (64, 4, 2, 0), (128, 3, 1, 1), (128, 3, 1, 1), (128, 4, 2, 0))
_EIGHT = (*_EIGHT_1, (256, 3, 1, 1), (256, 4, 2, 0))
_LEAKY = ((32, 3, 1, 1), (64, 3, 1, 1), "max", (128, 3, 1, 1), "max")
_STL_1 = ((32, 3, 1, 1), "max", (64, 3, 1, 1), "max", (128, 3, 1, 1), "max", (256, 3, 1, 1), "max")
_STL = (*_STL_1, (256, 3, 1, 0), (512, 3, 1, 0), "avg")
_CIFAR = (3, 32, 32)

add("linear", mlp, "one dense layer", "logistic regression", hidden=())
add("mlp", mlp, "multi-layer perceptron; choose hidden and activation", "any textbook")
add("mlp-255", mlp, "one hidden layer of 255", _CHIANG, hidden=(255,))
add("fc1", mlp, "one hidden layer of 1024; also with sigmoid or tanh", _WONG, hidden=(1024,))
add("cnn", cnn, "convolutions and pools, then dense layers; choose all of them", "any textbook")
add("small", cnn, "2 convolutions, 2 dense", _GOWAL, layers=_SMALL)
add("small-star", cnn, "2 strided convolutions, 2 dense; the default for MNIST", _WONG)
add("medium", cnn, "4 convolutions, 3 dense", _GOWAL, layers=_MEDIUM, hidden=(512, 512))
add("large", cnn, "5 wide convolutions, 2 dense", _GOWAL, layers=_LARGE, hidden=(512,))
add("large-star", cnn, "4 wide convolutions, 2 dense", _LEE, layers=_LARGE[1:], hidden=(512,))
add("2c2f", cnn, "small-star, by its layer counts", _WONG)
add("4c3f", cnn, "medium, by its layer counts", _BCP, layers=_MEDIUM, hidden=(512, 512))
add("6c2f", cnn, "6 convolutions, 2 dense", _BCP, layers=_SIX, hidden=(512,), input_shape=_CIFAR)
add(
    "8c2f",
    cnn,
    "8 convolutions, 2 dense, for Tiny ImageNet",
    _BCP,
    layers=_EIGHT,
    hidden=(256,),
    input_shape=(3, 64, 64),
    classes=200,
)
add("cnn-2layer", cnn, "small-star with few channels", _CHIANG, layers=_NARROW_2, hidden=(256,))
add("cnn-4layer", cnn, "medium with few channels", _CHIANG, layers=_NARROW_4, hidden=(256, 256))
add("cnn-5layer-wide", cnn, "large, for CIFAR-10", _CHIANG, layers=_LARGE, hidden=(512,), input_shape=_CIFAR)
add(
    "graddiv-mnist",
    cnn,
    "3 convolutions with leaky ReLU and max pooling",
    _GRADDIV,
    layers=_LEAKY,
    hidden=(1024,),
    activation="leaky_relu",
)
add(
    "graddiv-stl",
    cnn,
    "6 convolutions with batch norm, for STL-10",
    _GRADDIV,
    layers=_STL,
    hidden=(),
    batch_norm=True,
    input_shape=(3, 96, 96),
)
add("lenet", lenet, "LeNet-5 with ReLU and max pooling; width is a factor", _LENET)
add("lenet-padded", padded_lenet, "two padded 5x5 convolutions of 2w and 4w channels", _LIU)
add("vgg16", vgg16, "VGG-16 with batch norm and one dense layer; 4w to 32w channels", _VGG, input_shape=_CIFAR)
