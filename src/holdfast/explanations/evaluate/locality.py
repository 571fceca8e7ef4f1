"""Do the features that a model uses lie where a person sees the object? Scores against boxes or masks.

Wang, "On the feature alignment of deep vision models" (thesis, 2023), chapters 2 and 3.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks import attack
from holdfast.checks import check_task
from holdfast.errors import InputError
from holdfast.explanations import explain
from holdfast.explanations.evaluate.annotations import BoxTable, Masks, box_masks, box_table
from holdfast.explanations.evaluate.randomise import randomise_all
from holdfast.results import Explanation
from holdfast.threats import Linf, Threat
from holdfast.utils.intervals import clopper_pearson
from holdfast.utils.show import Shown

SCORES = ("precision", "recall", "f1", "energy", "pointing")
METHODS: dict[str, dict[str, Any]] = {"saliency": {}, "integrated-gradients": {"steps": 20}, "big": {"steps": 20}}
"""The attributions of the protocols, with the options as published."""


@dataclass(frozen=True, eq=False, repr=False)
class Scores(Shown):
    """How well an attribution A overlaps a mask M, for each input; (B,) each, NaN where it is not defined.

    Attributes:
        precision: sum of A+ M over sum of A+: the share of what speaks for the class that lies inside.
        recall: sum of A+ M over sum of |A| M: the share of what lies inside that speaks for the class.
        f1: harmonic mean of the two.
        energy: sum of |A| M over sum of |A|.
        pointing: 1 where the largest value lies inside, else 0.
    """

    precision: Tensor
    recall: Tensor
    f1: Tensor
    energy: Tensor
    pointing: Tensor


def scores(attribution: Tensor, mask: Tensor, *, per_channel: bool = False) -> Scores:
    """Scores of attributions (B, C, H, W) on masks (B, H, W).

    An attribution that is positive inside and zero outside scores 1. One of independent signs scores a precision of the
    share of the image that the mask covers, and a recall of one half.

    Args:
        per_channel: every value of every channel is a feature; else the channels of a pixel are added up first.
    """
    if attribution.ndim != 4 or mask.shape != (len(attribution), *attribution.shape[2:]):
        raise InputError(
            f"expected attributions (B, C, H, W) and masks (B, H, W), got {tuple(attribution.shape)} and "
            f"{tuple(mask.shape)}"
        )
    a = attribution if per_channel else attribution.sum(1, keepdim=True)
    m = mask[:, None].expand_as(a).flatten(1)
    a = a.flatten(1)
    positive, size = a.clamp(min=0), a.abs()
    inside = (positive * m).sum(1)
    # 0 / 0 is NaN: an attribution with nothing positive has no precision.
    precision, recall = inside / positive.sum(1), inside / (size * m).sum(1)
    both = precision + recall
    f1 = torch.where(both > 0, 2 * precision * recall / both, both)
    energy = (size * m).sum(1) / size.sum(1)
    top = a.argmax(1, keepdim=True) if a.shape[1] else a.new_zeros(len(a), 1, dtype=torch.int64)
    pointing = torch.where(positive.sum(1) > 0, m.gather(1, top)[:, 0].to(a.dtype), torch.nan)
    return Scores(precision, recall, f1, energy, pointing)


@dataclass(frozen=True)
class Mean:
    """Mean over the inputs with a score.

    Attributes:
        mean: NaN where no input has a score.
        error: standard error of the mean.
        count: inputs with a score.
        interval: 95 % interval of the mean: 1.96 standard errors to both sides, or Clopper and Pearson's exact interval
            if the mean is a share of the inputs.
    """

    mean: float
    error: float
    count: int
    interval: tuple[float, float]


def mean_of(values: Tensor, *, share: bool = False) -> Mean:
    """Mean of (B,) values without those that are NaN; `share` says that each of them is 0 or 1."""
    kept = values[torch.isfinite(values)].double()
    if len(kept) == 0:
        return Mean(math.nan, math.nan, 0, (math.nan, math.nan))
    mean, error = float(kept.mean()), float(kept.std()) / math.sqrt(len(kept)) if len(kept) > 1 else math.nan
    normal = (mean - 1.96 * error, mean + 1.96 * error)
    return Mean(mean, error, len(kept), clopper_pearson(int(kept.sum()), len(kept)) if share else normal)


@dataclass(frozen=True, eq=False)
class Locality:
    """Locality of a model over a data set.

    Attributes:
        scores: one entry for each input; NaN where it was set aside.
        means: by name of the score.
        explanation: what was scored.
        problem: why an input was set aside, for each input; empty where it was not.
    """

    scores: Scores
    means: dict[str, Mean]
    explanation: Explanation
    problem: tuple[str, ...]


def promises(explanation: Explanation) -> str:
    """In words: how many explanations are no fallback, how many boundaries were found, and the completeness errors."""
    ok, error = explanation.ok, explanation.error[~torch.isnan(explanation.error)]
    text = f"{int(ok.sum())} of {len(ok)} keep their promise"
    if explanation.distance is not None:
        found = torch.isfinite(explanation.distance)
        text += f"; boundary found for {int(found.sum())}"
        text += f", mean distance {float(explanation.distance[found].mean()):.3g}" if bool(found.any()) else ""
    if len(error) > 0:
        text += f"; completeness error {float(error.median()):.2g} in the median, {float(error.max()):.2g} at most"
    return text


def masks_for(where: Tensor | BoxTable | Masks, x: Tensor, *, max_area: float = 0.8) -> Masks:
    """Masks of images x (N, C, H, W), from boxes (N, 4), a table, or masks (N, H, W), bool."""
    if x.ndim != 4:
        raise InputError(f"locality needs images (N, C, H, W), got inputs of shape {tuple(x.shape)}")
    if isinstance(where, Masks):
        return where
    if isinstance(where, Tensor) and where.ndim == 3:
        if where.shape != (len(x), *x.shape[2:]) or where.dtype != torch.bool:
            raise InputError(
                f"masks must be bool of shape {(len(x), *x.shape[2:])}, got {where.dtype} {tuple(where.shape)}"
            )
        empty = ("the mask is empty", "")
        return Masks(where.cpu(), tuple(empty[int(bool(m.any()))] for m in where))
    if isinstance(where, Tensor) and len(where) != len(x):
        raise InputError(f"expected one box for each of the {len(x)} inputs, got {len(where)}")
    table = box_table(where) if isinstance(where, Tensor) else where
    return box_masks(table, len(x), *x.shape[2:], max_area=max_area)


def locality(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    where: Tensor | BoxTable | Masks,
    method: str = "big",
    *,
    max_area: float = 0.8,
    per_channel: bool = False,
    **options: Any,
) -> Locality:
    """Score the explanations of a data set against boxes or masks.

    Inputs with a bad box, without one, or with one that covers `max_area` of the image or more are set aside, each with
    its reason; so are explanations that are not finite. Inputs whose explanation is a fallback count.

    Args:
        x: images, (N, C, H, W).  y: classes, (N,).
        where: boxes (N, 4), masks (N, H, W) of bool, or a table from `read_boxes`.
        method: a method of `hf.explain`; `options` go to it.
    """
    masks = masks_for(where, x, max_area=max_area)
    explanation = explain(model, x, y, method, **options)
    inside = masks.inside.to(x.device)
    found = scores(explanation.attribution, inside, per_channel=per_channel)
    good = torch.tensor([not reason for reason in masks.problem], device=x.device)
    kept = {name: torch.where(good, getattr(found, name), torch.nan) for name in SCORES}
    undefined = ["the attribution has no positive value" if bool(torch.isnan(v)) else "" for v in found.precision]
    problem = tuple(reason or other for reason, other in zip(masks.problem, undefined, strict=True))
    means = {name: mean_of(v, share=name == "pointing") for name, v in kept.items()}
    return Locality(Scores(**kept), means, explanation, problem)


def protocol(
    models: Mapping[str, nn.Module],
    x: Tensor,
    y: Tensor,
    where: Tensor | BoxTable | Masks,
    *,
    threat: Threat | None = None,
    methods: Mapping[str, Mapping[str, Any]] | Sequence[str] = METHODS,
    floor: bool = True,
    seed: int = 0,
    **options: Any,
) -> list[dict[str, Any]]:
    """Locality of several models side by side: one row for each model and method.

    Without a threat: does locality follow accuracy? With one: does it follow robustness? The rows hold "model",
    "method", "accuracy", "robust" (None without a threat), "ok" (share of explanations without fallback) and a `Mean`
    for each score.

    Args:
        threat: what the models are attacked with, by the cascade.
        methods: methods of `hf.explain`, with their options.
        floor: also a copy of the first model with random weights, "random weights": what chance gives.
    """
    chosen = methods if isinstance(methods, Mapping) else {name: METHODS.get(name, {}) for name in methods}
    masks = masks_for(where, x, max_area=options.pop("max_area", 0.8))
    all_models = dict(models)
    if floor and models:
        all_models["random weights"] = randomise_all(copy.deepcopy(next(iter(models.values()))), seed)
    rows = []
    for name, model in all_models.items():
        logits = check_task(model, x, y, threat or Linf(0.0), chunk=256)
        right = logits.argmax(1) == y
        robust = None
        if threat is not None:
            robust = float((~attack(model, x, y, threat, seed=seed).success).double().mean())
        for method, how in chosen.items():
            result = locality(model, x, y, masks, method, seed=seed, **{**how, **options})
            row = {"model": name, "method": method, "accuracy": float(right.double().mean()), "robust": robust}
            ok = float(result.explanation.ok.double().mean())
            rows.append({**row, "ok": ok, **result.means})
    return rows
