"""A small U-Net: from an image to a map of the same size with several channels."""

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from holdfast.models.zoo.resnets import basic_block


class UNet(nn.Module):
    """Residual blocks down to 1/16 of the size, and a decoder that looks at every level on the way up.

    The network that proposes places for patches in Chiang et al., "Certified defenses for adversarial patches", 2020.

    Args:
        inputs: channels of the image.
        outputs: channels of the map.
        width: channels of the first level; the third one has four times as many.
    """

    def __init__(self, inputs: int, outputs: int, *, width: int = 10) -> None:
        super().__init__()
        w = width
        self.full = nn.Sequential(_conv(inputs, w, 3), _conv(w, w, 3))
        self.stem = nn.Sequential(nn.Conv2d(inputs, w, 7, 2, 3, bias=False), nn.BatchNorm2d(w), nn.ReLU())
        self.levels = nn.ModuleList(
            [nn.Sequential(nn.MaxPool2d(3, 2, 1), _blocks(w, w, 1)), _blocks(w, 2 * w, 2), _blocks(2 * w, 4 * w, 2)]
        )
        self.laterals = nn.ModuleList([_conv(c, c, 1) for c in (w, w, 2 * w, 4 * w)])
        ups = ((6 * w, 4 * w), (5 * w, 2 * w), (3 * w, w), (2 * w, w))
        self.ups = nn.ModuleList([_conv(a, b, 3) for a, b in ups])
        self.head = nn.Conv2d(w, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, outputs, H, W)."""
        maps = [self.stem(x)]
        for level in self.levels:
            maps.append(level(maps[-1]))
        seen = [self.full(x), *(lateral(m) for lateral, m in zip(self.laterals, maps, strict=True))]
        up = seen.pop()
        for merge in self.ups:
            wider = seen.pop()
            up = interpolate(up, size=wider.shape[2:], mode="bilinear", align_corners=False)
            up = merge(torch.cat([up, wider], 1))
        out: Tensor = self.head(up)
        return out


def _conv(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), nn.ReLU())


def _blocks(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(basic_block(inputs, outputs, stride, True), basic_block(outputs, outputs, 1, True))
