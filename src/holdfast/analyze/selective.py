"""Selective classification: how much does a model get wrong among what it answers, and what does it refuse?

A model that may abstain ranks inputs by a score and answers those that reach a threshold. Coverage is the share that it
answers, risk the share of the answers that is wrong (El-Yaniv and Wiener, "On the foundations of noise-free selective
classification", 2010).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.utils.show import Shown
from holdfast.utils.svg import STYLES, Axes, figure, rounds, stroke, text

WIDTH, HEIGHT = 640, 400  # of the chart
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 55  # from its edges to its axes


@dataclass(frozen=True, eq=False, repr=False)
class RiskCoverage(Shown):
    """Risk against coverage, one entry for each distinct score, (N,) float64, from the highest score to the lowest.

    Attributes:
        threshold: the score; inputs with at least this much are answered.
        coverage: share of the inputs that is answered, increasing to 1.
        risk: share of the answers that is wrong.
    """

    threshold: Tensor
    coverage: Tensor
    risk: Tensor

    @property
    def area(self) -> float:
        """Mean risk over all coverages; the lower, the better the score tells wrong from right."""
        return float((self.risk * torch.diff(self.coverage, prepend=self.coverage.new_zeros(1))).sum())

    def coverage_at(self, risk: float) -> float:
        """The largest coverage at which at most `risk` of the answers are wrong; 0 if there is none."""
        return float(self.coverage[self.risk <= risk].max()) if bool((self.risk <= risk).any()) else 0.0

    def threshold_at(self, coverage: float) -> float:
        """The highest threshold that answers at least a share `coverage` of the inputs."""
        if not 0 < coverage <= 1:
            raise InputError(f"coverage must be above 0 and at most 1, got {coverage}")
        return float(self.threshold[self.coverage >= coverage - 1e-12][0])


def risk_coverage(score: Tensor, correct: Tensor) -> RiskCoverage:
    """The curve of a score; inputs of equal score are answered together or not at all.

    Args:
        score: (B,), higher for what is to be answered first: a certified radius, a margin, or the `acceptance` of a
            centroid network.
        correct: (B,) bool, whether the prediction is right.

    >>> curve = risk_coverage(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([True, True, False]))
    >>> curve.risk.tolist()[:2], round(curve.area, 4)
    ([0.0, 0.0], 0.1111)
    """
    if score.ndim != 1 or len(score) == 0 or score.shape != correct.shape or correct.dtype != torch.bool:
        raise InputError(
            f"expected scores (B,) and bool (B,) of at least one input, got {tuple(score.shape)} and {correct.dtype} "
            f"{tuple(correct.shape)}"
        )
    if bool(score.isnan().any()):
        raise InputError(f"the score of input {int(score.isnan().nonzero()[0])} is NaN")
    order = score.sort(descending=True).indices
    ranked, wrong = score[order].double(), (~correct[order]).double().cumsum(0)
    last = torch.cat([ranked[1:] != ranked[:-1], ranked.new_ones(1, dtype=torch.bool)])
    count = torch.arange(1, len(score) + 1, dtype=torch.float64, device=score.device)
    return RiskCoverage(ranked[last], (count / len(score))[last], (wrong / count)[last])


@dataclass(frozen=True)
class Outcome:
    """Shares of a set of inputs that were answered right, answered wrong, and rejected; they add up to 1."""

    right: float
    wrong: float
    rejected: float

    @property
    def selective_accuracy(self) -> float:
        """Share of the answers that is right; NaN if there are none."""
        answered = self.right + self.wrong
        return self.right / answered if answered else math.nan


def outcome(prediction: Tensor, y: Tensor) -> Outcome:
    """What became of inputs with known labels, such as clean or adversarial ones.

    Args:
        prediction: (B,) int64, -1 for a rejection.
        y: (B,) labels.
    """
    if prediction.shape != y.shape or len(y) == 0:
        raise InputError(
            f"expected a prediction for each of at least one label, got {tuple(prediction.shape)} and {tuple(y.shape)}"
        )
    right, rejected = (prediction == y).double().mean(), (prediction < 0).double().mean()
    wrong = ((prediction >= 0) & (prediction != y)).double().mean()
    return Outcome(float(right), float(wrong), float(rejected))


@torch.no_grad()
def rejection_rates(
    predict: Callable[[Tensor], Tensor], groups: Mapping[str, Tensor], *, chunk: int = 256
) -> dict[str, float]:
    """Share of each group that gets no answer: adversarial, out-of-distribution or unseen-class inputs, and clean ones.

    Args:
        predict: from inputs (B, ...) to classes (B,) int64, -1 for a rejection, such as
            `lambda x: hf.guard(model, threat)(x).prediction`; see also `rejecting`.
        groups: inputs by name, at least one each. `probes` makes some that no model should judge.
    """
    empty = [name for name, x in groups.items() if len(x) == 0]
    if empty:
        raise InputError(f"the group '{empty[0]}' is empty")
    return {name: sum(int((predict(part) < 0).sum()) for part in x.split(chunk)) / len(x) for name, x in groups.items()}


def rejecting(model: Callable[[Tensor], Tensor], classes: int) -> Callable[[Tensor], Tensor]:
    """Predictions of a model whose logit number `classes` stands for "I don't know", with -1 for that."""

    def predict(x: Tensor) -> Tensor:
        label = model(x).argmax(1)
        return torch.where(label < classes, label, -1)

    return predict


def probes(x: Tensor, *, seed: int = 0, low: float = 0.0, high: float = 1.0) -> dict[str, Tensor]:
    """Inputs of the shape of x (B, ...) that mean nothing, for `rejection_rates`.

    "noise" is uniform over the range, "corners" are far from everything: each value low or high; "shuffled" are the
    inputs with their values in random order.
    """
    noise = Noise.for_batch(seed, len(x), x.device)
    uniform = noise.uniform(x.shape[1:], x.dtype)
    order = noise.fork(1).uniform((x[0].numel(),), x.dtype).argsort(1)
    corners = (noise.fork(2).uniform(x.shape[1:], x.dtype) > 0.5).to(x.dtype)
    return {
        "noise": low + (high - low) * uniform,
        "corners": low + (high - low) * corners,
        "shuffled": x.flatten(1).gather(1, order).view_as(x),
    }


def risk_coverage_svg(curves: Mapping[str, RiskCoverage], *, title: str = "Risk and coverage") -> str:
    """The curves as steps in one chart, with a legend; at most five."""
    if not 1 <= len(curves) <= len(STYLES):
        raise InputError(f"expected 1 to {len(STYLES)} curves, got {list(curves)}")
    ticks = rounds(0.0, max(float(curve.risk.max()) for curve in curves.values()))
    chart = Axes(LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM, (0.0, 1.0), ticks)
    parts = [
        text(LEFT, 18, title, size=15),
        text(18, (TOP + HEIGHT - BOTTOM) / 2, "risk", anchor="middle", turned=True),
    ]
    parts += chart.grid("coverage", {tick: f"{tick:g}" for tick in (0.0, 0.25, 0.5, 0.75, 1.0)})
    for i, ((name, curve), style) in enumerate(zip(curves.items(), STYLES, strict=False)):
        ends, risks = curve.coverage.tolist(), curve.risk.tolist()
        corners = [place for pair in zip([0.0, *ends[:-1]], ends, strict=True) for place in pair]
        label = f"{name} (area {curve.area:.4f})"
        parts.append(chart.line(corners, [risk for risk in risks for _ in (0, 1)], style, label))
        x = LEFT + 14 + 200 * (i % 3)
        y = TOP - 12 + 17 * (i // 3)
        parts += [f'<path d="M{x} {y}h24" {stroke(*style)}/>', text(x + 30, y + 4, label)]
    return figure(parts, WIDTH, HEIGHT, title=title, size=13)
