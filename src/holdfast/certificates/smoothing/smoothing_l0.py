"""Randomised ablation: the network sees k of the d pixels, chosen at random, and the smoothed classifier votes.

If rho pixels change, the network sees none of them with probability C(d - rho, k) / C(d, k), and then it answers as
before. So the probability p of y falls by at most

    Delta(rho) = 1 - C(d - rho, k) / C(d, k) = 1 - product over i < rho of (d - k - i) / (d - i),

and y keeps more than one half while p - Delta(rho) > 1/2 (Levine and Feizi, "Robustness certificates for sparse
adversarial attacks by randomized ablation", 2020). It is for the smoothed classifier, with probability 1 - alpha.
"""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.bounding.core.rounding import gamma
from holdfast.certificates.smoothing.ablation import ablate, choose, pixels
from holdfast.certificates.smoothing.prove import Variant, prove
from holdfast.certificates.smoothing.votes import Draw
from holdfast.errors import InputError
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import Sparse
from holdfast.utils.intervals import SLACK
from holdfast.utils.options import Count, Whole, options_from


def fall(count: int, size: int) -> Tensor:
    """Delta(rho) for rho = 0 ... d, (d + 1,), float64, rounded up; d = `count` pixels, of which k = `size` are kept."""
    i = torch.arange(count, dtype=torch.float64)
    unseen = ((count - size - i).clamp(min=0) / (count - i)).cumprod(0)
    rounded = (1 - unseen * (1 - gamma(3 * count, torch.float64))) * (1 + SLACK)
    return torch.cat([torch.zeros(1, dtype=torch.float64), rounded.clamp(max=1.0)])


def ablation_noise(size: int, null: float) -> Draw:
    """Copies of one input in which all but `size` random pixels are ablated."""

    def draw(x: Tensor, number: int, generator: torch.Generator) -> Tensor:
        count = pixels(x[None])
        # 63 random bits for each pixel: no two are alike, so that each set of pixels comes equally often.
        key = torch.empty(number, count, dtype=torch.int64, device=x.device).random_(generator=generator)
        return ablate(x, choose(key, size, x.shape), null)

    return draw


@Certificate(
    "smoothing-l0",
    summary="randomised ablation: the network sees a few random pixels; needs a model trained on such inputs",
    guarantee="probabilistic proof",
    threats=("sparse",),
    reference="Levine and Feizi, Robustness certificates for sparse adversarial attacks by randomized ablation, 2020",
    smoothed=True,
)
@options_from(prove)
def smoothing_l0(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Sparse,
    *,
    size: Count | None = None,  # k, pixels that the network sees
    null: float = 0.5,  # value of ablated pixels, as in training
    radii: tuple[Whole, ...] = (),  # further numbers of pixels to settle
    **sampling: Any,
) -> CertifyResult:
    """Certified if the smoothed classifier is shown to answer y whatever the pixels of the threat; see the top.

    Returns:
        `radius` is a number of pixels; `margin` is the lower bound of the probability of y, 0 where y is not the class
        guessed, minus 1/2 + Delta(rho).
    """
    count = pixels(x)
    if size is None or size > count:
        raise InputError(
            f"'smoothing-l0' needs size, the number of pixels that the network sees, 1 to {count}, got {size}"
        )
    asked = [threat.k, *radii]
    needed = (0.5 + fall(count, size)).to(x.device)

    def radius(probability: Tensor) -> Tensor:
        # `needed` grows: as many of its entries as lie below p belong to rho = 0, 1, ...
        return (torch.searchsorted(needed, probability) - 1).clamp(min=0).double()

    variant = Variant(
        name="smoothing-l0",
        noise=f"pixels {size} null {null!r}",
        draw=ablation_noise(size, null),
        probability=needed[torch.tensor(asked, device=x.device).clamp(max=count)],
        radius=radius,
        budget=threat.k,
        what=f"{min(asked)} pixels with {size} of {count} seen",
        count=True,
    )
    return prove(model, x, y, variant, **sampling)
