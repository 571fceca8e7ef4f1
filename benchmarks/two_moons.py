"""Two Moons: what the examples of that name show, over ten seeds.

- flat: adversarial training of a perceptron 2-100-100-2 (linf 0.02, one step, momentum SGD at 0.1, 100 epochs, batches
  of 50) alone, with 0.5 times the trace of the Hessian of the top layer, and with 0.05 times the trace of all layers.
  Traces are of the cross-entropy at the clean points, exact, after the last epoch and as means over the last 20 epochs;
  the spread of the eigenvalues is taken on networks of width 16 trained alike. With one seed the arms have the same
  points, first weights and batches.
- reject: GloRo and a centroid network (l2 0.025) on moons of which a fifth is moved by Gaussian noise: the share of the
  moons and of the moved points that each one rejects. The settings were chosen with seed 0, which is not among those
  reported.

One thread. Every seed is a cell; those that are among the results already are left out.

    python benchmarks/two_moons.py --part flat
    python benchmarks/two_moons.py --part reject
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, describe_markdown, describe_run, markdown_table, read_results, report_claim, store_cell
from scipy import stats
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.analyze.selective import outcome, rejecting
from holdfast.certificates import GloRo
from holdfast.models.zoo.centroid import with_rejection
from holdfast.training.curvature import eigenvalue_spread, trace_relu_layers

NAME = "two_moons"
SEEDS = range(1, 11)
EPOCHS, LAST, WIDTH, SMALL = 100, 20, 100, 16
THREAT = hf.Linf(0.02, low=-3, high=4)
ARMS = {"Standard": (0.0, slice(None)), "Top": (0.5, slice(-1, None)), "Full": (0.05, slice(None))}
Cell = dict[str, Any]


# --- Flat minima ------------------------------------------------------------------------------------------------------


def points(seed: int, count: int = 500) -> tuple[Tensor, Tensor]:
    """Two half circles with noise 0.1, in the coordinates of the paper; seeds the global generator."""
    torch.manual_seed(seed)
    y, angle = torch.arange(count) % 2, torch.pi * torch.rand(count)
    x = torch.stack([angle.cos() * (1 - 2 * y) + y, angle.sin() * (1 - 2 * y) + y / 2], 1)
    return x + 0.1 * torch.randn(count, 2), y


def train_arm(arm: str, seed: int, width: int) -> tuple[nn.Module, Tensor]:
    """The network, and the mean trace of each layer after each epoch, (epochs, layers)."""
    weight, layers = ARMS[arm]
    x, y = points(seed)
    model = hf.make_model("mlp", input_shape=(2,), classes=2, hidden=(width, width), seed=seed).eval()
    optimizer, traces = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(50):
            x_adv = hf.attack(model, x[rows], y[rows], THREAT, "fgsm").x_adv
            penalty = weight * trace_relu_layers(model, x_adv)[layers].sum(0).mean()
            optimizer.zero_grad()
            (cross_entropy(model(x_adv), y[rows]) + penalty).backward()
            optimizer.step()
        with torch.no_grad():
            traces.append(trace_relu_layers(model, x).mean(1))
    return model, torch.stack(traces)


def measure_flat(seed: int) -> Cell:
    """Figures of the three arms for one seed."""
    (x, y), cell = points(seed), {}
    for arm in ARMS:
        model, traces = train_arm(arm, seed, WIDTH)
        small, _ = train_arm(arm, seed, SMALL)
        broken = hf.attack(model, x, y, THREAT, "pgd").success
        cell |= {
            f"{arm} last epoch": round(float(traces[-1].sum()), 4),
            f"{arm} trace": round(float(traces[-LAST:].sum(1).mean()), 4),
            f"{arm} lower layers": round(float(traces[-LAST:, :-1].sum(1).mean()), 4),
            f"{arm} spread": round(float(eigenvalue_spread(small, x, y)), 5),
            f"{arm} accuracy": round(100 * float((model(x).argmax(1) == y).double().mean()), 1),
            f"{arm} robust": round(100 * float((~broken).double().mean()), 1),
        }
    return cell


# --- Rejection --------------------------------------------------------------------------------------------------------

SPREADS = (0.5, 0.25, 0.1)
ETA = 0.5
BODY = {"hidden": [64, 64], "activation": "minmax"}
MODELS: dict[str, tuple[Cell, Cell]] = {  # model and objective
    "gloro": ({"name": "mlp"}, {}),
    "centroid": ({"name": "centroid", "body": "mlp", "features": 2, "per_class": 8}, {"eta": ETA, "scale": 100.0}),
}


def trained(name: str, seed: int) -> nn.Module:
    """The network that says no: class -1 of `rejecting`."""
    model, objective = MODELS[name]
    recipe = {
        "threat": "l2:0.025",
        "epochs": EPOCHS,
        "batch_size": 50,
        "validation": 0.0,
        "seed": seed,
        "model": model | BODY,
        "objective": {"name": name, **objective},
        "optimizer": {"name": "adam", "lr": 5e-3},
        "learning_rate": {"name": "one-cycle"},
    }
    net = hf.train(recipe, data=hf.load_data("two-moons", n=500, seed=seed), progress=False).model
    return GloRo(net, hf.L2(0.025)).eval() if name == "gloro" else with_rejection(net, ETA).eval()


def measure_reject(seed: int) -> Cell:
    """Shares rejected by both models for one seed, at each spread of the outliers."""
    test, generator, cell = hf.load_data("two-moons", n=500, seed=seed).test, torch.Generator().manual_seed(seed), {}
    moved, noise = torch.rand(500, generator=generator) < 0.2, torch.randn(500, 2, generator=generator)
    for name in MODELS:
        answer = rejecting(trained(name, seed), 2)
        moons = outcome(answer(test.x[~moved]), test.y[~moved])
        cell[f"{name} moons rejected"] = round(100 * moons.rejected, 1)
        cell[f"{name} right"] = round(100 * moons.selective_accuracy, 1)
        for spread in SPREADS:
            far = outcome(answer(test.x[moved] + spread * noise[moved]), test.y[moved])
            cell[f"{name} outliers {spread} rejected"] = round(100 * far.rejected, 1)
    return cell


# --- Results ----------------------------------------------------------------------------------------------------------


def summary(values: Sequence[float], digits: int) -> str:
    """Mean, and smallest to largest."""
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def ratio(values: Sequence[float], base: Sequence[float]) -> str:
    """Geometric mean of the ratios with its 95 % t interval, and for how many seeds the ratio is below 1."""
    logs = [math.log(a / b) for a, b in zip(values, base, strict=True)]
    centre, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = float(stats.t.ppf(0.975, len(logs) - 1)) * error
    low, middle, high = (math.exp(v) for v in (centre - reach, centre, centre + reach))
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]; {sum(v < 0 for v in logs)} of {len(logs)}"


def to_markdown(record: dict[str, Any]) -> str:
    """The page of results."""
    text = ["# Two Moons", "Made by benchmarks/two_moons.py; its docstring says what is done."]
    for part, shown in (("flat", _flat), ("reject", _reject)):
        cells = record.get(part, {})
        if len(cells) >= 2:
            each = [[key, *(v for k, v in cell.items() if k != "run")] for key, cell in cells.items()]
            names = [k for k in next(iter(cells.values())) if k != "run"]
            text += [f"## {part}", shown(list(cells.values())), markdown_table(["seed", *names], each)]
    runs = dict.fromkeys(describe_markdown(cell["run"]) for part in record.values() for cell in part.values())
    return "\n\n".join([*text, "## Runs", "\n".join(runs)])


def _flat(cells: list[Cell]) -> str:
    figures = {"trace": 3, "last epoch": 3, "lower layers": 3, "spread": 4, "accuracy": 1, "robust": 1}

    def of(arm: str, figure: str) -> list[float]:
        return [cell[f"{arm} {figure}"] for cell in cells]

    rows = [[arm, *(summary(of(arm, figure), digits) for figure, digits in figures.items())] for arm in ARMS]
    pairs = [("Top", "Standard"), ("Full", "Standard"), ("Top", "Full")]
    ratios = [[f"{a} / {b}", *(ratio(of(a, figure), of(b, figure)) for figure in list(figures)[:4])] for a, b in pairs]
    return "\n\n".join(
        [
            f"Mean (smallest to largest) over {len(cells)} seeds. Trace: over all weights, mean of the last {LAST} "
            f"epochs; lower layers: the same without the top layer; spread: standard deviation of the eigenvalues at "
            f"width {SMALL}.",
            markdown_table(["arm", *figures], rows),
            "Geometric mean of the ratios with its 95 % t interval; seeds with a ratio below 1.",
            markdown_table(["", *list(figures)[:4]], ratios),
        ]
    )


def _reject(cells: list[Cell]) -> str:
    figures = ["moons rejected", "right", *(f"outliers {spread} rejected" for spread in SPREADS)]
    rows = [[name, *(summary([cell[f"{name} {f}"] for cell in cells], 1) for f in figures)] for name in MODELS]
    more = [
        f"outliers {spread}: the centroid network rejects more on "
        f"{sum(c[f'centroid outliers {spread} rejected'] > c[f'gloro outliers {spread} rejected'] for c in cells)} of "
        f"{len(cells)} seeds"
        for spread in SPREADS
    ]
    return "\n\n".join(
        [
            f"Percent: mean (smallest to largest) over {len(cells)} seeds. Right: of the answers on the moons. "
            "Outliers are moved by noise of that standard deviation.",
            markdown_table(["model", *figures], rows),
            "; ".join(more) + ".",
        ]
    )


def verdict(values: Sequence[float], base: Sequence[float]) -> tuple[str, str]:
    """Is the first smaller than the second? The 95 % t interval of the ratio decides; also returns its text."""
    logs = [math.log(value / start) for value, start in zip(values, base, strict=True)]
    interval = stats.t.interval(0.95, len(logs) - 1, statistics.mean(logs), stats.sem(logs))
    outcome = "confirmed" if interval[1] < 0 else "refuted" if interval[0] > 0 else "not decided at this size"
    return outcome, ratio(values, base)


def report(part: str, cells: list[Cell]) -> None:
    """Print the verdicts on the claims of a part."""

    def column(name: str) -> list[float]:
        return [cell[name] for cell in cells]

    if part == "flat":
        for arm, claim in (("Top", "two-moons-top-flattens"), ("Full", "two-moons-full-flattens")):
            report_claim(claim, *verdict(column(f"{arm} trace"), column("Standard trace")))
        report_claim("two-moons-full-flatter-than-top", *verdict(column("Full trace"), column("Top trace")))
    else:
        far = [f"{name} outliers 0.5 rejected" for name in ("gloro", "centroid")]
        report_claim("two-moons-centroid-rejects-outliers", *verdict(column(far[0]), column(far[1])))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("flat", "reject"), required=True)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many of the ten seeds to run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    done = read_results(NAME, args.out).get(args.part, {})
    for seed in SEEDS[: args.seeds]:
        if str(seed) not in done:
            cell = (measure_flat if args.part == "flat" else measure_reject)(seed)
            cell["run"] = describe_run(("holdfast", "torch"))
            store_cell(NAME, args.part, str(seed), cell, to_markdown=to_markdown, folder=args.out)
    cells = read_results(NAME, args.out)[args.part]
    report(args.part, [cells[str(seed)] for seed in SEEDS[: args.seeds]])


if __name__ == "__main__":
    main()
