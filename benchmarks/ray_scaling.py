"""How much more an audit gets done on two Ray workers than on one, and what a task costs beside its work.

The work is alpha-CROWN on a small convolutional network, one input for each task: random weights, uniform random
inputs, one thread for each worker. Each round starts a cluster of one worker and one of two, in turns; workers load
torch and the model before the clock starts. The answers must be those of one process to the last bit. What a task costs
beside its work is the time of tasks that classify one input, less the time that they say they took.

    pip install "holdfast[ray]"
    python benchmarks/ray_scaling.py                  # about three minutes on two cores that do nothing else
    python benchmarks/ray_scaling.py --quick          # a look; writes no results
"""

import argparse
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, describe_markdown, describe_run, load_average, markdown_table, write_results
from torch import nn

import holdfast as hf
from holdfast.audits.engine import Engine, local
from holdfast.audits.ray_engine import ray_engine
from holdfast.audits.task import Found, Task
from holdfast.bounding import Ascent

NAME = "ray_scaling"
PACKAGES = ("holdfast", "torch", "ray")
WORKERS = (1, 2)
BAR = 1.6  # throughput of two workers over that of one
COST = 0.1  # seconds of work that an input must take at least
EPS = 0.01
ITERATIONS = 60

Answers = dict[int, tuple[bool, float | None]]


def costly(model: nn.Module, count: int, *, first: int = 0) -> list[Task]:
    """Proofs of one input each."""
    generator = torch.Generator().manual_seed(first)
    x = torch.rand(count, 1, 28, 28, generator=generator)
    with torch.no_grad():
        y = model(x).argmax(1)
    options = {"ascent": Ascent(iterations=ITERATIONS)}
    index = torch.arange(first, first + count)
    parts = zip(index.split(1), x.split(1), y.split(1), strict=True)
    return [Task("certify", "alpha-crown", options, 0, hf.Linf(EPS), *part, size=EPS) for part in parts]


def cheap(count: int) -> list[Task]:
    """Classifications of one input each."""
    x, y = (
        torch.rand(count, 1, 28, 28, generator=torch.Generator().manual_seed(1)),
        torch.zeros(count, dtype=torch.long),
    )
    parts = zip(torch.arange(count).split(1), x.split(1), y.split(1), strict=True)
    return [Task("clean", "", {}, 0, None, *part) for part in parts]


def timed(engine: Engine, model: nn.Module, tasks: Sequence[Task]) -> tuple[float, list[Found]]:
    """Seconds by the clock, and the results."""
    started = time.perf_counter()
    found = [result for _, result in engine(model, tasks)]
    return time.perf_counter() - started, found


def answers(found: Sequence[Found]) -> Answers:
    """What was proved of each input."""
    return {outcome.position: (outcome.passed, outcome.size) for one in found for outcome in one.outcomes}


def on_cluster(workers: int, model: nn.Module, tasks: Sequence[Task], empty: Sequence[Task]) -> dict[str, Any]:
    """Figures of a cluster of so many workers, which is started for them and ended after them."""
    started = time.perf_counter()
    engine = ray_engine("local", workers=workers)
    timed(engine, model, costly(model, 4 * workers, first=100_000))  # every worker has loaded everything
    ready = time.perf_counter() - started
    wall, found = timed(engine, model, tasks)
    idle, nothing = timed(engine, model, empty)
    work = [one.seconds for one in found]
    del engine
    gc.collect()  # the cluster ends with the engine
    return {
        "workers": workers,
        "start_seconds": ready,
        "wall_seconds": wall,
        "inputs_per_second": len(tasks) / wall,
        "work_per_input": statistics.mean(work),
        "busy": sum(work) / (wall * workers),
        "overhead_per_task": idle / len(empty) - statistics.mean([one.seconds for one in nothing]) / workers,
        "answers": answers(found),
    }


def rounds(count: int) -> Iterator[tuple[int, ...]]:
    """The order of the clusters, which alternates."""
    for number in range(count):
        yield WORKERS if number % 2 == 0 else WORKERS[::-1]


def measure(inputs: int, repetitions: int) -> dict[str, Any]:
    """Everything that was measured."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = hf.make_model("cnn").eval()
    tasks, empty = costly(model, inputs), cheap(5 * inputs)
    load = load_average()
    timed(local, model, costly(model, 2, first=100_000))
    wall, found = timed(local, model, tasks)
    figures = []
    for order in rounds(repetitions):
        for workers in order:
            figures.append(on_cluster(workers, model, tasks, empty))
            print(summary_row(figures[-1]), flush=True)
    same = all(figure.pop("answers") == answers(found) for figure in figures)
    speed = {w: statistics.median(f["inputs_per_second"] for f in figures if f["workers"] == w) for w in WORKERS}
    ratio = speed[2] / speed[1]
    cost = min(f["work_per_input"] for f in figures)
    return {
        "run": describe_run(PACKAGES),
        "load": [load, load_average()],
        "inputs": inputs,
        "proved": sum(passed for passed, _ in answers(found).values()),
        "local": {"inputs_per_second": inputs / wall, "work_per_input": wall / inputs},
        "rounds": figures,
        "ratio": ratio,
        "overhead_per_task": statistics.median(f["overhead_per_task"] for f in figures if f["workers"] == 1),
        "same_answers": same,
        "met": ratio >= BAR and cost >= COST and same,
    }


def summary_row(figure: dict[str, Any]) -> tuple[object, ...]:
    """One line of the table."""
    return (
        figure["workers"],
        f"{figure['inputs_per_second']:.2f}",
        f"{1000 * figure['work_per_input']:.0f}",
        f"{figure['busy']:.0%}",
        f"{1000 * figure['overhead_per_task']:.1f}",
        f"{figure['start_seconds']:.1f}",
    )


def to_markdown(record: dict[str, Any]) -> str:
    """The results as a page."""
    header = ("workers", "inputs per s", "work per input, ms", "busy", "beside the work, ms per task", "start, s")
    same = "the same, to the last bit," if record["same_answers"] else "NOT the same"
    return "\n\n".join(
        [
            "# Two Ray workers against one",
            f"alpha-CROWN with {ITERATIONS} iterations at linf:{EPS} on the architecture `cnn`, random weights, "
            f"{record['inputs']} uniform random inputs ({record['proved']} proved), one for each task, one thread for "
            "each worker.",
            describe_markdown(record["run"])
            + f"\n- load average before and after: {record['load'][0]} and {record['load'][1]}",
            f"**Two workers do {record['ratio']:.2f} times as much as one** (medians; at least {BAR} is asked for, on "
            f"inputs of at least {1000 * COST:.0f} ms: {'met' if record['met'] else 'not met'}). The answers are "
            f"{same} as in one process without Ray, which does {record['local']['inputs_per_second']:.2f} inputs per "
            f"second. A task costs {1000 * record['overhead_per_task']:.1f} ms beside its work.",
            markdown_table(header, [summary_row(figure) for figure in record["rounds"]]),
            "Busy: share of the time in which the workers were at work. Start: until every worker has loaded torch and "
            "the model and done its first inputs.",
        ]
    )


def main() -> None:
    """Parses the command line, measures, prints and writes."""
    parser = argparse.ArgumentParser(description="Compare two Ray workers with one.")
    parser.add_argument("--quick", action="store_true", help="few inputs, one round; writes no results")
    parser.add_argument("--inputs", type=int, help="in each measurement (default: 80; with --quick: 8)")
    parser.add_argument("--repetitions", type=int, help="rounds (default: 3; with --quick: 1)")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder for the results (default: benchmarks/results)"
    )
    options = parser.parse_args()
    record = measure(options.inputs or (8 if options.quick else 80), options.repetitions or (1 if options.quick else 3))
    page = to_markdown(record)
    if not options.quick:
        write_results(NAME, record, page, options.out)
    print(page)


if __name__ == "__main__":
    main()
