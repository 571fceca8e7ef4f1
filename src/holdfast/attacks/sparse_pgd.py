"""PGD-L0: gradient ascent on a few pixels, which may be changed at will."""

import torch
from torch import Tensor

from holdfast.attacks.core.ascent import climb
from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.losses import Loss, get_loss
from holdfast.attacks.core.stages import run_restarts
from holdfast.errors import InputError, either
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.threats import Sparse
from holdfast.utils.options import Count, NotNegative


def project_sparse(threat: Sparse, x_new: Tensor, x: Tensor) -> Tensor:
    """Euclidean projection on the inputs in range that differ from x in k pixels, for `x_new` far out of range.

    With d = x_new - x and c its part in range, pixel i is worth |d_i|^2 - |d_i - c_i|^2: keep the best k.
    """
    inside = threat.clip(x_new)
    worth = (x_new - x).square() - (x_new - inside).square()
    return threat.keep(inside, x, threat.per_pixel(worth))


@Attack(
    "sparse-pgd",
    summary="gradient steps projected on the k pixels that matter most (PGD-L0)",
    threats=("sparse",),
    reference="Croce and Hein, Sparse and imperceivable adversarial attacks, 2019",
)
@on_task
def sparse_pgd(
    task: Task, *, steps: Count = 20, step_size: NotNegative = 2.0, restarts: Count = 10, loss: str | Loss = "ce"
) -> AttackResult:
    """PGD-L0: x_adv <- project(x_adv + step_size * gradient / mean|gradient|) on the inputs with k pixels changed.

    A pixel of an image counts once, whatever its number of channels. The step is dense; the projection keeps the k
    pixels with the most to gain. The first run starts at x, where the gradient ranks all pixels alike, the others at
    random points of the set.

    Args:
        steps: gradient steps of each run.
        step_size: mean step over all values, as a share of the valid range.
        restarts: runs in all; the first one included.
        loss: "ce", "margin", "dlr" or a function (logits, y) -> (B,) to maximise.

    Departs from the paper: its step (120000/255 over the sum of |gradient|, for the 3072 values of CIFAR-10) is 0.15
    here, and settles on the first pixels that it picks. Steps past the range let pixels be exchanged to the end.
    """
    model, x, y, threat, noise = task
    if not isinstance(threat, Sparse):
        raise InputError(
            f"'sparse-pgd' changes a number of pixels, got the threat '{threat}'; use "
            f"{either('hf.Sparse(k)', '--threat sparse:10')}"
        )
    size = step_size * (threat.high - threat.low)

    def move(x_adv: Tensor, gradient: Tensor, x: Tensor) -> Tensor:
        mean = gradient.abs().flatten(1).mean(1).clamp(min=torch.finfo(x.dtype).tiny)
        return project_sparse(threat, x_adv + size * gradient / mean.view(-1, *[1] * (x.ndim - 1)), x)

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        x_start = x if restart == 0 else threat.random_start(x, noise.fork(restart))
        return climb(model, x, y, x_start, move, loss=get_loss(loss), steps=steps, name="sparse-pgd")

    return run_restarts(x, y, noise, restarts, run)
