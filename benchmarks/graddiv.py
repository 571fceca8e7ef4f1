"""Does GradDiv make random networks harder to attack, or only harder to attack as published?

Trains a network of a quarter of the published width on the embedded MNIST with Adv-BNN and with RSE, each with and
without GradDiv, on the same seeds. Judges each by EOT as published (20 steps of a quarter of the budget, 1 to 20
draws), by stronger settings, and by the minimum over all of them; measures how concentrated the gradients over draws
are, and how well examples transfer between draws.

python benchmarks/graddiv.py                     all cells of the size "full" that are missing; hours
python benchmarks/graddiv.py --size small        a reduced set; see SIZES
python benchmarks/graddiv.py --minutes 15        ends after that time; call it again to go on

Results go to benchmarks/results/graddiv.md and .json; trained models to the cache folder of Holdfast.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    Judgement,
    describe_markdown,
    describe_run,
    markdown_table,
    read_results,
    report_claims,
    store_cell,
    verdict_of,
)

import holdfast as hf
from holdfast.analyze.concentration import concentration
from holdfast.attacks import transfer_matrix
from holdfast.attacks.core.transfer import transfer_summary
from holdfast.attacks.eot_grid import eot_grid_of, published, stronger
from holdfast.data import Dataset, cache_root

GRADDIV = {"regularizers": {"graddiv-kappa": {"weight": 1.0, "samples": 3, "warm_up": 0.1, "ramp_up": 0.3}}}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "adv-bnn": ("mnist-mini-adv-bnn", {}),
    "adv-bnn+graddiv": ("mnist-mini-adv-bnn", GRADDIV),
    "rse": ("mnist-mini-rse", {}),
    "rse+graddiv": ("mnist-mini-rse", GRADDIV),
}
"""Recipe and overrides of each."""
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Size:
    """How much is done."""

    images: int  # for training
    overrides: dict[str, Any]  # of the recipes, for all methods
    adversary: dict[str, Any]  # of the recipes with an attack
    budgets: tuple[float, ...]
    inputs: int  # that are attacked
    draws: tuple[int, ...]  # of the published attack
    strong: tuple[int, int]  # draws and steps of the stronger settings
    measured: int  # inputs whose gradients are measured
    gradients: int  # draws of each
    sources: int  # draws in the transfer matrix
    moved: int  # inputs of the transfer matrix
    transfer: float  # budget of the transfer matrix


SIZES = {
    "small": Size(3000, {"epochs": 10}, {}, (0.1, 0.15), 60, (1, 5, 10, 20), (10, 30), 20, 50, 6, 60, 0.15),
    "full": Size(
        10_000,
        {"epochs": 10, "threat": "linf:0.3", "optimizer.lr": 1e-3},
        {"attack.steps": 10, "attack.step_size": 0.075},
        (0.3, 0.38),
        60,
        (1, 5, 10, 20, 100),
        (10, 60),
        100,
        100,
        50,
        100,
        0.4,
    ),
}


def model_path(size: str, method: str, seed: int) -> Path:
    """File of a trained model."""
    return cache_root() / "benchmarks" / f"graddiv-{size}-{method}-{seed}.safetensors"


def train_cell(name: str, size: Size, method: str, seed: int, data: Dataset) -> dict[str, Any]:
    """Train one model; measure the time of a step."""
    part = Dataset(data.name, data.train[: size.images], data.test, data.classes)
    recipe, own = METHODS[method]
    changes = size.overrides | own | (size.adversary if method.startswith("adv-bnn") else {})
    began = time.process_time()
    result = hf.train(recipe, data=part, seed=seed, progress=False, **changes)
    seconds = time.process_time() - began
    path = model_path(name, method, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    hf.save_model(result.model, path)
    rows = result.history
    return {
        "cpu_seconds": round(seconds, 1),
        "step_seconds": [round(row["seconds"], 2) for row in rows],
        "validation_clean": [row["validation_clean"] for row in rows],
        "validation_robust": [row["validation_robust"] for row in rows],
    }


def measure_cell(name: str, size: Size, method: str, seed: int, data: Dataset) -> dict[str, Any]:
    """Measure how concentrated the gradients over draws are, and how examples transfer between draws."""
    model, test = hf.load_model(model_path(name, method, seed)), data.test
    x, y = test.x[: size.measured], test.y[: size.measured]
    found = concentration(model, x, y, draws=size.gradients, seed=seed)
    models = [model.sample(i) for i in range(size.sources)]
    moved = transfer_summary(
        transfer_matrix(models, test.x[: size.moved], test.y[: size.moved], hf.Linf(size.transfer))
    )
    return {
        "resultant": float(found.resultant.mean()),
        "kappa_over_p": float(found.kappa.mean()) / x[0].numel(),
        "r_mean": float(found.r_mean.mean()),
        "transfer": {"mean": moved.mean, "min": moved.min, "max": moved.max},
    }


def judge_cell(size: Size, path: Path, budget: float, seed: int, data: Dataset) -> dict[str, Any]:
    """Attack one model at one budget by all settings."""
    model, settings = hf.load_model(path), (*published(size.draws), *stronger(*size.strong))
    x, y = data.test.x[: size.inputs], data.test.y[: size.inputs]
    began = time.process_time()
    found = eot_grid_of(model, x, y, hf.Linf(budget), settings, seed=seed)
    rows = dict(zip(found.names, found.accuracy, strict=True))
    seconds = round(time.process_time() - began, 1)
    sure = dict(zip(found.names, found.confirmed, strict=True))
    return {"clean": found.clean, **rows, "minimum": found.minimum, "confirmed": sure, "cpu_seconds": seconds}


def to_markdown(record: dict[str, Any]) -> str:
    """The results as tables, by size."""
    text = ["# Random networks: GradDiv under published and stronger attacks", ""]
    for size in SIZES:
        cells = {part: record.get(f"{part} {size}", {}) for part in ("train", "measure", "judge")}
        if not cells["train"]:
            continue
        last = list(cells["train"].values())[-1]["run"]
        what = SIZES[size]
        text += [f"## Size {size}", "", describe_markdown(last), ""]
        text += [
            f"{what.images} training images of mnist-mini, {what.overrides['epochs']} epochs, "
            f"{what.inputs} test images attacked. Adv-BNN is trained at {what.overrides.get('threat', 'linf:0.1')}. "
            "One line for each method and seed; accuracies in percent.",
            "",
            f"Run so far: {len(cells['train'])} of {len(METHODS) * len(SEEDS)} trainings, {len(cells['judge'])} of "
            f"{len(METHODS) * len(SEEDS) * len(what.budgets)} judgements. What has fewer than three seeds is a trial, "
            "not a finding. Each attack counts what its own 20 votes call broken; the last two columns count only what "
            "100 fresh draws confirm: the least that a published setting (FGSM and PGD with 1 to 100 draws) leaves, "
            "and what all settings together leave. The latter may lie above a single attack by luck of its votes.",
            "",
            *_measures(cells),
            *_judged(cells["judge"], what),
        ]
    return "\n".join(text)


def _measures(cells: dict[str, Any]) -> list[str]:
    head = ("model", "CPU s of training", "clean", "resultant length", "kappa / p", "R_mean", "transfer mean", "least")
    rows = []
    for key, cell in cells["train"].items():
        m = cells["measure"].get(key)
        tail = ("-",) * 5 if m is None else (
            f"{m['resultant']:.3f}", f"{m['kappa_over_p']:.3f}", f"{m['r_mean']:.3f}",
            f"{100 * m['transfer']['mean']:.0f}", f"{100 * m['transfer']['min']:.0f}",
        )  # fmt: skip
        rows.append((key, f"{cell['cpu_seconds']:.0f}", f"{100 * cell['validation_clean'][-1]:.0f}", *tail))
    return [markdown_table(head, rows), ""]


def _judged(cells: dict[str, Any], size: Size) -> list[str]:
    columns = [s.name for s in (*published(size.draws), *stronger(*size.strong))]
    text = []
    for budget in size.budgets:
        rows = [
            (key.rpartition(" ")[0], *(f"{100 * value:.0f}" for value in _row(cell, columns, size)))
            for key, cell in cells.items()
            if key.endswith(f" {budget:g}")
        ]
        if not rows:
            continue
        head = ("model", "clean", *columns, "published, confirmed", "minimum")
        text += [f"Accuracy at linf {budget:g}:", "", markdown_table(head, rows), ""]
    return text


def _row(cell: dict[str, Any], columns: list[str], size: Size) -> list[float]:
    known = min(cell.get("confirmed", cell)[s.name] for s in published(size.draws))  # the oldest cell has no other
    return [cell["clean"], *(cell[name] for name in columns), known, cell["minimum"]]


def judge(record: dict[str, Any]) -> Iterator[Judgement]:
    """Concentration and accuracy with and without GradDiv, seed by seed, of the largest size that has all seeds."""
    for name in ("full", "small"):
        sides = [[f"{method} {seed}" for seed in SEEDS] for method in ("adv-bnn", "adv-bnn+graddiv")]
        measured, judged = record.get(f"measure {name}", {}), record.get(f"judge {name}", {})
        if all(key in measured for side in sides for key in side):
            length = [[measured[key]["resultant"] for key in side] for side in sides]
            falls = [after < before for before, after in zip(*length, strict=True)]
            text = "; ".join(", ".join(f"{v:.3f}" for v in side) for side in length)
            yield "graddiv-lowers-concentration", verdict_of(falls), f"resultant length without and with: {text}"
            budgets = [b for b in SIZES[name].budgets if all(f"{k} {b:g}" in judged for side in sides for k in side)]
            for attack, claim in (("eot-pgd-20", "accuracy-under-eot"), ("minimum", "accuracy-under-strongest")):
                found = {b: [[judged[f"{key} {b:g}"][attack] for key in side] for side in sides] for b in budgets}
                outside = [pair for b, pair in found.items() if b > SIZES[name].budgets[0]]
                rises = [after > before for pair in outside for before, after in zip(*pair, strict=True)]
                text = "; ".join(f"{b:g}: {_percent(p[0])} without, {_percent(p[1])} with" for b, p in found.items())
                outcome = verdict_of(rises) if rises else "not decided at this size"
                yield f"graddiv-{claim}", outcome, f"accuracy under {attack} at {text}"
            yield from _judge_strength(judged, SIZES[name])
            return


def _judge_strength(judged: dict[str, Any], size: Size) -> Iterator[Judgement]:
    """Do more draws make the published attack stronger?"""
    few, many = (f"eot-pgd-{n}" for n in (size.draws[0], size.draws[-1]))
    found = [cell.get("confirmed", cell) for cell in judged.values()]
    falls = [each[many] <= each[few] for each in found]
    text = ", ".join(f"{100 * each[few]:.0f} to {100 * each[many]:.0f} %" for each in found)
    yield "graddiv-more-draws-are-stronger", verdict_of(falls), f"accuracy from {few} to {many}: {text}"


def _percent(values: list[float]) -> str:
    return ", ".join(f"{100 * v:.0f}" for v in values) + " %"


def main() -> None:
    """Run the cells that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    data, size, began = hf.load_data("mnist-mini"), SIZES[chosen.size], time.monotonic()

    def cell(part: str, key: str, run: Callable[[], dict[str, Any]]) -> None:
        part = f"{part} {chosen.size}"
        if (
            key not in read_results("graddiv", chosen.out).get(part, {})
            and time.monotonic() - began < 60 * chosen.minutes
        ):
            value = {**run(), "run": describe_run(["holdfast", "torch"])}
            store_cell("graddiv", part, key, value, to_markdown=to_markdown, folder=chosen.out)

    trained = [(method, seed, f"{method} {seed}") for seed in SEEDS for method in chosen.methods]
    for method, seed, key in trained:
        cell("train", key, partial(train_cell, chosen.size, size, method, seed, data))
        if model_path(chosen.size, method, seed).exists():
            cell("measure", key, partial(measure_cell, chosen.size, size, method, seed, data))
    for budget in size.budgets:
        for method, seed, key in trained:
            path = model_path(chosen.size, method, seed)
            if path.exists():
                cell("judge", f"{key} {budget:g}", partial(judge_cell, size, path, budget, seed, data))
    report_claims(judge(read_results("graddiv", chosen.out)))


if __name__ == "__main__":
    main()
