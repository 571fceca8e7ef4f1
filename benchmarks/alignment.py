"""Do explanations follow the nearest boundary and the object, and does robust training help?

Parts, each cell of which is one network; cells that are among the results already are left out:

- exact: networks 2-16-16-2 on Two Moons. The search of PGD and CW as published, the same with bisection, and ours,
  against the exact nearest boundary (branch and bound; a grid of a million points beside it). At the exact point: the
  angle between the direction to it and the gradient of the margin there, and at the input.
- search: standard networks on mnist-mini. The nearest point found by PGD at growing budgets, then with CW, then with
  APGD (both losses).
- distances: mnist-mini, standard and adversarially trained at two l2 budgets: |saliency - BSM|, |IG - BIG|, as
  published (logits), and divided by the norm of the first of each pair.
- randomise: mnist-mini. Rank correlation of an explanation with itself after all weights were destroyed, from the last
  layer to the first.
- locality: small digit scenes whose background carries a faint pattern of the label, right for nine scenes of ten:
  locality scores of standard and adversarially trained networks, and of one with random weights.

One thread. "CPU s" contains the training of the network.

    python benchmarks/alignment.py --part exact
    python benchmarks/alignment.py --part distances --models MODELS
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, all_or_none, cells_page, listed, measure_cells, report_claim, trained_model
from torch import Tensor, nn

import holdfast as hf
from holdfast.attacks.core.gradients import input_gradient
from holdfast.attacks.core.losses import margin
from holdfast.data import Dataset
from holdfast.data.dataset import Split
from holdfast.data.scenes import digit_scenes
from holdfast.explanations import PUBLISHED, BoundarySearch
from holdfast.explanations.core.boundary import bisect, nearest_boundary
from holdfast.explanations.core.exact_boundary import exact_boundary
from holdfast.explanations.evaluate.locality import METHODS, protocol
from holdfast.explanations.evaluate.randomise import randomise_all, randomised
from holdfast.explanations.evaluate.stability import alignment
from holdfast.explanations.evaluate.trust import setting_for
from holdfast.random import Noise

NAME = "alignment"
Cell = dict[str, Any]
Tasks = dict[str, Callable[[], Cell]]
NOTES = {
    "exact": "Ratio: distance found over the exact one. Cosines: with the direction to the exact nearest boundary.",
    "search": "Mean distance over the inputs that every stage broke; found: share broken, percent.",
    "distances": "Means over the inputs; relative: divided by the norm of the explanation at the input.",
    "randomise": "Mean rank correlation of the absolute values; 1 before any layer was destroyed.",
    "locality": "Means over the test scenes. F1, precision and recall of three explanations against the digit's box.",
}


def to_markdown(record: Cell) -> str:
    """The page of results."""
    return cells_page("Alignment of explanations", NOTES, record)


def mean(values: Tensor, digits: int = 3) -> float:
    """Mean of the finite values."""
    return round(float(values[torch.isfinite(values)].double().mean()), digits)


def percent(hits: Tensor) -> float:
    """Share of True, in percent."""
    return round(100 * float(hits.double().mean()), 1)


# --- The exact boundary -----------------------------------------------------------------------------------------------


def moons_network(seed: int) -> tuple[nn.Module, Tensor]:
    """A network 2-16-16-2 in float64, and the test points."""
    data = hf.load_data("two-moons", n=500, seed=seed)
    recipe = {
        "epochs": 60, "batch_size": 50, "validation": 0.0, "seed": seed, "objective": {"name": "standard"},
        "model": {"name": "mlp", "hidden": [16, 16]}, "optimizer": {"name": "adam", "lr": 1e-2},
    }  # fmt: skip
    return hf.train(recipe, data=data, progress=False).model.double().eval(), data.test.x.double()


def grid_distance(model: nn.Module, x: Tensor, y: Tensor, side: int = 1000) -> Tensor:
    """Distance (B,) to the nearest of side^2 grid points that has another class."""
    line = torch.linspace(0, 1, side, dtype=x.dtype)
    points = torch.cartesian_prod(line, line)
    with torch.no_grad():
        classes = torch.cat([model(part).argmax(1) for part in points.split(100_000)])
    return torch.stack([(points[classes != c] - p).norm(dim=1).min() for p, c in zip(x, y.tolist(), strict=True)])


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Between the rows, (B,)."""
    return torch.nn.functional.cosine_similarity(a, b, dim=1).abs()


def at_fold(model: nn.Module, point: Tensor, y: Tensor, reach: float = 1e-4, rays: int = 16) -> Tensor:
    """Whether the gradient of the margin changes around a point, (B,): there the boundary has no normal."""
    angles = torch.arange(rays, dtype=point.dtype) * 2 * torch.pi / rays
    around = [point + reach * torch.stack([a.cos(), a.sin()]) for a in angles]
    slopes = torch.stack([input_gradient(model, p, y, margin)[0] for p in around])
    return ((slopes - slopes[0]).abs().amax((0, 2)) > 1e-6 * slopes[0].abs().amax(1)).bool()


def measure_exact(seed: int, count: int = 100) -> Cell:
    """Three searches against the exact boundary, and the gradients there."""
    model, x = moons_network(seed)
    x = x[:count]
    y = model(x).argmax(1)
    point, exact = exact_boundary(model, x, max_relus=32)
    published = nearest_boundary(model, x, setting_for(x), PUBLISHED)
    hit = torch.isfinite(published.distance)
    halved = (bisect(model, x, y, published.x_adv) - x).norm(dim=1).where(hit, torch.inf)
    ours = nearest_boundary(model, x, setting_for(x), BoundarySearch()).distance
    cell: Cell = {"grid less exact, largest": round(float((grid_distance(model, x, y) - exact).abs().max()), 4)}
    for name, found in (("published", published.distance), ("with bisection", halved), ("ours", ours)):
        ratio = found / exact
        cell[f"{name}: within 5 %"] = percent(ratio <= 1.05)
        cell[f"{name}: smallest ratio"] = round(float(ratio.min()), 6)
        cell[f"{name}: median ratio"] = round(float(ratio.median()), 4)
    direction = point - x
    inside = ((point > 1e-6) & (point < 1 - 1e-6)).all(1)  # elsewhere the range of the inputs bends the way there
    flat = inside & ~at_fold(model, point, y)
    at_boundary = input_gradient(model, x + 1.0001 * direction, y, margin)[0]
    cell["nearest point at a fold %"] = percent(~flat[inside])
    cell["BSM of the margin: cosine above 0.999"] = percent(cosine(at_boundary, direction)[flat] > 0.999)
    cell["BSM of the margin: mean cosine"] = mean(cosine(at_boundary, direction)[inside], 4)
    cell["saliency: mean cosine"] = mean(cosine(input_gradient(model, x, y, margin)[0], direction)[inside], 4)
    return cell


def report_exact(cells: dict[str, Cell]) -> None:
    """Within 5 % for at least 95 % of the inputs of every seed; never nearer than the exact boundary."""

    def of(name: str) -> list[float]:
        return [cell[name] for cell in cells.values()]

    for claim, name in (("boundary-search-exact", "with bisection"), ("boundary-search-refined", "ours")):
        near, least = of(f"{name}: within 5 %"), of(f"{name}: smallest ratio")
        holds = [a >= 95 and b >= 1 - 1e-6 for a, b in zip(near, least, strict=True)]
        text = f"within 5 % of the exact distance for {listed(near)} % of the inputs; smallest ratio {min(least)}"
        report_claim(claim, all_or_none(holds), text)
    normal, folds = of("BSM of the margin: cosine above 0.999"), of("nearest point at a fold %")
    text = (
        f"cosine above 0.999 for {listed(normal)} % of the inputs, without {listed(folds)} % that are nearest to a fold"
    )
    report_claim("bsm-is-normal", all_or_none([share >= 99 for share in normal]), text)


# --- The search -------------------------------------------------------------------------------------------------------

BUDGETS = (*PUBLISHED.budgets, 1.5, 2.2)


def with_apgd(model: nn.Module, x: Tensor, y: Tensor, known: Tensor, seed: int) -> Tensor:
    """The distances (B,) after APGD with both losses at every budget below what is known."""
    best = known.clone()
    for name in ("apgd-ce", "apgd-dlr"):
        open_ = torch.ones_like(y, dtype=torch.bool)
        for budget in BUDGETS:
            rows = (open_ & (best > budget)).nonzero()[:, 0]
            if len(rows) == 0:
                continue
            found = hf.attack(model, x[rows], y[rows], hf.L2(budget), name, steps=100, seed=seed)
            distance = (found.x_adv - x[rows]).flatten(1).norm(dim=1)
            best[rows] = torch.where(found.success & (distance < best[rows]), distance, best[rows])
            open_[rows] = ~found.success
    return best


def measure_search(seed: int, models: Path | None, count: int = 50) -> Cell:
    """Distances after each stage."""
    model = robust_network(0.0, seed, models)
    x = hf.load_data("mnist-mini").test.x[:count]
    y = model(x).argmax(1)
    pgds = replace(PUBLISHED, budgets=BUDGETS, attacks=())
    first = nearest_boundary(model, x, setting_for(x, seed=seed), pgds).distance
    cw = nearest_boundary(model, x, setting_for(x, seed=seed), replace(pgds, steps=0, attacks=("cw",))).distance
    second = torch.minimum(first, cw)
    third = with_apgd(model, x, y, second, seed)
    ours = nearest_boundary(model, x, setting_for(x, seed=seed), BoundarySearch(budgets=BUDGETS)).distance
    everywhere = torch.isfinite(first) & torch.isfinite(second) & torch.isfinite(third) & torch.isfinite(ours)
    cell: Cell = {}
    for name, found in (("PGDs", first), ("with CW", second), ("with APGD", third), ("ours", ours)):
        cell[f"{name}: distance"] = mean(found[everywhere], 4)
        cell[f"{name}: found %"] = percent(torch.isfinite(found))
    cell["nearer by CW %"] = percent(cw < first - 1e-6)
    cell["nearer by APGD %"] = percent(third < second - 1e-6)
    return cell


def report_search(cells: dict[str, Cell]) -> None:
    """APGD brings nothing where it shortens the mean by less than 1 % and breaks no more inputs than 1 in 100."""

    def less(a: str, b: str) -> list[float]:
        return [100 * (1 - c[f"{b}: distance"] / c[f"{a}: distance"]) for c in cells.values()]

    nothing = [
        gain < 1 and c["with APGD: found %"] - c["with CW: found %"] <= 1
        for gain, c in zip(less("with CW", "with APGD"), cells.values(), strict=True)
    ]
    pairs = {"CW": ("PGDs", "with CW"), "APGD": ("with CW", "with APGD"), "ours": ("with APGD", "ours")}
    text = "; ".join(f"{name}: {listed(less(*pair))} % shorter" for name, pair in pairs.items())
    report_claim("boundary-search-apgd", all_or_none(nothing), text)


# --- Distances between paired explanations ----------------------------------------------------------------------------

L2_BUDGETS = (0.0, 1.0, 2.0)


def robust_network(eps: float, seed: int, models: Path | None) -> nn.Module:
    """small-star on mnist-mini: standard, or adversarially trained at an l2 budget for three epochs."""
    if eps == 0:
        return trained_model("mnist-mini-standard", models, seed=seed)
    return trained_model("mnist-mini-at", models, seed=seed, threat=f"l2:{eps}", epochs=3)


def measure_distances(eps: float, seed: int, models: Path | None, count: int = 100) -> Cell:
    """Distances of the pairs, absolute and relative to the norm of the explanation at the input."""
    model, test = robust_network(eps, seed, models), hf.load_data("mnist-mini").test
    x, y = test.x[:count], test.y[:count]
    found = alignment(model, x, y, seed=seed)
    label = model(x).argmax(1)
    norms = [
        hf.explain(model, x, label, m).attribution.flatten(1).norm(dim=1) for m in ("saliency", "integrated-gradients")
    ]
    robust = ~hf.attack(model, x, y, hf.L2(1.0), "apgd-ce", seed=seed).success
    cell = {"accuracy": percent(label == y), "robust, l2 1.0": percent(robust), "ok": percent(found.ok)}
    for name, distance, norm in (("SM-BSM", found.saliency, norms[0]), ("IG-BIG", found.integrated, norms[1])):
        cell |= {name: mean(distance[found.ok]), f"{name} relative": mean((distance / norm)[found.ok])}
    return cell | {"cosine with the normal": mean(found.cosine[found.ok]), "distance": mean(found.distance[found.ok])}


def report_distances(cells: dict[str, Cell], seeds: range) -> None:
    """Lower with the larger budget and on every seed; the factor is part of the result."""

    def of(eps: float, name: str) -> list[float]:
        return [cells[f"l2 {eps}, seed {seed}"][name] for seed in seeds]

    for claim, name in (("saliency-nears-bsm", "SM-BSM"), ("ig-nears-big", "IG-BIG")):
        by_budget = [of(eps, name) for eps in L2_BUDGETS]
        falls = [one < start for one, start in zip(by_budget[1], by_budget[0], strict=True)]
        text = "; ".join(f"{eps}: {listed(v)}" for eps, v in zip(L2_BUDGETS, by_budget, strict=True))
        report_claim(claim, all_or_none(falls), f"by l2 budget {text}")
        falls = [b < a for a, b in zip(by_budget[1], by_budget[2], strict=True)]
        report_claim(f"{claim}-with-budget", all_or_none(falls), f"by l2 budget {text}")
        relative = [of(eps, f"{name} relative") for eps in L2_BUDGETS]
        text = "; ".join(f"{eps}: {listed(v)}" for eps, v in zip(L2_BUDGETS, relative, strict=True))
        falls = [max(after) < start for start, *after in zip(*relative, strict=True)]
        report_claim(f"{claim}-relative", all_or_none(falls), f"by l2 budget {text}")


# --- Randomised weights -----------------------------------------------------------------------------------------------

METHODS_RANDOMISED = ("big", "saliency", "guided-backprop")


def measure_randomised(kind: str, seed: int, models: Path | None, count: int = 12) -> Cell:
    """Correlation after all layers were destroyed, for each method."""
    model = robust_network(0.0 if kind == "standard" else 1.0, seed, models)
    x = hf.load_data("mnist-mini").test.x[:count]
    y = model(x).argmax(1)
    cell: Cell = {}
    for method in METHODS_RANDOMISED:
        found = randomised(model, x, y, method, seed=seed).correlation.mean(1)
        cell |= {method: round(float(found[-1]), 3), f"{method}, half": round(float(found[len(found) // 2]), 3)}
    return cell


def report_randomised(cells: dict[str, Cell]) -> None:
    """An explanation passes where less than 0.3 of the correlation is left, and fails above 0.5."""
    for claim, name, holds in (
        ("big-passes-randomisation", "big", lambda left: left < 0.3),
        ("guided-backprop-fails-randomisation", "guided-backprop", lambda left: left > 0.5),
    ):
        left = [cell[name] for cell in cells.values()]
        report_claim(claim, all_or_none([holds(v) for v in left]), f"correlation left: {listed(left)}")


# --- Locality ---------------------------------------------------------------------------------------------------------

SIZE, CUE, SHOWN = 32, 0.06, 0.9
SCENE_BUDGETS = (0.0, 0.05, 0.1)


def scenes_with_cue(seed: int, count: int) -> Dataset:
    """Digit scenes whose background carries a pattern of signs: the label's for a share SHOWN, else any class's."""
    scenes = digit_scenes(count, size=SIZE, scale=(0.55, 0.75), seed=seed)
    signs = torch.randint(0, 2, (10, 1, SIZE, SIZE), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1

    def cued(part: Split, fork: int) -> Split:
        noise = Noise.for_batch(seed, len(part)).fork(fork)
        other = noise.fork(0).integers(10)
        shown = torch.where(noise.fork(1).uniform(()) < SHOWN, part.y, other)
        return Split((part.x + CUE * signs[shown]).clamp(0, 1), part.y, part.boxes)

    return Dataset("cued-scenes", cued(scenes.train, 0), cued(scenes.test, 1), scenes.classes)


def scene_network(eps: float, data: Dataset, seed: int, start: nn.Module | None, epochs: int) -> nn.Module:
    """Three convolutions and the largest value of each channel; robust training starts from the standard weights."""
    torch.manual_seed(seed)
    sizes = ((1, 16, 5), (16, 32, 3), (32, 64, 3))
    layers = [m for a, b, k in sizes for m in (nn.Conv2d(a, b, k, 1 + (a != 32), k // 2), nn.ReLU())]
    network = nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    recipe: Cell = {
        "epochs": epochs, "batch_size": 64, "seed": seed, "validation": 0.0, "objective": {"name": "standard"},
        "optimizer": {"name": "adam", "lr": 2e-3}, "learning_rate": {"name": "one-cycle", "peak": 0.3},
    }  # fmt: skip
    if eps:
        recipe |= {
            "threat": f"linf:{eps}", "objective": {"name": "at"}, "attack": {"name": "pgd", "steps": 3},
            "budget": {"name": "linear", "end": max(1, epochs // 2)},
        }  # fmt: skip
    return hf.train(recipe, copy.deepcopy(start) if eps and start else network, data, progress=False).model.eval()


def measure_locality(seed: int, count: int = 100, scenes: int = 4000, epochs: int = 8) -> Cell:
    """Scores of all networks of a seed: the standard one trained twice as long, so that all have as many epochs."""
    data = scenes_with_cue(seed, scenes)
    first = scene_network(0.0, data, seed, None, epochs)
    part, cell = data.test[:count], {}
    search = BoundarySearch(attacks=("deepfool",), starts=2, refine=4)
    methods = {name: dict(how) for name, how in METHODS.items()}
    methods["big"]["search"] = search
    again = {"threat": "linf:0.1", "epochs": epochs, "batch_size": 64, "seed": seed, "validation": 0.0,
             "objective": {"name": "standard"}, "optimizer": {"name": "adam", "lr": 2e-3},
             "learning_rate": {"name": "one-cycle", "peak": 0.3}}  # fmt: skip
    networks = {"standard": hf.train(again, copy.deepcopy(first), data, progress=False).model.eval()}
    networks |= {f"at {eps}": scene_network(eps, data, seed, first, epochs) for eps in SCENE_BUDGETS[1:]}
    networks["random"] = randomise_all(copy.deepcopy(first), seed)
    rows = protocol(networks, part.x, part.y, part.boxes, threat=hf.Linf(0.05), methods=methods, floor=False, seed=seed)
    for row in rows:
        name, method = row["model"], row["method"]
        cell |= {f"{name}: accuracy": percent_of(row["accuracy"]), f"{name}: robust": percent_of(row["robust"])}
        cell |= {f"{name}: {method} {score}": round(row[score].mean, 3) for score in ("f1", "precision", "recall")}
    sides = (part.boxes[:, 2:] - part.boxes[:, :2]).prod(1) / SIZE**2
    return cell | {"area": round(float(sides.mean()), 3)}


def percent_of(share: float) -> float:
    """In percent, one decimal."""
    return round(100 * share, 1)


def report_locality(cells: dict[str, Cell]) -> None:
    """F1 of the robust networks against the standard one, by method; saliency's floor at random weights."""
    for method, claim in (("saliency", "saliency"), ("integrated-gradients", "ig"), ("big", "big")):
        by_budget = [
            [cell[f"{name}: {method} f1"] for cell in cells.values()]
            for name in ("standard", *(f"at {eps}" for eps in SCENE_BUDGETS[1:]))
        ]
        text = "; ".join(f"{eps}: {listed(v)}" for eps, v in zip(SCENE_BUDGETS, by_budget, strict=True))
        rises = [min(c) > a for a, *c in zip(*by_budget, strict=True)]
        report_claim(f"robust-locality-{claim}", all_or_none(rises), f"F1 by linf budget {text}")
    trend = [c["at 0.1: big f1"] > c["at 0.05: big f1"] > c["standard: big f1"] for c in cells.values()]
    report_claim("locality-grows-with-robustness", all_or_none(trend), "F1 of BIG rises with each budget")
    near = [
        abs(c["random: saliency precision"] - c["area"]) < 0.1 and abs(c["random: saliency recall"] - 0.5) < 0.1
        for c in cells.values()
    ]
    text = "; ".join(
        f"precision {c['random: saliency precision']} at area {c['area']}, recall {c['random: saliency recall']}"
        for c in cells.values()
    )
    report_claim("locality-floor", all_or_none(near), text)


# --- Command line -----------------------------------------------------------------------------------------------------


def list_tasks(part: str, seeds: range, models: Path | None, count: int) -> Tasks:
    """What there is to measure, seeds outside."""
    kinds = ("standard", "at, l2 1.0")
    match part:
        case "exact":
            return {f"seed {seed}": partial(measure_exact, seed, count) for seed in seeds}
        case "search":
            return {f"standard, seed {s}": partial(measure_search, s, models, count) for s in seeds}
        case "distances":
            pairs = [(eps, seed) for seed in seeds for eps in L2_BUDGETS]
            return {f"l2 {eps}, seed {s}": partial(measure_distances, eps, s, models, count) for eps, s in pairs}
        case "randomise":
            return {f"{k}, seed {s}": partial(measure_randomised, k, s, models) for s in seeds for k in kinds}
        case _:
            return {f"seed {seed}": partial(measure_locality, seed, count) for seed in seeds}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(NOTES), required=True)
    parser.add_argument("--seeds", type=int, default=3, help="networks of each kind (default: 3)")
    parser.add_argument("--inputs", type=int, default=100, help="test inputs (default: 100)")
    parser.add_argument("--models", type=Path, help="folder for the trained networks of mnist-mini")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(args.seeds)
    tasks = list_tasks(args.part, seeds, args.models, args.inputs)
    cells = measure_cells(NAME, args.part, tasks, to_markdown=to_markdown, folder=args.out)
    match args.part:
        case "exact":
            report_exact(cells)
        case "search":
            report_search(cells)
        case "distances":
            report_distances(cells, seeds)
        case "randomise":
            report_randomised(cells)
        case _:
            report_locality(cells)


if __name__ == "__main__":
    main()
