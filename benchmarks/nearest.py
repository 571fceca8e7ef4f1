"""The nearest misclassified point: `hf.nearest` with its default portfolio against the minimum-norm attacks of foolbox.

All contenders get the same correctly classified test inputs, from a part of the test set that no setting was tuned on.
Every point of a peer is checked before it counts: it must be misclassified and lie in the range, and its distance is
measured; a point that fails is infinitely far. One thread; parameters need no gradients, which spares the peers what
Holdfast spares itself. The time of Holdfast includes its checks, that of foolbox does not.

Settings of foolbox: its defaults but for the steps, which are given with each name (DDN and FMN also with five times
their default); CW gets 9 x 200 steps in place of 9 x 10,000, at the better of the step sizes 0.01 and 0.05 (judged by
the median on other inputs of each model).

    pip install --no-deps foolbox eagerpy    # none may replace torch
    pip install requests gitpython

    python benchmarks/attack_models.py --folder MODELS --data ROOT
    python benchmarks/nearest.py --models MODELS --data ROOT                        # about seven minutes
    python benchmarks/nearest.py --models MODELS --data ROOT --only mnist-standard
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attack_models import SPECS, load
from common import RESULTS, Neighbours, describe_markdown, describe_run, markdown_table, write_results
from torch import Tensor, nn

import holdfast as hf
from holdfast.attacks.core.minimum_norm import norm_of
from holdfast.data import Split

NAME = "nearest"
OURS = "holdfast auto"
MODELS = ("mnist-standard", "mnist-pgd", "cifar-pgd")
NORMS = ("l2", "linf")
PACKAGES = ("holdfast", "torch", "foolbox", "eagerpy")
CW_STEP = {"mnist-standard": 0.05, "mnist-pgd": 0.05, "cifar-pgd": 0.01}  # the better of two on other inputs
ROUNDING = 1e-4  # relative: distances that differ by less are the same

Cell = dict[str, Any]
Attack = Callable[[Tensor, Tensor], Tensor]


def contenders(model: nn.Module, name: str, norm: str) -> dict[str, Attack]:
    """Each attack as a function (x, y) -> nearest misclassified points."""
    from foolbox import PyTorchModel, attacks

    wrapped = PyTorchModel(model, bounds=(0, 1), device="cpu")
    step = CW_STEP[name]
    peers = {
        "l2": {
            "DeepFool 50": attacks.L2DeepFoolAttack(),
            f"CW 9 x 200 at {step:g}": attacks.L2CarliniWagnerAttack(steps=200, stepsize=step),
            "DDN 100": attacks.DDNAttack(steps=100),
            "DDN 500": attacks.DDNAttack(steps=500),
            "FMN 100": attacks.L2FMNAttack(steps=100),
            "FMN 500": attacks.L2FMNAttack(steps=500),
        },
        "linf": {
            "DeepFool 50": attacks.LinfDeepFoolAttack(),
            "FMN 100": attacks.LInfFMNAttack(steps=100),
            "FMN 500": attacks.LInfFMNAttack(steps=500),
        },
    }

    def by_holdfast(x: Tensor, y: Tensor) -> Tensor:
        return hf.nearest(model, x, y, norm).x_adv

    def by_foolbox(attack: Any) -> Attack:
        # `run` without the conversion and the evaluation that a plain call adds.
        return lambda x, y: attack.run(wrapped, x, y)

    return {OURS: by_holdfast, **{f"foolbox {key}": by_foolbox(attack) for key, attack in peers[norm].items()}}


@torch.no_grad()
def distances(model: nn.Module, part: Split, x_adv: Tensor, norm: str) -> Tensor:
    """(B,) distance of each point, infinite where it is classified right or outside of [0, 1]."""
    inside = ((x_adv >= 0) & (x_adv <= 1)).flatten(1).all(1)
    wrong = model(x_adv).argmax(1) != part.y
    return torch.where(inside & wrong, norm_of(x_adv - part.x, norm), torch.inf)


@torch.no_grad()
def right_inputs(model: nn.Module, part: Split, count: int) -> Split:
    """The first `count` inputs that the model classifies right."""
    return part[(model(part.x).argmax(1) == part.y).nonzero()[:count, 0]]


def measure(name: str, norm: str, part: Split, model: nn.Module, warm_up: Split) -> dict[str, Cell]:
    """Distances and seconds of each contender."""
    cells = {}
    for who, attack in contenders(model, name, norm).items():
        if who == OURS:
            attack(warm_up.x, warm_up.y)  # the first call of a process is slow; it comes first, and pays for all
        neighbours, cpu, wall = Neighbours(), time.process_time(), time.perf_counter()
        x_adv = attack(part.x, part.y)
        cell: Cell = {
            "cpu_seconds": round(time.process_time() - cpu, 2),
            "wall_seconds": round(time.perf_counter() - wall, 2),
            "others": neighbours.cores(),
        }
        found = distances(model, part, x_adv, norm)
        cell["found"] = int(torch.isfinite(found).sum())
        cell["median"] = _median(found)
        cell["distances"] = [round(d, 6) if d < float("inf") else None for d in found.tolist()]
        cells[who] = cell
        print(f"{name}, {norm}, {who}: median {cell['median']}, {cell['cpu_seconds']} s", flush=True)
    return cells


def _median(found: Tensor) -> float | None:
    """The median with points that were not found as infinitely far; None if that is infinite."""
    median = statistics.median(found.tolist())
    return round(median, 6) if median < float("inf") else None


def compare(cells: dict[str, Cell]) -> Cell:
    """Our median against the best of the peers, and the share of inputs on which ours is at most theirs."""
    peers = {who: cell["median"] for who, cell in cells.items() if who != OURS and cell["median"] is not None}
    best = min(peers, key=lambda who: peers[who])
    at_most = {who: _share_at_most(cells[OURS], cell) for who, cell in cells.items() if who != OURS}
    ratio = cells[OURS]["median"] / peers[best]
    return {"best_peer": best, "ratio": round(ratio, 4), "met": ratio <= 1, "share_at_most": at_most}


def _share_at_most(ours: Cell, theirs: Cell) -> float:
    far = float("inf")
    pairs = zip(ours["distances"], theirs["distances"], strict=True)
    return statistics.mean((far if a is None else a) <= (far if b is None else b) * (1 + ROUNDING) for a, b in pairs)


def to_markdown(record: dict[str, Any]) -> str:
    """The results as a page."""
    verdicts, details = [], []
    for name, norms in record["models"].items():
        for norm, result in norms.items():
            cells, verdict = result["contenders"], compare(result["contenders"])
            best = verdict["best_peer"]
            medians = [f"{cells[who]['median']:.4f}" for who in (OURS, best)]
            met = "yes" if verdict["met"] else "no"
            verdicts.append((name, norm, medians[0], best, medians[1], f"{verdict['ratio']:.3f}", met))
            for who, cell in cells.items():
                share = verdict["share_at_most"].get(who)
                median = "not found" if cell["median"] is None else f"{cell['median']:.4f}"
                shares = "" if share is None else f"{share:.0%}"
                work = f"{cell['cpu_seconds']:.1f}", cell["others"]
                details.append((name, norm, who, median, f"{cell['found']} of {result['inputs']}", shares, *work))
    results = [result for norms in record["models"].values() for result in norms.values()]
    runs = dict.fromkeys(_describe(result["run"]) for result in results)
    sections = [
        "# The nearest misclassified point, against foolbox",
        "Median distance from correctly classified test inputs (found nowhere: infinitely far); smaller is better. The "
        "peer is the one with the smallest median, whatever its time. Bar: a ratio of at most 1.",
        markdown_table(("model", "norm", "ours", "best peer", "its median", "ratio", "met"), verdicts),
        "Ours at most theirs: share of the inputs, with a relative 0.01 % for rounding. Others: cores that other "
        "processes kept busy meanwhile. foolbox runs with its default options but for the steps behind each name. "
        "CW has 9 x 200 steps in place of its default 9 x 10,000, at the better step size of 0.01 and 0.05 (judged on "
        "other inputs). The projection of foolbox's L2 FMN leaves its argument as it is (version 3.3.4), so that its "
        "radius has no effect.",
        markdown_table(
            ("model", "norm", "attack", "median", "found", "ours at most theirs", "CPU s", "others"), details
        ),
        "# Runs",
        *runs,
    ]
    return "\n\n".join(sections)


def _describe(run: dict[str, Any]) -> str:
    return describe_markdown(run) + (f"\n- {run['note']}" if run.get("note") else "")


def main() -> None:
    """Parses the command line, measures, and writes after each model."""
    parser = argparse.ArgumentParser(description="Compare the nearest misclassified points with those of foolbox.")
    parser.add_argument("--models", type=Path, required=True, help="folder written by attack_models.py")
    parser.add_argument("--data", type=Path, required=True, help="root of MNIST and CIFAR-10")
    parser.add_argument("--only", choices=MODELS, nargs="+", default=list(MODELS), help="models (default: all)")
    parser.add_argument("--norms", choices=NORMS, nargs="+", default=list(NORMS), help="(default: all)")
    parser.add_argument("--inputs", type=int, default=100, help="classified right (default: 100)")
    parser.add_argument("--first", type=int, default=5000, help="position of the first test input (default: 5000)")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder for the results (default: benchmarks/results)"
    )
    parser.add_argument("--note", default="", help="a remark on the data or the machine, written with the results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # the peers use names that newer Python and torch have deprecated
    torch.set_num_threads(1)
    run = {**describe_run(PACKAGES), "note": options.note}
    path = options.out / f"{NAME}.json"
    models = json.loads(path.read_text())["models"] if path.exists() else {}
    for name in options.only:
        model = load(name, options.models).requires_grad_(False)
        data = hf.load_data(SPECS[name].data, root=options.data)
        part = right_inputs(model, data.test[options.first :][: 4 * options.inputs], options.inputs)
        warm_up = right_inputs(model, data.train[: 4 * options.inputs], options.inputs)
        for norm in options.norms:
            cells = measure(name, norm, part, model, warm_up)
            result = {"first": options.first, "inputs": len(part), **compare(cells), "contenders": cells, "run": run}
            models.setdefault(name, {})[norm] = result
            ordered = {key: models[key] for key in MODELS if key in models}
            record = {"models": {key: {n: norms[n] for n in NORMS if n in norms} for key, norms in ordered.items()}}
            write_results(NAME, record, to_markdown(record), options.out)


if __name__ == "__main__":
    main()
