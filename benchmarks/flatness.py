"""Flat minima in robust training: what do their methods bring, what do they cost, and what does the bound behind say?

Parts, each cell of which is one network; cells that are among the results already are left out:

- defences: adversarial training and TRADES, each alone and with an average of the weights, S2O, AWP, AWP of the top
  layer, and the trace of the Hessian of the top layer (TrH). Accuracy under APGD with both losses on the test set, the
  robust gap between training and test data, and the terms of the PAC-Bayes objective.
- lambda: adversarial training with TrH, by its weight, which is constant or rises in steps.
- bound: adversarial training alone, with AWP and with TrH once more. The objective with the exact diagonal of the
  Hessian, and the linear bound for networks drawn around the trained one, at the best of some prior variances.
- cost: CPU seconds of an epoch and peak memory with each method, of a small CNN and of a small vision transformer.

Perceptrons 784-100-100-10, 1,000 images of mnist-mini to train on, linf 0.15, PGD-5, 15 epochs; the budget rises for
six. The set-up was chosen with seed 9, which is not reported. One thread.

    python benchmarks/flatness.py --part lambda
    python benchmarks/flatness.py --part defences
"""

import argparse
import copy
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from common import RESULTS, all_or_none, cells_page, larger, listed, measure_cells, report_claim
from torch import Tensor, nn

import holdfast as hf
from holdfast.analyze.pac_bayes import kl_gaussians, linear_bound, pac_bayes_of, robust_gap
from holdfast.data import Dataset
from holdfast.utils.memory import peak_memory

NAME = "flatness"
Cell = dict[str, Any]
THREAT, EPOCHS, IMAGES, JUDGED = hf.Linf(0.15), 15, 1000, 300
NOTES = {
    "defences": "Percent; gap: robust accuracy (PGD) on training data less on test data. Objective: first order.",
    "lambda": "Percent; features: squared norm of the features; trace: of the top layer.",
    "bound": "Objective: at prior variance 1 / 100. Bound: with probability 0.95, of the robust error of the drawn "
    "networks by PGD, a lower bound of the true one; above 1 it says nothing.",
    "cost": "CPU seconds of an epoch of 640 images in batches of 32, and MB of a process of its own.",
}


def to_markdown(record: Cell) -> str:
    """The page of results."""
    return cells_page("Flat minima in robust training", NOTES, record)


def percent(share: float) -> float:
    """In percent, one decimal."""
    return round(100 * share, 1)


def subset() -> Dataset:
    """The training images, and the test images that are judged."""
    data = hf.load_data("mnist-mini")
    return Dataset(data.name, data.train[:IMAGES], data.test[:JUDGED], data.classes)


def recipe(objective: str, seed: int, **parts: Any) -> Cell:
    """The common set-up, with the parts of a method."""
    attack = {"name": "pgd", "steps": 5, **({"random_start": False} if objective == "trades" else {})}
    return {
        "threat": str(THREAT), "epochs": EPOCHS, "batch_size": 64, "validation": 0.0, "seed": seed,
        "model": {"name": "mlp", "hidden": [100, 100]}, "objective": {"name": objective}, "attack": attack,
        "optimizer": {"name": "adam", "lr": 2e-3}, "learning_rate": {"name": "one-cycle", "peak": 0.3},
        "budget": {"name": "linear", "end": 6}, **parts,
    }  # fmt: skip


def trh(weight: float, schedule: str = "constant") -> Cell:
    """The regulariser's part of a recipe."""
    return {"regularizers": {"trh": {"weight": weight, "schedule": schedule}}}


METHODS: dict[str, Cell] = {
    "base": {},
    "swa": {"average": {"name": "ema", "decay": 0.995}},
    "s2o": {"regularizers": {"s2o": {"weight": 0.1}}},
    "awp": {"perturb_weights": {"name": "awp", "delta": 5e-3}},
    "awp-top": {"perturb_weights": {"name": "awp-top", "delta": 5e-3}},
    "trh": trh(1e-2, "multistep"),
}
S2O_TRADES = {"regularizers": {"s2o": {"weight": 0.3}}}
"""The average is exponential, as in the paper that calls it SWA; S2O has a weight of its own for TRADES there."""


def judge(model: nn.Module, data: Dataset, seed: int) -> Cell:
    """Accuracies on the test images, and the robust gap."""
    x, y = data.test.x, data.test.y
    broken = torch.zeros_like(y, dtype=torch.bool)
    for name in ("apgd-ce", "apgd-dlr"):
        broken |= hf.attack(model, x, y, THREAT, name, seed=seed).success
    with torch.no_grad():
        clean = float((model(x).argmax(1) == y).double().mean())
    gap = robust_gap(model, (data.train.x[:JUDGED], data.train.y[:JUDGED]), (x, y), THREAT, seed=seed)
    robust = float((~broken).double().mean())
    return {
        "clean": percent(clean),
        "robust": percent(robust),
        "train, PGD": percent(gap.train),
        "gap": percent(gap.gap),
    }


def measure_defence(objective: str, method: str, seed: int) -> Cell:
    """Accuracies, gap and objective of one network."""
    data = subset()
    parts = S2O_TRADES if (objective, method) == ("trades", "s2o") else METHODS[method]
    model = hf.train(recipe(objective, seed, **parts), data=data, progress=False).model.eval()
    found = pac_bayes_of(model, data.train.x, data.train.y, THREAT, seed=seed)
    return judge(model, data, seed) | {
        "risk": round(found.risk, 3), "norm": round(found.norm_term, 3), "curvature": round(found.curvature_term, 3),
        "objective": round(found.value, 3),
    }  # fmt: skip


def report_defences(cells: dict[str, Cell], seeds: range, objectives: Sequence[str]) -> None:
    """Differences over the seeds, by their interval."""

    def of(objective: str, method: str, name: str = "robust") -> list[float]:
        return [cells[f"{objective} ({method}), seed {seed}"][name] for seed in seeds]

    for objective in objectives:
        means = {method: statistics.mean(of(objective, method)) for method in METHODS}
        table = ", ".join(f"{method} {value:.1f}" for method, value in means.items())
        outcome, text = larger(of(objective, "trh"), of(objective, "base"))
        report_claim(f"trh-over-base-{objective}", outcome, f"TrH less base: {text}; means {table}")
        best = max((m for m in METHODS if m != "trh"), key=lambda m: means[m])
        outcome, text = larger(of(objective, "trh"), of(objective, best))
        report_claim(
            f"trh-best-{objective}", outcome, f"TrH less {best}, the best of the others: {text}; means {table}"
        )
        outcome, text = larger(of(objective, "awp"), of(objective, "awp-top"))
        report_claim(f"awp-over-awp-top-{objective}", outcome, f"AWP less AWP of the top layer: {text}")
        outcome, text = larger(of(objective, "base", "gap"), of(objective, "trh", "gap"))
        report_claim(f"trh-narrows-gap-{objective}", outcome, f"gap of the base less that of TrH: {text}")


# --- The weight of TrH ------------------------------------------------------------------------------------------------

WEIGHTS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
SCHEDULES = {"constant": WEIGHTS, "multistep": WEIGHTS[2:]}


def measure_weight(weight: float, schedule: str, seed: int) -> Cell:
    """Accuracies of one network, and the two factors of the trace at the end."""
    data = subset()
    result = hf.train(recipe("at", seed, **trh(weight, schedule)), data=data, progress=False)
    last = result.history[-1]
    cell = judge(result.model.eval(), data, seed)
    return cell | {"features": round(last["train_trh_features"], 2), "trace": round(last["train_trh_trace"], 3)}


def report_weights(cells: dict[str, Cell], seeds: range) -> None:
    """Learned: above 20 % robust accuracy, where chance is 10 %."""

    def of(weight: float, schedule: str, name: str = "robust") -> list[float]:
        return [cells[f"{weight:g}, {schedule}, seed {seed}"][name] for seed in seeds]

    table = "; ".join(f"{s} {w:g}: {listed(of(w, s))}" for s, weights in SCHEDULES.items() for w in weights)
    means = [statistics.mean(of(weight, "constant")) for weight in WEIGHTS]
    best = max(range(len(WEIGHTS)), key=means.__getitem__)
    error = 100 * math.sqrt(0.25 / (JUDGED * len(seeds)))
    beside = [abs(means[i] - means[best]) for i in (best - 1, best + 1) if 0 <= i < len(means)]
    flat = "confirmed" if min(beside) <= 2 * error else "refuted"
    text = (
        f"best at {WEIGHTS[best]:g}; ten times away {listed(beside)} points lower, standard error {error:.2g}; {table}"
    )
    report_claim("trh-flat-over-a-decade", flat, text)
    lost = [of(WEIGHTS[-1], "constant")[i] < 20 and of(WEIGHTS[-1], "constant", "features")[i] < 1 for i in seeds]
    features = "; ".join(f"{w:g}: {listed(of(w, 'constant', 'features'))}" for w in WEIGHTS)
    report_claim("trh-too-strong-collapses", all_or_none(lost), f"robust {table}; features {features}")
    strong = SCHEDULES["multistep"]
    gains = [statistics.mean(of(w, "multistep")[i] - of(w, "constant")[i] for w in strong) for i in seeds]
    outcome, text = larger(gains, [0.0] * len(gains))
    report_claim("trh-ramp-helps", outcome, f"multistep less constant at 0.1 and more: {text}; {table}")


# --- The bound --------------------------------------------------------------------------------------------------------

PRIORS = (1e-3, 1e-2, 1e-1, 1.0)
DRAWS = 3
BOUNDED = ("base", "awp", "trh")


def drawn_error(model: nn.Module, deviation: Tensor, data: Dataset, seed: int) -> float:
    """Mean robust error under PGD, on training images, of networks whose weights are drawn around those of `model`."""
    generator, errors = torch.Generator().manual_seed(seed), []
    for _ in range(DRAWS):
        network = copy.deepcopy(model)
        start = 0
        for parameter in network.parameters():
            part = deviation[start : start + parameter.numel()].view_as(parameter).to(parameter)
            parameter.data += part * torch.randn(parameter.shape, generator=generator)
            start += parameter.numel()
        x, y = data.train.x[:JUDGED], data.train.y[:JUDGED]
        errors.append(float(hf.attack(network, x, y, THREAT, "pgd", steps=10, seed=seed).success.double().mean()))
    return statistics.mean(errors)


def measure_bound(method: str, seed: int) -> Cell:
    """The objective in two forms, and the smallest linear bound over the prior variances."""
    data = subset()
    model = hf.train(recipe("at", seed, **METHODS[method]), data=data, progress=False).model.eval()
    task = (model, data.train.x, data.train.y, THREAT)
    cell = judge(model, data, seed)
    for mode in ("log", "first-order"):
        found = pac_bayes_of(*task, network="full", mode=cast(Any, mode), sigma0_sq=0.01, seed=seed)
        cell |= {f"objective, {mode}": round(found.value, 3), f"curvature, {mode}": round(found.curvature_term, 3)}
    theta = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    bounds = []
    for prior in PRIORS:
        variance = pac_bayes_of(*task, network="full", mode="log", sigma0_sq=prior, seed=seed).sigma2
        risk, kl = (
            drawn_error(model, variance.sqrt(), data, seed),
            float(kl_gaussians(theta, variance, sigma0_sq=prior)),
        )
        # The union over the priors costs log(4) of the confidence.
        bound = linear_bound(risk, kl, n=IMAGES, tau=0.05 / len(PRIORS), beta=IMAGES)
        bounds.append((round(bound, 3), prior, round(risk, 3), round(kl)))
    best = min(bounds)
    return cell | dict(zip(("bound", "prior", "error of the drawn", "KL"), best, strict=True))


def report_bounds(cells: dict[str, Cell], seeds: range) -> None:
    """Says something: below 1. The objective of TrH against the base, and its log form against its first-order form."""

    def of(method: str, name: str) -> list[float]:
        return [cells[f"{method}, seed {seed}"][name] for seed in seeds]

    bounds = {method: of(method, "bound") for method in BOUNDED}
    text = "; ".join(f"{method} {listed(values)}" for method, values in bounds.items())
    report_claim("pac-bayes-bound-informative", all_or_none([b < 1 for v in bounds.values() for b in v]), text)
    log, first = of("base", "objective, log"), of("base", "objective, first-order")
    falls = [b < a for a, b in zip(of("base", "objective, log"), of("trh", "objective, log"), strict=True)]
    text = "; ".join(f"{method} {listed(of(method, 'objective, log'))}" for method in BOUNDED)
    report_claim("trh-lowers-its-objective", all_or_none(falls), f"log form: {text}")
    close = [
        a / b > 0.9 for a, b in zip(of("base", "curvature, log"), of("base", "curvature, first-order"), strict=True)
    ]
    text = f"objective {listed(log)} in log form, {listed(first)} to first order"
    report_claim("pac-bayes-first-order-close", all_or_none(close), text)


# --- Cost -------------------------------------------------------------------------------------------------------------

NETWORKS: dict[str, Cell] = {
    "small CNN": {"name": "small-star"},
    "small transformer": {"name": "vit-ti", "dim": 48, "depth": 3, "heads": 3, "mlp_dim": 96, "patch": 4},
}


def train_once(network: str, method: str, seed: int, images: int = 640) -> None:
    """One epoch in batches of 32."""
    whole = hf.load_data("mnist-mini")
    data = Dataset(whole.name, whole.train[:images], whole.test[:10], whole.classes)
    changes = {"model": NETWORKS[network], "epochs": 1, "batch_size": 32, "budget": {"name": "constant"}}
    hf.train(recipe("at", seed, **METHODS[method]) | changes, data=data, progress=False)


def measure_cost(network: str, seed: int, rounds: int = 2) -> Cell:
    """Least of some rounds, all methods in turn; memory of a process of its own."""
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    train_once(network, "base", seed, 64)
    for i in range(rounds):
        for method in list(METHODS)[:: 1 if i % 2 else -1]:
            started = time.process_time()
            train_once(network, method, seed)
            seconds[method].append(time.process_time() - started)
    cell: Cell = {f"{method}, s": round(min(taken), 2) for method, taken in seconds.items()}
    cell |= {f"{m}, ratio": round(min(taken) / min(seconds["base"]), 3) for m, taken in seconds.items()}
    for method in METHODS if seed == 0 else ():
        command = [sys.executable, __file__, "--peak", network, method]
        cell[f"{method}, MB"] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return cell


def report_cost(cells: dict[str, Cell]) -> None:
    """TrH is free within a tenth in time and memory; AWP takes longer than every other method."""
    for network in NETWORKS:
        own, name = [c for key, c in cells.items() if key.startswith(network)], network.split()[1].lower()
        text = "; ".join(f"{method} {listed([c[f'{method}, ratio'] for c in own])}" for method in METHODS)
        memory = {method: own[0][f"{method}, MB"] for method in METHODS}
        free = [c["trh, ratio"] < 1.1 and memory["trh"] < 1.1 * memory["base"] for c in own]
        report_claim(f"trh-costs-nothing-{name}", all_or_none(free), f"time to base: {text}; MB {memory}")
        slowest = [c["awp, ratio"] == max(c[f"{m}, ratio"] for m in METHODS) for c in own]
        report_claim(f"awp-costs-most-{name}", all_or_none(slowest), f"time to base: {text}")


# --- Command line -----------------------------------------------------------------------------------------------------


def list_tasks(part: str, seeds: range, objectives: Sequence[str] = ("at", "trades")) -> dict[str, Callable[[], Cell]]:
    """What there is to measure, seeds outside."""
    match part:
        case "defences":
            keys = [(objective, m, s) for s in seeds for objective in objectives for m in METHODS]
            return {f"{o} ({m}), seed {s}": partial(measure_defence, o, m, s) for o, m, s in keys}
        case "lambda":
            trials = [(w, schedule, s) for s in seeds for schedule, weights in SCHEDULES.items() for w in weights]
            return {f"{w:g}, {k}, seed {s}": partial(measure_weight, w, k, s) for w, k, s in trials}
        case "bound":
            return {f"{m}, seed {s}": partial(measure_bound, m, s) for s in seeds for m in BOUNDED}
        case _:
            return {f"{n}, seed {s}": partial(measure_cost, n, s) for s in seeds for n in NETWORKS}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(NOTES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--objectives", nargs="+", choices=("at", "trades"), default=("at", "trades"), help="of 'defences'"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--peak", nargs=2, metavar=("NETWORK", "METHOD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak:
        train_once(*args.peak, seed=0)
        print(round(peak_memory(), 1))
        return
    if not args.part:
        parser.error("--part is missing")
    seeds = range(args.seeds)
    tasks = list_tasks(args.part, seeds, args.objectives)
    cells = measure_cells(NAME, args.part, tasks, to_markdown=to_markdown, folder=args.out)
    match args.part:
        case "defences":
            report_defences(cells, seeds, args.objectives)
        case "lambda":
            report_weights(cells, seeds)
        case "bound":
            report_bounds(cells, seeds)
        case _:
            report_cost(cells)


if __name__ == "__main__":
    main()
