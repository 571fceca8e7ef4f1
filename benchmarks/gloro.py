"""GloRo networks: is their global bound sound, tight and cheap, and what do depth and many classes cost?

Parts, each cell of which is one network or one seed; cells that are among the results already are left out:

- bug: attacks on small random networks at the certified radius, and at the radius that a certificate would give whose
  constants are 0.9 of the true ones; and whether the contract suite of certificates notices that certificate.
- classes: clusters of points in 16 dimensions, 6,000 to train on however many classes there are; CE, TRADES and EMMA:
  verified accuracy, and the share of the examples whose most threatening class is not that of an epoch ago.
- depth: LiResNet, the same with an activation inside the branches, and the same without skips, at three depths.
- tightness: the steepest pairs of inputs found, anywhere and within a ball, against the bound, for a network trained
  by GloRo and the same network trained without.
- cost: CPU seconds for an input: GloRo, the dual bound of Wong and Kolter, and smoothing with 100,000 samples.

One thread.

    python benchmarks/gloro.py --part bug
    python benchmarks/gloro.py --part classes
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import RESULTS, all_or_none, cells_page, larger, listed, measure_cells, report_claim
from torch import Tensor, nn

import holdfast as hf
from holdfast.analyze.lipschitz_lower import global_lower_bound, local_lower_bound, tightness_ratio
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.lipschitz.constants import LipschitzBound, lipschitz_bound
from holdfast.certificates.core import lipschitz_margins
from holdfast.data import Dataset
from holdfast.data.dataset import Split
from holdfast.models.layers import MinMax
from holdfast.testing import check_certificate

NAME = "gloro"
Cell = dict[str, Any]
NOTES = {
    "bug": "Broken: inputs that an attack misclassified within the radius.",
    "classes": "Percent. Churn: mean over the epochs after the first.",
    "depth": "Percent; l2 0.5. Bound: the largest constant of a pair of classes.",
    "tightness": "Lower: the steepest pair found. Local: within l2 0.5, mean over the inputs.",
    "cost": "CPU milliseconds for an input, and ratios to GloRo.",
}


def to_markdown(record: Cell) -> str:
    """The page of results."""
    return cells_page("GloRo networks", NOTES, record)


def percent(hits: Tensor) -> float:
    """Share of True, in percent."""
    return round(100 * float(hits.double().mean()), 1)


# --- An injected bug --------------------------------------------------------------------------------------------------

FACTOR = 0.9


def too_small(*arguments: Any, **options: Any) -> LipschitzBound:
    """`lipschitz_bound` with the bug."""
    bound = lipschitz_bound(*arguments, **options)
    return LipschitzBound(FACTOR * bound.body, FACTOR * bound.pairs, bound.layers, bound.proven)


def with_bug() -> Any:
    """A context in which certificates take constants that are 0.9 of the true ones."""
    return mock.patch.object(lipschitz_margins, "lipschitz_bound", too_small)


def random_network(generator: torch.Generator, orthogonal: bool) -> nn.Sequential:
    """A small MinMax network whose classes meet in the middle of the unit cube."""
    size, depth, classes = (int(torch.randint(*ends, (), generator=generator)) for ends in ((1, 5), (0, 4), (2, 6)))
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(2 * size, 2 * size), MinMax()]
        weight = torch.randn(2 * size, 2 * size, generator=generator)
        layers[-2].weight.data = torch.linalg.qr(weight).Q if orthogonal else weight
        layers[-2].bias.data = 0.1 * torch.randn(2 * size, generator=generator)
    head = nn.Linear(2 * size, classes)
    head.weight.data = torch.randn(classes, 2 * size, generator=generator)
    model = nn.Sequential(*layers, head).eval()
    with torch.no_grad():
        head.bias -= model(torch.full((1, 2 * size), 0.5))[0]
    return model


def measure_bug(seed: int, networks: int = 20, count: int = 20) -> Cell:
    """Broken inputs at the radius of the certificate and of the one with the bug."""
    generator, cell = torch.Generator().manual_seed(seed), dict[str, Any]()
    cell |= {"networks": networks, "certified": 0, "broken": 0, "broken with the bug": 0, "networks with the bug": 0}
    for i in range(networks):
        model = random_network(generator, orthogonal=i % 2 == 0)
        x = 0.3 + 0.4 * torch.rand(count, model[-1].in_features, generator=generator)
        y = model(x).argmax(1)
        radius = hf.radius(model, x, y, "l2", "gloro")
        with with_bug():
            wrong = hf.radius(random_copy(model), x, y, "l2", "gloro")
        nearest = hf.nearest(model, x, y, "l2", seed=seed).distance
        cell["certified"] += int((radius > 0).sum())
        cell["broken"] += int((nearest < radius).sum())
        cell["broken with the bug"] += int((nearest < wrong).sum())
        cell["networks with the bug"] += bool((nearest < wrong).any())
    with with_bug():
        try:
            check_certificate("gloro")
            cell["suite"] = "passes the bug"
        except AssertionError:
            cell["suite"] = "finds the bug"
    return cell


def random_copy(model: nn.Sequential) -> nn.Sequential:
    """The same network as a new object: constants are kept with the object."""
    return nn.Sequential(*model).eval()


def report_bug(cells: dict[str, Cell]) -> None:
    """The radius holds if nothing is broken; the bug is caught if attacks break inputs of every seed."""
    text = f"{sum(c['broken'] for c in cells.values())} of {sum(c['certified'] for c in cells.values())} inputs broken"
    report_claim("gloro-radius-holds", all_or_none([c["broken"] == 0 for c in cells.values()]), text)
    caught = [c["broken with the bug"] for c in cells.values()]
    suite = {c["suite"] for c in cells.values()}
    text = f"{listed(caught)} inputs broken, by seed; the contract suite {' and '.join(suite)}"
    holds = [n > 0 and c["suite"] == "finds the bug" for n, c in zip(caught, cells.values(), strict=True)]
    report_claim("gloro-bug-is-caught", all_or_none(holds), text)


# --- Many classes -----------------------------------------------------------------------------------------------------

CLASSES = (10, 50, 200)
LOSSES = ("ce", "trades", "emma")
DIMENSIONS, SPREAD, CLUSTER_EPS = 16, 0.1, 0.15


def clusters(classes: int, seed: int, train: int = 6_000, test: int = 2_000) -> Dataset:
    """Gaussian clusters in the unit cube, one for each class, with as many points in all for any number of classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = 0.2 + 0.6 * torch.rand(classes, DIMENSIONS, generator=generator)

    def draw(count: int) -> Split:
        y = torch.arange(count) % classes
        x = centres[y] + SPREAD * torch.randn(count, DIMENSIONS, generator=generator)
        return Split(x.clamp(0, 1), y)

    return Dataset("clusters", draw(train), draw(test), tuple(map(str, range(classes))))


def measure_classes(classes: int, loss: str, seed: int, epochs: int = 10) -> Cell:
    """Verified accuracy and churn of one network."""
    data, threat = clusters(classes, seed), hf.L2(CLUSTER_EPS)
    recipe = {
        "threat": str(threat), "epochs": epochs, "batch_size": 128, "validation": 0.0, "seed": seed,
        "model": {"name": "mlp", "hidden": [128, 128], "activation": "minmax"},
        "objective": {"name": "gloro", "loss": loss}, "optimizer": {"name": "adam", "lr": 5e-3},
        "learning_rate": {"name": "one-cycle", "peak": 0.3}, "budget": {"name": "linear", "end": epochs // 2},
    }  # fmt: skip
    result = hf.train(recipe, data=data, progress=False)
    model, x, y = result.model.eval(), data.test.x, data.test.y
    churn = [row["train_churn"] for row in result.history[1:]]
    return {
        "clean": percent(model(x).argmax(1) == y),
        "verified": percent(hf.certify(model, x, y, threat, "gloro").certified),
        "churn": round(100 * sum(churn) / len(churn), 1),
        "churn, last": round(100 * churn[-1], 1),
    }


def report_classes(cells: dict[str, Cell], seeds: range) -> None:
    """Churn rises with the classes on every seed; verified accuracy by the interval over the seeds."""

    def of(classes: int, loss: str, name: str) -> list[float]:
        return [cells[f"{classes} classes, {loss}, seed {seed}"][name] for seed in seeds]

    rises, texts = [], []
    for loss in LOSSES[:2]:
        churns = [of(classes, loss, "churn") for classes in CLASSES]
        rises += [list(row) == sorted(row) for row in zip(*churns, strict=True)]
        texts += [f"{loss} {c}: {listed(v)} %" for c, v in zip(CLASSES, churns, strict=True)]
    report_claim("churn-grows-with-classes", all_or_none(rises), "; ".join(texts))
    for other in LOSSES[:2]:
        for classes in (CLASSES[0], CLASSES[-1]):
            outcome, text = larger(of(classes, "emma", "verified"), of(classes, other, "verified"))
            report_claim(f"emma-over-{other}-{classes}", outcome, f"verified, points of percent: {text}")


# --- Depth ------------------------------------------------------------------------------------------------------------

DEPTHS = (2, 6, 12)
BODIES = ("liresnet", "resnet-minmax", "convnet-minmax")


def measure_depth(body: str, depth: int, seed: int, images: int = 1000, epochs: int = 6) -> Cell:
    """Clean and verified accuracy, and the bound."""
    whole = hf.load_data("mnist-mini")
    data, threat = Dataset(whole.name, whole.train[:images], whole.test[:1000], whole.classes), hf.L2(0.5)
    recipe = {
        "threat": str(threat), "epochs": epochs, "batch_size": 64, "validation": 0.0, "seed": seed,
        "model": {"name": body, "depth": depth, "width": 16, "neck": 128},
        "objective": {"name": "gloro", "loss": "emma"}, "optimizer": {"name": "adam", "lr": 2e-3},
        "learning_rate": {"name": "one-cycle", "peak": 0.3}, "budget": {"name": "linear", "end": epochs // 2},
    }  # fmt: skip
    model, x, y = hf.train(recipe, data=data, progress=False).model.eval(), data.test.x, data.test.y
    bound = lipschitz_bound(trace(model, x[:1]))
    return {
        "clean": percent(model(x).argmax(1) == y),
        "verified": percent(hf.certify(model, x, y, threat, "gloro").certified),
        "bound": round(float(bound.pairs.max()), 3),
    }


def report_depth(cells: dict[str, Cell], seeds: range) -> None:
    """Which body keeps its verified accuracy with depth, and which has more at the largest."""

    def of(body: str, depth: int) -> list[float]:
        return [cells[f"{body}, depth {depth}, seed {seed}"]["verified"] for seed in seeds]

    table = "; ".join(f"{body} at {depth}: {listed(of(body, depth))}" for body in BODIES for depth in DEPTHS)
    holds = [min(of("liresnet", depth)[i] for depth in DEPTHS[1:]) > of("liresnet", 2)[i] - 5 for i in seeds]
    report_claim("liresnet-trains-at-all-depths", all_or_none(holds), table)
    for other, claim in zip(BODIES[1:], ("resnet", "convnet"), strict=True):
        outcome, text = larger(of("liresnet", DEPTHS[-1]), of(other, DEPTHS[-1]))
        report_claim(f"liresnet-over-{claim}", outcome, f"verified at depth {DEPTHS[-1]}, points of percent: {text}")
        falls = [of(other, DEPTHS[-1])[i] < of(other, DEPTHS[0])[i] for i in seeds]
        report_claim(f"{claim}-falls-with-depth", all_or_none(falls), table)


# --- Tightness --------------------------------------------------------------------------------------------------------


def network(kind: str, seed: int, model: str, models: Path | None) -> nn.Module:
    """Trained on mnist-mini by GloRo at l2 0.5 or without an adversary; from the folder if it is there."""
    path = None if models is None else models / f"{model}-{kind}-{seed}.safetensors"
    if path is not None and path.exists():
        return hf.load_model(path).eval()
    changes: Cell = {"model.name": model, "seed": seed, "epochs": 4}
    found = hf.train("mnist-mini-gloro" if kind == "gloro" else "mnist-mini-standard", **changes, progress=False).model
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        hf.save_model(found, path)
    return found.eval()


def measure_tightness(kind: str, seed: int, models: Path | None, pairs: int = 10, steps: int = 600) -> Cell:
    """Lower and upper bounds of the constant of the margins."""
    model, test = network(kind, seed, "2c2f-minmax", models), hf.load_data("mnist-mini").test
    x, y, threat = test.x, test.y, hf.L2(0.5)
    upper = lipschitz_bound(trace(model, x[:1]))
    lower = global_lower_bound(model, x[:pairs], x[pairs : 2 * pairs], steps=steps, step_size=1e-2)
    local = local_lower_bound(model, x[:pairs], threat, steps=steps // 3, step_size=1e-2, seed=seed)
    return {
        "clean": percent(model(x).argmax(1) == y),
        "verified, l2 0.5": percent(hf.certify(model, x, y, threat, "gloro").certified),
        "upper": round(float(upper.pairs.max()), 3),
        "lower": round(float(lower.value.max()), 3),
        "local": round(float(local.value.mean()), 3),
        "lower / upper": round(tightness_ratio(lower, upper), 3),
        "local / upper": round(float(local.value.mean() / upper.pairs.max()), 3),
    }


def report_tightness(cells: dict[str, Cell], seeds: range) -> None:
    """Tight: more than half; local: below half; far looser: a ratio below half of the one with GloRo."""

    def of(kind: str, name: str) -> list[float]:
        return [cells[f"{kind}, seed {seed}"][name] for seed in seeds]

    ratios = {kind: of(kind, "lower / upper") for kind in ("gloro", "standard")}
    local = of("gloro", "local / upper")
    text = f"{listed(ratios['gloro'])} with GloRo, {listed(ratios['standard'])} without"
    report_claim("gloro-bound-tight", all_or_none([r > 0.5 for r in ratios["gloro"]]), text)
    holds = [2 * b < a for a, b in zip(ratios["gloro"], ratios["standard"], strict=True)]
    report_claim("standard-bound-loose", all_or_none(holds), text)
    report_claim("gloro-local-below-global", all_or_none([r < 0.5 for r in local]), f"local / upper {listed(local)}")


# --- Cost -------------------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], object], rounds: int) -> float:
    """CPU seconds of the fastest of some rounds."""
    taken = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return min(taken)


def measure_cost(seed: int) -> Cell:
    """CPU milliseconds for an input by three certificates of the same network."""
    model = hf.make_model("small-star", seed=seed).eval()
    test = hf.load_data("mnist-mini").test
    x, y, threat = test.x, model(test.x).argmax(1), hf.L2(0.25)

    def proof(count: int, method: str, **options: Any) -> Callable[[], object]:
        return lambda: hf.certify(model, x[:count], y[:count], threat, method, **options)

    first = seconds(proof(1, "gloro"), 1)
    cell = {
        "GloRo": 1e3 * seconds(proof(2000, "gloro"), 5) / 2000,
        "inference": 1e3 * seconds(lambda: [model(part) for part in x.split(256)], 5) / 2000,
        "dual": 1e3 * seconds(proof(20, "kw"), 2) / 20,
        "smoothing": 1e3 * seconds(proof(1, "smoothing", sigma=0.25, n=100_000, adaptive=False), 1),
    }
    ratios = {f"{name} / GloRo": round(cell[name] / cell["GloRo"], 1) for name in ("inference", "dual", "smoothing")}
    return {name: round(value, 4) for name, value in cell.items()} | ratios | {"constants, once, s": round(first, 3)}


def report_cost(cells: dict[str, Cell]) -> None:
    """Of the size that is printed: within a factor of sqrt(10) of it."""
    for claim, name, printed in (("gloro-cost-smoothing", "smoothing", 1e5), ("gloro-cost-dual", "dual", 600)):
        ratios = [cell[f"{name} / GloRo"] for cell in cells.values()]
        holds = [printed / 10**0.5 < ratio < printed * 10**0.5 for ratio in ratios]
        report_claim(claim, all_or_none(holds), f"{listed(ratios)} times as long as GloRo; {printed:g} printed")


# --- Command line -----------------------------------------------------------------------------------------------------


def list_tasks(part: str, seeds: range, models: Path | None, networks: int) -> dict[str, Callable[[], Cell]]:
    """What there is to measure, seeds outside."""
    match part:
        case "bug":
            return {f"seed {s}": partial(measure_bug, s, networks) for s in seeds}
        case "classes":
            keys = [(m, loss, s) for s in seeds for m in CLASSES for loss in LOSSES]
            return {f"{m} classes, {loss}, seed {s}": partial(measure_classes, m, loss, s) for m, loss, s in keys}
        case "depth":
            keys = [(body, depth, s) for s in seeds for body in BODIES for depth in DEPTHS]
            return {f"{body}, depth {d}, seed {s}": partial(measure_depth, body, d, s) for body, d, s in keys}
        case "tightness":
            keys = [(kind, s) for s in seeds for kind in ("gloro", "standard")]
            return {f"{kind}, seed {s}": partial(measure_tightness, kind, s, models) for kind, s in keys}
        case _:
            return {f"seed {s}": partial(measure_cost, s) for s in seeds}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(NOTES), required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", type=int, default=20, help="random networks of 'bug' for a seed (default: 20)")
    parser.add_argument("--models", type=Path, help="folder for the trained networks of 'tightness'")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(args.seeds)
    tasks = list_tasks(args.part, seeds, args.models, args.networks)
    cells = measure_cells(NAME, args.part, tasks, to_markdown=to_markdown, folder=args.out)
    match args.part:
        case "bug":
            report_bug(cells)
        case "classes":
            report_classes(cells, seeds)
        case "depth":
            report_depth(cells, seeds)
        case "tightness":
            report_tightness(cells, seeds)
        case _:
            report_cost(cells)


if __name__ == "__main__":
    main()
