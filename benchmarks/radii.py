"""Radii: the envelope against all-or-nothing certificates, the search against bisection, boxes against cubes.

MLPs with three hidden layers of 100 are trained on the embedded MNIST: one with cross-entropy and two with PGD (linf
0.1). The attack of `robust` is not clipped to [0, 1], as the boxes that are measured are not either; that of `clipped`
is, which leaves the model free on pixels that are black in every image. `fc1` has one hidden layer of 1024: its bounds
are cheap, so that the distances weigh most; no boxes are measured on it.

    python benchmarks/radii.py               # ten minutes on one thread
    python benchmarks/radii.py --only fc1    # one model; the results of the others stay
    python benchmarks/radii.py --quick       # a few inputs and epochs; writes nothing
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import (
    RESULTS,
    describe_markdown,
    describe_run,
    load_average,
    markdown_table,
    read_results,
    write_results,
)
from torch import Tensor, nn

import holdfast as hf
from holdfast.analyze.bounding_maps import similarity
from holdfast.certificates.core.radius import search_radius
from holdfast.certificates.crown import crown
from holdfast.certificates.fastlin import fastlin
from holdfast.certificates.nonuniform import nonuniform
from holdfast.certificates.pec import pec

PACKAGES = ("holdfast", "torch")
KINDS = {"linf": hf.Linf, "l2": hf.L2}
BUDGETS = {"linf": (0.02, 0.05, 0.1), "l2": (0.2, 0.5, 1.0)}
INTERVALS = {"linf": 0.4, "l2": 1.2}
RECIPES: dict[str, dict[str, Any]] = {
    "standard": {"recipe": "mnist-mini-standard", "epochs": 6},
    "robust": {"recipe": "mnist-mini-at", "epochs": 15, "threat": "linf:0.1@-1:2"},
    "clipped": {"recipe": "mnist-mini-at", "epochs": 15},
    "fc1": {"recipe": "mnist-mini-standard", "epochs": 6},
}
PAIRS = 5  # of timed runs, in turn; the median of their ratios is recorded


def train(name: str, recipe: str, **overrides: Any) -> nn.Module:
    """An MLP with three hidden layers of 100; `fc1` is the catalogue's, with one of 1024."""
    options: dict[str, Any] = {} if name == "fc1" else {"hidden": (100, 100, 100)}
    model = hf.make_model("fc1" if name == "fc1" else "mlp", seed=0, **options)
    return hf.train(recipe, model=model, **overrides).model.eval()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of right answers."""
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def time_ratio(ours: Callable[[], object], theirs: Callable[[], object]) -> float:
    """Median over pairs of runs of the CPU time of `ours` over that of `theirs`, after one run of each."""
    ratios = []
    for _ in range(PAIRS + 1):
        start = time.process_time()
        theirs()
        middle = time.process_time()
        ours()
        ratios.append((time.process_time() - middle) / (middle - start))
    return statistics.median(ratios[1:])


@torch.no_grad()
def one_shot(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Any]]:
    """Mean radius of one evaluation of the bounds, with and without the envelope, for both kinds of slopes."""
    rows = []
    for norm, budgets in BUDGETS.items():
        for eps in budgets:
            for slopes, name, rival in (("parallel", "fastlin/kw", fastlin), ("adaptive", "crown", crown)):
                threat = KINDS[norm](eps)
                envelope = partial(pec, model, x, y, threat, slopes=slopes)  # type: ignore[arg-type]
                baseline = partial(rival, model, x, y, threat)
                whole, ours = baseline().certified, envelope()
                theirs = torch.where(whole, eps, 0.0)
                rows.append(
                    {
                        "threat": str(threat),
                        "bounds": name,
                        "all_or_nothing": float(theirs.mean()),
                        "pec": float(ours.radius.mean()) if ours.radius is not None else 0.0,
                        "pec_below": int((ours.radius < theirs).sum()),
                        "time_ratio": time_ratio(envelope, baseline),
                    }
                )
    return rows


def searches(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Any]]:
    """Evaluations of the bounds and mean radius, for bisection and with the envelope; inputs that are right."""
    rows = []
    for norm, top in INTERVALS.items():
        row: dict[str, Any] = {"norm": norm, "eps_max": top}
        for method in ("fastlin", "pec"):
            found = search_radius(model, x, y, norm, method, eps_max=top)  # type: ignore[arg-type]
            row[f"{method}_evaluations"] = float(found.evaluations.float().mean())
            row[f"{method}_radius"] = float(found.radius.mean())
        row["evaluations_ratio"] = row["pec_evaluations"] / row["fastlin_evaluations"]
        rows.append(row)
    return rows


def volumes(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> list[dict[str, Any]]:
    """Ratios of geometric means of the half-widths, box to cube, and how alike the boxes of the inputs are."""
    rows = []
    for elide in (True, False):
        start = time.perf_counter()
        found = nonuniform(model, x, y, hf.Linf(0.0), steps=steps, elide=elide)
        alike = similarity(found.radius)
        rows.append(
            {
                "margins": "differences of logits" if elide else "logits one by one",
                "uniform": float(found.uniform.mean()),
                "nonuniform": float(found.log_volume.exp().mean()),
                "ratio_mean": statistics.fmean(found.ratio.tolist()),
                "ratio_min": float(found.ratio.min()),
                "ratio_max": float(found.ratio.max()),
                "cosine_mean": alike.mean,
                "cosine_min": alike.minimum,
                "seconds_per_input": (time.perf_counter() - start) / len(x),
            }
        )
    return rows


def measure(name: str, n: int, boxes: int, steps: int, epochs: int | None) -> dict[str, Any]:
    """All three comparisons on one model."""
    data = hf.load_data("mnist-mini")
    settings = {**RECIPES[name], "epochs": epochs or RECIPES[name]["epochs"]}
    model = train(name, **settings)
    with torch.no_grad():
        right = (model(data.test.x).argmax(1) == data.test.y).nonzero()[:n, 0]
    x, y = data.test.x[right], data.test.y[right]
    return {
        "training": settings,
        "test_accuracy": accuracy(model, data.test.x, data.test.y),
        "one_shot": one_shot(model, x, y),
        "search": searches(model, x, y),
        "volume": [] if name == "fc1" else volumes(model, x[:boxes], y[:boxes], steps),
        "load_average": load_average(),
        "run": describe_run(PACKAGES),
    }


def to_markdown(record: dict[str, Any]) -> str:
    """The same, to be read."""
    text = [
        "# Radii",
        "",
        "- one thread; the machine was shared",
        "- MLP 784-100-100-100-10 on mnist-mini (a CPU-sized set-up); `standard`: 6 epochs of cross-entropy; "
        "`robust`: 15 epochs of PGD training at linf 0.1, attack not clipped to [0, 1]; `clipped`: the same, clipped; "
        "`fc1`: 784-1024-10, 6 epochs of cross-entropy",
        f"- times: medians over {PAIRS} pairs of runs in turn, CPU time, after one run of each",
        f"- the first {record['inputs']} test inputs that the model classifies right; "
        f"boxes: the first {record['boxes']} of them, {record['steps']} steps",
        "",
    ]
    for name, part in record["models"].items():
        text += [f"## {name} (test accuracy {part['test_accuracy']:.1%})", ""]
        text += [describe_markdown(part["run"]), f"- load average at the end: {part['load_average']}", ""]
        text += ["One evaluation of the bounds: mean radius, and inputs where the envelope proves less.", ""]
        rows = [
            (
                r["threat"],
                r["bounds"],
                f"{r['all_or_nothing']:.4f}",
                f"{r['pec']:.4f}",
                r["pec_below"],
                f"{r['time_ratio']:.2f}",
            )
            for r in part["one_shot"]
        ]
        text += [
            markdown_table(("threat", "bounds", "all or nothing", "pec", "pec below", "time pec / theirs"), rows),
            "",
        ]
        text += ["Search for the largest radius, tolerance 1e-4: evaluations per input and mean radius proved.", ""]
        rows = [
            (
                f"{r['norm']} in [0, {r['eps_max']}]",
                f"{r['fastlin_evaluations']:.2f}",
                f"{r['pec_evaluations']:.2f}",
                f"{r['evaluations_ratio']:.3f}",
                f"{r['fastlin_radius']:.4f}",
                f"{r['pec_radius']:.4f}",
            )
            for r in part["search"]
        ]
        header = ("search", "bisection", "pec", "ratio", "radius by bisection", "radius by pec")
        text += [markdown_table(header, rows), ""]
        if part["volume"]:
            text += [
                "Non-uniform boxes: geometric mean of the half-widths, and cosine between the boxes of two inputs.",
                "",
            ]
            rows = [
                (
                    r["margins"],
                    f"{r['uniform']:.4f}",
                    f"{r['nonuniform']:.4f}",
                    f"{r['ratio_mean']:.3f}",
                    f"{r['ratio_min']:.3f} to {r['ratio_max']:.3f}",
                    f"{r['cosine_mean']:.4f}",
                    f"{r['cosine_min']:.4f}",
                    f"{r['seconds_per_input']:.1f}",
                )
                for r in part["volume"]
            ]
            header = ("bounds of", "uniform", "non-uniform", "ratio", "range", "cosine", "least cosine", "s / input")
            text += [markdown_table(header, rows), ""]
    text += [
        "Liu, Tomioka and Cevher (2019) measured ratios of 1.13 to 1.18 (standard) and 2.43 to 2.77 (robust) on all of "
        "MNIST, with logits one by one and pixels in [-1, 1]: the same experiment, not the same set-up.",
    ]
    return "\n".join(text)


def main() -> None:
    """Measures and writes results/radii.json and radii.md, model by model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few inputs and one epoch; writes nothing")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), help="these models")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"inputs": 4, "boxes": 2, "steps": 5} if given.quick else {"inputs": 50, "boxes": 10, "steps": 100}
    record = {**sizes, "models": {} if given.quick else read_results("radii", RESULTS).get("models", {})}
    for name in given.only:
        record["models"][name] = measure(name, *sizes.values(), 1 if given.quick else None)
        if not given.quick:
            write_results("radii", record, to_markdown(record))
    if given.quick:
        print(to_markdown(record))


if __name__ == "__main__":
    main()
