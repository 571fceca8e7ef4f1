"""Certified training: what can be proved of models that were trained for it, and what the training costs.

Parts, which can run at different times and are put together in one file of results:

- linf: MNIST at linf 0.1 and 0.3, the methods side by side on one small network with the same epochs, schedules and
  seed; verified error by the method's own bound and by the best that Holdfast has.
- reach: the network and the schedule that go furthest within the stated CPU time; the best bound is the exact solver
  on the inputs that neither bounds nor attacks decide.
- patch: MNIST against patches of 2x2 and 5x5 pixels, random places, and guided ones at equal cost.
- cifar: CIFAR-10 at linf 2/255 with a small network.
- time: seconds per step of IBP and CROWN-IBP training against the same training written with auto_LiRPA.
- survive: AutoAttack on every test input that a model is certified on.

One thread, the full training set but for a validation split of 5 %, on which the epoch is chosen. Published figures are
for networks ten to a hundred times as large, trained five to twenty times as long.

    python benchmarks/certified_training.py --data ROOT --models MODELS --part linf          # hours
    python benchmarks/certified_training.py --data ROOT --models MODELS --part linf --only ibp-0.3 --resume

The part "time" needs auto_LiRPA 0.7.1 (a checkout of its repository) in the environment.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from certified_training_time import measure_time, times_table
from common import RESULTS, Neighbours, describe_markdown, describe_run, markdown_table, read_results, store_cell
from torch import nn

import holdfast as hf
from holdfast.data import Dataset
from holdfast.training.initial_weights import ibp_weights

NAME = "certified_training"
PARTS = ("linf", "reach", "patch", "cifar", "time", "survive")
PACKAGES = ("holdfast", "torch")
Cell = dict[str, Any]

# --- The runs ---------------------------------------------------------------------------------------------------------

SMALL = {"name": "cnn", "layers": [[8, 4, 2, 1], [16, 4, 2, 1]], "hidden": [100]}
# IBP at linf 0.1 on the small network, six epochs, validation: Adam 90.6 % certified, Muon at a rate of 0.008 93.3 %,
# at 0.016 with decay 94.8 %. Against 2x2 patches, six epochs by Muon prove more than 22 by Adam.
BASE: dict[str, Any] = {
    "epochs": 6,
    "batch_size": 128,
    "validation": 0.05,
    "seed": 0,
    "optimizer": {"name": "muon", "lr": 0.016, "weight_decay": 0.2},
    "learning_rate": {"name": "one-cycle", "initial": 1.0, "peak": 0.3, "final": 1e-3},  # constant, then linear down
    "evaluate": {"count": 1000, "attack_steps": 0},
}
PGD = {"name": "pgd", "steps": 8}


def linf(eps: float, objective: dict[str, Any], *, attack: bool = False, warm: bool = True, **more: Any) -> Cell:
    """A run at linf eps on the small network; trained at little more than eps."""
    return {
        **BASE,
        "threat": f"linf:{eps}",
        "model": SMALL,
        "objective": objective,
        "budget": {"name": "smooth", "start": 0.5, "end": 4, "final": 1.1 if eps > 0.2 else 1.2},
        **({"weights": "ibp", "regularizers": {"ibp-warmup": {}}} if warm else {}),
        **({"attack": PGD} if attack else {}),
        **more,
    }


def per_at(eps: float) -> Cell:
    """PER+at as published: no random weights for intervals, and the budget itself, which it does not overshoot."""
    objective = {"name": "per-at", "bounds": "interval", "share": 0.25, "start_epoch": 2}
    return {
        **linf(eps, objective, attack=True, warm=False),
        "budget": {"name": "linear", "start": 0.5, "end": 4},
    }


LINF: dict[str, Cell] = {
    f"{name}-{eps}": recipe
    for eps, box, alpha in ((0.1, 0.4, 0.2), (0.3, 0.8, 0.6))
    for name, recipe in (
        ("ibp", linf(eps, {"name": "ibp"})),
        ("sabr", linf(eps, {"name": "sabr", "box": box}, attack=True)),
        ("mtl-ibp", linf(eps, {"name": "mtl-ibp", "alpha": alpha}, attack=True)),
        ("crown-ibp", linf(eps, {"name": "crown-ibp"})),
        ("crown-ibp-1-1", linf(eps, {"name": "crown-ibp", "beta_end": 1.0})),
        ("slope-step", linf(eps, {"name": "slope-step"})),
        ("per-at", per_at(eps)),
    )
}
OWN = {"ibp": "ibp", "slope-step": "slope-step", "per-at": "pec"}  # the bound that a method trains; else crown-ibp


def patch(size: str, epochs: int, objective: dict[str, Any], **more: Any) -> Cell:
    """A run against square patches on the small network of Chiang et al., 2020."""
    return {
        **BASE,
        "threat": f"patch:{size}",
        "epochs": epochs,
        "batch_size": 100,
        "model": {"name": "cnn-2layer"},
        "objective": objective,
        "budget": {"name": "linear", "start": 0.5, "end": round(0.6 * epochs)},
        "evaluate": {"count": 200, "attack_steps": 0},
        **more,
    }


PATCH: dict[str, Cell] = {
    "random-2x2": patch("2x2", 8, {"name": "patch", "places": 10}),
    "random-5x5": patch("5x5", 14, {"name": "patch", "places": 20}),
    # The same network goes on at more places, and lower rates: 20 random ones leave gaps that longer training does not
    # close (14 epochs 52.8 %, 8 epochs 53.2 %).
    "random-5x5-more": {
        **patch("5x5", 3, {"name": "patch", "places": 80}),
        "start": "random-5x5",
        "optimizer": {"name": "muon", "lr": 0.006, "weight_decay": 0.2},
        "learning_rate": {"name": "one-cycle", "initial": 1.0, "peak": 0.01, "final": 1e-3},
        "budget": {"name": "constant"},
    },
    "mini-guided-5x5": patch("5x5", 12, {"name": "patch-guided"}),
    "mini-random-5x5": patch("5x5", 12, {"name": "patch", "places": 20}),
}


def cifar(objective: dict[str, Any], epochs: int, **more: Any) -> Cell:
    """A run on CIFAR-10 at linf 2/255 with two strided convolutions and two dense layers."""
    return {
        **BASE,
        "threat": "linf:2/255",
        "epochs": epochs,
        "model": {"name": "cnn", "layers": [[16, 4, 2, 1], [32, 4, 2, 1]], "hidden": [100]},
        "objective": objective,
        "weights": "ibp",
        "regularizers": {"ibp-warmup": {}},
        "augment": {"flip": True},
        "optimizer": {"name": "muon", "lr": 0.008, "weight_decay": 0.2},
        "budget": {"name": "smooth", "start": 0.5, "end": round(0.5 * epochs)},
        **more,
    }


CIFAR: dict[str, Cell] = {
    "ibp": cifar({"name": "ibp", "kappa_end": 0.5}, 12),
    "sabr": cifar({"name": "sabr", "box": 0.3, "kappa_start": 0.0}, 12, attack={"name": "pgd", "steps": 3}),
}
WIDE = {"name": "cnn", "layers": [[32, 4, 2, 1], [64, 4, 2, 1]], "hidden": [256]}
REACH: dict[str, Cell] = {
    f"threshold-{eps}": {
        **linf(eps, {"name": "ibp"}),
        "model": WIDE,
        "front": "threshold",
        "epochs": epochs,
        "optimizer": {"name": "muon", "lr": 0.008, "weight_decay": 0.2},  # at 0.016 it collapsed
        "budget": {"name": "smooth", "start": 0.3, "end": 6, "final": final},
    }
    for eps, epochs, final in ((0.3, 12, 1.1), (0.1, 20, 1.05))
}
# A small share of the interval bound leaves the proofs to tighter bounds. Six epochs, 2,000 held-out images, verified
# error by the best bound: alpha 0.05 on the small network 3.9 %, 0.01 3.5 %; 0.05 on this one 2.6 %.
REACH["share-0.1"] = {
    **linf(0.1, {"name": "mtl-ibp", "alpha": 0.05}),
    "model": {"name": "cnn", "layers": [[16, 4, 2, 1], [32, 4, 2, 1]], "hidden": [100]},
    "attack": {"name": "pgd", "steps": 5},
    "epochs": 16,
    "budget": {"name": "smooth", "start": 0.5, "end": 8, "final": 1.1},
}
# As long as a run of CTRAIN's IBP that reached 96.75 % clean and 91.48 % certified accuracy in 567 CPU seconds on such
# a machine (a small network, 12 epochs, linf 0.1); trained for little more than the budget that counts.
NEAR = {"name": "smooth", "start": 0.5, "end": 7, "final": 1.2}
REACH["near-0.1"] = {**linf(0.1, {"name": "ibp"}), "epochs": 12, "budget": NEAR}
RUNS: dict[str, dict[str, Cell]] = {"linf": LINF, "reach": REACH, "patch": PATCH, "cifar": CIFAR}


def behind_threshold(model: nn.Module) -> nn.Sequential:
    """The model behind two 1x1 convolutions that take each pixel to 0 below 0.4 and to 1 above 0.6, at first.

    relu(1 - relu(3 - 5 x)) has exact interval bounds. The four numbers are trained with the rest.
    """
    first, second = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)
    with torch.no_grad():
        for layer, weight, bias in ((first, -5.0, 3.0), (second, -1.0, 1.0)):
            layer.weight.fill_(weight)
            layer.bias.fill_(bias)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *model)


# --- Results: one file, read and written again with every finished cell -----------------------------------------------


def store(folder: Path, part: str, key: str, cell: Cell) -> None:
    """Puts one cell among the results."""
    store_cell(NAME, part, key, cell, to_markdown=to_markdown, folder=folder, silent=("run", "recipe"))


# --- Training and judging ---------------------------------------------------------------------------------------------


NOTE = "cpu_seconds.txt"


def cpu_seconds(folder: Path) -> float:
    """What the calls of a run took so far."""
    return float((folder / NOTE).read_text()) if (folder / NOTE).exists() else 0.0


def train(key: str, recipe: Cell, data: Dataset, models: Path) -> tuple[nn.Module, float, int]:
    """The trained model, CPU seconds and the number of epochs; a run that was interrupted goes on."""
    folder, model, started = models / key, None, time.process_time()
    recipe = {**recipe, "name": key}
    if recipe.pop("front", None) == "threshold":
        body = hf.make_model(**recipe.pop("model"), input_shape=(1, 28, 28), classes=10, seed=recipe["seed"])
        model = behind_threshold(ibp_weights(body, recipe["seed"]))
        del recipe["weights"]
    before = recipe.pop("start", None)
    if before is not None:
        model = hf.load_model(models / before / "model.safetensors")
        del recipe["model"]
    result = hf.train(recipe, model, data, out=folder, resume=(folder / "recipe.toml").exists())
    seconds = cpu_seconds(folder) + time.process_time() - started
    (folder / NOTE).write_text(f"{seconds:.1f}")
    return result.model, seconds + (cpu_seconds(models / before) if before else 0.0), len(result.history)


def judge(model: nn.Module, data: Dataset, threat: hf.Linf, own: str, exact: bool = False) -> Cell:
    """Errors on the test set, in percent: clean, verified by two bounds, and found by the attacks.

    With `exact`, what neither `auto` nor the attacks decide goes to the exact solver, a minute for each input.
    """
    x, y = data.test.x, data.test.y
    right = torch.cat([model(part).argmax(1) for part in x.split(500)]) == y
    mine = hf.certify(model, x, y, threat, own).certified
    best = hf.certify(model, x, y, threat, "auto").certified | mine
    open_ = (right & ~best).nonzero()[:, 0]
    broken = torch.zeros_like(right)
    if len(open_):
        broken[open_] = hf.attack(model, x[open_], y[open_], threat, "cascade").success
    auto, left = best.clone(), (right & ~best & ~broken).nonzero()[:, 0]
    if exact and len(left):
        best[left] = hf.certify(model, x[left], y[left], threat, "milp", time_limit=60.0).certified
    percent = {"clean": ~right, "own bound": ~mine, "auto": ~auto, "best bound": ~best, "attack": ~right | broken}
    return {"own": own, **{key: round(100 * float(v.double().mean()), 2) for key, v in percent.items()}}


def run_linf(part: str, key: str, data: Dataset, models: Path, folder: Path) -> None:
    """Trains and judges one model, and stores the cell."""
    recipe, others = RUNS[part][key], Neighbours()
    model, seconds, epochs = train(key, recipe, data, models)
    threat = hf.threat(recipe["threat"])
    started = time.process_time()
    name = recipe["objective"]["name"]
    errors = judge(model.eval(), data, threat, OWN.get(name, "crown-ibp"), exact=part == "reach")
    cell = {
        "objective": name,
        "threat": recipe["threat"],
        "errors": errors,
        "inputs": len(data.test.x),
        "epochs": epochs,
        "train_cpu_seconds": round(seconds),
        "judge_cpu_seconds": round(time.process_time() - started),
        "parameters": sum(p.numel() for p in model.parameters()),
        "others": others.cores(),
        "recipe": recipe,
        "run": describe_run(PACKAGES),
    }
    store(folder, part, key, cell)


def run_patch(key: str, data: Dataset, models: Path, folder: Path) -> None:
    """Trains one model against patches and proves it at all places; keys with "mini" on the embedded data.

    On the whole test set: the first 2,000 digits are harder than the rest, by 4 points for 2x2 and 6 for 5x5.
    """
    recipe, others = PATCH[key], Neighbours()
    data = hf.load_data("mnist-mini") if key.startswith("mini") else data
    model, seconds, epochs = train(key, recipe, data, models)
    x, y, threat = data.test.x, data.test.y, hf.threat(recipe["threat"])
    parts = zip(x.split(500), y.split(500), strict=True)
    proved = torch.cat([hf.certify(model.eval(), a, b, threat, "patch", early=True).certified for a, b in parts])
    cell = {
        "objective": recipe["objective"],
        "threat": recipe["threat"],
        "clean": round(100 * float((model(x).argmax(1) == y).double().mean()), 2),
        "certified": round(100 * float(proved.double().mean()), 2),
        "inputs": len(x),
        "epochs": epochs,
        "train_cpu_seconds": round(seconds),
        "others": others.cores(),
        "recipe": recipe,
        "run": describe_run(PACKAGES),
    }
    store(folder, "patch", key, cell)


def survive(key: str, data: Dataset, models: Path, folder: Path) -> None:
    """AutoAttack, in its standard version, on every test input that the model is certified on."""
    threat = hf.threat(LINF[key]["threat"])
    model, (x, y) = hf.load_model(models / key / "model.safetensors").eval(), (data.test.x, data.test.y)
    proved = hf.certify(model, x, y, threat, "auto").certified.nonzero()[:, 0]
    started = time.process_time()
    broken = int(hf.attack(model, x[proved], y[proved], threat, "autoattack").success.sum())
    cell = {"certified": len(proved), "attacked by": "autoattack", "broken": broken}
    store(
        folder,
        "survive",
        key,
        {**cell, "cpu_seconds": round(time.process_time() - started), "run": describe_run(PACKAGES)},
    )


# --- Tables -----------------------------------------------------------------------------------------------------------


def to_markdown(record: dict[str, Any]) -> str:
    """The results as a page."""
    lines = ["# Certified training", "", "Made by benchmarks/certified_training.py; its docstring says what is done."]
    for part in ("linf", "reach", "cifar"):
        if part in record:
            lines += ["", f"## {part}", "", _errors(record[part])]
    if "patch" in record:
        lines += ["", "## patch", "", _patches(record["patch"])]
    if "time" in record:
        lines += ["", "## time", "", times_table(record["time"])]
    if "survive" in record:
        rows = [
            (key, c["certified"], c["attacked by"], c["broken"], c["cpu_seconds"])
            for key, c in record["survive"].items()
        ]
        lines += ["", "## survive", "", markdown_table(("model", "certified", "attack", "broken", "CPU s"), rows)]
    runs = {describe_markdown(cell["run"]) for cells in record.values() for cell in cells.values()}
    return "\n".join([*lines, "", "## Runs", "", *sorted(runs)])


def _errors(cells: dict[str, Cell]) -> str:
    header = (
        "run",
        "threat",
        "clean error",
        "by attacks",
        "verified, own bound",
        "verified, auto",
        "verified, best bound",
        "test inputs",
        "epochs",
        "CPU s",
    )
    rows = []
    for key, cell in cells.items():
        e = cell["errors"]
        own = f"{e['own bound']} ({e['own']})"
        rows.append(
            (
                key,
                cell["threat"],
                e["clean"],
                e["attack"],
                own,
                e.get("auto", e["best bound"]),
                e["best bound"],
                cell.get("inputs", 10_000),
                cell["epochs"],
                cell["train_cpu_seconds"],
            )
        )
    return markdown_table(header, rows)


def _patches(cells: dict[str, Cell]) -> str:
    header = ("run", "threat", "clean accuracy", "certified accuracy", "test inputs", "epochs", "CPU s")
    rows = [
        (key, c["threat"], c["clean"], c["certified"], c["inputs"], c["epochs"], c["train_cpu_seconds"])
        for key, c in cells.items()
    ]
    return markdown_table(header, rows)


# --- Command line -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with mnist and cifar10")
    parser.add_argument("--models", type=Path, help="folder for the runs")
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--only", nargs="*", help="keys of the runs; all of the part if none is given")
    parser.add_argument("--resume", action="store_true", help="leave out what is among the results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "time":
        measure_time(partial(store, options.out, options.part))
        return
    data = hf.load_data("cifar10" if options.part == "cifar" else "mnist", root=options.data)
    done = read_results(NAME, options.out).get(options.part, {}) if options.resume else {}
    for key in options.only or RUNS[options.part]:
        if key in done:
            continue
        if options.part == "survive":
            survive(key, data, options.models, options.out)
        elif options.part == "patch":
            run_patch(key, data, options.models, options.out)
        else:
            run_linf(options.part, key, data, options.models, options.out)


if __name__ == "__main__":
    main()
