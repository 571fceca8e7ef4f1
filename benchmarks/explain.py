"""Explanations: against Captum and exact boundaries, how complete they are, and whether robust models see the object.

Parts, which can run at different times and are put together in one file of results:

- captum: integrated gradients, saliency and SmoothGrad against Captum at batch 32 and 50 steps: largest difference, and
  ratio of CPU times.
- boundary: how near the boundary search, and the published one, come to the exact answer on small ReLU networks, three
  of each shape: l2 by branch and bound over the sides of the ReLUs, linf by bisection with mixed-integer programming.
- completeness: error of integrated gradients and BIG at the default options.
- randomise: rank correlation of an explanation with itself while the layers lose their weights, from the last down, for
  three seeds of a standard and of a robust model.
- locality: a standard and several adversarially trained CNNs on the digit scenes: locality of saliency, integrated
  gradients and BIG, and alignment of the gradient with the boundary's normal, against robust accuracy.

One thread. Settings of "locality" were tried out on scenes of another seed than those reported.

    python benchmarks/explain.py --part captum
    python benchmarks/explain.py --part locality --models MODELS --resume          # an hour

The part "captum" needs Captum in the environment.
"""

import argparse
import copy
import itertools
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    Neighbours,
    describe_markdown,
    describe_run,
    markdown_table,
    read_results,
    store_cell,
    trained_model,
)
from torch import Tensor, nn

import holdfast as hf
from holdfast.certificates.complete.milp import exact_margin
from holdfast.data import Dataset
from holdfast.explanations import PUBLISHED, BoundarySearch
from holdfast.explanations.core.boundary import nearest_boundary
from holdfast.explanations.core.exact_boundary import exact_boundary
from holdfast.explanations.evaluate.locality import METHODS, SCORES, Mean, mean_of, protocol
from holdfast.explanations.evaluate.randomise import randomise_all, randomised, rank_correlation
from holdfast.explanations.evaluate.stability import alignment
from holdfast.explanations.evaluate.trust import setting_for
from holdfast.explanations.smoothgrad import BLOCK, noise_blocks
from holdfast.random import Noise

NAME = "explain"
PARTS = ("captum", "boundary", "completeness", "randomise", "locality")
PACKAGES = ("holdfast", "torch")
BATCH, STEPS = 32, 50
Cell = dict[str, Any]


# --- Results: one file, read and written again with every finished cell -----------------------------------------------


def store(folder: Path, part: str, key: str, cell: Cell, packages: tuple[str, ...] = PACKAGES) -> None:
    """Puts one cell among the results."""
    store_cell(NAME, part, key, {**cell, "run": describe_run(packages)}, to_markdown=to_markdown, folder=folder)


# --- Captum -----------------------------------------------------------------------------------------------------------


RULES = {"gauss-legendre": "gausslegendre", "left": "riemann_left", "right": "riemann_right"}
TOOLS = ("holdfast", "captum")
KINDS = (*(f"integrated gradients, {rule}" for rule in RULES), "saliency", "smoothgrad")


def make_task(tool: str, kind: str, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """One explanation of the batch by one of the tools, with the same rule and the same number of steps."""
    rule = kind.partition(", ")[2]
    if tool == "holdfast":
        if rule:
            how = {"rule": rule, "steps": STEPS, "tolerance": None}
            return lambda: hf.explain(model, x, y, "integrated-gradients", **how).attribution
        return lambda: hf.explain(model, x, y, kind, **({"samples": STEPS} if kind == "smoothgrad" else {})).attribution

    from captum.attr import IntegratedGradients, NoiseTunnel, Saliency

    if rule:
        path, black = IntegratedGradients(model), torch.zeros_like(x)
        return lambda: path.attribute(x, black, target=y, n_steps=STEPS, method=RULES[rule])
    saliency = Saliency(model)
    if kind == "saliency":
        return lambda: saliency.attribute(x, target=y, abs=False)
    tunnel = NoiseTunnel(saliency)
    return lambda: tunnel.attribute(x, nt_samples=STEPS, stdevs=0.15, target=y, abs=False)


def same_noise(x: Tensor) -> Callable[..., Tensor]:
    """In place of `torch.normal`, so that Captum draws the numbers that Holdfast draws."""
    noise = Noise.for_batch(0, len(x))
    draws = noise_blocks(noise, slice(0, -(-STEPS // BLOCK)), x)[:, :STEPS].flatten(0, 1)
    return lambda mean, deviation: draws * deviation


def serve(pipe: Any, tool: str, name: str, shape: tuple[int, ...]) -> None:
    """A process of its own for each tool: sends the result of each kind, then a time for each that is asked for."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Captum warns where it sets requires_grad by itself
    torch.manual_seed(0)
    model = hf.make_model(name, input_shape=shape, classes=10, seed=0).eval()
    x, y = torch.rand(BATCH, *shape), torch.randint(0, 10, (BATCH,))
    tasks = {kind: make_task(tool, kind, model, x, y) for kind in KINDS}
    own_normal = torch.normal
    for kind, task in tasks.items():
        if tool == "captum" and kind == "smoothgrad":
            torch.normal = same_noise(x)
        pipe.send(task().detach().numpy())
        torch.normal = own_normal
    while (kind := pipe.recv()) is not None:
        calls = 50 if kind == "saliency" else 1
        started = time.process_time()
        for _ in range(calls):
            tasks[kind]()
        pipe.send(1e3 * (time.process_time() - started) / calls)


def measure_captum(folder: Path, pairs: int = 3, rounds: int = 3) -> None:
    """Median CPU milliseconds of both, in turn, and the largest difference of the results.

    Each tool runs in a process of its own, and several pairs of processes one after the other: where a process happens
    to lie in memory makes up to a fifth of its time.
    """
    for name, shape in (("small", (1, 28, 28)), ("small", (3, 32, 32)), ("medium", (3, 32, 32)), ("mlp", (1, 28, 28))):
        others = Neighbours()
        runs = [time_pair(name, shape, rounds) for _ in range(pairs)]
        for kind in KINDS:
            taken = {tool: [ms for _, times in runs for ms in times[kind][tool]] for tool in TOOLS}
            medians = {tool: round(statistics.median(values), 2) for tool, values in taken.items()}
            cell = {
                "difference": max(apart[kind] for apart, _ in runs),
                "milliseconds": medians,
                "ratio": round(medians["holdfast"] / medians["captum"], 3),
                "others": others.cores(),
            }
            store(folder, "captum", f"{kind}; {name} {'x'.join(map(str, shape))}", cell, (*PACKAGES, "captum"))


Times = dict[str, dict[str, list[float]]]


def time_pair(name: str, shape: tuple[int, ...], rounds: int) -> tuple[dict[str, float], Times]:
    """For each kind the largest difference of the results, and the milliseconds of each tool."""
    context, pipes, workers = multiprocessing.get_context("spawn"), {}, []
    for tool in TOOLS:
        pipes[tool], end = context.Pipe()
        workers.append(context.Process(target=serve, args=(end, tool, name, shape), daemon=True))
        workers[-1].start()
        end.close()  # so that a process that dies is noticed
    answers = [[pipe.recv() for _ in KINDS] for pipe in pipes.values()]
    apart = {kind: float(abs(a - b).max()) for kind, a, b in zip(KINDS, *answers, strict=True)}
    times: Times = {kind: {tool: [] for tool in TOOLS} for kind in KINDS}
    for kind in KINDS:
        for _ in range(rounds):
            for tool, pipe in pipes.items():
                pipe.send(kind)
                times[kind][tool].append(pipe.recv())
    for pipe, worker in zip(pipes.values(), workers, strict=True):
        pipe.send(None)
        worker.join()
    return apart, times


# --- Boundary ---------------------------------------------------------------------------------------------------------


def small_network(features: int, hidden: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """A ReLU network trained on points whose class is that of the nearest of a few centres, in float64."""
    torch.manual_seed(seed)
    widths = [features, *hidden, classes]
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())][:-1]
    model = nn.Sequential(*layers).double()
    x, centres = torch.rand(600, features).double(), torch.rand(3 * classes, features).double()
    y = torch.cdist(x, centres).argmin(1) % classes
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def exact_linf(model: nn.Module, x: Tensor, y: Tensor, found: Tensor, halvings: int = 9) -> Tensor:
    """Lower ends of the linf distances, (B,): the last radius proved free, by bisection below the distances found."""
    lower, upper = torch.zeros_like(found), found.clone()
    for _ in range(halvings):
        middle = (lower + upper) / 2
        for i, radius in enumerate(middle.tolist()):
            free = exact_margin(model, x[i : i + 1], y[i : i + 1], hf.Linf(radius)).status[0] == "certified"
            (lower if free else upper)[i] = radius
    return lower


SHAPES = ((2, (8, 8), 3), (5, (10, 8), 4), (8, (12,), 3), (10, (10, 8), 4))
SEEDS = 3


def measure_boundary(folder: Path, count: int = 100) -> None:
    """Share of the inputs whose boundary point is within 2 % of the exact distance; the published search beside it."""
    for (features, hidden, classes), run in itertools.product(SHAPES, range(SEEDS)):
        model = small_network(features, hidden, classes, seed=100 * run + features)
        x = torch.rand(count, features).double()
        y = model(x).argmax(1)
        ours = nearest_boundary(model, x, setting_for(x), BoundarySearch())
        published = nearest_boundary(model, x, setting_for(x), PUBLISHED)
        started = time.process_time()
        exact = exact_boundary(model, x)[1]
        cell = {"inputs": count, **near("l2", ours.distance / exact), **near("published", published.distance / exact)}
        cell["exact CPU s"] = round(time.process_time() - started, 1)
        part = slice(0, 30)
        linf = nearest_boundary(model, x[part], setting_for(x[part]), BoundarySearch(norm="linf")).distance
        cell |= near("linf", linf / exact_linf(model, x[part], y[part], linf))
        cell["gradients"] = round(float(ours.gradients.double().mean()))
        cell["published gradients"] = round(float(published.gradients.double().mean()))
        store(folder, "boundary", f"{features}-{'-'.join(map(str, hidden))}-{classes}, run {run}", cell)


def near(name: str, ratio: Tensor) -> Cell:
    """Share within 2 %, and the median and the largest ratio of those found."""
    kept = ratio[torch.isfinite(ratio)]
    return {
        f"{name} within 2 %": round(100 * float((ratio <= 1.02).double().mean()), 1),
        f"{name} median": round(float(kept.median()), 4),
        f"{name} largest": round(float(kept.max()), 3),
    }


# --- Completeness -----------------------------------------------------------------------------------------------------


def measure_completeness(folder: Path, count: int = 200) -> None:
    """Errors and gradient evaluations at the default options, on a standard and on a robust model."""
    data = hf.load_data("mnist-mini")
    x, y = data.test.x[:count], data.test.y[:count]
    for recipe in ("mnist-mini-standard", "mnist-mini-at"):
        model = hf.train(recipe).model
        for method, options in (
            ("integrated-gradients", {}),
            ("integrated-gradients", {"tolerance": None}),
            ("integrated-gradients", {"rule": "gauss-legendre"}),
            ("big", {}),
            ("big", {"tolerance": None}),
        ):
            started = time.process_time()
            found = hf.explain(model, x, y, method, **options)
            cell = {
                "mean error %": round(100 * float(found.error.mean()), 3),
                "largest error %": round(100 * float(found.error.max()), 3),
                "below 1 %": round(100 * float((found.error < 0.01).double().mean()), 1),
                "gradients": round(float(found.gradients.double().mean())),
                "CPU s": round(time.process_time() - started, 1),
            }
            what = ", ".join(f"{k} {v}" for k, v in options.items()) or "default"
            store(folder, "completeness", f"{method}, {what}; {recipe}", cell)


# --- Randomised weights -----------------------------------------------------------------------------------------------


def measure_randomised(folder: Path, models: Path | None, seeds: int = 3, count: int = 24) -> None:
    """Mean correlation after each layer; with other random weights in all layers also over all values."""
    x = hf.load_data("mnist-mini").test.x[:count]
    for recipe, seed in itertools.product(("mnist-mini-standard", "mnist-mini-at"), range(seeds)):
        model = trained_model(recipe, models, seed=seed)
        y, random = model(x).argmax(1), randomise_all(copy.deepcopy(model), seed)
        for method in METHODS:
            found = randomised(model, x, y, method, seed=seed)
            both = [hf.explain(network, x, y, method, seed=seed).attribution.abs() for network in (model, random)]
            cell = {
                "by layers destroyed": [round(value, 2) for value in found.correlation.mean(1).tolist()],
                "compared": round(float(found.compared.mean()), 2),
                "another draw, over all values": round(float(rank_correlation(*both).mean()), 2),
            }
            store(folder, "randomise", f"{method}; {recipe}, seed {seed}", cell)


# --- Locality ---------------------------------------------------------------------------------------------------------

THREAT = hf.Linf(0.1)
RUNS = {"standard": 0.0, "standard-longer": 0.0, "at-0.03": 0.03, "at-0.06": 0.06, "at-0.1": 0.1, "at-0.15": 0.15}
"""Budget of adversarial training by name of the run. All but the first start from the weights of the first, so that
"standard-longer" has as many epochs as the robust ones."""


def network() -> nn.Module:
    """Four convolutions that see 33 x 33 pixels, and the largest value of each channel: a digit may lie anywhere."""
    torch.manual_seed(0)
    sizes = ((1, 16, 5), (16, 32, 3), (32, 64, 3))
    layers = [m for a, b, k in sizes for m in (nn.Conv2d(a, b, k, stride=2, padding=k // 2), nn.ReLU())]
    last = (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(*layers, *last)


def recipe(eps: float, epochs: int) -> Cell:
    """Standard training, or adversarial training at linf eps whose budget grows over the first third."""
    common = {
        "epochs": epochs,
        "batch_size": 64,
        "seed": 0,
        "validation": 0.05,
        "optimizer": {"name": "adam", "lr": 2e-3},
        "learning_rate": {"name": "one-cycle", "peak": 0.3},
        "evaluate": {"count": 200, "attack_steps": 10},
    }
    if eps == 0:
        return {**common, "threat": str(THREAT), "objective": {"name": "standard"}}
    robust = {"threat": f"linf:{eps}", "objective": {"name": "at"}, "attack": {"name": "pgd", "steps": 5}}
    return {**common, **robust, "budget": {"name": "linear", "start": 0.0, "end": max(1, epochs // 3)}}


def trained(
    key: str, eps: float, data: Dataset, models: Path, epochs: int, start: nn.Module | None
) -> tuple[nn.Module, float]:
    """The model and its CPU seconds; a run that was interrupted goes on."""
    folder, started = models / key, time.process_time()
    resume = (folder / "recipe.toml").exists()
    first = network() if start is None else copy.deepcopy(start)
    result = hf.train({**recipe(eps, epochs), "name": key}, first, data, out=folder, resume=resume)
    return result.model.eval(), time.process_time() - started


def measure_locality(folder: Path, models: Path, done: dict[str, Any], *, scenes: int, count: int, epochs: int) -> None:
    """One cell for each model; "random weights" is the floor.

    From random weights adversarial training does not leave the level of chance within this time.
    """
    data, start = hf.load_data("digit-scenes", n=scenes, seed=1), None
    part = data.test[:count]
    for key, eps in RUNS.items():
        if key in done and start is not None:
            continue
        others = Neighbours()
        model, seconds = trained(key, eps, data, models, epochs, start)
        start = start or model
        if key in done:
            continue
        rows = protocol(
            {key: model}, part.x, part.y, part.boxes, threat=THREAT, methods=METHODS, floor=key == "standard"
        )
        for name in dict.fromkeys(row["model"] for row in rows):
            own = [row for row in rows if row["model"] == name]
            cell = {"accuracy": percent(own[0]["accuracy"]), "robust": percent(own[0]["robust"])}
            cell |= {
                f"{row['method']} {score}": as_list(row[score], share=score == "pointing")
                for row in own
                for score in SCORES
            }
            if name == key:
                half = part[: count // 2]
                angles = alignment(model, half.x, half.y)
                for field in ("cosine", "saliency", "integrated", "distance"):
                    cell[f"alignment {field}"] = as_list(mean_of(getattr(angles, field)[angles.ok]))
                cell |= {"train_cpu_seconds": round(seconds), "epochs": epochs, "scenes": scenes, "inputs": len(part)}
            store(folder, "locality", name, {**cell, "others": others.cores()})


def percent(share: float) -> float:
    """In percent, one decimal."""
    return round(100 * share, 1)


def as_list(mean: Mean, *, share: bool = False) -> list[float]:
    """Mean and half of the 95 % interval; of a share, whose interval does not lie evenly around it, mean and ends."""
    interval = mean.interval if share else (1.96 * mean.error,)
    return [round(value, 4) for value in (mean.mean, *interval)]


def interval_text(mean: float, *interval: float) -> str:
    """What `as_list` gives, as text."""
    return f"{mean:.3f} " + (f"± {interval[0]:.3f}" if len(interval) == 1 else "({:.3f} to {:.3f})".format(*interval))


# --- Tables -----------------------------------------------------------------------------------------------------------


def to_markdown(record: dict[str, Any]) -> str:
    """The results as a page."""
    lines = ["# Explanations", "", "Made by benchmarks/explain.py; its docstring says what is done."]
    for part, table in (
        ("captum", _captum),
        ("boundary", _plain),
        ("completeness", _plain),
        ("randomise", _plain),
        ("locality", _locality),
    ):
        if part in record:
            lines += ["", f"## {part}", "", table(record[part])]
    runs = {describe_markdown(cell["run"]) for cells in record.values() for cell in cells.values()}
    return "\n".join([*lines, "", "## Runs", "", *sorted(runs)])


def _captum(cells: dict[str, Cell]) -> str:
    rows = [
        (
            key,
            f"{c['difference']:.1e}",
            c["milliseconds"]["holdfast"],
            c["milliseconds"]["captum"],
            c["ratio"],
            c["others"],
        )
        for key, c in cells.items()
    ]
    return markdown_table(("method; model", "difference", "Holdfast ms", "Captum ms", "ratio", "others"), rows)


def _plain(cells: dict[str, Cell]) -> str:
    columns = [name for name in next(iter(cells.values())) if name != "run"]
    return markdown_table(("", *columns), [(key, *(c.get(name, "") for name in columns)) for key, c in cells.items()])


def _locality(cells: dict[str, Cell]) -> str:
    order = sorted(cells, key=lambda key: (key != "random weights", list(RUNS).index(key) if key in RUNS else -1))
    columns = [f"{method} f1" for method in METHODS] + [
        "alignment cosine",
        "alignment saliency",
        "alignment integrated",
    ]
    rows = []
    for key in order:
        cell = cells[key]
        values = [interval_text(*cell[c]) if c in cell else "" for c in columns]
        rows.append((key, cell["accuracy"], cell["robust"], *values))
    first = markdown_table(("model", "accuracy", f"robust, {THREAT}", *columns), rows)
    full = [f"{method} {score}" for method in METHODS for score in SCORES if score != "f1"]
    rows = [(key, *(interval_text(*cells[key][c]) for c in full)) for key in order]
    return (
        first
        + "\n\nMeans with 95 % intervals; Clopper-Pearson for pointing, which is a share of the inputs.\n\n"
        + markdown_table(("model", *full), rows)
    )


# --- Command line -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Runs the part that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--models", type=Path, help="folder for the trained models of 'locality' and 'randomise'")
    parser.add_argument("--resume", action="store_true", help="leave out models that are among the results")
    parser.add_argument("--scenes", type=int, default=8000, help="to train on (default: 8000)")
    parser.add_argument("--inputs", type=int, default=500, help="test scenes that are scored (default: 500)")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "captum":
        measure_captum(options.out)
    elif options.part == "boundary":
        measure_boundary(options.out)
    elif options.part == "completeness":
        measure_completeness(options.out)
    elif options.part == "randomise":
        measure_randomised(options.out, options.models)
    else:
        if options.models is None:
            parser.error("the part 'locality' needs --models")
        done = read_results(NAME, options.out).get("locality", {}) if options.resume else {}
        sizes = {"scenes": options.scenes, "count": options.inputs, "epochs": options.epochs}
        measure_locality(options.out, options.models, done, **sizes)


if __name__ == "__main__":
    main()
