"""Pyramid adversarial training: what does a step cost, and what does it do for clean and shifted accuracy?

A tiny vision transformer and a small convolutional network are trained on a part of CIFAR-10 (or other data) by plain
training and by the methods below, with several seeds each.

- accuracy: clean accuracy and plain mean corruption error (15 corruptions, severities 1, 3 and 5) on test images.
- strength: accuracy on clean training images minus accuracy under the current perturbation, in the last epoch.
- time: seconds of training, as a ratio to plain training in the same run.

One thread. Every training is a cell; finished cells are left out.

    python benchmarks/pyramid.py
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, describe_markdown, describe_run, markdown_table, read_results, store_cell

import holdfast as hf
from holdfast.analyze.shift import mean_corruption_error, shifted_accuracy
from holdfast.data import Dataset

NAME = "pyramid"
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"name": "standard"},
    "upat": {"name": "upat"},
    "pat-1": {"name": "pat", "steps": 1},
    "pat-3": {"name": "pat", "steps": 3},
    "no pyramid": {"name": "upat", "levels": [1], "multipliers": [1.0]},
    "no clean loss": {"name": "upat", "clean_weight": 0.0},
    "schedule": {"name": "upat", "decay_start": 0},
}
MODELS: dict[str, dict[str, Any]] = {
    "vit": {"name": "vit-ti", "dim": 96, "depth": 4, "heads": 3, "mlp_dim": 192, "patch": 4, "pool": "mean"},
    "cnn": {"name": "small-star"},
}


def measure(method: str, model: str, seed: int, data: Dataset, epochs: int, radius: float) -> dict[str, Any]:
    """Train one network and look at its accuracies."""
    objective = METHODS[method] | ({} if method == "plain" else {"radius": radius})
    if method == "schedule":
        objective["decay_end"] = epochs
    recipe = {
        "epochs": epochs,
        "seed": seed,
        "batch_size": 128,
        "validation": 0.0,
        "model": MODELS[model],
        "objective": objective,
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "clip_norm": 1.0},
        "learning_rate": {"name": "cosine"},
        "augment": {"flip": True, "crop": 4},
    }
    with tempfile.TemporaryDirectory() as folder:
        result = hf.train(recipe, data=data, out=Path(folder) / "run", progress=False)
    found = shifted_accuracy(result.model, data.test.x, data.test.y, severities=(1, 3, 5))
    last = result.history[-1]
    return {
        "clean": found.clean / found.inputs,
        "corruption_error": mean_corruption_error(found.errors()),
        "strength": last.get("train_clean_accuracy", last["train_accuracy"]) - last["train_accuracy"],
        "seconds": sum(row["seconds"] for row in result.history),
    }


def to_markdown(record: dict[str, Any]) -> str:
    """One row for each training; times as ratios to plain training of the same model and seed."""
    cells = record["cells"]

    def ratio(key: str) -> str:
        plain = cells.get("plain, " + key.partition(", ")[2])
        return f"{cells[key]['seconds'] / plain['seconds']:.2f}" if plain else ""

    rows = [
        (key, f"{c['clean']:.3f}", f"{c['corruption_error']:.3f}", f"{c['strength']:.3f}", ratio(key))
        for key, c in sorted(cells.items())
    ]
    header = ("method, model, seed", "clean accuracy", "mean corruption error", "strength", "time, plain = 1")
    run = next(iter(cells.values()))["run"]
    parts = ["# Pyramid adversarial training", __doc__.split("\n\n    python")[0].partition("\n\n")[2]]
    return "\n\n".join([*parts, describe_markdown(run), markdown_table(header, rows)])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--train", type=int, default=5000, help="training images")
    parser.add_argument("--test", type=int, default=1000, help="test images")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--radius", type=float, default=8 / 255)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    whole = hf.load_data(args.data)
    data = Dataset(whole.name, whole.train[: args.train], whole.test[: args.test], whole.classes)
    for seed in range(args.seeds):
        for model in args.models:
            for method in METHODS:
                key = f"{method}, {model}, {seed}"
                if key not in read_results(NAME, args.out).get("cells", {}):
                    cell = measure(method, model, seed, data, args.epochs, args.radius)
                    cell["run"] = describe_run(("holdfast", "torch", "scipy"))
                    store_cell(NAME, "cells", key, cell, to_markdown=to_markdown, folder=args.out)


if __name__ == "__main__":
    main()
