"""The contract of a training objective, as checks that anyone can run on an objective of their own."""

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.data import Dataset, Split
from holdfast.errors import InputError
from holdfast.models import make_model
from holdfast.registry import Certificate, Method, Objective, get, lend
from holdfast.results import TrainResult
from holdfast.testing.subject import Subject, refuses, require, run_checks, subjects_of, untouched
from holdfast.training import Context, train
from holdfast.training.context import Metrics

SHAPE = (1, 6, 5)


def check_objective(method: str | Method, **options: Any) -> None:
    """Check that a training objective keeps its contract; raise an AssertionError that says which part is broken.

    Example:
        >>> check_objective("standard")
    """
    with subjects_of(Objective, method, options, shape=SHAPE, scale=0.1) as subjects:
        run_checks("check_objective", subjects[0], CHECKS)


def _task() -> Dataset:
    """Is the left or the right half brighter? 49 images, so that the last of the batches of 16 has one."""
    x = torch.rand(69, *SHAPE, generator=torch.Generator().manual_seed(0)) * 0.5
    y = torch.arange(69) % 2
    x[y == 0, :, :, :2] += 0.4
    x[y == 1, :, :, 3:] += 0.4
    return Dataset("halves", Split(x[:49], y[:49]), Split(x[49:], y[49:]), ("left", "right"))


def _model(record: Objective) -> nn.Module:
    """A chain of dense layers and ReLUs, or the architecture that the objective's certificate needs."""
    certificate = get("certify", record.certificate) if record.certificate else None
    if isinstance(certificate, Certificate) and certificate.needs:
        return make_model(certificate.needs, input_shape=SHAPE, classes=2, seed=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 2))


def _train(s: Subject, **more: Any) -> TrainResult:
    assert isinstance(s.method, Objective)
    recipe = {
        "epochs": 1,
        "batch_size": 16,
        "validation": 0.0,
        "objective": {"name": s.name, **s.options, **more},
        "optimizer": {"name": "sgd", "lr": 0.05},
        "evaluate": {"attack_steps": 0},
        **({"attack": {"name": "pgd", "steps": 2}} if "attack" in s.method.takes else {}),
        **({} if s.threat is None else {"threat": str(s.threat)}),
    }
    return train(recipe, model=_model(s.method), data=_task(), progress=False)


def returns_a_loss_and_metrics(s: Subject) -> None:
    """Each step returns a finite scalar loss with gradients, and finite metrics; the loop moves the weights, not it."""

    @functools.wraps(s.method.function)
    def watched(model: nn.Module, x: Tensor, y: Tensor, context: Context, **options: Any) -> tuple[Tensor, Metrics]:
        buffers = "a weight or a buffer of the model"  # running statistics may change, weights may not
        weights = [p.detach().clone() for p in model.parameters()]
        with untouched(model, x, y, may_change=(buffers,)):
            loss, metrics = s.method.function(model, x, y, context, **options)
        still = all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
        require(still, "the objective changed the weights by itself; the loop takes the step.")
        _check_answer(loss, metrics)
        return loss, metrics

    with lend(replace(s.method, function=watched)):
        _train(s)


def _check_answer(loss: Any, metrics: Any) -> None:
    require(isinstance(loss, Tensor) and loss.ndim == 0, f"the loss must be a scalar tensor, got {loss!r}.")
    require(loss.requires_grad, "the loss has no gradient: was it detached?")
    require(math.isfinite(loss.item()), f"the loss is {loss.item()}.")
    require(isinstance(metrics, Mapping), f"the metrics must be a table of names and numbers, got {metrics!r}.")
    for name, value in metrics.items():
        require(math.isfinite(float(value)), f"the metric '{name}' is {float(value)}.")


def trains(s: Subject) -> None:
    """A run of one epoch moves the weights, keeps them finite, and is the same again with the same seed."""
    assert isinstance(s.method, Objective)
    before, (first, second) = _model(s.method).state_dict(), (_train(s).model.state_dict() for _ in range(2))
    require(all(torch.isfinite(value).all() for value in first.values()), "a weight is NaN or infinite.")
    require(any(not torch.equal(first[key], before[key]) for key in first), "no weight has moved.")
    require(all(torch.equal(first[key], second[key]) for key in first), "two runs with the same seed differ.")


def refuses_bad_options(s: Subject) -> None:
    """An option that it does not have, and a threat that it does not handle, are refused with an InputError."""
    refuses(lambda: _train(s, no_such_option=1), "an option that the objective does not have")
    if s.method.threats and s.threat is not None:
        refuses(lambda: _train(replace(s, threat=None)), "a recipe without a threat", InputError)


CHECKS = (returns_a_loss_and_metrics, trains, refuses_bad_options)
