"""What a learned mask looks like: kept weights per channel, empty channels, and whether layers agree on these.

A random mask of the same density leaves practically no channel empty. Learned masks do, and the channels that one layer
leaves empty at its output tend to be channels that the next layer ignores (Liu et al., "Robust binary models by pruning
randomly-initialized networks", 2022).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from holdfast.errors import InputError
from holdfast.models.masked import patterns, pruned
from holdfast.utils.options import Count
from holdfast.utils.panels import line_keys, panel_at, panel_axes, panels_figure
from holdfast.utils.show import Shown, Svg
from holdfast.utils.svg import STYLES, inner_rounds

_BETWEEN = (nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity, nn.MaxPool2d, nn.AvgPool2d, _BatchNorm)
"""Layers that keep every channel where it is."""
_BETWEEN_CALLS = {"relu", "relu_", "leaky_relu", "tanh", "sigmoid", "dropout", "max_pool2d", "avg_pool2d"}
"""The same as functions of torch and as methods of a tensor, by name."""


@dataclass(frozen=True, eq=False, repr=False)
class LayerPattern(Shown):
    """The mask of one layer.

    Attributes:
        name: of the layer.
        mask: (r_out, r_in, ...) bool, True where a weight is kept.
        outputs, inputs: (r_out,) and (r_in,) int64, kept weights of each output and input channel.
    """

    name: str
    mask: Tensor
    outputs: Tensor
    inputs: Tensor

    @property
    def density(self) -> float:
        """Share of the weights that are kept."""
        return float(self.mask.double().mean())

    @property
    def empty_outputs(self) -> float:
        """Share of the output channels without any weight."""
        return float((self.outputs == 0).double().mean())

    @property
    def empty_inputs(self) -> float:
        """Share of the input channels that no weight reads."""
        return float((self.inputs == 0).double().mean())

    @property
    def random_outputs(self) -> float:
        """Expected share of empty output channels of a random mask with as many weights."""
        return empty_share(self.mask.numel(), int(self.mask.sum()), len(self.outputs))

    @property
    def random_inputs(self) -> float:
        """As `random_outputs`, of input channels."""
        return empty_share(self.mask.numel(), int(self.mask.sum()), len(self.inputs))


def layer_patterns(model: nn.Module) -> dict[str, LayerPattern]:
    """The pattern of each dense and convolution layer, by name; zeros count as pruned where there is no mask.

    >>> from holdfast.models import make_model
    >>> layer_patterns(make_model("linear"))["1"].density
    1.0
    """
    return {name: pattern_of(name, mask) for name, mask in patterns(model).items()}


def pattern_of(name: str, mask: Tensor) -> LayerPattern:
    """The pattern of a mask (r_out, r_in, ...)."""
    outputs = mask.flatten(1).sum(1)
    inputs = mask.transpose(0, 1).flatten(1).sum(1)
    return LayerPattern(name, mask, outputs, inputs)


def empty_share(weights: int, kept: int, channels: int) -> float:
    """Expected share of empty channels if `kept` of the `weights` are chosen at random: C(n - c, m) / C(n, m).

    >>> round(empty_share(4, 1, 2), 9)
    0.5
    """
    rest = weights - weights // channels
    if kept > rest:
        return 0.0
    logs = [math.lgamma(rest + 1), -math.lgamma(rest - kept + 1), -math.lgamma(weights + 1)]
    return math.exp(sum(logs) + math.lgamma(weights - kept + 1))


def alignment(first: LayerPattern, second: LayerPattern) -> float:
    """Jaccard index of the empty outputs of one layer and the inputs that the next one ignores; 1 if both have none."""
    if len(first.outputs) != len(second.inputs):
        raise InputError(
            f"layer '{first.name}' has {len(first.outputs)} outputs, layer '{second.name}' {len(second.inputs)} "
            "inputs; one must feed the other"
        )
    silent, unread = first.outputs == 0, second.inputs == 0
    either = int((silent | unread).sum())
    return int((silent & unread).sum()) / either if either else 1.0


def consecutive(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of layers of which the second sees the outputs of the first; none if the model cannot be traced."""
    try:
        nodes = list(fx.symbolic_trace(pruned(model)).graph.nodes)
    except Exception:  # control flow that depends on values
        return []
    modules = dict(pruned(model).named_modules())

    def layer(node: fx.Node) -> nn.Module | None:
        return modules.get(str(node.target)) if node.op == "call_module" else None

    pairs = []
    for node in nodes:
        if not _reads_channels(layer(node)):
            continue
        before = node.all_input_nodes[0]
        while _keeps_channels(before, layer(before)):
            before = before.all_input_nodes[0]
        if type(layer(before)) is type(layer(node)) and _reads_channels(layer(before)):
            pairs.append((str(before.target), str(node.target)))
    return pairs


def _reads_channels(layer: nn.Module | None) -> bool:
    """Whether each output of the layer may see each input channel: no groups, and weights as (r_out, r_in, ...)."""
    return isinstance(layer, nn.Linear) or (isinstance(layer, _ConvNd) and layer.groups == 1 and not layer.transposed)


def _keeps_channels(node: fx.Node, layer: nn.Module | None) -> bool:
    called = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    between = called in _BETWEEN_CALLS if node.op in ("call_function", "call_method") else isinstance(layer, _BETWEEN)
    return between and len(node.all_input_nodes) == 1


def random_counts(pattern: LayerPattern, *, draws: Count = 500, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sorted numbers of kept weights per output and input channel, averaged over random masks of the same density."""
    generator = np.random.default_rng(seed)
    kept, weights = int(pattern.mask.sum()), pattern.mask.numel()

    def drawn(channels: int) -> Tensor:
        sizes = [weights // channels] * channels
        counts = generator.multivariate_hypergeometric(sizes, kept, size=draws, method="marginals")
        return torch.from_numpy(np.sort(counts, 1)[:, ::-1].mean(0).copy())

    return drawn(len(pattern.outputs)), drawn(len(pattern.inputs))


def mask_picture(mask: Tensor) -> Tensor:
    """A mask (r_out, r_in, h, w) as an image (1, h r_out, w r_in): kernels side by side, 1 where a weight is kept."""
    if mask.ndim == 2:
        return mask[None].float()
    if mask.ndim != 4:
        raise InputError(
            f"a picture needs the mask of a dense layer or of a 2-D convolution, got shape {tuple(mask.shape)}"
        )
    r_out, r_in, height, width = mask.shape
    return mask.permute(0, 2, 1, 3).reshape(1, r_out * height, r_in * width).float()


def channel_plot(pattern: LayerPattern, *, draws: Count = 500, seed: int = 0) -> Svg:
    """Kept weights of each channel, sorted, beside the mean of random masks of the same density."""
    parts = []
    learned = (pattern.outputs, pattern.inputs)
    random = random_counts(pattern, draws=draws, seed=seed)
    for column, (title, own, chance) in enumerate(
        zip(("output channels", "input channels"), learned, random, strict=True)
    ):
        lines = {"learned": own.sort(descending=True).values.tolist(), "random": chance.tolist()}
        xs = list(range(1, len(own) + 1))
        panel = panel_at(column, 0, xs, [0.0, *(value for line in lines.values() for value in line)])
        parts += panel_axes(panel, title, "channel, most weights first", inner_rounds(1, len(xs)))
        parts += [panel.line(xs, line, style, n) for (n, line), style in zip(lines.items(), STYLES, strict=False)]
    title = f"kept weights per channel of layer '{pattern.name}'"
    empty = f"{pattern.empty_outputs:.0%} of the outputs and {pattern.empty_inputs:.0%} of the inputs are empty"
    return Svg(panels_figure(title, 2, 1, parts, line_keys(["learned", "random"])), f"{title}; {empty}")
