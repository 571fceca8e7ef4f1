"""Two defences against patches that do not hold: local gradient smoothing and digital watermarking.

They are here to be broken. Each is a module from images (B, C, H, W) to images; the defended model is
`nn.Sequential(defence, model)`. An attack that does not know the defence makes it look strong; one that differentiates
through it (smoothing) or past it (watermarking, with `StraightThrough`) shows that it is not. Chiang et al., "Certified
defenses for adversarial patches", 2020.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, max_pool2d, pad

from holdfast.attacks.core.losses import cross_entropy
from holdfast.errors import InputError


class LocalGradientSmoothing(nn.Module):
    """Darkens the regions of high frequency: x (1 - clip(strength * g, 0, 1)).

    g is the size of the image gradient, normalised to [0, 1] for each image, and zero outside the windows whose mean
    exceeds the threshold. Differentiable, with the choice of the windows as a constant.

    Naseer, Khan and Porikli, "Local gradients smoothing: defense against localized adversarial attacks", 2019.

    Args:
        window: side of the square windows in pixels; at most the image's.
        overlap: pixels that neighbouring windows share.
        threshold: on the mean of the normalised gradient over a window.
        strength: lambda of the paper. The defaults are the paper's for images of 224 to 299 pixels.
    """

    def __init__(self, *, window: int = 15, overlap: int = 5, threshold: float = 0.1, strength: float = 2.3) -> None:
        super().__init__()
        if not 0 <= overlap < window:
            raise InputError(f"the overlap must be at least 0 and less than the window {window}, got {overlap}")
        self.window, self.overlap, self.threshold, self.strength = window, overlap, threshold, strength

    def forward(self, x: Tensor) -> Tensor:
        """The smoothed images, (B, C, H, W) in [0, 1] for x in [0, 1]."""
        g = normalised_gradient(x)
        g = g * self._noisy(g.detach())
        return x * (1 - (self.strength * g).clamp(0, 1))

    def _noisy(self, g: Tensor) -> Tensor:
        """1 under the windows whose mean exceeds the threshold, (B, 1, H, W)."""
        if self.window > min(g.shape[-2:]):
            raise InputError(f"the window {self.window} is larger than the image of {g.shape[-2]}x{g.shape[-1]} pixels")
        mean = avg_pool2d(g, self.window, stride=1)
        chosen = torch.zeros_like(mean)
        rows, columns = (self._starts(size, g.device) for size in mean.shape[-2:])
        chosen[..., rows[:, None], columns] = 1.0
        chosen = chosen * (mean > self.threshold)
        return max_pool2d(pad(chosen, (self.window - 1,) * 4), self.window, stride=1)

    def _starts(self, places: int, device: torch.device) -> Tensor:
        """Where the windows start; the last one ends at the image's edge."""
        starts = torch.arange(0, places, self.window - self.overlap, device=device)
        return torch.cat([starts, starts.new_tensor([places - 1])])


def normalised_gradient(x: Tensor) -> Tensor:
    """Size of the forward differences, averaged over the channels, from 0 to 1 in each image: (B, 1, H, W).

    Zero for a constant image. The gradient of the norm is zero where the image is flat, not infinite.
    """
    down = pad(x.diff(dim=2), (0, 0, 0, 1))
    right = pad(x.diff(dim=3), (0, 1))
    size: Tensor = torch.linalg.vector_norm(torch.stack([down, right]), dim=0).mean(1, keepdim=True)
    least, most = size.amin((1, 2, 3), keepdim=True), size.amax((1, 2, 3), keepdim=True)
    spread = torch.where(most > least, most - least, torch.ones_like(most))
    return (size - least) / spread


class DigitalWatermarking(nn.Module):
    """Masks the one dense region where the loss is most sensitive to the pixels.

    The saliency is the gradient of the loss of the predicted class. The pixels above its quantile are eroded (a pixel
    stays if enough of its neighbourhood is salient), and what is connected to the densest point is dilated and filled.

    Hayes, "On visible adversarial perturbations and digital watermarking", 2018; with the plain gradient in place of
    guided backpropagation, which is defined for ReLU networks only.

    Args:
        model: the classifier whose saliency is used.
        quantile: share of the pixels of an image that are not salient.
        size: side of the neighbourhood in pixels, odd.
        density: share of a neighbourhood that must be salient; 1 is plain erosion.
        fill: value of the masked pixels.
    """

    def __init__(
        self, model: nn.Module, *, quantile: float = 0.9, size: int = 3, density: float = 0.6, fill: float = 0.0
    ) -> None:
        super().__init__()
        if not (0 < quantile < 1 and 0 < density <= 1 and size >= 1 and size % 2 == 1):
            raise InputError(
                "quantile must lie in (0, 1), density in (0, 1] and size must be odd, "
                f"got {quantile}, {density} and {size}"
            )
        self.model, self.quantile, self.size, self.density, self.fill = model, quantile, size, density, fill

    def forward(self, x: Tensor) -> Tensor:
        """The masked images, (B, C, H, W)."""
        return x.masked_fill(self.mask(x), self.fill)

    def mask(self, x: Tensor) -> Tensor:
        """True in the region that is taken for a patch, (B, 1, H, W), bool; nowhere if there is no dense region."""
        saliency = self._saliency(x)
        level = saliency.flatten(1).quantile(self.quantile, dim=1).view(-1, 1, 1, 1)
        salient = (saliency > level).to(x.dtype)
        density = avg_pool2d(salient, self.size, stride=1, padding=self.size // 2)
        # Half a pixel of slack: a share of pixels is a sum of rounded terms.
        dense = density >= self.density - 0.5 / self.size**2
        densest = torch.zeros_like(density).flatten(1)
        densest.scatter_(1, density.flatten(1).argmax(1, keepdim=True), 1.0)
        region = _connected(densest.view_as(density), dense.to(x.dtype))
        return max_pool2d(region, self.size, stride=1, padding=self.size // 2) > 0

    def _saliency(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            logits = self.model(x)
            loss = cross_entropy(logits, logits.argmax(1).detach())
            (gradient,) = torch.autograd.grad(loss.sum(), x)
        return gradient.abs().sum(1, keepdim=True)


def _connected(seed: Tensor, allowed: Tensor) -> Tensor:
    """The part of `allowed` (B, 1, H, W) of zeros and ones that is connected to the seed, diagonals included."""
    region = seed * allowed
    while True:
        grown = max_pool2d(region, 3, stride=1, padding=1) * allowed
        if torch.equal(grown, region):
            return region
        region = grown
