"""How much larger are non-uniform boxes than cubes, and what does adversarial training change about them?

Tables 3.2 and 3.3 of Liu, "Towards verifiable, generalizable and efficient robust deep neural networks", 2022, at a
size for a CPU: perceptrons with three hidden layers of 100, the embedded MNIST, the first ten test inputs that a
network classifies right, 100 steps (400 there). `standard` is trained with cross-entropy for 6 epochs, `robust` with
PGD at linf 0.1 for 15 epochs; neither its attack nor the boxes are clipped to [0, 1]. Both logits of a margin are
bounded one by one, as in the tables. Every network is a cell; finished cells are left out.

    python benchmarks/boxes.py
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
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
from radii import RECIPES, accuracy, volumes

import holdfast as hf

NAME, SEEDS, PART = "boxes", (0, 1, 2), "networks"
TRAININGS = ("standard", "robust")
INPUTS, STEPS = 10, 100
SHOWN = ("uniform", "nonuniform", "ratio_mean", "ratio_min", "cosine_mean", "cosine_min")


def measure(training: str, seed: int) -> dict[str, Any]:
    """Train one network and find the boxes of its inputs."""
    began, data = time.process_time(), hf.load_data("mnist-mini")
    new = hf.make_model("mlp", hidden=(100, 100, 100), seed=seed)
    model = hf.train(**RECIPES[training], model=new, seed=seed, progress=False).model.eval()
    with torch.no_grad():
        right = (model(data.test.x).argmax(1) == data.test.y).nonzero()[:INPUTS, 0]
    found = next(
        row for row in volumes(model, data.test.x[right], data.test.y[right], STEPS) if "one" in row["margins"]
    )
    return {
        "test accuracy": accuracy(model, data.test.x, data.test.y),
        **{name: found[name] for name in SHOWN},
        "cpu_seconds": round(time.process_time() - began, 1),
        "run": describe_run(("holdfast", "torch")),
    }


def judge(record: dict[str, Any]) -> Iterator[Judgement]:
    """What the finished networks say of the claims."""
    cells = record.get(PART, {})
    if not all(f"{training}, {seed}" in cells for training in TRAININGS for seed in SEEDS):
        return

    def of(training: str, key: str) -> list[float]:
        return [cells[f"{training}, {seed}"][key] for seed in SEEDS]

    def shown(key: str) -> str:
        return "; ".join(f"{training} {', '.join(f'{v:.3g}' for v in of(training, key))}" for training in TRAININGS)

    least = [value > 1 for training in TRAININGS for value in of(training, "ratio_min")]
    yield "boxes-larger-than-cubes", verdict_of(least), f"least ratio {shown('ratio_min')}"
    for claim, key in (("boxes-gain-more-if-robust", "ratio_mean"), ("boxes-alike-if-robust", "cosine_mean")):
        more = [b > a for a, b in zip(of("standard", key), of("robust", key), strict=True)]
        yield claim, verdict_of(more), f"{key} {shown(key)}"


def to_markdown(record: dict[str, Any]) -> str:
    """Every network in a row."""
    cells = record[PART]
    rows = [
        (key, *(f"{cell[name]:.4g}" for name in ("test accuracy", *SHOWN, "cpu_seconds")))
        for key, cell in cells.items()
    ]
    text = ["# Non-uniform boxes", __doc__.partition("\n\n    python")[0].partition("\n\n")[2]]
    text += [describe_markdown(next(iter(cells.values()))["run"])]
    text += ["Geometric means of half-widths, box to cube, and cosines between the boxes of two inputs."]
    return "\n\n".join([*text, markdown_table(("network", "test accuracy", *SHOWN, "CPU s"), rows)])


def main() -> None:
    """Measures what is missing, and says what it decides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    for seed in SEEDS:
        for training in TRAININGS:
            key = f"{training}, {seed}"
            if key not in read_results(NAME, out).get(PART, {}):
                store_cell(NAME, PART, key, measure(training, seed), to_markdown=to_markdown, folder=out)
    report_claims(judge(read_results(NAME, out)))


if __name__ == "__main__":
    main()
