"""Which certified loss is tight, which is smooth, and which one trains? The relaxations of ReLU on small networks.

Claims of Lee, "Robustness of deep neural networks to adversarial attack", 2021, chapter 3.3 (Lee et al., "Towards
better understanding of training certifiably robust models against adversarial examples", 2021), on perceptrons
784-100-100-10, 2,000 images of mnist-mini, Adam at 2e-3, the robust loss by itself (kappa = 0). Parts:

- train-0.1: linf 0.1, 8 epochs (1 without a budget, a rise over 4, the rest at the full budget). One network for each
  loss and seed. Measured: the loss at a tenth of the budget before it rises (`start`); every 20 steps of the rise the
  range of the loss along its gradient (`variation`), the change and the turn of the gradient along one step, and the
  change of the gradient at the full budget (`target`). After training: clean error, error under PGD and verified error
  by the loss's own bound on 500 test inputs; the states of the ReLUs; the mean sum of the upper bounds of z_j - z_y by
  five relaxations over the same intervals (lower is tighter).
- train-0.2: four of the losses at linf 0.2, 14 epochs with a rise over 9.
- paths: the highest loss less the higher end along a Bezier curve between two networks of train-0.1 with one seed,
  bent for either loss.

One thread; models are kept in the cache folder. Finished cells are left out.

    python benchmarks/relaxations.py [--part train-0.1 train-0.2 paths]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
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
from torch import Tensor, nn

import holdfast as hf
from holdfast.analyze.connectivity import barrier, connect, path_losses
from holdfast.analyze.relu_state import relu_state
from holdfast.analyze.smoothness import record as smoothness
from holdfast.analyze.tightness import tightness
from holdfast.bounding.linear.slopes import optimised_slopes
from holdfast.data import cache_root
from holdfast.random import Noise
from holdfast.training.objectives.cap import polytope_bound
from holdfast.training.objectives.core.certified import Bound, certified_loss, interval_bound, linear_bound
from holdfast.training.objectives.crown_ibp import slope_rule

NAME = "relaxations"
SEEDS = (0, 1, 2)
IMAGES, BATCH, LR, WARM = 2000, 50, 2e-3, 1
PROBED = 20  # steps between two measurements of smoothness
PAIRS = (("ibp", "crown-ibp"), ("ibp", "slope-step"), ("crown-ibp", "slope-step"))
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def bounds(noise: Noise) -> dict[str, Bound]:
    """The margins of each loss; `noise` draws random slopes, the same at each call."""

    def step(r: Any, y: Tensor) -> Any:
        return optimised_slopes(r, y, noise=noise[: len(y)], step_size=2.0)

    def rule(name: Any, p: float = 0.0, q: float = 1.0) -> Bound:
        return linear_bound(1.0, lambda r, y: slope_rule(name, p, q, noise[: len(y)])(r, y))

    return {
        "ibp": interval_bound,
        "crown-ibp": rule("adaptive"),
        "cap": polytope_bound,
        "cap-ibp": rule("chord"),
        "slope-step": linear_bound(1.0, step),
        "(0, 0)": rule("bernoulli", 0.0, 0.0),
        "(0, 0.5)": rule("bernoulli", 0.0, 0.5),
        "(1, 1)": rule("bernoulli", 1.0, 1.0),
    }


METHODS = tuple(bounds(Noise.for_batch(0, 1)))
FEW = ("ibp", "crown-ibp", "cap", "slope-step")


@dataclass(frozen=True)
class Setting:
    """A budget, and how long it is trained for."""

    eps: float
    epochs: int
    rise: int
    methods: tuple[str, ...]

    def budget(self, t: float) -> float:
        """The budget at epoch t."""
        return self.eps * min(1.0, max(0.0, (t - WARM) / self.rise))


SETTINGS = {"train-0.1": Setting(0.1, 8, 4, METHODS), "train-0.2": Setting(0.2, 14, 9, FEW)}


def loss_of(method: str, eps: float, seed: int) -> Loss:
    """The certified loss at eps as a function of model, inputs and labels."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        bound = bounds(Noise.for_batch(seed, len(x)))[method]
        return certified_loss(model, x, y, hf.Linf(eps), bound, use_logits=False)[0].mean()

    return loss


def train(method: str, seed: int, how: Setting) -> tuple[nn.Module, float, list[dict[str, float]]]:
    """The model, the loss at the full budget before it rises, and the smoothness of the loss while it rises."""
    data = hf.load_data("mnist-mini").train[:IMAGES]
    model = hf.make_model("mlp", seed=seed, hidden=(100, 100))
    optimizer, generator = torch.optim.Adam(model.parameters(), lr=LR), torch.Generator().manual_seed(seed)
    start, rows, steps = 0.0, [], IMAGES // BATCH
    for epoch in range(how.epochs):
        if epoch == WARM:
            with torch.no_grad():
                start = float(loss_of(method, 0.1 * how.eps, seed)(model, data.x[:500], data.y[:500]))
        for number, index in enumerate(torch.randperm(IMAGES, generator=generator).split(BATCH)):
            t = epoch + (number + 0.5) / steps
            x, y, loss = (
                data.x[index],
                data.y[index],
                loss_of(method, how.budget(t), seed * 1000 + epoch * steps + number),
            )
            if WARM <= t < WARM + how.rise and number % PROBED == 0:
                rows.append(smoothness(model, loss, x, y, step=t, lr=LR, target=loss_of(method, how.eps, seed)))
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()
    return model.eval(), start, rows


def measure(method: str, seed: int, how: Setting, cache: Path) -> dict[str, Any]:
    """Train one network, keep it and measure it."""
    began = time.process_time()
    model, start, rows = train(method, seed, how)
    seconds = time.process_time() - began
    cache.mkdir(parents=True, exist_ok=True)
    hf.save_model(model, file_of(cache, method, seed, how))
    test = hf.load_data("mnist-mini").test[:500]
    x, y, threat = test.x, test.y, hf.Linf(how.eps)
    with torch.no_grad():
        right = model(x).argmax(1) == y
        margins = certified_loss(model, x, y, threat, bounds(Noise.for_batch(0, len(x)))[method])[2]
        proved = (margins > 0).scatter(1, y[:, None], True).all(1)
    broken = hf.attack(model, x, y, threat, "pgd", steps=40).success
    state = relu_state(model, x, threat)
    bands = [row["loss_high"] - row["loss_low"] for row in rows]
    return {
        "start": round(start, 4),
        "variation": statistics.fmean(bands),
        "gradient": statistics.fmean(row["gradient_difference"] for row in rows),
        "turn": statistics.fmean(row["cosine_distance"] for row in rows),
        "target": statistics.fmean(row["target_difference"] for row in rows),
        "clean": error(~right),
        "pgd": error(broken),
        "verified": error(~(proved & right)),
        "active": float(state.active.double().mean()),
        "unstable": float(state.unstable.double().mean()),
        "dead": float(state.dead.double().mean()),
        "tightness": {name: float(t.total.mean()) for name, t in tightness(model, x, y, threat).items()},
        "seconds": round(seconds, 1),
        "run": describe_run(("holdfast", "torch")),
    }


def file_of(cache: Path, method: str, seed: int, how: Setting) -> Path:
    """The trained model."""
    return cache / f"{method}-{how.eps}-{seed}.safetensors"


def error(wrong: Tensor) -> float:
    """Share in percent."""
    return round(100 * float(wrong.double().mean()), 2)


def measure_path(pair: tuple[str, str], seed: int, cache: Path) -> dict[str, Any]:
    """Curves between two networks, bent for the loss of either."""
    data = hf.load_data("mnist-mini").train[:IMAGES]
    how = SETTINGS["train-0.1"]
    ends = [hf.load_model(file_of(cache, method, seed, how)) for method in pair]
    cell: dict[str, Any] = {}
    for method in pair:
        loss = loss_of(method, how.eps, seed)
        curve = connect(*ends, loss, data.x, data.y, steps=120, lr=1e-2, batch_size=100, seed=seed)
        ts = [i / 10 for i in range(11)]
        losses = path_losses(curve, {"loss": loss}, data.x[:500], data.y[:500], ts=ts, chunk=500)["loss"]
        cell[method] = {"barrier": barrier(losses), "losses": losses.tolist()}
    return {**cell, "run": describe_run(("holdfast", "torch"))}


# --- The record, and what it says of the claims -----------------------------------------------------------------------

COLUMNS = ("start", "variation", "gradient", "turn", "target", "clean", "pgd", "verified", "active", "unstable", "dead")


def to_markdown(record: dict[str, Any]) -> str:
    """Means over the seeds, and the range."""
    text = ["# Relaxations", __doc__.split("\n\n    python")[0].partition("\n\n")[2]]
    text += [describe_markdown(next(iter(record["train-0.1"].values()))["run"])]
    text += ["Means over the seeds, in parentheses the smallest and the largest value."]
    for part, how in SETTINGS.items():
        rows, tight, names = [], [], list[str]()
        for method in how.methods:
            found = [c for key, c in record.get(part, {}).items() if key.rpartition(", ")[0] == method]
            if found:
                rows.append((method, len(found), *(spread([cell[name] for cell in found]) for name in COLUMNS)))
                names = list(found[0]["tightness"])
                tight.append((method, *(spread([cell["tightness"][name] for cell in found]) for name in names)))
        text += [f"## {part}", markdown_table(("loss", "seeds", *COLUMNS), rows)]
        text += ["Sum of the upper bounds:", markdown_table(("trained by", *names), tight)]
    if "paths" in record:
        rows = [
            (key, *(f"{m}: {cell[m]['barrier']:.3f}" for m in cell if m != "run"))
            for key, cell in sorted(record["paths"].items())
        ]
        text += ["## Barriers", markdown_table(("networks, seed", "one loss", "the other"), rows)]
    return "\n\n".join(text)


def spread(values: list[float]) -> str:
    """Mean and range."""
    return f"{statistics.fmean(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def judge(record: dict[str, Any]) -> Iterator[Judgement]:
    """The verdicts that the finished cells allow."""
    for part, how in SETTINGS.items():
        cells = record.get(part, {})
        done = [m for m in how.methods if all(f"{m}, {s}" in cells for s in SEEDS)]
        yield from judge_part(f"relaxations-{how.eps}".replace(".", "-"), cells, done)
    yield from judge_paths(record.get("paths", {}))


def judge_part(prefix: str, cells: dict[str, Any], done: list[str]) -> Iterator[Judgement]:
    """The verdicts on one budget that the losses which are `done` allow."""
    other = ("verified-ibp", "verified-cap") if prefix.endswith("0-1") else ("verified-crown-ibp",)
    for claim, column, methods in ORDERS:
        if set(methods) <= set(done) and claim not in other:
            values = [[cells[f"{m}, {s}"][column] for m in methods] for s in SEEDS]
            text = "; ".join(", ".join(f"{v:.4g}" for v in row) for row in values)
            rises = [all(a < b for a, b in pairwise(row)) for row in values]
            yield f"{prefix}-{claim}", verdict_of(rises), f"{column} of {', '.join(methods)}, by seed: {text}"
    if "crown-ibp" in done:
        tight = [[cells[f"crown-ibp, {s}"]["tightness"][m] for m in TIGHT] for s in SEEDS]
        text = "; ".join(", ".join(f"{v:.4g}" for v in row) for row in tight)
        holds = [row == sorted(row) for row in tight]
        yield f"{prefix}-tightness", verdict_of(holds), f"{', '.join(TIGHT)} on networks of crown-ibp: {text}"


ORDERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("start", "start", ("crown-ibp", "ibp")),
    ("start-cap", "start", ("cap", "crown-ibp")),
    ("smooth-ibp", "variation", ("ibp", "crown-ibp")),
    ("smooth-slope-step", "variation", ("slope-step", "crown-ibp")),
    ("gradients-turn", "turn", ("ibp", "crown-ibp")),
    ("verified-slope-step", "verified", ("slope-step", "crown-ibp")),
    ("verified-crown-ibp", "verified", ("crown-ibp", "ibp")),  # of 0.1, where the source has this order
    ("verified-ibp", "verified", ("ibp", "crown-ibp")),  # of 0.2
    ("verified-cap", "verified", ("ibp", "cap")),
    ("verified-slope-step-ibp", "verified", ("slope-step", "ibp")),
    ("dead", "dead", ("crown-ibp", "ibp")),
    ("active", "active", ("ibp", "crown-ibp")),
    ("sparse-smooth", "variation", ("(0, 0)", "(0, 0.5)", "crown-ibp")),
    ("sparse-loose", "verified", ("crown-ibp", "(0, 0)")),
)
"""Claims that a column of the table rises strictly along some losses, for each seed."""
TIGHT = ("slope-step", "crown-ibp", "cap-ibp", "random")


def judge_paths(paths: dict[str, Any]) -> Iterator[Judgement]:
    """Which networks have a barrier between them, under the loss of either."""

    def done(pair: tuple[str, str]) -> bool:
        return all(f"{pair[0]} and {pair[1]}, {seed}" in paths for seed in SEEDS)

    def values(pair: tuple[str, str], loss: str) -> list[float]:
        return [round(paths[f"{pair[0]} and {pair[1]}, {seed}"][loss]["barrier"], 4) for seed in SEEDS]

    first, second, _ = PAIRS
    if done(first):
        own, other = values(first, "crown-ibp"), values(first, "ibp")
        text = f"barrier {own} under the loss of crown-ibp, {other} under that of ibp"
        yield "relaxations-path-crown-ibp", verdict_of([a > 0.01 >= b for a, b in zip(own, other, strict=True)]), text
    if done(second):
        both = [values(second, loss) for loss in second]
        text = f"barrier {both[0]} under the loss of ibp, {both[1]} under that of slope-step"
        holds = [a > 0.01 and b > 0.01 for a, b in zip(*both, strict=True)]
        yield "relaxations-path-ibp-slope-step", verdict_of(holds), text


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=(*SETTINGS, "paths"), default=[*SETTINGS, "paths"])
    parser.add_argument("--only", nargs="+", choices=METHODS, help="only these losses")
    parser.add_argument("--cache", type=Path, default=cache_root() / "benchmarks" / NAME, help="folder of the models")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)

    def keep(part: str, key: str, make: Callable[[], dict[str, Any]]) -> None:
        if key not in read_results(NAME, args.out).get(part, {}):
            store_cell(NAME, part, key, make(), to_markdown=to_markdown, folder=args.out)

    for part in [part for part in SETTINGS if part in args.part]:
        chosen = [m for m in SETTINGS[part].methods if not args.only or m in args.only]
        for seed in SEEDS:
            for method in chosen:
                keep(part, f"{method}, {seed}", partial(measure, method, seed, SETTINGS[part], args.cache))
    for pair in PAIRS if "paths" in args.part else ():
        for seed in SEEDS if not args.only or set(pair) <= set(args.only) else ():
            keep("paths", f"{pair[0]} and {pair[1]}, {seed}", partial(measure_path, pair, seed, args.cache))
    report_claims(judge(read_results(NAME, args.out)))


if __name__ == "__main__":
    main()
