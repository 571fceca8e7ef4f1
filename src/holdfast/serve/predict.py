"""All about one input: the answer, what is proved of it, the nearest point that breaks it, and what it rests on."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from holdfast.attacks import nearest
from holdfast.attacks.core.chance import is_stochastic, mean_prediction
from holdfast.attacks.core.minimum_norm import BALLS, check_norm, norm_of
from holdfast.certificates import certify, radius
from holdfast.checks import check_inputs, check_logits
from holdfast.errors import HoldfastError, UnsupportedError
from holdfast.explanations import explain
from holdfast.explanations.core.pictures import signed_map
from holdfast.serve.subjects import Subject
from holdfast.utils.png import data_uri, is_picture

TRIES = 5  # budgets at which the tightest proof is tried
SECONDS = 5.0  # after which no further budget is tried
STEPS, TARGETS = 40, 3  # of the search for the nearest example

Answer = dict[str, Any]


def try_input(subject: Subject, x: Tensor, *, norm: str = "linf", label: int | None = None) -> Answer:
    """What the page shows of one input, as values for JSON; pictures are `data:` addresses.

    A part that the model does not allow, such as a proof through a layer that no certificate has a rule for, has an
    "error" that says why; the others stand. A random model answers with the mean softmax of 20 draws.

    Args:
        subject: the model and its data.
        x: in [0, 1], in the shape that the model takes.
        norm: of the perturbations: "linf", "l2" or "l1".
        label: the true class, if it is known.
    """
    check_norm(norm)
    start = time.monotonic()
    place = next(subject.model.parameters(), None)
    batch = x[None] if place is None else x[None].to(place)
    check_inputs(batch)
    logits = check_logits(subject.model, batch)[0]
    if is_stochastic(subject.model, batch):
        logits = mean_prediction(subject.model, batch)[0]
    y = logits.argmax()[None]
    found = _part(lambda: _nearest(subject, batch, y, norm))
    x_adv: Tensor | None = found.pop("x_adv", None)
    answer = {
        "model": subject.name,
        "norm": norm,
        "picture": _picture(batch[0]),
        "label": None if label is None else subject.class_name(label),
        "prediction": subject.class_name(int(y)),
        "scores": _scores(subject, logits),
        "adversarial": found,
        "attribution": _part(lambda: _attribution(subject, batch, y, x_adv)),
        "certified": _part(lambda: _radius(subject, batch, y, norm, found.get("distance"))),
    }
    return answer | {"seconds": round(time.monotonic() - start, 2)}


def _part(work: Callable[[], Answer]) -> Answer:
    """One part of the answer, or why there is none."""
    try:
        return {"error": None, **work()}
    except (HoldfastError, RuntimeError) as error:  # torch's own, such as a lack of memory
        return {"error": str(error)[:500]}


def _scores(subject: Subject, logits: Tensor) -> list[Answer]:
    """The classes from the most to the least probable."""
    shares = logits.double().softmax(0)
    order = shares.argsort(descending=True)
    return [{"name": subject.class_name(k), "probability": float(shares[k])} for k in order.tolist()]


def _picture(x: Tensor, *, low: float = 0.0, high: float = 1.0) -> str | None:
    """The input (C, H, W) as a picture; None if it is none."""
    return data_uri(x.double().cpu().numpy(), low=low, high=high) if is_picture(tuple(x.shape)) else None


def _nearest(subject: Subject, x: Tensor, y: Tensor, norm: str) -> Answer:
    """The nearest misclassified point; nothing but `distance`, which is None, if none was found."""
    found = nearest(subject.model, x, y, norm, steps=STEPS, targets=TARGETS)
    distance = float(found.distance[0])
    if not math.isfinite(distance):
        return {"distance": None}
    logits = check_logits(subject.model, found.x_adv)[0]
    change = found.x_adv[0] - x[0]
    scale = float(change.abs().max()) or 1.0
    return {
        "distance": distance,
        "by": found.by[0],
        "prediction": subject.class_name(int(logits.argmax())),
        "scores": _scores(subject, logits),
        "picture": _picture(found.x_adv[0]),
        # Grey is no change; the scale makes the largest one black or white.
        "difference": _picture(change, low=-scale, high=scale),
        "enlarged": 1 / (2 * scale),
        "x_adv": found.x_adv,
    }


def _attribution(subject: Subject, x: Tensor, y: Tensor, x_adv: Tensor | None) -> Answer:
    """What decides between the input and the nearest example; against black if there is no example."""
    how: Answer = {"quantity": "margin", "tolerance": None, "baseline": "black" if x_adv is None else x_adv}
    found = explain(subject.model, x, y, "integrated-gradients", **how)
    shown = is_picture(tuple(x.shape[1:]))
    return {
        "method": "integrated-gradients",
        "baseline": "black" if x_adv is None else "the adversarial example",
        "picture": data_uri(signed_map(found.attribution[0])) if shown else None,
        "completeness_error": float(found.error[0]) if math.isfinite(float(found.error[0])) else None,
    }


def _radius(subject: Subject, x: Tensor, y: Tensor, norm: str, distance: float | None) -> Answer:
    """The largest radius proved below the distance of the nearest example: no larger one can be.

    CROWN's radius first, which takes a second for a small network, then bisection with the tighter "auto".
    """
    deadline = time.monotonic() + SECONDS
    widest = float(norm_of(torch.ones_like(x), norm)[0])
    open_ = widest if distance is None else distance
    try:
        how: Answer = {"eps_max": open_, "tolerance": max(open_ / 256, 1e-6)}
        proved, by = float(radius(subject.model, x, y, norm, "crown", **how)[0]), "crown"  # type: ignore[arg-type]
    except UnsupportedError:  # "auto" can do with intervals alone
        proved, by = 0.0, ""
    tries = 0
    while tries < TRIES and proved < open_ and time.monotonic() < deadline:
        middle = (proved + open_) / 2
        result = certify(subject.model, x, y, BALLS[norm](middle))
        tries += 1
        if bool(result.certified[0]):
            proved, by = middle, result.by[0]
        else:
            open_ = middle
    return {"radius": proved, "by": by if proved else "", "in_time": tries == TRIES or proved >= open_}
