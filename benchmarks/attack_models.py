"""The models that attacks are compared on: four small networks, sized to be trained on one core of a CPU.

Three are for MNIST at linf 0.3 (standard training, PGD adversarial training, TRADES), one is for CIFAR-10 at linf 8/255
(PGD adversarial training). They are no records of accuracy: they are there because attacks differ on robust models, and
differently after each kind of training.

    python benchmarks/attack_models.py --folder MODELS --data ROOT                     # about 25 minutes on one core
    python benchmarks/attack_models.py --folder MODELS --data ROOT --only mnist-pgd

ROOT holds what `hf.load_data("mnist", root=ROOT)` and `hf.load_data("cifar10", root=ROOT)` read. A model that is in the
folder already is not trained again.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import holdfast as hf
from holdfast.attacks.core.ascent import perturb
from holdfast.random import Noise

CHECKED = 1000  # test inputs for the accuracies that are kept with a model
WARM_UP = 0.4  # share of the training over which the budget grows from nothing; at once, training at 0.3 never starts
TRADES_WEIGHT = 6.0


@dataclass(frozen=True)
class Spec:
    """How one model is made: data, architecture, budget of the adversary, and training."""

    data: str
    eps: float
    objective: str
    epochs: int
    steps: int = 7
    lr: float = 2e-3
    batch: int = 128
    flip: bool = False
    architecture: str = "small-star"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def threat(self) -> hf.Linf:
        """What the adversary may do, in training and when the model is attacked."""
        return hf.Linf(self.eps)


_CIFAR = {
    "input_shape": (3, 32, 32),
    "layers": ((32, 4, 2, 1), (48, 4, 2, 1), (64, 3, 1, 1), (64, 3, 1, 1)),
    "hidden": (128,),
    "batch_norm": True,
}
SPECS = {
    "mnist-standard": Spec("mnist", 0.3, "standard", epochs=4),
    "mnist-pgd": Spec("mnist", 0.3, "pgd", epochs=7),
    "mnist-trades": Spec("mnist", 0.3, "trades", epochs=6),
    "cifar-pgd": Spec("cifar10", 8 / 255, "pgd", 7, 3, 4e-3, flip=True, architecture="cnn", options=_CIFAR),
}

Objective = Callable[[nn.Module, Tensor, Tensor, hf.Linf, Spec, Noise], Tensor]


def standard(model: nn.Module, x: Tensor, y: Tensor, threat: hf.Linf, spec: Spec, noise: Noise) -> Tensor:
    """Cross-entropy at the inputs themselves."""
    del threat, spec, noise
    return functional.cross_entropy(model(x), y)


def pgd(model: nn.Module, x: Tensor, y: Tensor, threat: hf.Linf, spec: Spec, noise: Noise) -> Tensor:
    """Cross-entropy at points that maximise it (Madry et al., 2018)."""
    return functional.cross_entropy(model(_worst(model, x, y, threat, spec, noise)), y)


def trades(model: nn.Module, x: Tensor, y: Tensor, threat: hf.Linf, spec: Spec, noise: Noise) -> Tensor:
    """Cross-entropy + weight * KL(p(x) || p(x_adv)) (Zhang et al., "Theoretically principled trade-off ...", 2019)."""
    with torch.no_grad():
        clean = model.eval()(x).softmax(1)

    def divergence(logits: Tensor, y: Tensor) -> Tensor:
        return functional.kl_div(logits.log_softmax(1), clean, reduction="none").sum(1)

    x_adv = _worst(model, x, y, threat, spec, noise, divergence)
    logits, logits_adv = model(x), model(x_adv)
    apart = functional.kl_div(logits_adv.log_softmax(1), logits.softmax(1), reduction="batchmean")
    return functional.cross_entropy(logits, y) + TRADES_WEIGHT * apart


def _worst(
    model: nn.Module, x: Tensor, y: Tensor, threat: hf.Linf, spec: Spec, noise: Noise, loss: Any = "ce"
) -> Tensor:
    """Projected gradient ascent in eval mode, so that batch norm does not average over the points on the way."""
    step_size = min(1.0, 2.5 / spec.steps) * threat.budget
    x_adv = perturb(model.eval(), x, y, threat, noise=noise, steps=spec.steps, step_size=step_size, loss=loss)
    model.train()
    return x_adv


OBJECTIVES: dict[str, Objective] = {"standard": standard, "pgd": pgd, "trades": trades}


def train(spec: Spec, data: hf.Dataset, seed: int = 0) -> nn.Module:
    """Adam with one cycle of the learning rate; the budget grows over the first part of the training."""
    generator = torch.Generator().manual_seed(seed)
    model = hf.make_model(spec.architecture, seed=seed, **spec.options).train()
    objective, x, y = OBJECTIVES[spec.objective], data.train.x, data.train.y
    total = spec.epochs * (len(y) // spec.batch)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, spec.lr, total_steps=total)
    for epoch in range(spec.epochs):
        order, started, losses = torch.randperm(len(y), generator=generator), time.process_time(), []
        for rows in order.split(spec.batch)[: total // spec.epochs]:
            step = schedule.last_epoch
            batch = x[rows]
            if spec.flip:
                mirrored = torch.rand(len(batch), 1, 1, 1, generator=generator) < 0.5
                batch = torch.where(mirrored, batch.flip(3), batch)
            threat = hf.Linf(spec.eps * min(1.0, (step + 1) / (WARM_UP * total)))
            optimizer.zero_grad()
            loss = objective(model, batch, y[rows], threat, spec, Noise(seed, rows, stream=step))
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        mean, spent = sum(losses) / len(losses), time.process_time() - started
        print(
            f"epoch {epoch + 1} of {spec.epochs}: loss {mean:.3f}, budget {threat.budget:.3f}, {spent:.0f} s",
            flush=True,
        )
    return model.eval()


def accuracies(model: nn.Module, spec: Spec, data: hf.Dataset) -> dict[str, float]:
    """Share of the first test inputs classified right, as they are and under PGD-20."""
    part = data.test[:CHECKED]
    by = hf.attack(model, part.x, part.y, spec.threat, "pgd", steps=20).by
    return {"clean": 1 - by.count("clean") / len(part), "pgd_20": by.count("") / len(part)}


def make(name: str, folder: Path, root: Path) -> None:
    """Trains and saves one model, unless the folder has it."""
    path, spec = folder / f"{name}.safetensors", SPECS[name]
    if path.exists():
        return
    data = hf.load_data(spec.data, root=root)
    started = time.process_time()
    model = train(spec, data)
    spent = time.process_time() - started
    figures = accuracies(model, spec, data)
    folder.mkdir(parents=True, exist_ok=True)
    hf.save_model(model, path, spec=asdict(spec), cpu_seconds=round(spent, 1), **figures)
    print(f"{name}: {figures['clean']:.1%} clean, {figures['pgd_20']:.1%} under PGD-20, {spent:.0f} s", flush=True)


def load(name: str, folder: Path) -> nn.Module:
    """A trained model, in eval mode."""
    return hf.load_model(folder / f"{name}.safetensors").eval()


def main() -> None:
    """Parses the command line and trains what is missing."""
    parser = argparse.ArgumentParser(description="Train the models of the comparison of attacks.")
    parser.add_argument("--folder", type=Path, required=True, help="where the models are kept")
    parser.add_argument("--data", type=Path, required=True, help="root of MNIST and CIFAR-10")
    parser.add_argument("--only", choices=SPECS, nargs="+", default=list(SPECS), help="(default: all)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.only:
        make(name, options.folder, options.data)


if __name__ == "__main__":
    main()
