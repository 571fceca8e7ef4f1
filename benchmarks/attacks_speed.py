"""PGD against PGD: Holdfast, torchattacks and foolbox on the same models, inputs, steps, step size and threads.

Every contender attacks every batch, in turn, in one process, after one batch that is not counted; each round has its
own batch and seed. The peers run twice, as they come and with the gradients of the parameters switched off; Holdfast is
compared with the fastest of the four. Its time includes the checks of its inputs and of its answers.

    python benchmarks/attacks_speed.py            # about two minutes after the models are trained
    python benchmarks/attacks_speed.py --quick    # a few rounds; writes nothing
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import (
    Neighbours,
    describe_markdown,
    describe_run,
    markdown_table,
    trained_model,
    write_results,
)
from torch import Tensor, nn

import holdfast as hf

# Largest ratio of our time to that of the fastest peer that we want to see.
BARS = {"mnist-mini-at": 0.9, "mnist-mini-standard": 0.5}
PACKAGES = ("holdfast", "torch", "torchattacks", "foolbox", "eagerpy")
OURS = "holdfast"

Attack = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Setting:
    """What all contenders share."""

    eps: float = 0.1
    steps: int = 40
    batch: int = 256

    @property
    def step_size(self) -> float:
        """The usual 2.5 eps / steps (Madry et al., 2018)."""
        return 2.5 * self.eps / self.steps


def contenders(model: nn.Module, setting: Setting) -> dict[str, Attack]:
    """Each attack as a function (x, y, round) -> x_adv; all start at random points."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers use names that newer Python and torch have deprecated
        import foolbox
        import torchattacks

    threat = hf.Linf(setting.eps)
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1))
    linf_pgd = foolbox.attacks.LinfPGD(abs_stepsize=setting.step_size, steps=setting.steps, random_start=True)
    pgd = torchattacks.PGD(model, eps=setting.eps, alpha=setting.step_size, steps=setting.steps, random_start=True)

    def by_holdfast(x: Tensor, y: Tensor, seed: int) -> Tensor:
        result = hf.attack(model, x, y, threat, "pgd", seed=seed, steps=setting.steps, step_size=setting.step_size)
        return result.x_adv

    def by_torchattacks(x: Tensor, y: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        x_adv: Tensor = pgd(x, y)
        return x_adv

    def by_foolbox(x: Tensor, y: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        # `run` spares foolbox the checks and the evaluation that a plain call adds.
        x_adv: Tensor = linf_pgd.run(wrapped, x, y, epsilon=setting.eps)
        return x_adv

    return {
        OURS: by_holdfast,
        "torchattacks": by_torchattacks,
        "torchattacks, frozen": frozen(model, by_torchattacks),
        "foolbox": by_foolbox,
        "foolbox, frozen": frozen(model, by_foolbox),
    }


def frozen(model: nn.Module, attack: Attack) -> Attack:
    """The same attack, spared the gradients of the parameters."""

    def run(x: Tensor, y: Tensor, seed: int) -> Tensor:
        model.requires_grad_(False)
        try:
            return attack(x, y, seed)
        finally:
            model.requires_grad_(True)

    return run


def measure(
    model: nn.Module, data: hf.Dataset, setting: Setting, rounds: int, attacks: dict[str, Attack] | None = None
) -> dict[str, dict[str, Any]]:
    """Seconds per round (wall clock, and of the processor), and inputs still classified right, of each contender."""
    attacks = contenders(model, setting) if attacks is None else attacks
    warm_up = data.train[: setting.batch]
    for attack in attacks.values():
        attack(warm_up.x, warm_up.y, 0)
    seconds: dict[str, list[float]] = {name: [] for name in attacks}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in attacks}
    robust = dict.fromkeys(attacks, 0)
    per_pass = len(data.test) // setting.batch
    for number in range(rounds):
        start = number % per_pass * setting.batch
        part = data.test[start : start + setting.batch]
        shift = number % len(attacks)  # nobody always comes first
        for name in [*attacks, *attacks][shift : shift + len(attacks)]:
            started, cpu_started = time.perf_counter(), time.process_time()
            x_adv = attacks[name](part.x, part.y, number)
            seconds[name].append(time.perf_counter() - started)
            cpu_seconds[name].append(time.process_time() - cpu_started)
            with torch.no_grad():
                robust[name] += int((model(x_adv).argmax(1) == part.y).sum())
    total = rounds * setting.batch
    return {
        name: {
            "median_seconds": statistics.median(seconds[name]),
            "median_cpu_seconds": statistics.median(cpu_seconds[name]),
            "seconds": [round(s, 4) for s in seconds[name]],
            "robust": robust[name],
            "inputs": total,
        }
        for name in attacks
    }


def compare(recipe: str, threads: int, figures: dict[str, dict[str, Any]], others: float | None) -> dict[str, Any]:
    """Our median against that of the fastest peer; `others` says how busy the machine was with other work."""
    peers = {name: f["median_seconds"] for name, f in figures.items() if name != OURS}
    fastest = min(peers, key=lambda name: peers[name])
    ratio = figures[OURS]["median_seconds"] / peers[fastest]
    cpu_fastest = min(figures[name]["median_cpu_seconds"] for name in peers)
    return {
        "recipe": recipe,
        "threads": threads,
        "fastest_peer": fastest,
        "ratio": round(ratio, 3),
        "cpu_ratio": round(figures[OURS]["median_cpu_seconds"] / cpu_fastest, 3),
        "others": others,
        "bar": BARS[recipe],
        "met": ratio <= BARS[recipe],
        "contenders": figures,
    }


def to_markdown(record: dict[str, Any]) -> str:
    """The results as a page."""
    setting = record["setting"]
    verdicts = [
        (
            c["recipe"],
            c["threads"],
            c["fastest_peer"],
            f"{c['ratio']:.2f}",
            c["bar"],
            "yes" if c["met"] else "no",
            f"{c['cpu_ratio']:.2f}",
            c["others"],
        )
        for c in record["comparisons"]
    ]
    details = [
        (
            c["recipe"],
            c["threads"],
            name,
            f"{f['median_seconds']:.3f}",
            f"{min(f['seconds']):.3f} to {max(f['seconds']):.3f}",
            f"{f['robust']} of {f['inputs']}",
        )
        for c in record["comparisons"]
        for name, f in c["contenders"].items()
    ]
    return "\n\n".join(
        [
            "# Speed of PGD",
            f"Linf {setting['eps']}, {setting['steps']} steps of {setting['step_size']:g}, random start, batches of "
            f"{setting['batch']} images of mnist-mini, architecture small-star; {setting['rounds']} rounds, in turn.",
            describe_markdown(record["run"]),
            "Ratio: our median time divided by the time of the fastest peer, smaller is better; CPU ratio: the same "
            "for the processor's time. Others: cores that other processes kept busy meanwhile; with two threads on two "
            "cores, a row is to be trusted only if this is near 0.",
            markdown_table(
                ("model", "threads", "fastest peer", "ratio", "at most", "met", "CPU ratio", "others"), verdicts
            ),
            "Seconds per batch, and the inputs that each attack leaves classified right (fewer is a stronger attack).",
            markdown_table(("model", "threads", "attack", "median s", "range s", "robust"), details),
        ]
    )


def main() -> None:
    """Parses the command line, measures, prints and writes."""
    parser = argparse.ArgumentParser(description="Compare the speed of PGD with torchattacks and foolbox.")
    parser.add_argument("--quick", action="store_true", help="models of one epoch, two rounds; writes no results")
    parser.add_argument("--rounds", type=int, default=7, help="batches that each contender attacks (default: 7)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts (default: 1 2)")
    parser.add_argument("--models", type=Path, help="folder of trained models (default: in the cache folder)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    options = parser.parse_args()

    setting, data, rounds = Setting(), hf.load_data("mnist-mini"), 2 if options.quick else options.rounds
    models = {name: trained_model(name, options.models, **({"epochs": 1} if options.quick else {})) for name in BARS}
    comparisons = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for recipe, model in models.items():
            neighbours = Neighbours()
            figures = measure(model, data, setting, rounds)
            comparisons.append(compare(recipe, threads, figures, neighbours.cores()))
    record = {
        "run": describe_run(PACKAGES),
        "setting": {**vars(setting), "step_size": setting.step_size, "rounds": rounds},
        "comparisons": comparisons,
    }
    page = to_markdown(record)
    print(page)
    if not options.quick:
        write_results("attacks_speed", record, page, **({"folder": options.out} if options.out else {}))


if __name__ == "__main__":
    main()
