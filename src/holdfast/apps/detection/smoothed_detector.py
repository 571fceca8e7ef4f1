"""Median smoothing of a detector: boxes and labels that hold for every change of the image within a radius.

f = encode . detect . denoise is run on n noisy copies of an image. The median of each output over the copies is the
prediction; two other order statistics bound the median of every image within an L2 distance of epsilon (Chiang et al.,
"Detection as regression: certified object detection by median smoothing", 2020; ranks corrected, docs/smoothing.md).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from holdfast.apps.detection.boxes import LABEL, Detector, check_detections
from holdfast.apps.detection.encoding import Detections, Encoding, decode, encode
from holdfast.certificates.smoothing.percentile import (
    check_sigma,
    each_confidence,
    order_ranks,
    percentile_bounds,
    smallest_samples,
)
from holdfast.checks import check_inputs
from holdfast.errors import InputError, either
from holdfast.random import Noise
from holdfast.utils.show import Shown

CERTIFIED = [0, 1, 2, 3, LABEL]  # columns of a detection that are bounded


@dataclass(frozen=True, eq=False, repr=False)
class CertifiedDetections(Shown):
    """What is proved of the detections of one image, one row for each slot that any noisy copy used.

    The median of every image within `epsilon` (L2, open ball) lies between `lower` and `upper`, with probability
    `confidence` for each bound of each number, or for all bounds of the image together if `familywise`. Slots that are
    not listed are empty within the radius.

    Attributes:
        lower, upper: bounds of x1, y1, x2, y2 and label, shape (S, 5); +inf means "nothing there".
        median: the smoothed prediction, an estimate, shape (S, 7) in the columns of a detection; +inf if nothing.
        bins: the bin of each slot, shape (S,).
        sigma, n, seed: standard deviation of the noise, number of copies, and what fixes them.
    """

    lower: Tensor
    upper: Tensor
    median: Tensor
    bins: Tensor
    epsilon: float
    sigma: float
    n: int
    confidence: float
    familywise: bool = False
    seed: int = 0

    def __len__(self) -> int:
        return int(self.lower.shape[0])

    @property
    def empty(self) -> Tensor:
        """(S,) bool: no image within the radius has a detection here."""
        return self.lower[:, 0] == torch.inf

    @property
    def present(self) -> Tensor:
        """(S,) bool: every image within the radius has a detection here."""
        return self.upper[:, 0] < torch.inf

    @property
    def label(self) -> Tensor:
        """(S,) int64: the label that every image within the radius gives, or -1 if it is not proved."""
        low, high = self.lower[:, 4], self.upper[:, 4]
        same = (low == high) & torch.isfinite(low)
        return torch.where(same, low, -torch.ones_like(low)).long()

    @property
    def detections(self) -> Tensor:
        """The smoothed prediction as a detector gives it, shape (K, 7)."""
        return decode(self.median)


@dataclass(frozen=True, eq=False)
class Draws:
    """What the detector found in `n` noisy copies of one image of `size` (height, width)."""

    found: Detections
    size: tuple[int, int]
    sigma: float
    encoding: Encoding
    seed: int = 0

    @property
    def n(self) -> int:
        """Number of copies."""
        return self.found.count

    def detect(self, *, objectness: float = 0.0) -> Tensor:
        """The smoothed prediction, shape (K, 7): the median of each column over the copies.

        Args:
            objectness: leave out what the detector is less sure of; each value makes another detector to be smoothed.
        """
        slots, _ = encode(self.found.above(objectness), self.size, self.encoding)
        return decode(percentile_bounds(slots, 0.0, self.sigma).median)

    def certify(
        self, epsilon: float, confidence: float = 0.999, *, objectness: float = 0.0, slots: int | None = None
    ) -> CertifiedDetections:
        """Bounds of the smoothed prediction within an L2 distance of `epsilon`.

        Args:
            slots: make `confidence` that of all bounds of the image together. It is the number of slots that the
                detector can ever fill, known before the image is: bins times the most detections in an image.
        """
        used, bins = encode(self.found.above(objectness), self.size, self.encoding)
        if slots is not None and slots < len(bins):
            raise InputError(
                f"slots must be the most that the detector can fill, got {slots}; it filled {len(bins)} here"
            )
        each = each_confidence(confidence, len(CERTIFIED) * (slots or 1), familywise=slots is not None)
        if None in order_ranks(self.n, epsilon, self.sigma, confidence=each):
            raise InputError(
                f"{either(f'n = {self.n} noisy copies', f'--samples {self.n}')} prove nothing at epsilon = "
                f"{epsilon:g}, sigma = {self.sigma:g} and a confidence of {each:.8g}; the smallest "
                f"{either('n', '--samples')} that does is {smallest_samples(epsilon, self.sigma, confidence=each)}"
            )
        bounds = percentile_bounds(used, epsilon, self.sigma, confidence=each)
        lower, upper = bounds.lower[:, CERTIFIED], bounds.upper[:, CERTIFIED]
        about = (epsilon, self.sigma, self.n, confidence, slots is not None, self.seed)
        return CertifiedDetections(lower, upper, bounds.median, bins, *about)


@dataclass(frozen=True, eq=False)
class SmoothedDetector:
    """Any detector, made certifiable.

    Attributes:
        detector: images (B, C, H, W) to a list of (N, 7); it must be deterministic.
        sigma: standard deviation of the noise, in the units of the image.
        n: noisy copies of each image.
        denoiser: runs before the detector, if given; part of what is smoothed, so the certificate stays true.
        encoding: see `Encoding`.
        batch: noisy copies in one call of the detector; memory grows with it, the answer does not change.
        seed: decides the noise, by position of the image and number of the copy.
        low, high: valid range of the images. The noise is not clipped to it.
    """

    detector: Detector
    sigma: float = 0.25
    n: int = 2000
    denoiser: Callable[[Tensor], Tensor] | None = None
    encoding: Encoding = field(default_factory=Encoding)
    batch: int = 100
    seed: int = 0
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        check_sigma(self.sigma)
        if self.n < 1 or self.batch < 1:
            raise InputError(f"n and batch must be at least 1, got n={self.n} and batch={self.batch}")

    def detect(self, x: Tensor, *, objectness: float = 0.0) -> list[Tensor]:
        """Smoothed detections (K, 7) of each image of x (B, C, H, W)."""
        return [draws.detect(objectness=objectness) for draws in self.draw(x)]

    def certify(
        self, x: Tensor, epsilon: float, confidence: float = 0.999, *, objectness: float = 0.0, slots: int | None = None
    ) -> list[CertifiedDetections]:
        """Detections of each image of x (B, C, H, W) with bounds for all images within an L2 distance of `epsilon`."""
        return [draws.certify(epsilon, confidence, objectness=objectness, slots=slots) for draws in self.draw(x)]

    @torch.no_grad()
    def draw(self, x: Tensor) -> list[Draws]:
        """Run the detector on `n` noisy copies of each image; radii and thresholds can then be tried at no cost."""
        check_inputs(x, self.low, self.high)
        if x.ndim != 4:
            raise InputError(f"images must have shape (B, C, H, W), got {tuple(x.shape)}")
        values, copy = [], []
        for pair in torch.arange(len(x) * self.n, device=x.device).split(self.batch):
            image, number = pair // self.n, pair % self.n
            noise = Noise(self.seed, image * 2**32 + number).normal(x.shape[1:], x.dtype)
            noisy = x[image] + self.sigma * noise
            found = self.detector(noisy if self.denoiser is None else self.denoiser(noisy))
            check_detections(found, len(pair))
            counts = torch.tensor([len(each) for each in found], device=x.device)
            values.append(torch.cat([*found]).to(x))
            copy.append(pair.repeat_interleave(counts))
        every, pairs = torch.cat(values), torch.cat(copy)
        sizes = torch.bincount(pairs // self.n, minlength=len(x)).tolist()
        return [
            Draws(Detections(rows, of % self.n, self.n), (x.shape[2], x.shape[3]), self.sigma, self.encoding, self.seed)
            for rows, of in zip(every.split(sizes), pairs.split(sizes), strict=True)
        ]
