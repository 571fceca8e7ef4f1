"""Everything about a run that changes while it goes: what a checkpoint holds."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from holdfast.errors import InputError
from holdfast.training.workers import Workers

Weights = dict[str, Tensor]
_PLAIN = ("epoch", "batch", "seconds", "examples", "snapshots", "totals", "history")
"""What a checkpoint holds of a `RunState` as it is."""


@dataclass(frozen=True, eq=False)
class Best:
    """The best epoch so far (counted from 1) on the validation split, its score and its weights."""

    epoch: int
    score: float
    weights: Weights


@dataclass(eq=False)
class RunState:
    """Where a run stands."""

    model: nn.Module
    optimizer: Optimizer
    average: AveragedModel | None
    data: int  # fingerprint of the training split
    epoch: int = 0  # the epoch under way
    batch: int = 0  # batches of it that are done
    seconds: float = 0.0  # training time of this epoch so far
    examples: int = 0  # that this epoch has seen so far
    totals: dict[str, float] = field(default_factory=dict)  # over the examples of this epoch
    objective: dict[str, Tensor] = field(default_factory=dict)  # what it keeps between steps (`Context.state`)
    history: list[dict[str, Any]] = field(default_factory=list)
    snapshots: list[Weights] = field(default_factory=list)  # weights at the end of each period, for an ensemble
    best: Best | None = None
    updates: list[dict[str, Any]] = field(default_factory=list)  # of this epoch, where they are logged

    @property
    def averaging(self) -> bool:
        """True once the average holds at least one set of weights."""
        return self.average is not None and int(self.average.n_averaged) > 0

    @property
    def judged(self) -> nn.Module:
        """The model that is validated and returned: the average where there is one."""
        if self.average is not None and self.averaging:
            return self.average.module
        return self.model

    def count(self, means: dict[str, float], examples: int) -> None:
        """Add the means of one batch to the totals of the epoch."""
        for key, value in means.items():
            self.totals[key] = self.totals.get(key, 0.0) + value * examples
        self.examples += examples
        self.batch += 1

    def next_epoch(self, row: dict[str, Any]) -> None:
        """Close the epoch with its row of the history."""
        self.history.append(row)
        self.epoch, self.batch, self.seconds, self.examples, self.totals = self.epoch + 1, 0, 0.0, 0, {}
        self.updates = []

    def snapshot(self, team: Workers) -> dict[str, Any]:
        """Tensors and plain values; every process must take part, for its random state."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "objective": self.objective,
            "random": team.gather(_random_state(_device(self.model))),
            "data": self.data,
            "updates": self.updates,
            **{name: getattr(self, name) for name in _PLAIN},
        }

    def restore(self, saved: dict[str, Any], team: Workers) -> None:
        """Back to a snapshot, to the last bit; a ValueError for one that no run leaves."""
        _check_snapshot(saved)
        if len(saved["random"]) != team.count:
            raise InputError(
                f"the run was saved by {len(saved['random'])} processes and cannot be resumed by {team.count}; "
                "start as many as before"
            )
        if saved["data"] != self.data:
            raise InputError("the run was trained on other data; resume it with the same")
        device = _device(self.model)
        load_weights(self.model, saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(saved["average"])
        self.objective.update({key: value.to(device) for key, value in saved["objective"].items()})
        for name in _PLAIN:
            setattr(self, name, saved[name])
        self.updates = saved.get("updates", [])  # checkpoints of older versions have none
        _set_random_state(device, saved["random"][team.rank])


def read_best(saved: dict[str, Any]) -> Best:
    """The best epoch of a checkpoint; a ValueError for what is none."""
    if set(saved) != {"epoch", "score", "weights"} or not isinstance(saved["weights"], dict):
        raise ValueError("it does not hold an epoch, its score and its weights")
    if not (_is_count(saved["epoch"]) and isinstance(saved["score"], int | float) and math.isfinite(saved["score"])):
        raise ValueError("its epoch and its score must be numbers")
    return Best(**saved)


def _check_snapshot(saved: dict[str, Any]) -> None:
    """Refuse positions in the run that are none: training would go on without end, or where it never was."""
    counts, tables = ("epoch", "batch", "examples"), ("model", "optimizer", "objective", "totals")
    lists = ("random", "snapshots", "history")
    missing = [key for key in (*counts, *tables, *lists, "seconds", "average", "data") if key not in saved]
    if missing:
        raise ValueError(f"it has no '{missing[0]}'")
    wrong = [key for key in counts if not _is_count(saved[key])]
    wrong += [key for key in tables if not isinstance(saved[key], dict)]
    wrong += [key for key in lists if not isinstance(saved[key], list)]
    wrong += [] if isinstance(saved.get("updates", []), list) else ["updates"]
    wrong += [] if isinstance(saved["seconds"], float | int) and math.isfinite(saved["seconds"]) else ["seconds"]
    if wrong:
        raise ValueError(f"'{wrong[0]}' is not what a run saves")
    epochs = [isinstance(row, dict) and row.get("epoch") for row in saved["history"]]
    if epochs != list(range(1, saved["epoch"] + 1)):
        raise ValueError("its history is not one row for each epoch")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def load_weights(model: nn.Module, weights: Weights) -> None:
    """Weights of a checkpoint into the model, or an error that names the first that does not fit."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        detail = str(error).splitlines()[-1].strip()
        raise InputError(f"the checkpoint holds the weights of another model: {detail}") from error


def copy_weights(model: nn.Module) -> Weights:
    """A copy of the weights on the CPU, which later steps do not change."""
    return {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _random_state(device: torch.device) -> Tensor:
    """State of torch's global generators, which dropout draws from, as one vector of bytes."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _set_random_state(device: torch.device, state: Tensor) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[size:], device)
