"""The loss landscape of adversarial training: does it get sharper with the budget, and what turns the adversary?

LeNets of width 1 (two padded 5x5 convolutions, two dense layers) are trained on mnist-mini with PGD at four budgets and
three seeds. On 1,000 training images:

- time: CPU seconds and Hessian-vector products for the top five eigenvalues.
- sharpness: top eigenvalue of the Hessian at frozen perturbations, as it is and divided by the loss of fresh weights;
  norm of the gradient of the loss under attack at the end of training.
- paths: the loss under attack along a Bezier curve between two seeds, bent for a low mean loss; its highest point less
  the higher end.
- similarity: cosine of the perturbations for theta + a v and theta - a v, for the top eigenvector and a random vector.

One thread. Every training is a cell; finished cells are left out.

    python benchmarks/landscape.py
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    Judgement,
    describe_markdown,
    describe_run,
    markdown_table,
    read_results,
    report_claims,
    store_cell,
    trained_model,
    verdict_of,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.analyze.connectivity import barrier, connect, path_losses
from holdfast.analyze.landscape.attacked import Adversary
from holdfast.analyze.landscape.spectrum import initial_loss, spectrum
from holdfast.analyze.landscape.surface import perturbation_similarity
from holdfast.analyze.landscape.weight_directions import random_direction

NAME = "landscape"
BUDGETS = (0.0, 0.1, 0.2, 0.3)
SEEDS = (0, 1, 2)
PAIRS = ((0, 1), (1, 2), (0, 2))
SIZES = (0.5, 1.0, 2.0)
LEARNED = BUDGETS[:3]
"""Two of three networks do not train at 0.3."""


def measure(eps: float, seed: int, epochs: int, cache: Path | None) -> dict[str, Any]:
    """Train one network and measure around its weights."""
    model = network(eps, seed, epochs, cache)
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


def network(eps: float, seed: int, epochs: int, cache: Path | None) -> nn.Module:
    """The network of one budget and seed, trained on first use."""
    settings = {"epochs": epochs, "seed": seed, "model.name": "lenet-padded", "model.width": 1}
    if eps == 0:
        return trained_model("mnist-mini-standard", cache, **settings)
    return trained_model("mnist-mini-at", cache, threat=f"linf:{eps}", **settings)


def measure_path(eps: float, seeds: tuple[int, int], epochs: int, cache: Path | None) -> dict[str, Any]:
    """Bend a curve between two networks and measure the loss under attack along it."""
    data = hf.load_data("mnist-mini").train
    x, y = data.x[:500], data.y[:500]
    adversary = Adversary(hf.Linf(eps), steps=5, seed=seeds[0])

    def attacked(net: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        return cross_entropy(net(adversary.perturb(net, a, b)), b)

    ends = [network(eps, seed, epochs, cache) for seed in seeds]
    curve = connect(*ends, attacked, x, y, steps=150, lr=1e-2, batch_size=64, seed=seeds[0])
    losses = path_losses(curve, {"loss": attacked}, x, y, ts=[i / 10 for i in range(11)], chunk=500)["loss"]
    return {"losses": losses.tolist(), "barrier": barrier(losses), "highest": float(losses.max())}


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
    parts += [describe_markdown(run), markdown_table(header, rows)]
    if "paths" in record:
        along = [(key, f"{c['barrier']:.3f}", *(f"{v:.2f}" for v in c["losses"])) for key, c in record["paths"].items()]
        names = ("eps, seeds", "barrier", *(f"t = {i / 10:g}" for i in range(11)))
        parts += ["## Paths between two seeds", markdown_table(names, sorted(along))]
    return "\n\n".join(parts)


def judge(record: dict[str, Any]) -> Iterator[Judgement]:
    """Verdicts on sharpness, gradients, similarity and paths, from the budgets at which every network learns."""
    cells, paths = record.get("cells", {}), record.get("paths", {})
    if any(f"{eps}, {seed}" not in cells for eps in LEARNED for seed in SEEDS):
        return

    def of(name: str, seed: int) -> list[float]:
        values = [cells[f"{eps}, {seed}"][name] for eps in LEARNED]
        return [value[0] if isinstance(value, list) else value for value in values]

    def by_seed(name: str) -> str:
        each = "; ".join(", ".join(f"{v:.3g}" for v in of(name, seed)) for seed in SEEDS)
        return f"{name} at {LEARNED}, by seed: {each}"

    sharp, loss = ([of(name, seed) for seed in SEEDS] for name in ("normalised", "loss"))
    yield "landscape-sharper-under-attack", verdict_of([min(v[1:]) > v[0] for v in sharp]), by_seed("normalised")
    # Networks that fit much less at the larger budget do not compare minima with minima.
    fits = all(v[2] < 1.5 * v[1] for v in loss)
    rises = verdict_of([v == sorted(v) for v in sharp])
    yield "landscape-sharper-with-budget", rises if fits else "not decided at this size", by_seed("normalised")
    grows = [of("gradient", seed) == sorted(of("gradient", seed)) for seed in SEEDS]
    yield "landscape-final-gradients", verdict_of(grows), by_seed("gradient")
    pairs = [cells[f"{eps}, {seed}"] for eps in LEARNED[1:] for seed in SEEDS]
    text = "; ".join(f"{c['eigenvector'][0]:.2f} against {c['random'][0]:.2f}" for c in pairs)
    text = f"cosine of the perturbations at +-{SIZES[0]}, eigenvector against random: {text}"
    turns = [c["eigenvector"][0] < c["random"][0] - 0.05 for c in pairs]
    yield "landscape-eigenvector-turns-adversary", verdict_of(turns), text
    yield "landscape-random-keeps-adversary", verdict_of([c["random"][0] > 0.9 for c in pairs]), text
    names = [[f"{eps}, {first} and {second}" for eps in LEARNED] for first, second in PAIRS]
    if all(name in paths for row in names for name in row):
        rise = [[paths[name]["barrier"] for name in row] for row in names]
        text = "; ".join(", ".join(f"{v:.3f}" for v in values) for values in rise)
        text = f"barrier at {LEARNED}, by pair of seeds: {text}"
        yield "landscape-paths-less-flat", verdict_of([min(v[1:]) > v[0] for v in rise]), text


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
    for pair in PAIRS:
        for eps in BUDGETS:
            key = f"{eps}, {pair[0]} and {pair[1]}"
            if key not in read_results(NAME, args.out).get("paths", {}):
                cell = measure_path(eps, pair, args.epochs, args.cache)
                cell["run"] = describe_run(("holdfast", "torch", "scipy"))
                store_cell(NAME, "paths", key, cell, to_markdown=to_markdown, folder=args.out)
    report_claims(judge(read_results(NAME, args.out)))


if __name__ == "__main__":
    main()
