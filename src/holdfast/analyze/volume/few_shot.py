"""Few-shot heads: a new linear layer on frozen features, learned from one or a few images of each new class.

Does the head need gradients? For each episode one head is learned by gradient descent and one by pattern search, on the
same features, l2-normalised, both from zero (Chiang et al., "Loss landscapes are all you need", 2023, section 7.4.4 of
the thesis of P. Chiang).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from holdfast.analyze.volume.fitting import Fitting, make_fitting
from holdfast.analyze.volume.gradient_descent import descend
from holdfast.analyze.volume.pattern_search import pattern_search
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.utils.options import Count, Positive
from holdfast.utils.progress import progress_bars

Head = Callable[[Fitting, int], Tensor]
"""From an episode's samples and a seed to the weights of a head, (P,)."""


@dataclass(frozen=True, eq=False)
class Episode:
    """Positions of the samples to learn from and to be asked about, (ways * shots,) and (ways * queries,).

    The labels of both count from 0, class after class: `support_y`, `query_y`.
    """

    support: Tensor
    query: Tensor
    support_y: Tensor
    query_y: Tensor


@dataclass(frozen=True)
class HeadScore:
    """Mean query accuracy over episodes and its standard error."""

    accuracy: float
    error: float
    episodes: int


def make_episodes(
    y: Tensor, count: int, *, ways: Count = 5, shots: Count = 1, queries: Count = 15, seed: int = 0
) -> list[Episode]:
    """Draw episodes: `ways` classes, `shots` samples of each to learn from and `queries` others to be asked about."""
    known = y.unique()
    fewest = int(torch.bincount(y)[known].min()) if len(known) else 0
    if ways < 2 or len(known) < ways or fewest < shots + queries:
        raise InputError(
            f"{ways} ways need so many classes with {shots + queries} samples each; there are {len(known)}, of which "
            f"the smallest has {fewest}"
        )
    episodes = []
    for number in range(count):
        noise = Noise.for_batch(seed, len(y)).fork(number)
        classes = known[noise[: len(known)].bits(()).argsort()[:ways]]
        keys = noise.fork(0).bits(())
        rows = [of[keys[of].argsort()[: shots + queries]] for of in ((y == c).nonzero()[:, 0] for c in classes)]
        labels = torch.arange(ways)
        episodes.append(
            Episode(
                torch.cat([row[:shots] for row in rows]),
                torch.cat([row[shots:] for row in rows]),
                labels.repeat_interleave(shots),
                labels.repeat_interleave(queries),
            )
        )
    return episodes


def gradient_head(*, steps: Count = 100, lr: Positive = 0.1) -> Head:
    """Learn heads by gradient descent on all samples of the episode."""

    def learn(fitting: Fitting, seed: int) -> Tensor:
        zero = fitting.x.new_zeros(1, fitting.family.size)
        how = {"epochs": steps, "lr": lr, "batch_size": len(fitting.x)}
        return descend(fitting.family, zero, fitting.x, fitting.y, **how, seed=seed)[0][0]  # type: ignore[arg-type]

    return learn


def pattern_head(*, steps: Count = 3000, radius: Positive = 1.0, block: Count = 128) -> Head:
    """Learn heads by pattern search, which goes on for all its steps after the samples fit."""

    def learn(fitting: Fitting, seed: int) -> Tensor:
        zero = fitting.x.new_zeros(fitting.family.size)
        found = pattern_search(fitting, start=zero, radius=radius, block=block, limit=steps, to_the_end=True, seed=seed)
        if found.last is None:
            raise AssertionError("a search ends somewhere")
        return found.last

    return learn


def few_shot(features: Tensor, episodes: Sequence[Episode], head: Head, *, seed: int = 0) -> Tensor:
    """Accuracy on the queries of each episode, (E,) float64, of heads learned on frozen features (N, D)."""
    if features.ndim != 2 or not bool(features.isfinite().all()):
        raise InputError(f"features must be finite and have shape (N, D), got {tuple(features.shape)}")
    unit = normalize(features.detach(), dim=1)
    found = []
    with progress_bars() as bars:
        bar = bars.add_task("few-shot heads", total=len(episodes))
        for number, episode in enumerate(episodes):
            ways = int(episode.support_y.max()) + 1
            layer = nn.Sequential(nn.Linear(unit.shape[1], ways)).eval()
            fitting = make_fitting(layer.to(unit), unit[episode.support], episode.support_y, divisor=None)
            weights = head(fitting, seed + number)
            logits = fitting.family.logits(weights[None], unit[episode.query])[0]
            found.append((logits.argmax(1) == episode.query_y).double().mean())
            bars.advance(bar)
    return torch.stack(found)


def score(accuracies: Tensor) -> HeadScore:
    """Mean and standard error over episodes."""
    count = len(accuracies)
    error = float(accuracies.std()) / count**0.5 if count > 1 else float("nan")
    return HeadScore(float(accuracies.mean()), error, count)
