"""Trainings on easy, random and hard parts of the data, side by side: who overfits, and how steep is the network?

Fitting hard examples under attack forces a large Lipschitz constant (Liu, "Towards verifiable, generalizable and
efficient robust deep neural networks", 2022, Section 4.3 and Table 4.5).
"""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from holdfast.bounding.graph.trace import trace
from holdfast.bounding.lipschitz.constants import lipschitz_bound
from holdfast.errors import InputError
from holdfast.models import load_model
from holdfast.training import folder as files
from holdfast.training.recipe.reading import load_recipe
from holdfast.training.setup import prepare


@dataclass(frozen=True)
class SubsetRun:
    """One training.

    Attributes:
        subset: kind and share of the training set, or "all".
        threat: the adversary of the training.
        examples: training examples.
        fitted: accuracy at the training inputs as the objective saw them, in the last epoch.
        best, last: accuracy under attack on the validation split, in the best and in the last epoch.
        lipschitz: upper bound of the l2 Lipschitz constant of every margin.
    """

    subset: str
    threat: str
    examples: int
    fitted: float
    best: float
    last: float
    lipschitz: float

    @property
    def overfitted(self) -> float:
        """Accuracy under attack that was lost between the best epoch and the last."""
        return self.best - self.last


def subset_run(run: Path) -> SubsetRun:
    """What a finished training with a validation split under attack shows."""
    recipe = load_recipe(run)
    task = prepare(recipe, None, None, None)
    rows = files.read_history(run)
    if not rows or "validation_robust" not in rows[-1] or "train_accuracy" not in rows[-1]:
        raise InputError(
            f"the run in '{run}' has no accuracy under attack; set a threat, validation > 0 and evaluate.attack_steps "
            "> 0 in its recipe"
        )
    robust = [float(row["validation_robust"]) for row in rows]
    part = recipe.subset
    return SubsetRun(
        subset="all" if part is None else f"{part.kind} {part.share:g}",
        threat=recipe.threat or "none",
        examples=len(task.train),
        fitted=float(rows[-1]["train_accuracy"]),
        best=max(robust),
        last=robust[-1],
        lipschitz=steepest_margin(load_model(run / files.MODEL), task.train.x.shape[1:]),
    )


def steepest_margin(model: nn.Module, shape: tuple[int, ...]) -> float:
    """An upper bound of the l2 Lipschitz constant of z_i - z_j for every pair of classes, the largest of them.

    Args:
        model: in eval mode.
        shape: of one input.
    """
    like = next(model.parameters())
    return float(lipschitz_bound(trace(model, like.new_zeros(1, *shape))).pairs.max())
