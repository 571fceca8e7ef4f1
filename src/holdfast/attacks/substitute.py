"""Substitute models: examples made on a stand-in that has learned the model's decisions, and shown to the model."""

from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.attacks.core.ascent import BALLS, perturb
from holdfast.attacks.core.auto_pgd import auto_pgd
from holdfast.attacks.core.bpda import Part, decisive_part
from holdfast.attacks.core.chance import seeded
from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.losses import LOSSES
from holdfast.attacks.core.stages import run_restarts
from holdfast.attacks.core.survivors import broken_by
from holdfast.attacks.patch_pgd import patch_pgd
from holdfast.attacks.sparse_pgd import sparse_pgd
from holdfast.checks import check_inputs
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.threats import Placed, Sparse, Threat
from holdfast.utils import clock
from holdfast.utils.options import Count, Whole

LOOKED_INTO = 64
"""Inputs that show whether a part of the model will do as the stand-in."""
BATCH, RATE = 100, 2e-3
"""Batch size and learning rate of a stand-in that is trained, by Adam."""
Craft = Callable[..., tuple[Tensor, Tensor]]


@Attack(
    "substitute",
    summary="examples for a stand-in that has learned the model's decisions: needs no gradient",
    threats=(*BALLS, "patch", "patch-shape", "sparse"),
    reference="Papernot et al., Practical black-box attacks against machine learning, 2017",
    gradients="none",
)
@on_task
def substitute(
    task: Task,
    *,
    data: Tensor | None = None,
    rounds: Count = 4,
    steps: Count = 20,
    epochs: Count = 5,
    copies: Whole = 1,
) -> AttackResult:
    """Run gradient ascent on a stand-in; an example counts if the model misclassifies it. Only decisions are used.

    The stand-in is a small network that learns the decisions of the model on `data` and on noisy copies of it. In each
    round after the first it also learns the decisions on examples that were made for `data` on the stand-in itself,
    where the two differ most. If the answer of the model has no useful gradient, and a part of the model decides the
    same and has one (`bpda.decisive_part`), this part is the stand-in, and nothing needs to be learned.

    Use it where gradients are missing or misleading. Not all examples of a learned stand-in carry over: an
    attack with true gradients leaves less accuracy.

    Args:
        data: inputs to learn from, shape (N, ...), without labels; the more and the closer to x, the better. If None,
            the inputs under attack: then the answer for one input depends on the others.
        rounds: rounds of learning and attacking.
        steps: gradient steps of each attack.
        epochs: passes over everything learned so far, in each round.
        copies: noisy copies of each input of `data`, anywhere between the input and uniform noise.

    `queries` counts the answers asked for one input of `data` and for the input itself. `gradients` is 0: the gradients
    are the stand-in's. Departs from the paper: the data grow by examples within the threat, not by one short step along
    the sign of the Jacobian.
    """
    model, x, y, threat, noise = task
    data = x if data is None else _checked(data, x, threat)
    logits, part = decisive_part(model, data[:LOOKED_INTO])
    craft: Craft = partial(_craft, threat=threat, steps=steps)
    student = None if part else Student(model, data, logits, threat, seed=noise.seed, copies=copies)

    def attempt(number: int, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        asked = torch.ones_like(y) + (number == 0)
        if student is not None:
            asked += student.learn(craft, number) + (copies if number == 0 else 0)
            student.fit(epochs, number)
        stand_in = student.net if student else part
        x_adv, passes = craft(stand_in, x, y, noise=noise.fork(number), number=number)
        wrong = model(x_adv).argmax(1) != y
        by = broken_by("substitute", wrong)
        return AttackResult(x_adv, wrong, by, torch.zeros_like(y), asked + passes * (part is not None))

    return run_restarts(x, y, noise, rounds, attempt)


def _checked(data: Tensor, x: Tensor, threat: Threat) -> Tensor:
    check_inputs(data, threat.low, threat.high)
    if data.shape[1:] != x.shape[1:]:
        raise InputError(f"data must hold inputs of shape {tuple(x.shape[1:])} as x does, got {tuple(data.shape[1:])}")
    return data.detach().to(x)


def _craft(
    net: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, steps: int, noise: Noise, number: int
) -> tuple[Tensor, Tensor]:
    """Points of the threat set that `net` gets wrong, shape of x, and how many passes each took, (B,).

    Rounds of even number raise the cross-entropy, others the margin. On a learned network all steps are taken: points
    far beyond its boundary carry over better. A part of the model has the model's own boundary.
    """
    loss = "margin" if number % 2 else "ce"
    if isinstance(threat, Placed):
        found = patch_pgd(net, x, y, threat, noise=noise, steps=steps, step_size=0.1, restarts=8, probes=64, loss=loss)
        return found.x_adv, found.queries
    if isinstance(threat, Sparse):
        found = sparse_pgd(net, x, y, threat, noise=noise, steps=steps, restarts=2, loss=loss)
        return found.x_adv, found.queries
    if isinstance(net, Part):
        start = threat.random_start(x, noise)
        run = auto_pgd(net, x, y, threat, start, loss=LOSSES[loss], steps=steps, name="substitute")
        return run.x_adv, run.queries
    size = 2.5 * threat.budget / steps
    x_adv = perturb(net, x, y, threat, noise=noise, steps=steps, step_size=size, loss=loss, random_start=number > 0)
    return x_adv, torch.full_like(y, steps)


class Student:
    """A small network that learns the decisions of a model.

    Args:
        model: from (B, ...) to logits (B, K).
        data: inputs to learn from, shape (N, ...).
        logits: answers of the model to the first of them, shape (M, K).
        threat: gives the valid range.
        seed: fixes weights, copies and the order of learning.
        copies: noisy copies of each input.
    """

    def __init__(
        self, model: nn.Module, data: Tensor, logits: Tensor, threat: Threat, *, seed: int, copies: int
    ) -> None:
        self.model, self.data, self.seed = model, data, seed
        shape = (len(data), *[1] * (data.ndim - 1))
        with seeded(seed, data.device):
            self.net = small_network(tuple(data.shape[1:]), logits.shape[1]).to(data)
            noisy = []
            for _ in range(copies):
                image = threat.low + (threat.high - threat.low) * torch.rand_like(data)
                noisy.append(data.lerp(image, torch.rand(shape).to(data)))
        self.own = torch.cat([logits.argmax(1), *self._decide(data[len(logits) :])])
        self.x = torch.cat([data, *noisy])
        self.label = torch.cat([self.own, *(label for part in noisy for label in self._decide(part))])
        self.optimizer = torch.optim.Adam(self.net.parameters(), RATE)

    def _decide(self, x: Tensor) -> list[Tensor]:
        return [self.model(part).argmax(1) for part in x.split(BATCH) if len(part)]

    def learn(self, craft: Craft, number: int) -> int:
        """Add examples for the data on the network as it is, except in round 0; return the answers asked for each."""
        if number == 0:
            return 0
        noise = Noise.for_batch(self.seed, len(self.data), self.data.device).fork(number)
        x_adv, _ = craft(self.net, self.data, self.own, noise=noise, number=number)
        self.x = torch.cat([self.x, x_adv])
        self.label = torch.cat([self.label, *self._decide(x_adv)])
        return 1

    @torch.enable_grad()
    def fit(self, epochs: int, number: int) -> None:
        """Train on all that is known."""
        with seeded(self.seed + number, self.data.device):
            for _ in range(epochs):
                if clock.over():
                    return
                for rows in torch.randperm(len(self.x)).to(self.x.device).split(BATCH):
                    self.optimizer.zero_grad()
                    cross_entropy(self.net(self.x[rows]), self.label[rows]).backward()
                    self.optimizer.step()


def small_network(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """From inputs (B, *shape) to logits: two convolutions first for images of at least eight pixels a side."""
    layers: list[nn.Module] = []
    size = prod(shape)
    if len(shape) == 3 and min(shape[1:]) >= 8:
        layers += [nn.Conv2d(shape[0], 16, 4, stride=2, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(16, 32, 4, stride=2, padding=1), nn.ReLU()]
        size = 32 * (shape[1] // 4) * (shape[2] // 4)
    layers += [nn.Flatten(), nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, classes)]
    return nn.Sequential(*layers).eval()
