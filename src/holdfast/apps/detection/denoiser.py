"""DnCNN: a small network that removes noise, to stand in front of a detector that was not trained on noise.

Zhang et al., "Beyond a Gaussian denoiser: residual learning of deep CNN for image denoising", 2017; in front of a
smoothed model: Salman et al., "Denoised smoothing: a provable defense for pretrained classifiers", 2020. It becomes a
part of the function that is smoothed, so that it changes what can be proved, but never whether it holds.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from holdfast.certificates.smoothing.percentile import check_sigma
from holdfast.checks import check_inputs
from holdfast.errors import InputError
from holdfast.random import Noise


class DnCNN(nn.Module):
    """x - net(x), with `depth` convolutions 3x3 of `width` channels; the identity before training.

    The published size is depth 17 and width 64; a small one does for grey digits.
    """

    def __init__(self, channels: int = 1, *, depth: int = 17, width: int = 64, seed: int = 0) -> None:
        super().__init__()
        if depth < 2 or width < 1:
            raise InputError(f"a denoiser needs depth >= 2 and width >= 1, got {depth} and {width}")
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth - 2):
            norm = nn.BatchNorm2d(width, eps=1e-4, momentum=0.05)  # keeps 95 % of its averages, as published
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), norm, nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Conv2d(width, channels, 3, padding=1))
        generator = torch.Generator().manual_seed(seed)
        for module in self.net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.orthogonal_(module.weight, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        last = self.net[-1]
        assert isinstance(last, nn.Conv2d)
        nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Images without their noise, shape of x."""
        return x - self.net(x)  # type: ignore[no-any-return]


def train_denoiser(
    images: Tensor,
    sigma: float,
    *,
    model: DnCNN | None = None,
    epochs: int = 5,
    batch: int = 32,
    lr: float = 1e-3,
    seed: int = 0,
) -> DnCNN:
    """Train a denoiser for noise of standard deviation `sigma`, by the mean squared error to the clean image.

    Args:
        images: clean images in [0, 1], shape (N, C, H, W).
        model: trained in place, and returned in eval mode; a DnCNN of depth 5 and width 16 if none is given.
    """
    check_sigma(sigma)
    check_inputs(images)
    model = DnCNN(images.shape[1], depth=5, width=16, seed=seed) if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    noise = Noise.for_batch(seed, len(images), images.device)
    model.train()
    for epoch in range(epochs):
        this = noise.fork(epoch)
        for chosen in this.fork(0).bits(()).argsort().split(batch):
            clean = images[chosen]
            noisy = clean + sigma * this.fork(1)[chosen].normal(clean.shape[1:], clean.dtype)
            optimizer.zero_grad()
            mse_loss(model(noisy), clean).backward()
            optimizer.step()
    optimizer.zero_grad()
    return model.eval()
