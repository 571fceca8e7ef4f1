"""The loss landscape of adversarial training: does it get sharper with the budget, and what turns the adversary?

LeNets of width 1 (two padded 5x5 convolutions, two dense layers) are trained on mnist-mini with PGD at four budgets and
three seeds. On 1,000 training images:

- time: CPU seconds and Hessian-vector products for the top five eigenvalues.
- sharpness: top eigenvalue of the Hessian at frozen perturbations, as it is and divided by the loss of fresh weights;
  norm of the gradient of the loss under attack at the end of training.
- similarity: cosine of the perturbations for theta + a v and theta - a v, for the top eigenvector and a random vector.

One thread. Every training is a cell; finished cells are left out.

    python benchmarks/landscape.py
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    describe_markdown,
    describe_run,
    markdown_table,
    read_results,
    report_claim,
    store_cell,
    trained_model,
)
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.analyze.landscape.attacked import Adversary
from holdfast.analyze.landscape.spectrum import initial_loss, spectrum
from holdfast.analyze.landscape.surface import perturbation_similarity
from holdfast.analyze.landscape.weight_directions import random_direction

NAME = "landscape"
BUDGETS = (0.0, 0.1, 0.2, 0.3)
SEEDS = (0, 1, 2)
SIZES = (0.5, 1.0, 2.0)


def measure(eps: float, seed: int, epochs: int, cache: Path | None) -> dict[str, Any]:
    """Train one network and measure around its weights."""
    settings = {"epochs": epochs, "seed": seed, "model.name": "lenet-padded", "model.width": 1}
    if eps == 0:
        model = trained_model("mnist-mini-standard", cache, **settings)
    else:
        model = trained_model("mnist-mini-at", cache, threat=f"linf:{eps}", **settings)
    data = hf.load_data("mnist-mini").train
    x, y = data.x[:1000], data.y[:1000]
    adversary = Adversary(hf.Linf(eps), steps=10, seed=seed)
    x_adv = adversary.perturb(model, x, y)
    start = time.process_time()
    found = spectrum(model, x_adv, y, k=5, tolerance=1e-3, seed=seed)
    seconds = time.process_time() - start
    net = model.requires_grad_(True)
    gradient = torch.autograd.grad(cross_entropy(net(x_adv), y), list(net.parameters()))
    fresh = initial_loss(model, x, y, adversary, seed=seed)
    cell = {
        "accuracy": float((model(x_adv).argmax(1) == y).double().mean()),
        "loss": found.loss,
        "eigenvalues": found.values.tolist(),
        "normalised": found.normalised(fresh).tolist(),
        "gradient": float(torch.nn.utils.get_total_norm(gradient)),
        "products": found.products,
        "seconds": round(seconds, 2),
    }
    if eps > 0:
        directions = {"eigenvector": found.vectors[0], "random": random_direction(model, seed)}
        for name, v in directions.items():
            cell[name] = perturbation_similarity(model, x[:300], y[:300], adversary, v, SIZES).tolist()
    return cell


def to_markdown(record: dict[str, Any]) -> str:
    """One row for each training."""
    cells = record["cells"]
    rows = [
        (
            key,
            f"{c['accuracy']:.3f}",
            f"{c['loss']:.4f}",
            f"{c['eigenvalues'][0]:.3g}",
            f"{c['normalised'][0]:.3g}",
            f"{c['gradient']:.3g}",
            " / ".join(f"{v:.2f}" for v in c.get("eigenvector", ())),
            " / ".join(f"{v:.2f}" for v in c.get("random", ())),
            f"{c['seconds']:.1f} ({c['products']})",
        )
        for key, c in sorted(cells.items())
    ]
    header = (
        *("eps, seed", "accuracy", "loss", "top eigenvalue", "normalised", "gradient"),
        *(f"cosine, eigenvector, a = {SIZES}", "cosine, random", "CPU s (products)"),
    )
    run = next(iter(cells.values()))["run"]
    parts = ["# Loss landscape under attack", __doc__.split("\n\n    python")[0].partition("\n\n")[2]]
    return "\n\n".join([*parts, describe_markdown(run), markdown_table(header, rows)])


def report(cells: dict[str, Any], seeds: tuple[int, ...]) -> None:
    """Print the verdicts: a claim is confirmed if it holds for every seed, refuted if for none."""

    def verdict(holds: list[bool]) -> str:
        return "confirmed" if all(holds) else "not decided at this size" if any(holds) else "refuted"

    def of(name: str, seed: int) -> list[float]:
        values = [cells[f"{eps}, {seed}"][name] for eps in BUDGETS]
        return [value[0] if isinstance(value, list) else value for value in values]

    for claim, name in (("sharper-with-budget", "normalised"), ("gradients-grow-with-budget", "gradient")):
        rising = [of(name, seed) == sorted(of(name, seed)) for seed in seeds]
        text = "; ".join(", ".join(f"{v:.3g}" for v in of(name, seed)) for seed in seeds)
        report_claim(claim, verdict(rising), f"{name} at {BUDGETS}, by seed: {text}")
    pairs = [cells[f"{eps}, {seed}"] for eps in BUDGETS[1:] for seed in seeds]
    turns = [c["eigenvector"][-1] < c["random"][-1] - 0.05 for c in pairs]
    text = "; ".join(f"{c['eigenvector'][-1]:.2f} against {c['random'][-1]:.2f}" for c in pairs)
    report_claim("eigenvectors-turn-the-adversary", verdict(turns), f"cosine at a = {SIZES[-1]}: {text}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--cache", type=Path, help="folder of trained models")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in SEEDS:
        for eps in BUDGETS:
            if f"{eps}, {seed}" not in read_results(NAME, args.out).get("cells", {}):
                cell = measure(eps, seed, args.epochs, args.cache)
                cell["run"] = describe_run(("holdfast", "torch", "scipy"))
                store_cell(NAME, "cells", f"{eps}, {seed}", cell, to_markdown=to_markdown, folder=args.out)
    report(read_results(NAME, args.out)["cells"], SEEDS)


if __name__ == "__main__":
    main()
