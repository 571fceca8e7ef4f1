"""Robust training: what its parts cost and what they bring, each against its own baseline trained in the same run.

Four parts, which can run at different times and are put together in one file of results:

- cost: step time and memory of adversarial training (PGD-10) with the TrH regulariser of the top layer, and with AWP,
  against adversarial training alone, on multi-layer perceptrons of 5, 10 and 20 layers; steps of all of them in turn.
- throughput: images per second of our loop against a plain one with PGD of torchattacks inside, same model and threads.
- overfitting: adversarial training on a small subset of CIFAR-10, alone and with TrH, AWP or an average of the weights,
  three seeds; best and last accuracy under PGD on held-out inputs.
- fast: FGSM-RS, ATTA and ATAS at equal epochs, judged by AutoAttack, and where FGSM-RS collapses.

One thread. CPU-sized: subsets and small networks, so that figures compare with each other and not with papers.

    pip install --no-deps torchattacks==3.5.1 requests tqdm
    python benchmarks/training.py --data ROOT                                # hours
    python benchmarks/training.py --data ROOT --part overfitting --resume
"""

import argparse
import itertools
import multiprocessing
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    Judgement,
    Neighbours,
    describe_markdown,
    describe_run,
    markdown_table,
    read_results,
    report_claims,
    store_cell,
    verdict_of,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.audits.bracket import interval_text
from holdfast.data import Dataset
from holdfast.random import Noise
from holdfast.registry import get
from holdfast.training.augment import Transform
from holdfast.training.context import Context, Parts
from holdfast.utils.intervals import clopper_pearson
from holdfast.utils.memory import peak_memory as peak_resident

NAME = "training"
PARTS = ("cost", "throughput", "overfitting", "fast")
DEPTHS = (5, 10, 20)
SEEDS = (0, 1, 2)
Cell = dict[str, Any]

# --- Results: one file, read and written again with every finished cell -----------------------------------------------


def store(folder: Path, part: str, key: str, cell: Cell) -> None:
    """Puts one cell among the results."""
    store_cell(NAME, part, key, cell, to_markdown=to_markdown, folder=folder, silent=("run", "history"))


# --- Cost of a step ---------------------------------------------------------------------------------------------------

METHODS: dict[str, dict[str, Any]] = {
    "at": {},
    "at + trh": {"regularizers": {"trh": partial(get("train", "trh").function, weight=5e-4)}},
    "at + awp": {"perturb_weights": partial(get("train", "awp").function, delta=5e-3)},
}


def deep_mlp(depth: int, width: int = 256) -> nn.Sequential:
    """`depth` linear layers with ReLU in between, for MNIST; the top layer is the last module."""
    torch.manual_seed(0)
    sizes = [784, *[width] * (depth - 1), 10]
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(a, b), *([nn.ReLU()] if i < depth - 1 else [])]
    return nn.Sequential(*layers)


def make_step(method: str, depth: int, batch: int = 128) -> Callable[[], None]:
    """One training step of the method on random images, as the loop takes it."""
    model = deep_mlp(depth).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.rand(batch, 1, 28, 28), torch.arange(batch) % 10
    index = torch.arange(batch)
    parts = Parts(attack=partial(get("train", "pgd").function, steps=10), top=str(len(model) - 1), **METHODS[method])
    state: dict[str, Tensor] = {}
    objective = get("train", "at").function

    def step() -> None:
        context = Context(
            epoch=0, step=0, progress=0.5, index=index, noise=Noise(0, index), transform=Transform(), state=state,
            count=batch, optimizer=optimizer, adversary=hf.Linf(0.1), parts=parts,
        )  # fmt: skip
        optimizer.zero_grad()
        loss, _ = objective(model, x, y, context)
        loss.backward()
        optimizer.step()

    return step


def measure_cost(depth: int, rounds: int = 60) -> Cell:
    """Median over the rounds of the ratio of processor time to that of the base, steps of all methods in turn."""
    steps = {method: make_step(method, depth) for method in METHODS}
    for step in steps.values():
        for _ in range(5):
            step()
    neighbours, seconds = Neighbours(), {method: [] for method in METHODS}
    for i in range(rounds):
        order = list(METHODS) if i % 2 else list(METHODS)[::-1]
        for method in order:
            start = time.process_time()
            steps[method]()
            seconds[method].append(time.process_time() - start)
    ratios = {
        method: statistics.median(a / b for a, b in zip(seconds[method], seconds["at"], strict=True))
        for method in METHODS
    }
    return {
        "step_ms": {method: round(1000 * statistics.median(s), 2) for method, s in seconds.items()},
        "ratio": {method: round(ratio, 3) for method, ratio in ratios.items()},
        "peak_mb": {method: peak_memory(method, depth) for method in METHODS},
        "others": neighbours.cores(),
    }


def peak_memory(method: str, depth: int) -> float:
    """Largest resident set of a fresh process that takes 20 steps, in MB; the least of three processes."""
    command = [sys.executable, __file__, "--peak", method, str(depth)]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(3)]
    return min(float(text) for text in runs)


def print_peak(method: str, depth: int) -> None:
    """What `peak_memory` reads."""
    step = make_step(method, depth)
    for _ in range(20):
        step()
    print(round(peak_resident(), 1))


# --- Throughput -------------------------------------------------------------------------------------------------------


def plain_loop(model: nn.Module, data: Dataset, eps: float, batch: int) -> float:
    """Images per second of processor time of a plain loop around PGD-10 of torchattacks, one epoch."""
    import torchattacks

    attack = torchattacks.PGD(model, eps=eps, alpha=2.5 * eps / 10, steps=10, random_start=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    order = torch.randperm(len(data.train))
    start = time.process_time()
    for index in order.split(batch):
        x, y = data.train.x[index], data.train.y[index]
        model.eval()  # as ours attacks it
        x_adv = attack(x, y)
        model.train()
        optimizer.zero_grad()
        cross_entropy(model(x_adv), y).backward()
        optimizer.step()
    return len(data.train) / (time.process_time() - start)


def our_loop(model: nn.Module, data: Dataset, eps: float, batch: int) -> float:
    """The same by `hf.train`, its own checks and bookkeeping included."""
    recipe = {
        "threat": f"linf:{eps}", "epochs": 1, "batch_size": batch, "validation": 0.0, "objective": {"name": "at"},
        "attack": {"name": "pgd", "steps": 10}, "optimizer": {"name": "adam", "lr": 1e-3},
    }  # fmt: skip
    start = time.process_time()
    hf.train(recipe, model, data, progress=False)
    return len(data.train) / (time.process_time() - start)


LOOPS = {"ours": our_loop, "plain": plain_loop}


def serve(pipe: Any, loop: str, data: Dataset, model: str, eps: float, batch: int) -> None:
    """A process of its own for each loop, since ours sets up the allocator; images per second for each seed asked."""
    torch.set_num_threads(1)
    shape, classes = tuple(data.train.x.shape[1:]), len(data.classes)
    few = Dataset(data.name, data.train[: 2 * batch], data.test, data.classes)

    def speed(data: Dataset, seed: int) -> float:
        return LOOPS[loop](
            hf.make_model(model, input_shape=shape, classes=classes, seed=seed).train(), data, eps, batch
        )

    speed(few, 0)  # the first batches of a process build the kernels of the backend
    pipe.send(None)
    while (seed := pipe.recv()) is not None:
        pipe.send(speed(data, seed))


def measure_throughput(data: Dataset, model: str, eps: float, rounds: int = 5, batch: int = 128) -> Cell:
    """Both loops in turn on fresh models; the median ratio over the rounds."""
    context, pipes = multiprocessing.get_context("spawn"), {}
    for loop in LOOPS:
        pipes[loop], end = context.Pipe()
        context.Process(target=serve, args=(end, loop, data, model, eps, batch), daemon=True).start()
        end.close()  # so that a process that dies is noticed
        pipes[loop].recv()
    neighbours, speeds = Neighbours(), []
    for seed in range(rounds):
        taken = []
        for pipe in pipes.values():
            pipe.send(seed)
            taken.append(pipe.recv())
        speeds.append(tuple(taken))
    for pipe in pipes.values():
        pipe.send(None)
    return {
        "ours": round(statistics.median(a for a, _ in speeds), 1),
        "plain": round(statistics.median(b for _, b in speeds), 1),
        "ratio": round(statistics.median(a / b for a, b in speeds), 2),
        "others": neighbours.cores(),
    }


# --- Robust overfitting -----------------------------------------------------------------------------------------------

OVERFITTING: dict[str, dict[str, Any]] = {
    "at": {},
    "at + trh": {"regularizers": {"trh": {"weight": 0.2, "schedule": "multistep"}}},
    "at + awp": {"perturb_weights": {"name": "awp", "delta": 0.01, "start": 10}},
    "at + swa": {"average": {"name": "swa", "start_epoch": 10}},
}
SUBSET = 1000
LEARNED = 0.2
"""Robust accuracy on the training data below which a run says nothing about overfitting."""


def overfitting_recipe(method: str, seed: int) -> dict[str, Any]:
    """Half of the examples are held out. The strengths were chosen with another seed among three or four of each."""
    return {
        "threat": "linf:4/255", "epochs": 60, "batch_size": 64, "validation": 0.5, "seed": seed,
        "model": {"name": "small-star"}, "objective": {"name": "at"}, "attack": {"name": "pgd", "steps": 5},
        "optimizer": {"name": "sgd", "lr": 0.01, "weight_decay": 5e-4},
        "evaluate": {"attack_steps": 10, "count": SUBSET}, **OVERFITTING[method],
    }  # fmt: skip


def measure_overfitting(data: Dataset, method: str, seed: int) -> Cell:
    """Best and last robust accuracy on the held-out half, robust training accuracy at the end, and the time."""
    part = Dataset(data.name, data.train[: 2 * SUBSET], data.test[:10], data.classes)
    neighbours, start = Neighbours(), time.process_time()
    history = hf.train(overfitting_recipe(method, seed), data=part, progress=False).history
    robust = [row["validation_robust"] for row in history]
    return {
        "best": max(robust),
        "last": robust[-1],
        "gap": round(max(robust) - robust[-1], 4),
        "train_robust": round(history[-1]["train_accuracy"], 4),
        "clean": history[-1]["validation_clean"],
        "cpu_seconds": round(time.process_time() - start, 1),
        "others": neighbours.cores(),
        "history": robust,
    }


# --- Fast training ----------------------------------------------------------------------------------------------------

FAST: dict[str, dict[str, Any]] = {
    "fgsm-rs": {"attack": {"name": "fgsm-rs"}},
    "atta": {"attack": {"name": "atta"}},
    # The constant belongs to the size of the gradients, and was chosen with another seed for MNIST; the lower limit of
    # the step is that of the authors' release.
    "atas": {"attack": {"name": "atas", "c": 1e-3, "smallest": 0.5}},
}
JUDGED = 300


def fast_recipe(method: str, seed: int, setting: dict[str, Any]) -> dict[str, Any]:
    """Equal epochs for all methods; no early stopping: the last epoch is judged."""
    return {
        "threat": setting["threat"], "epochs": setting["epochs"], "batch_size": 128, "seed": seed,
        "validation": 0.1, "model": {"name": setting["model"]}, "objective": {"name": "at"},
        "optimizer": {"name": "adam", "lr": setting["lr"]}, "learning_rate": {"name": "one-cycle", "peak": 0.3},
        "budget": setting.get("budget", {"name": "constant"}), "augment": setting.get("augment", {}),
        "evaluate": {"attack_steps": 10, "count": 500}, **FAST[method],
    }  # fmt: skip


# Seed 0 served to choose the first; the second was chosen after a look at its seed 1.
SETTINGS: dict[str, dict[str, Any]] = {
    "rate 0.002": {
        "data": "mnist", "examples": 10_000, "model": "small-star", "threat": "linf:0.3", "epochs": 15, "lr": 2e-3,
        "budget": {"name": "linear", "end": 3.0}, "seeds": (1, 2, 3),
    },
    "budget 0.4": {
        "data": "mnist", "examples": 10_000, "model": "small-star", "threat": "linf:0.4", "epochs": 15, "lr": 2e-3,
        "budget": {"name": "linear", "end": 3.0}, "seeds": (1, 2, 3),
    },
}  # fmt: skip


def measure_fast(data: Dataset, method: str, seed: int, setting: dict[str, Any]) -> Cell:
    """Accuracy of the last epoch's model, clean and under AutoAttack; the collapse, if there was one."""
    part = Dataset(data.name, data.train[: setting["examples"]], data.test[:10], data.classes)
    neighbours, start = Neighbours(), time.process_time()
    recipe = fast_recipe(method, seed, setting)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        last = hf.train({**recipe, "evaluate": {**recipe["evaluate"], "select": "last"}}, data=part, progress=False)
    trained = time.process_time() - start
    test = data.test[:JUDGED]
    result = hf.attack(last.model, test.x, test.y, hf.threat(setting["threat"]), "autoattack")
    collapsed = [row["epoch"] for row in last.history if row.get("collapsed")]
    return {
        "clean": round(1 - sum(name == "clean" for name in result.by) / len(test), 4),
        "autoattack": round(1 - result.success.float().mean().item(), 4),
        "collapsed_in_epoch": collapsed[0] if collapsed else None,
        "train_cpu_seconds": round(trained, 1),
        "others": neighbours.cores(),
        "history": [(row["validation_robust"], row.get("validation_single")) for row in last.history],
    }


# --- Text -------------------------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """A share as text."""
    return f"{100 * share:.1f}%"


def to_markdown(record: dict[str, Any]) -> str:
    """The file to be read, of the parts that were measured so far."""
    sections = [
        "# Robust training",
        "CPU-sized: subsets and small networks. Every method is compared with its own baseline, trained in the same "
        "benchmark for the same epochs. One thread; others: cores that other processes kept busy meanwhile.",
        *(SECTIONS[part](record[part]) for part in PARTS if record.get(part)),
    ]
    runs = {describe_markdown(cell["run"]): None for part in PARTS for cell in record.get(part, {}).values()}
    return "\n\n".join([*sections, "# How it was measured", *runs])


def cost_text(cells: dict[str, Cell]) -> str:
    """Step time and memory by depth."""
    rows = [
        (depth, method, cell["step_ms"][method], cell["ratio"][method], cell["peak_mb"][method], cell["others"])
        for depth, cell in cells.items()
        for method in METHODS
    ]
    header = ("layers", "method", "step, ms", "ratio to at", "peak memory, MB", "others")
    return (
        "## Cost of a step\n\nPGD-10, batches of 128 on multi-layer perceptrons of width 256; processor time, median "
        "of 60 steps of all methods in turn. Memory: largest resident set of a process of its own, the least of "
        "three.\n\n" + markdown_table(header, rows)
    )


def throughput_text(cells: dict[str, Cell]) -> str:
    """Images per second."""
    rows = [(key, cell["ours"], cell["plain"], cell["ratio"], cell["others"]) for key, cell in cells.items()]
    header = ("data and model", "ours, images/s", "plain loop, images/s", "ratio", "others")
    return (
        "## Throughput of adversarial training\n\nPGD-10, batches of 128, one epoch on fresh models, in turn, three "
        "rounds; images per second of processor time. The plain loop calls PGD of torchattacks. Ours includes the "
        "checks and the bookkeeping of a run. Each column has its own median, so that the ratio, the median of the "
        "ratios of the rounds, is not the ratio of the two columns.\n\n" + markdown_table(header, rows)
    )


def overfitting_text(cells: dict[str, Cell]) -> str:
    """Best, last and gap by method, mean over the seeds that learned, and every run."""
    means = []
    for method in OVERFITTING:
        every = [cell for key, cell in cells.items() if key.rsplit(", ", 1)[0] == method]
        runs = [cell for cell in every if cell["train_robust"] >= LEARNED]
        if runs:
            mean = {k: statistics.mean(run[k] for run in runs) for k in ("best", "last", "gap", "clean", "cpu_seconds")}
            shown = [percent(mean[k]) for k in ("clean", "best", "last", "gap")]
            means.append((method, f"{len(runs)} of {len(every)}", *shown, round(mean["cpu_seconds"])))
    rows = [
        (
            key,
            percent(c["clean"]),
            percent(c["train_robust"]),
            percent(c["best"]),
            percent(c["last"]),
            percent(c["gap"]),
        )
        for key, c in cells.items()
    ]
    return "\n\n".join(
        [
            "## Robust overfitting",
            f"{SUBSET} training images of CIFAR-10, small-star, linf 4/255, PGD-5, SGD at a rate of 0.01, 60 "
            f"epochs; robust: accuracy under PGD-10 on {SUBSET} held-out images. Best: the best epoch on them, which "
            "no one could have chosen beforehand; gap: best less last. TrH: weight 0.2, multistep. AWP: delta 0.01 "
            "from epoch 10. SWA: from epoch 10. The weight decay is 5e-4 for all. The set-up and the strengths were "
            "chosen with another seed: at a rate of 0.03, or with TrH at 0.5 and more, or with AWP from the start, the "
            "regularised networks hardly learned, and so left no gap either.",
            f"A run that hardly learned (robust accuracy on the training data below {LEARNED:.0%}) has a small gap "
            "only for that reason, and is no evidence for its method. The means are over the runs that learned.",
            markdown_table(
                ("method", "seeds that learned", "clean, last", "robust, best", "robust, last", "gap", "CPU s"), means
            ),
            markdown_table(("run", "clean, last", "robust on training data", "best", "last", "gap"), rows),
        ]
    )


def fast_text(cells: dict[str, Cell]) -> str:
    """Accuracy at equal epochs, by setting."""
    rows = [
        (
            key,
            percent(cell["clean"]),
            percent(cell["autoattack"]),
            interval_text(clopper_pearson(round(cell["autoattack"] * JUDGED), JUDGED)),
            cell["collapsed_in_epoch"] or "no",
            cell["train_cpu_seconds"],
            cell["others"],
        )
        for key, cell in cells.items()
    ]
    header = ("setting, method, seed", "clean", "AutoAttack", "95 %", "collapsed in epoch", "training CPU s", "others")
    lines = [
        f"- {name}: {s['data']}, {s['examples']} images, {s['model']}, {s['threat']}, {s['epochs']} epochs"
        for name, s in SETTINGS.items()
    ]
    return "\n\n".join(
        [
            "## Fast adversarial training",
            f"The model of the last epoch on the first {JUDGED} test inputs; AutoAttack is the standard ensemble. "
            "Collapsed: accuracy under one step is more than 30 points above that under PGD-10, which has fallen to "
            "half of its best or below, on held-out inputs.",
            "\n".join(lines),
            markdown_table(header, rows),
            "95 %: Clopper-Pearson intervals, in percent. Accuracies within each other's interval are ties.",
        ]
    )


SECTIONS = {"cost": cost_text, "throughput": throughput_text, "overfitting": overfitting_text, "fast": fast_text}


def main() -> None:
    """Parses the command line and measures what it asks for, cell by cell."""
    if "--peak" in sys.argv:
        torch.set_num_threads(1)
        print_peak(sys.argv[-2], int(sys.argv[-1]))
        return
    parser = argparse.ArgumentParser(description="Measure robust training.")
    parser.add_argument("--data", type=Path, required=True, help="root of MNIST and CIFAR-10")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="(default: all)")
    parser.add_argument("--resume", action="store_true", help="keep the cells that are there, measure the missing ones")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--note", default="", help="a remark on the data or the machine, written with the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    packages = ("holdfast", "torch", *(("torchattacks",) if "throughput" in options.part else ()))
    run = {**describe_run(packages), "note": options.note}
    tasks = list_tasks(options.data)
    for part in options.part:
        for key, measure in tasks[part].items():
            if not (options.resume and key in read_results(NAME, options.out).get(part, {})):
                store(options.out, part, key, {**measure(), "run": run})
    report_claims(judge(read_results(NAME, options.out)))


def judge(record: dict[str, Any]) -> Iterator[Judgement]:
    """What the finished runs say of robust overfitting, of collapse, and of ATAS beside ATTA."""
    yield from judge_overfitting(record.get("overfitting", {}))
    cells = record.get("fast", {})
    pairs = [(name, seed) for name in SETTINGS for seed in SETTINGS[name]["seeds"]]
    if not all(f"{name}, {method}, seed {seed}" in cells for name, seed in pairs for method in FAST):
        return

    def left(method: str, only: str = "") -> list[float]:
        return [cells[f"{n}, {method}, seed {s}"]["autoattack"] for n, s in pairs if only in n]

    text = "; ".join(f"{method} {', '.join(f'{100 * a:.1f}' for a in left(method))} %" for method in FAST)
    yield "fast-fgsm-rs-collapses", verdict_of([a < 0.01 for a in left("fgsm-rs", "budget")]), text
    yield "fast-atas-does-not-collapse", verdict_of([a > 0.4 for a in left("atas")]), text
    better = [a > b for a, b in zip(left("atas"), left("atta"), strict=True)]
    yield "fast-atas-better-than-atta", verdict_of(better), text


def judge_overfitting(cells: dict[str, Cell]) -> Iterator[Judgement]:
    """Does robust accuracy fall late, and what narrows the fall? Left open where a run hardly learned."""
    if not all(f"{method}, seed {seed}" in cells for method in OVERFITTING for seed in SEEDS):
        return

    def of(method: str, key: str) -> list[float]:
        return [cells[f"{method}, seed {seed}"][key] for seed in SEEDS]

    def outcome(holds: list[bool], *methods: str) -> str:
        learned = all(value >= LEARNED for method in methods for value in of(method, "train_robust"))
        return verdict_of(holds) if learned else "not decided at this size"

    plain = of("at", "gap")
    shown = ", ".join(map(percent, plain))
    yield "robust-overfitting", outcome([gap > 0.02 for gap in plain], "at"), f"falls by {shown}"
    for method in ("trh", "awp", "swa"):
        gaps = of(f"at + {method}", "gap")
        less = [gap < without for gap, without in zip(gaps, plain, strict=True)]
        text = f"falls by {', '.join(map(percent, gaps))}, {shown} without"
        yield f"robust-overfitting-{method}", outcome(less, "at", f"at + {method}"), text


def list_tasks(root: Path) -> dict[str, dict[str, Callable[[], Cell]]]:
    """What there is to measure, by part and key; seeds outside, so that an early end leaves whole comparisons."""
    loaded: dict[str, Dataset] = {}

    def data(name: str, count: int | None = None) -> Dataset:
        if name not in loaded:
            loaded[name] = hf.load_data(name, root=root)
        whole = loaded[name]
        return Dataset(name, whole.train[:count], whole.test, whole.classes) if count else whole

    def throughput(name: str, model: str, eps: float, count: int) -> Cell:
        return measure_throughput(data(name, count), model, eps)

    return {
        "cost": {str(depth): partial(measure_cost, depth) for depth in DEPTHS},
        "throughput": {
            "mnist, small-star": lambda: throughput("mnist", "small-star", 0.1, 10_000),
            "cifar10, small-star": lambda: throughput("cifar10", "small-star", 8 / 255, 4_000),
        },
        "overfitting": {
            f"{method}, seed {seed}": lambda method=method, seed=seed: measure_overfitting(
                data("cifar10"), method, seed
            )
            for seed in SEEDS
            for method in OVERFITTING
        },
        "fast": {
            f"{name}, {method}, seed {seed}": lambda name=name, method=method, seed=seed: measure_fast(
                data(SETTINGS[name]["data"]), method, seed, SETTINGS[name]
            )
            for name in SETTINGS
            for seed in SETTINGS[name]["seeds"]
            for method in FAST
        },
    }


if __name__ == "__main__":
    main()
