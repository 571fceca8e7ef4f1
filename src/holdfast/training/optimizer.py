"""Optimisers, their learning rate and the norm of the gradient."""

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from holdfast.errors import InputError
from holdfast.training.lookahead import with_lookahead
from holdfast.training.muon import Muon
from holdfast.training.recipe.recipe import OptimizerPart, Recipe
from holdfast.training.schedules import LEARNING_RATES, warm_up


def make_optimizer(part: OptimizerPart, model: nn.Module) -> Optimizer:
    """The optimiser of the recipe on the parameters that want gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("the model has no parameters that require gradients: there is nothing to train")
    optimizer = _plain(part, parameters)
    if part.lookahead == 0:
        return optimizer
    return with_lookahead(optimizer, every=part.lookahead, rate=part.lookahead_rate)


def _plain(part: OptimizerPart, parameters: list[nn.Parameter]) -> Optimizer:
    rates: dict[str, Any] = {"lr": part.lr, "weight_decay": part.weight_decay}
    match part.name:
        case "sgd":
            return SGD(parameters, momentum=part.momentum, nesterov=part.nesterov, **rates)
        case "muon":
            return Muon(parameters, momentum=part.momentum, **rates)
        case "nadam":
            return NAdam(parameters, decoupled_weight_decay=True, **rates)
        case "adam":
            return Adam(parameters, **rates)
        case "adamw":
            return AdamW(parameters, **rates)


def learning_rate(recipe: Recipe, t: float) -> float:
    """The learning rate at the progress `t`, in epochs."""
    choice, (position, length) = recipe.learning_rate, recipe.period(t)
    factor = LEARNING_RATES[choice.name](position, length, **choice.options)
    return recipe.optimizer.lr * factor * warm_up(position, recipe.warmup)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """The same learning rate for every group of parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def gradient_norm(model: nn.Module, clip_norm: float | None) -> float:
    """Norm of the whole gradient before clipping; clips it if asked."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip_norm, norm)
    return float(norm)
