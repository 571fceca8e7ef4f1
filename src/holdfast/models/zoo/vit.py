"""Vision transformers: patches, or features of a convolutional stem, as tokens."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.models.catalog import Shape
from holdfast.models.catalog import add_architecture as add
from holdfast.models.zoo.plain import need_image
from holdfast.utils.options import Count

Stem = Literal["patch", "conv", "resnet50"]
Pool = Literal["token", "mean"]
Positions = Literal["learned", "sincos"]


class Attention(nn.Module):
    """Multi-head self-attention, (B, N, D) -> (B, N, D)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, heads, N, D / heads)."""
        heads: Tensor = x.unflatten(2, (self.heads, -1))
        return heads.transpose(1, 2)


class TransformerBlock(nn.Module):
    """Attention, then a dense network of two layers, each behind a layer norm and around a skip connection."""

    def __init__(self, dim: int, heads: int, mlp_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class VisionTransformer(nn.Module):
    """Stem to a grid of features, tokens with positions, transformer blocks, norm, dense head. See `vit`."""

    positions: Tensor

    def __init__(
        self, stem: nn.Module, grid: tuple[int, int], blocks: nn.Sequential, dim: int, classes: int, pool: Pool
    ) -> None:
        super().__init__()
        self.stem = stem
        self.token = nn.Parameter(torch.zeros(1, 1, dim)) if pool == "token" else None
        self.blocks = blocks
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)
        self.grid, self.tokens = grid, grid[0] * grid[1] + (pool == "token")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        if self.token is not None:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = self.norm(self.blocks(x + self.positions))
        out: Tensor = self.head(x.mean(1) if self.token is None else x[:, 0])
        return out


def vit(
    input_shape: Shape,
    classes: int,
    *,
    dim: Count = 384,
    depth: Count = 12,
    heads: Count = 6,
    mlp_dim: Count = 1536,
    patch: Count = 4,
    stride: Count | None = None,
    stem: Stem = "patch",
    pool: Pool = "token",
    positions: Positions = "learned",
) -> nn.Module:
    """Vision transformer with pre-norm blocks.

    Args:
        dim: width of a token; a multiple of `heads`.
        depth: number of blocks.
        heads: heads of each attention.
        mlp_dim: width of the hidden layer in each block.
        patch: side of the image square that a token sees first; 16 is usual at 224 pixels, 4 at 32.
        stride: between patches; less than `patch` makes them overlap. Default: `patch`.
        stem: "patch" is one convolution; "conv" stacks strided 3x3 ones (Xiao et al., 2021); "resnet50" is the
            hybrid: the first three stages of a ResNet-50, the third with the blocks of the fourth added, with group
            norm and standardised weights. These two reduce the image by `patch` and take no `stride`.
        pool: what the head sees: a class "token", or the "mean" of all tokens.
        positions: "learned", or fixed 2-D sines and cosines ("sincos", which needs a `dim` divisible by 4).
    """
    channels, height, width = need_image(input_shape)
    if dim % heads or (positions == "sincos" and dim % 4):
        raise InputError(f"dim must be a multiple of heads (and of 4 for sincos), got dim {dim}, heads {heads}")
    if stride is not None and stem != "patch":
        raise InputError(f"stride belongs to stem='patch'; stem='{stem}' reduces the image by patch")
    if stem == "patch":
        step = stride or patch
        front: nn.Module = nn.Conv2d(channels, dim, patch, step)
        grid = ((height - patch) // step + 1, (width - patch) // step + 1)
        fits = min(height, width) >= patch and (height - patch) % step == 0 and (width - patch) % step == 0
    else:
        front = _conv_stem(channels, dim, patch) if stem == "conv" else _resnet50_stem(channels, dim, patch)
        grid = (height // patch, width // patch)
        fits = height % patch == 0 and width % patch == 0
    if not fits:
        raise InputError(
            f"patches of {patch} do not tile an image of {height} x {width}; choose patch= (and stride=) that do"
        )
    blocks = nn.Sequential(*(TransformerBlock(dim, heads, mlp_dim) for _ in range(depth)))
    model = VisionTransformer(front, grid, blocks, dim, classes, pool)
    if positions == "learned":
        model.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, model.tokens, dim), std=0.02))
    else:
        model.register_buffer("positions", _sincos(grid, dim, model.tokens))
    return model


def _sincos(grid: tuple[int, int], dim: int, tokens: int) -> Tensor:
    """Sines and cosines of row and column at dim / 4 frequencies from 1 to 1e-4; zero for a class token."""
    frequency = 10_000.0 ** -(torch.arange(dim // 4) / max(dim // 4 - 1, 1))
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    angles = [place.flatten()[:, None] * frequency for place in (columns, rows)]
    table = torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], 1)
    return F.pad(table, (0, 0, tokens - table.shape[0], 0))[None]


def _conv_stem(channels: int, dim: int, patch: int) -> nn.Sequential:
    halvings = round(math.log2(patch)) if patch > 1 else 0
    if halvings < 1 or 2**halvings != patch:
        raise InputError(f"stem='conv' halves the image at each layer; patch must be 2, 4, 8, ..., got {patch}")
    modules: list[nn.Module] = []
    for index in range(halvings):
        outputs = max(dim >> (halvings - index), 1)
        modules += [nn.Conv2d(channels, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        channels = outputs
    return nn.Sequential(*modules, nn.Conv2d(channels, dim, 1))


class _StandardizedConv(nn.Conv2d):
    """Convolution whose kernels are shifted and scaled to mean 0 and variance 1 (Qiao et al., 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        variance = self.weight.var((1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) * torch.rsqrt(variance + 1e-10)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class _GroupNormBottleneck(nn.Module):
    """Bottleneck block with group norm; the shortcut is a convolution where the shapes differ."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(_StandardizedConv(inputs, width, 1, bias=False), nn.GroupNorm(32, width), nn.ReLU()),
            *(_StandardizedConv(width, width, 3, stride, 1, bias=False), nn.GroupNorm(32, width), nn.ReLU()),
            *(_StandardizedConv(width, 4 * width, 1, bias=False), nn.GroupNorm(32, 4 * width)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            projection = _StandardizedConv(inputs, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.GroupNorm(4 * width, 4 * width))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def _resnet50_stem(channels: int, dim: int, patch: int) -> nn.Sequential:
    """At patch 16 the root of the paper (7x7 and pooling); at patch 4, for small images, a plain 3x3 one."""
    if patch == 16:
        root: list[nn.Module] = [_StandardizedConv(channels, 64, 7, 2, 3, bias=False)]
        pool: list[nn.Module] = [nn.MaxPool2d(3, 2, 1)]
    elif patch == 4:
        root, pool = [_StandardizedConv(channels, 64, 3, 1, 1, bias=False)], []
    else:
        raise InputError(f"stem='resnet50' reduces the image by patch=16 or, for small images, 4; got {patch}")
    modules = [*root, nn.GroupNorm(32, 64), nn.ReLU(), *pool]
    inputs = 64
    for stage, (times, width) in enumerate(((3, 64), (4, 128), (9, 256))):
        for index in range(times):
            modules.append(_GroupNormBottleneck(inputs, width, 2 if stage > 0 and index == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*modules, nn.Conv2d(inputs, dim, 1))


_VIT = "Dosovitskiy et al., An image is worth 16x16 words, 2021"
_DEIT = "Touvron et al., Training data-efficient image transformers, 2021"
_PLAIN = "Beyer, Zhai and Kolesnikov, Better plain ViT baselines for ImageNet-1k, 2022"
_CIFAR = (3, 32, 32)

for _name, _dim, _depth, _heads, _reference in (
    ("vit-ti", 192, 12, 3, _DEIT),
    ("vit-s", 384, 12, 6, _DEIT),
    ("vit-b", 768, 12, 12, _VIT),
    ("vit-l", 1024, 24, 16, _VIT),
):
    add(
        *(_name, vit, f"vision transformer, width {_dim}, {_depth} blocks; patch 4, or choose", _reference),
        input_shape=_CIFAR,
        dim=_dim,
        depth=_depth,
        heads=_heads,
        mlp_dim=4 * _dim,
    )
add(
    *("vit-s16", vit, "ViT-S/16 for ImageNet with fixed positions and mean pooling", _PLAIN),
    input_shape=(3, 224, 224),
    classes=1000,
    patch=16,
    pool="mean",
    positions="sincos",
)
for _name, _dim, _depth, _heads, _stem in (
    ("vit-b16", 768, 12, 12, "patch"),
    ("vit-l16", 1024, 24, 16, "patch"),
    ("hybrid-l16", 1024, 24, 16, "resnet50"),
):
    add(
        *(_name, vit, f"{_name} for ImageNet" + (", on ResNet-50 features" if _stem != "patch" else ""), _VIT),
        input_shape=(3, 224, 224),
        classes=1000,
        dim=_dim,
        depth=_depth,
        heads=_heads,
        mlp_dim=4 * _dim,
        patch=16,
        stem=_stem,
    )
