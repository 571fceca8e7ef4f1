"""Robust overfitting: are wrong labels hard, does the hard part of the data overfit, and which schedules train?

Networks are trained on a part of mnist-mini with PGD and three seeds. The adversary is an linf ball; accuracy under
attack (5 steps) is on 500 held-out images.

- noise: a tenth of the labels is wrong. Share of the wrong labels among as many hardest examples, rank correlation of
  losses and 0-1 errors.
- subsets: a perceptron (100 hidden units) on the easiest, on random and on the hardest fifth of 2,000 images, ranked by
  the same training on all of them. Accuracy lost between the best epoch and the last; Lipschitz bound of the margins.
- targets: training with weights or with moving targets (one step of an adversary that is kept for each image).
  Correlation of difficulty, ranked by PGD training, with the weight of an image and with the share of its target that
  lies on its label.
- schedules: thin LeNets at a large budget that is constant or rises along a cosine or a line.

One thread. Every seed of a part is a cell; finished cells are left out.

    python benchmarks/overfitting.py
"""

import argparse
import tempfile
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
from torch import Tensor

import holdfast as hf
from holdfast.analyze.difficulty import d_distance, difficulty
from holdfast.analyze.subsets import steepest_margin
from holdfast.data import Dataset, Split, split_validation
from holdfast.training import folder as files
from holdfast.training.logs import read_examples
from holdfast.training.subset import mean_losses

NAME = "overfitting"
SEEDS = (0, 1, 2)
BUDGETS = (0.0, 0.1, 0.2)
KINDS = ("easy", "random", "hard")
HELD_OUT = 500
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {"name": "constant"},
    "cosine": {"name": "cosine", "peak": 1.5},
    "linear": {"name": "linear", "peak": 2.0},
}


def part_of_mnist(count: int, seed: int, wrong: float = 0.0) -> tuple[Dataset, Tensor]:
    """`count` training and 500 validation images, a share of labels wrong; and which of them are, (N,) bool."""
    data = hf.load_data("mnist-mini")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(data.train), generator=generator)[: count + HELD_OUT]
    x, y = data.train.x[chosen], data.train.y[chosen].clone()
    flipped = torch.rand(len(y), generator=generator) < wrong
    y[flipped] = (y[flipped] + torch.randint(1, 10, (int(flipped.sum()),), generator=generator)) % 10
    return Dataset("mnist-mini", Split(x, y), data.test, data.classes), flipped


def recipe(eps: float, count: int, seed: int, epochs: int, **more: Any) -> dict[str, Any]:
    """PGD training of a perceptron, standard training without a budget."""
    at = eps > 0
    return {
        "threat": f"linf:{eps}",
        "epochs": epochs,
        "batch_size": 50,
        "seed": seed,
        "validation": HELD_OUT / (count + HELD_OUT),
        "model": {"name": "mlp", "hidden": [100]},
        "objective": {"name": "at" if at else "standard"},
        **({"attack": {"name": "pgd", "steps": 5}} if at else {}),
        "optimizer": {"name": "adam", "lr": 1e-3},
        "evaluate": {"attack_steps": 5, "count": HELD_OUT, "select": "last"},
        "log": {"losses": True},
        **more,
    }


def train(source: dict[str, Any], data: Dataset, out: Path) -> hf.TrainResult:
    """Train quietly."""
    return hf.train(source, data=data, out=out, progress=False)


def correlation(a: Tensor, b: Tensor) -> float:
    """Of two vectors, Pearson's."""
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def noise(seed: int, folder: Path) -> dict[str, Any]:
    """Wrong labels among the hardest examples, at a budget of 0.1."""
    count = 2000
    data, flipped = part_of_mnist(count, seed, wrong=0.1)
    train(recipe(0.1, count, seed, 12), data, folder / "noise")
    numbers = Split(torch.arange(len(flipped)), data.train.y)  # which of the images the run was trained on
    wrong = flipped[split_validation(numbers, HELD_OUT / (count + HELD_OUT), seed)[0].x]
    by_loss, by_error = (difficulty(mean_losses(folder / "noise", zero_one=zero_one)) for zero_one in (False, True))
    hardest = by_loss.argsort()[: int(wrong.sum())]
    return {
        "wrong": int(wrong.sum()),
        "among hardest": float(wrong[hardest].double().mean()),
        "median difficulty of wrong labels": float(by_loss[wrong].median()),
        "0-1 against loss": correlation(by_loss, by_error),
    }


def subsets(seed: int, folder: Path) -> dict[str, Any]:
    """Training on parts of the data, at several budgets."""
    count, cell, ranks = 2000, {}, {}
    data, _ = part_of_mnist(count, seed)
    for eps in BUDGETS:
        ranking = folder / f"all-{eps}"
        train(recipe(eps, count, seed, 15), data, ranking)
        ranks[eps] = difficulty(mean_losses(ranking))
        for kind in KINDS:
            part = {"kind": kind, "share": 0.2, "run": str(ranking)}
            done = train(recipe(eps, count, seed, 40, subset=part), data, folder / f"{kind}-{eps}")
            robust = [row["validation_robust"] for row in done.history]
            cell[f"{kind} {eps}"] = {
                "fitted": done.history[-1]["train_accuracy"],
                "best": max(robust),
                "last": robust[-1],
                "overfitted": max(robust) - robust[-1],
                "lipschitz": steepest_margin(done.model, (1, 28, 28)),
            }
    cell["distance of 0 and 0.2"] = d_distance(ranks[0.0], ranks[0.2])
    return cell


def targets(seed: int, folder: Path) -> dict[str, Any]:
    """Weights and targets of fast training against difficulty."""
    count = 2000
    data, _ = part_of_mnist(count, seed)
    train(recipe(0.1, count, seed, 15), data, folder / "ranking")
    d = difficulty(mean_losses(folder / "ranking"))
    fast = {"attack": {"name": "atta", "step": 0.5}}
    adaptive = {"name": "adaptive", "start": 5}
    train(recipe(0.1, count, seed, 15, targets={**adaptive, "beta": 1.0, "reweight": True}, **fast), data, folder / "w")
    train(recipe(0.1, count, seed, 15, targets={**adaptive, "rho": 0.9, "beta": 0.1}, **fast), data, folder / "t")
    weight = (-read_examples(folder / "w")[5:]).exp().mean(0)  # the probability of the label at x'
    state = files.read_tensors(folder / "t" / files.LAST)["objective"]["target"]
    labels = split_validation(data.train, HELD_OUT / (count + HELD_OUT), seed)[0].y
    on_label = 0.1 + 0.9 * state.gather(1, labels[:, None])[:, 0]
    return {"weight": correlation(d, weight), "target": correlation(d, on_label)}


def schedules(seed: int, folder: Path, *, eps: float, count: int, epochs: int) -> dict[str, Any]:
    """Thin LeNets at a large budget: only the section [budget], the width and the learning rate differ."""
    data, _ = part_of_mnist(count, seed)
    cell = {}
    for width, lr in ((2, 1e-3),):
        for name, budget in SCHEDULES.items():
            model = {"name": "lenet-padded", "width": width}
            optimizer = {"name": "adam", "lr": lr}
            source = recipe(eps, count, seed, epochs, model=model, optimizer=optimizer, budget=budget, log={})
            done = train(source, data, folder / f"{name}-{width}-{lr}")
            cell[f"{name}, width {width}, lr {lr}"] = done.history[-1]["validation_robust"]
    return cell


def to_markdown(record: dict[str, Any]) -> str:
    """A table for each part."""
    run = next(cell["run"] for part in record.values() for cell in part.values())
    texts = ["# Robust overfitting", __doc__.split("\n\n    python")[0].partition("\n\n")[2], describe_markdown(run)]
    for part, cells in record.items():
        keys = [key for key in next(iter(cells.values())) if key != "run"]
        rows = [(key, *(_text(cells[seed].get(key)) for seed in sorted(cells))) for key in keys]
        texts += [f"## {part}", markdown_table(("", *(f"seed {seed}" for seed in sorted(cells))), rows)]
    notes = "Subsets: fitted (training, last epoch) / best / last (held-out, under attack) / Lipschitz bound."
    return "\n\n".join([*texts, notes])


def _text(value: Any) -> str:
    if isinstance(value, dict):
        shares = " / ".join(f"{value[key]:.3f}" for key in ("fitted", "best", "last"))
        return f"{shares} / {value['lipschitz']:.3g}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def judge(record: dict[str, Any]) -> Iterator[Judgement]:
    """Verdicts of the parts that are there for all seeds."""
    found = {part: [cells[str(s)] for s in SEEDS] for part, cells in record.items() if len(cells) == len(SEEDS)}
    for part, name, claim, least in (
        ("noise", "among hardest", "overfitting-noisy-labels-hard", 0.5),
        ("noise", "0-1 against loss", "overfitting-zero-one-difficulty", 0.9),
        ("targets", "weight", "overfitting-weights-follow-difficulty", 0.8),
        ("targets", "target", "overfitting-targets-follow-difficulty", 0.8),
    ):
        if part in found:
            each = [cell[name] for cell in found[part]]
            yield claim, verdict_of([v > least for v in each]), f"{name}, above {least}: {spread(each)}"
    if "subsets" in found:
        yield from _judge_subsets(found["subsets"])
    if "schedules" in found:
        pairs = [
            (c[k], max(c[k.replace("constant", n)] for n in ("cosine", "linear")))
            for c in found["schedules"]
            for k in c
            if k.startswith("constant")
        ]
        text = "; ".join(f"{a:.3f} against {b:.3f}" for a, b in pairs)
        yield "warm-up-trains-thin-networks", verdict_of([a < 0.15 and b > a + 0.1 for a, b in pairs]), text


def spread(values: list[float]) -> str:
    """One value for each seed."""
    return ", ".join(f"{v:.3f}" for v in values)


def _judge_subsets(cells: list[dict[str, Any]]) -> Iterator[Judgement]:
    """Overfitting of the hard part beside the easy one, its growth with the budget, and the Lipschitz bounds."""

    def of(kind: str, eps: float, name: str) -> list[float]:
        return [c[f"{kind} {eps}"][name] for c in cells]

    gaps = {
        eps: [h - e for h, e in zip(of("hard", eps, "overfitted"), of("easy", eps, "overfitted"), strict=True)]
        for eps in BUDGETS
    }
    text = "lost on the hardest less on the easiest, by budget: "
    text += "; ".join(f"{eps}: {spread(values)}" for eps, values in gaps.items())
    learns = min(of("hard", max(BUDGETS), "best")) > 0.2  # without that there is nothing to overfit
    grows = verdict_of([gaps[0.1][i] > 0 and gaps[0.0][i] < gaps[max(BUDGETS)][i] for i in range(len(cells))])
    yield "overfitting-hard-subset", grows if learns else "not decided at this size", text
    # The claim is about networks that fit the examples under attack.
    fitted = min(min(of(kind, 0.1, "fitted")) for kind in KINDS) > 0.95
    steep = {eps: {kind: of(kind, eps, "lipschitz") for kind in KINDS} for eps in (0.0, 0.1)}
    text = "Lipschitz bound at " + "; ".join(f"{e}, {kind}: {spread(v)}" for e in steep for kind, v in steep[e].items())
    holds = [e < r < h for e, r, h in zip(*(steep[0.1][kind] for kind in ("easy", "random", "hard")), strict=True)]
    yield "overfitting-hard-subset-steeper", verdict_of(holds) if fitted else "not decided at this size", text


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("noise", "subsets", "targets", "schedules"), help="only this part")
    parser.add_argument("--eps", type=float, default=0.4, help="budget of the schedules")
    parser.add_argument("--count", type=int, default=2000, help="training images of the schedules")
    parser.add_argument("--epochs", type=int, default=15, help="epochs of the schedules")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = {"eps": args.eps, "count": args.count, "epochs": args.epochs}
    parts: dict[str, Any] = {"noise": noise, "targets": targets, "subsets": subsets}
    parts["schedules"] = lambda seed, folder: schedules(seed, folder, **size)
    for name in [args.part] if args.part else parts:
        for seed in SEEDS:
            if str(seed) not in read_results(NAME, args.out).get(name, {}):
                with tempfile.TemporaryDirectory() as folder:
                    cell = parts[name](seed, Path(folder))
                cell["run"] = describe_run(("holdfast", "torch"))
                store_cell(NAME, name, str(seed), cell, to_markdown=to_markdown, folder=args.out)
    report_claims(judge(read_results(NAME, args.out)))


if __name__ == "__main__":
    main()
