"""Pyramid adversarial training: what does a step cost, and what does it do for clean and shifted accuracy?

A tiny vision transformer and a small convolutional network are trained on a part of CIFAR-10 by plain
training and by several forms of pyramid adversarial training, with several seeds each: 500 images, which the networks
come to know by heart, so that regularisation has something to do. The radius is 0.5/255 unless said otherwise: it was
chosen on a seed and on test images of its own; 8/255, as published for ImageNet, is times 31 for the sum of the
multipliers most of the pixel range, and networks of this size hardly learn. The recorded images went through JPEG.

- accuracy: clean accuracy on 1,000 test images, and plain mean corruption error on 150 of them (15 corruptions,
  severities 1, 3 and 5).
- strength: accuracy on clean training images minus accuracy under the current perturbation, in the last epoch.
- sharpness: rise of the mean loss on test images when the weights move by 0.2 of each filter's norm in a random
  direction, both ways along each of five directions.
- cost: CPU time of a training step over that of a plain step, each method in turn in each of many rounds: the median
  (and the quartiles) of the ratio, without and with the time that crops and flips take, which is the same for all.
  Passes are counted at the network, in batches.

One thread. Every training is a cell; finished cells are left out. A number in brackets is the smallest and the largest
of the seeds.

    python benchmarks/pyramid.py --data cifar10.npz
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, describe_markdown, describe_run, markdown_table, read_results, report_claim, store_cell
from torch import Tensor, nn

import holdfast as hf
from holdfast.analyze.landscape.attacked import mean_loss
from holdfast.analyze.landscape.weight_directions import filter_direction, moved
from holdfast.analyze.shift import mean_corruption_error, shifted_accuracy
from holdfast.data import Dataset
from holdfast.registry import get
from holdfast.training.loop import make_batch, shuffled
from holdfast.training.optimizer import gradient_norm, make_optimizer
from holdfast.training.recipe.reading import load_recipe
from holdfast.training.setup import prepare
from holdfast.training.state import RunState
from holdfast.training.workers import Workers, make_step
from holdfast.utils.allocator import reuse_blocks

NAME = "pyramid"
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"name": "standard"},
    "upat": {"name": "upat"},
    "pat-1": {"name": "pat", "steps": 1},
    "pat-3": {"name": "pat", "steps": 3},
    "upat, published radius": {"name": "upat", "radius": 8 / 255},
    "no pyramid": {"name": "upat", "levels": [1], "multipliers": [1.0]},
    "no clean loss": {"name": "upat", "clean_weight": 0.0},
    "schedule": {"name": "upat", "decay_start": 0},
}
MODELS: dict[str, dict[str, Any]] = {
    "vit": {"name": "vit-ti", "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128, "patch": 8, "pool": "mean"},
    "cnn": {"name": "small-star"},
}


COSTS: dict[str, dict[str, Any]] = {"plain": METHODS["plain"], "upat": METHODS["upat"]}
PUBLISHED = {"plain": 1, "upat": 2.09, "pat-1": 2.87, "pat-2": 3.88, "pat-3": 4.87, "pat-4": 5.94, "pat-5": 7.00}
BARS = {"plain": 1, "upat": 2.1} | {f"pat-{k}": round(k + 2.2, 1) for k in range(1, 6)}
COSTS |= {f"pat-{k}": {"name": "pat", "steps": k} for k in range(1, 6)}
MOVE = 0.2  # of the norm of each filter
DIRECTIONS = 5


def recipe(objective: dict[str, Any], model: str, seed: int, epochs: int, batch: int = 50) -> dict[str, Any]:
    """One training of a tiny network."""
    return {
        "epochs": epochs,
        "seed": seed,
        "batch_size": batch,
        "validation": 0.0,
        "model": MODELS[model],
        "objective": objective,
        "optimizer": {"name": "adamw", "lr": 2e-3, "weight_decay": 0.1, "clip_norm": 1.0},
        "learning_rate": {"name": "cosine"},
        "augment": {"flip": True},
    }


def measure(
    method: str, model: str, seed: int, data: Dataset, *, epochs: int, radius: float, shifted: int
) -> dict[str, Any]:
    """Train one network and look at its accuracies and its sharpness; the last two on `shifted` test images."""
    start = time.process_time()
    objective = ({} if method == "plain" else {"radius": radius}) | METHODS[method]
    if method == "schedule":
        objective["decay_end"] = epochs
    result = hf.train(recipe(objective, model, seed, epochs), data=data, progress=False)
    some, last = data.test[:shifted], result.history[-1]
    found = shifted_accuracy(result.model, some.x, some.y, severities=(1, 3, 5))
    with torch.no_grad():
        right = sum(
            int((result.model(x).argmax(1) == y).sum())
            for x, y in zip(data.test.x.split(250), data.test.y.split(250), strict=True)
        )
    return {
        "clean": right / len(data.test),
        "corruption_error": mean_corruption_error(found.errors()),
        "strength": last.get("train_clean_accuracy", last["train_accuracy"]) - last["train_accuracy"],
        "train": last.get("train_clean_accuracy", last["train_accuracy"]),
        "sharpness": sharpness(result.model, some.x, some.y),
        "cpu_seconds": time.process_time() - start,
    }


def sharpness(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Mean rise of the loss under moves of the weights that are as long as `MOVE` of each filter."""
    with torch.no_grad():
        start = mean_loss(model, x, y)
        steps = [sign * MOVE * filter_direction(model, seed) for seed in range(DIRECTIONS) for sign in (1, -1)]
        return sum(mean_loss(moved(model, step), x, y) - start for step in steps) / len(steps)


class Counted(nn.Module):
    """A network that counts the images that pass through it, forward and backward."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.forwards, self.backwards = body, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += len(x)
        out: Tensor = self.body(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: setattr(self, "backwards", self.backwards + len(gradient)))
        return out


def stepper(recipe: dict[str, Any], data: Dataset) -> Callable[[int], tuple[float, float]]:
    """The steps of a run one by one, as the training loop takes them: CPU seconds for the batch, and for the step."""
    task = prepare(load_recipe(recipe, {}), None, data, None)
    model, plan = task.model.train(), task.recipe
    run = RunState(model, make_optimizer(plan.optimizer, model), None, data=0)
    step = make_step(model, get("train", plan.objective.name).function, plan.objective.options, Workers())
    batches = [batch for batch in shuffled(task, 0) if len(batch) == plan.batch_size]

    def take(i: int) -> tuple[float, float]:
        start = time.process_time()
        x, y, context = make_batch(task, run, batches[i % len(batches)], len(batches))
        made = time.process_time()
        run.optimizer.zero_grad()
        loss, _ = step(x, y, context)
        loss.backward()
        gradient_norm(model, plan.optimizer.clip_norm)
        run.optimizer.step()
        return made - start, time.process_time() - made

    return take


def passes(objective: dict[str, Any], recipe: dict[str, Any], data: Dataset) -> tuple[float, float]:
    """Forward and backward passes of one step, in batches."""
    task = prepare(load_recipe(recipe | {"objective": objective}, {}), None, data, None)
    counted, options = Counted(task.model.train()), task.recipe.objective.options
    run = RunState(task.model, make_optimizer(task.recipe.optimizer, task.model), None, data=0)
    x, y, context = make_batch(task, run, shuffled(task, 0)[0], 1)
    get("train", objective["name"]).function(counted, x, y, context, **options)[0].backward()
    return counted.forwards / len(x), counted.backwards / len(x)


def cost(model: str, data: Dataset, radius: float, rounds: int) -> dict[str, Any]:
    """CPU time and passes of a step of each method; in each round all methods in turn, the first five not counted."""
    reuse_blocks()
    shape = recipe(METHODS["plain"], model, 0, 1, batch=128)
    objectives = {m: o if m == "plain" else o | {"radius": radius} for m, o in COSTS.items()}
    takes = {method: stepper(shape | {"objective": objective}, data) for method, objective in objectives.items()}
    times = [{method: take(i) for method, take in takes.items()} for i in range(rounds + 5)][5:]
    cell: dict[str, Any] = {"rounds": rounds}
    for method, objective in objectives.items():
        forwards, backwards = passes(objective, shape, data)
        ratios = sorted(row[method][1] / row["plain"][1] for row in times)
        cell[method] = {
            "milliseconds": 1e3 * statistics.median(row[method][1] for row in times),
            "ratio": statistics.median(ratios),
            "quartiles": [ratios[rounds // 4], ratios[-rounds // 4]],
            "with batch": statistics.median(sum(row[method]) / sum(row["plain"]) for row in times),
            "passes": [forwards, backwards],
        }
    return cell


def to_markdown(record: dict[str, Any]) -> str:
    """Costs as ratios to plain training, and one row for each method and model: the mean over its seeds."""
    parts = ["# Pyramid adversarial training", __doc__.split("\n\n    python")[0].partition("\n\n")[2]]
    for model, cell in record.get("cost", {}).items():
        rows = [
            (
                *(name, f"{cell[name]['milliseconds']:.1f}", "{:g} + {:g}".format(*cell[name]["passes"])),
                "{:.2f} ({:.2f} to {:.2f})".format(cell[name]["ratio"], *cell[name]["quartiles"]),
                *(f"{cell[name]['with batch']:.2f}", PUBLISHED[name], bar),
            )
            for name, bar in BARS.items()
        ]
        header = (
            "method",
            "CPU ms a step",
            "passes forward + backward",
            "plain = 1",
            "with the batch",
            "published",
            "bar",
        )
        parts += [f"## cost, {model}", markdown_table(header, rows), describe_markdown(cell["run"])]
    for model in MODELS:
        rows = []
        for method in METHODS:
            cells = [c for key, c in record.get("cells", {}).items() if key.rpartition(", ")[0] == f"{method}, {model}"]
            columns = ("clean", "corruption_error", "strength", "sharpness")
            if cells:
                rows.append((method, len(cells), *(spread([c[key] for c in cells]) for key in columns)))
        if rows:
            header = ("method", "seeds", "clean accuracy", "mean corruption error", "strength", "sharpness")
            run = [c["run"] for key, c in record["cells"].items() if f", {model}, " in key][-1]
            parts += [f"## accuracy, {model}", markdown_table(header, rows), describe_markdown(run)]
    return "\n\n".join(parts)


def verdict(holds: list[bool], fails: list[bool]) -> str:
    """Confirmed if a claim holds for every network and seed, refuted if it fails for every one."""
    return "confirmed" if all(holds) else "refuted" if all(fails) else "not decided at this size"


# Claim, method, figure, the method that it is compared with, and the published sign of the difference.
SIGNS = (
    ("pyramid-upat-clean", "upat", "clean", "plain", 1),
    ("pyramid-pat-1-clean", "pat-1", "clean", "plain", 1),
    ("pyramid-pat-3-clean", "pat-3", "clean", "plain", 1),
    ("pyramid-upat-shifted", "upat", "corruption_error", "plain", -1),
    ("pyramid-pat-shifted", "pat-3", "corruption_error", "plain", -1),
    ("pyramid-no-pyramid", "no pyramid", "clean", "plain", -1),
    ("pyramid-no-clean-loss", "no clean loss", "clean", "plain", -1),
    ("pyramid-schedule", "schedule", "clean", "upat", 1),
    ("pyramid-strength", "pat-3", "strength", "upat", 1),
    ("pyramid-pat-sharper", "pat-3", "sharpness", "plain", 1),
)


def report(cells: dict[str, Any], seeds: int) -> None:
    """Print the verdicts on accuracy, strength and sharpness."""

    def changes(method: str, base: str, figure: str) -> dict[str, list[float]]:
        def of(name: str, model: str, seed: int) -> float:
            return float(cells[f"{name}, {model}, {seed}"][figure])

        return {m: [of(method, m, seed) - of(base, m, seed) for seed in range(seeds)] for m in MODELS}

    def text(found: dict[str, list[float]]) -> str:
        return "; ".join(f"{model} " + ", ".join(f"{v:+.3f}" for v in values) for model, values in found.items())

    for claim, method, figure, base, sign in SIGNS:
        found = changes(method, base, figure)
        signed = [sign * v for values in found.values() for v in values]
        what = f"{figure.replace('_', ' ')} of '{method}' minus that of '{base}', by seed: {text(found)}"
        report_claim(claim, verdict([v > 0 for v in signed], [v < 0 for v in signed]), what)
    pat, upat = (changes(method, "plain", "sharpness") for method in ("pat-3", "upat"))
    closer = [abs(u) < abs(p) for model in MODELS for u, p in zip(upat[model], pat[model], strict=True)]
    result = f"change of sharpness by seed: UPAT {text(upat)}; PAT-3 {text(pat)}"
    report_claim("pyramid-upat-as-sharp", verdict(closer, [not c for c in closer]), result)


def report_cost(costs: dict[str, Any]) -> None:
    """Print the verdicts on the cost of a step."""
    for claim, methods in (("pyramid-upat-cost", ["upat"]), ("pyramid-pat-cost", [f"pat-{k}" for k in range(1, 6)])):
        holds = [costs[model][method]["ratio"] <= BARS[method] for model in MODELS for method in methods]
        ratios = {model: ", ".join(f"{costs[model][method]['ratio']:.2f}" for method in methods) for model in MODELS}
        result = "; ".join(f"{model} {values}" for model, values in ratios.items())
        report_claim(claim, verdict(holds, [not h for h in holds]), f"times the cost of a plain step: {result}")


def spread(values: list[float]) -> str:
    """Mean, smallest and largest."""
    return f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--train", type=int, default=500, help="training images")
    parser.add_argument("--test", type=int, default=1000, help="test images")
    parser.add_argument("--shifted", type=int, default=150, help="of them, images to corrupt")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--radius", type=float, default=0.5 / 255)
    parser.add_argument("--rounds", type=int, default=60, help="steps of each method for the cost")
    parser.add_argument("--parts", nargs="+", choices=("cost", "cells"), default=["cost", "cells"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    whole = hf.load_data(args.data)
    data = Dataset(whole.name, whole.train[: args.train], whole.test[: args.test], whole.classes)
    for model in args.models if "cost" in args.parts else ():
        if model not in read_results(NAME, args.out).get("cost", {}):
            run = {"run": describe_run(("holdfast", "torch"))}
            store_cell(
                NAME,
                "cost",
                model,
                cost(model, data, args.radius, args.rounds) | run,
                to_markdown=to_markdown,
                folder=args.out,
            )
    for seed in range(args.seeds if "cells" in args.parts else 0):
        for model in args.models:
            for method in METHODS:
                key = f"{method}, {model}, {seed}"
                if key not in read_results(NAME, args.out).get("cells", {}):
                    how = {"epochs": args.epochs, "radius": args.radius, "shifted": args.shifted}
                    cell = measure(method, model, seed, data, **how)
                    cell["run"] = describe_run(("holdfast", "torch", "scipy"))
                    store_cell(NAME, "cells", key, cell, to_markdown=to_markdown, folder=args.out)
    record = read_results(NAME, args.out)
    if set(MODELS) <= record.get("cost", {}).keys():
        report_cost(record["cost"])
    if all(f"{m}, {n}, {s}" in record.get("cells", {}) for m in METHODS for n in MODELS for s in range(args.seeds)):
        report(record["cells"], args.seeds)


if __name__ == "__main__":
    main()
