"""One random network seen through its draws: do examples transfer, how much does EOT gain, and do more draws help?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.attacks.core.batches import noise_for
from holdfast.attacks.core.chance import mean_prediction
from holdfast.attacks.core.losses import cross_entropy
from holdfast.attacks.core.transfer import TransferSummary, transfer_matrix, transfer_summary
from holdfast.attacks.eot import Average, eot_pgd
from holdfast.attacks.eot_nes import eot_nes
from holdfast.attacks.eot_square import eot_square
from holdfast.checks import check_task
from holdfast.errors import InputError
from holdfast.models.random import DRAWS, RandomNetwork
from holdfast.threats import Threat
from holdfast.threats import threat as read_threat
from holdfast.utils.show import Shown


@dataclass(frozen=True, eq=False, repr=False)
class DrawsTransfer(Shown):
    """How well the examples of one draw fool the others: accuracy (n, n), row the source, column the target."""

    matrix: Tensor
    summary: TransferSummary


def transfer_between_draws(
    model: RandomNetwork, x: Tensor, y: Tensor, threat: Threat | str, *, draws: int = 50, seed: int = 0
) -> DrawsTransfer:
    """Craft examples on each of `draws` frozen draws by 20 steps of PGD, and show them to every draw.

    Args:
        model: a random network; its draws are `model.sample(seed)`, `model.sample(seed + 1)`, ...
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: what the adversary may do.
        draws: at least 2.
    """
    if not isinstance(model, RandomNetwork):
        raise InputError(f"only a random network has draws; {type(model).__name__} is none (adv_bnn, rse)")
    if draws < 2:
        raise InputError(f"transfer between draws needs at least 2, got {draws}")
    matrix = transfer_matrix([model.sample(seed + i) for i in range(draws)], x, y, read_threat(threat), seed=seed)
    return DrawsTransfer(matrix, transfer_summary(matrix))


@dataclass(frozen=True, eq=False, repr=False)
class DrawsCurve(Shown):
    """Accuracy of the ensemble against what the attacker spends.

    Attributes:
        numbers: of draws for each gradient, or of queries.
        accuracy: left at each of them.
        rise: (N, B) how much the mean cross-entropy of each input rises, where it was measured.
    """

    numbers: tuple[int, ...]
    accuracy: tuple[float, ...]
    rise: Tensor | None = None


@torch.no_grad()
def accuracy_by_draws(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat | str,
    *,
    samples: Sequence[int] = (1, 5, 10, 20, 100),
    steps: int = 20,
    average: Average = "gradients",
    seed: int = 0,
) -> DrawsCurve:
    """Run EOT-PGD with steps of a quarter of the budget at several numbers of draws, on all inputs.

    Accuracy that rises with the number of draws by more than chance (`eot_grid.weaker_with_more_draws`) is a sign of
    an attack that is too weak. Wrong inputs count as wrong.
    """
    threat = read_threat(threat)
    check_task(model, x, y, threat)
    if not samples or min(samples) < 1:
        raise InputError(f"give numbers of draws, each at least 1, got {list(samples)}")
    before = cross_entropy(mean_prediction(model, x, DRAWS, seed), y)
    right = mean_prediction(model, x, DRAWS, seed).argmax(1) == y
    accuracy, rises = [], []
    for number in samples:
        found = eot_pgd(
            model, x, y, threat, noise=noise_for(x, seed, None), samples=number, steps=steps, average=average
        )
        accuracy.append(float((right & ~found.success).double().mean()))
        rises.append(cross_entropy(mean_prediction(model, found.x_adv, DRAWS, seed + 1), y) - before)
    return DrawsCurve(tuple(samples), tuple(accuracy), torch.stack(rises))


@torch.no_grad()
def accuracy_by_queries(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat | str,
    *,
    queries: Sequence[int] = (100, 300, 1000, 3000),
    samples: int = 1,
    seed: int = 0,
) -> dict[str, DrawsCurve]:
    """Accuracy under Square and NES, by name, if the attacker may ask for so many draws of each input.

    Args:
        queries: budgets, each at least 102 * samples.
        samples: draws averaged in each look; 1 is the bare oracle.
    """
    threat = read_threat(threat)
    check_task(model, x, y, threat)
    if not queries or samples < 1:
        raise InputError(f"give at least one budget of queries and samples >= 1, got {list(queries)} and {samples}")
    right = mean_prediction(model, x, DRAWS, seed).argmax(1) == y
    curves = {}
    for name, attack in (("eot-square", eot_square), ("eot-nes", eot_nes)):
        left = []
        for budget in queries:
            found = attack(model, x, y, threat, noise=noise_for(x, seed, None), queries=budget, samples=samples)
            left.append(float((right & ~found.success).double().mean()))
        curves[name] = DrawsCurve(tuple(queries), tuple(left))
    return curves
