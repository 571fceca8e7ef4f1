"""The volume of good minima: closed forms, toys, and the published tables of learning without gradients on MNIST.

Parts, which can run at different times and are put together in one file of results:

- closed: guess and check on a threshold classifier, whose answer is known; volume estimators on a set of known volume;
  pattern search on a separable quadratic.
- wedge, slab: the two toys, several seeds; slab with 10^7 guesses over three draws of its points.
- counts: parameters of the LeNets, and the normalised loss of random networks that fit.
- speed: networks per second of batched evaluation and of a plain loop over modules, in turn, one thread.
- bins: two-class MNIST by bins of the normalised training loss (table 7.2), guess and check, SGD and a linear model.
- poison: LeNets that fit n samples and fail on the test set (table 7.1).
- ten: ten classes, 100 samples, a LeNet of width 1 (table 7.4): SGD, pattern search, random greedy search.
- widths: guess and check with 16 samples by the width of the LeNet (table 7.6).
- heads: few-shot heads on features of a small network trained on five digits, episodes of the other five.

One thread. Published figures are from Chiang, "Reliability of machine learning models in the real world", thesis, 2023,
chapter 7: 175 splits on MNIST; ours are fewer, with the error beside each.

    python benchmarks/volume.py --data mnist.npz --work WORK --part bins --only 8 --splits 40 --resume
    python benchmarks/volume.py --part closed
"""

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
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
    report_claims,
    store_cell,
)
from scipy import stats
from torch import nn
from torch.nn.functional import cross_entropy
from volume_claims import COUNTS, EDGES, TABLE_2, TABLE_4, TABLE_6, WIDTHS, judge, percent

import holdfast as hf
from holdfast.analyze.plots.boundaries import boundaries_svg
from holdfast.analyze.volume.family import make_family
from holdfast.analyze.volume.few_samples import few_samples
from holdfast.analyze.volume.few_shot import few_shot, gradient_head, make_episodes, pattern_head, score
from holdfast.analyze.volume.fitting import make_bins, make_fitting
from holdfast.analyze.volume.gradient_descent import gradient_descent
from holdfast.analyze.volume.guess_and_check import guess_and_check
from holdfast.analyze.volume.pattern_search import pattern_path, pattern_search
from holdfast.analyze.volume.poison import poison
from holdfast.analyze.volume.random_greedy import random_greedy
from holdfast.analyze.volume.study import architecture_of, study, summary
from holdfast.analyze.volume.toys import slab_study, wedge_study
from holdfast.analyze.volume.volume_estimate import volume
from holdfast.analyze.volume.wedge import wedge_task
from holdfast.data import Dataset
from holdfast.utils.progress import without_progress

NAME, PACKAGES = "volume", ("holdfast", "torch")
Cell = dict[str, Any]
TEN_SEEDS, HEAD_SEEDS, TOY_SEEDS = range(5), range(3), range(5)
SLAB_GUESSES = 3_400_000  # for each of three draws of the points: more than 10^7 in all
SEARCHES: dict[str, Callable[..., Any]] = {
    "sgd": partial(gradient_descent, epochs=400, lr=0.01, momentum=0.5, batch_size=64, runs=1, start="default"),
    "pattern-search": partial(pattern_search, block=128),
    # Published: 30,000 failures before the noise is halved, which takes hours on a CPU.
    "random-greedy": partial(random_greedy, failures=64, block=16),
}


def store(folder: Path, part: str, key: str, cell: Cell) -> None:
    """Puts one cell among the results."""
    cell["run"] = describe_run(PACKAGES)
    store_cell(NAME, part, key, cell, to_markdown=to_markdown, folder=folder, silent=("run", "rows"))


# --- Closed forms -----------------------------------------------------------------------------------------------------


class Threshold(nn.Module):
    """Class 1 if x > t: the only parameter is t."""

    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (B, 1) to logits (B, 2)."""
        return torch.cat([torch.zeros_like(x), x - self.t], 1)


class Quadratic:
    """A separable quadratic around a known minimiser."""

    fits = False

    def __init__(self, point: torch.Tensor, centre: torch.Tensor, scale: torch.Tensor) -> None:
        self.point, self.centre, self.scale = point, centre, scale
        self.loss = float((scale * (point - centre) ** 2).sum())

    def losses(self, index: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Loss at the neighbours."""
        points = self.point.repeat(len(index), 1)
        points[torch.arange(len(index)), index] += step
        return (self.scale * (points - self.centre) ** 2).sum(1)


def run_closed(key: str) -> Cell:
    """Compare with what is known in closed form."""
    x, y = torch.tensor([[-0.2], [0.3]]), torch.tensor([0, 1])
    fitting = make_fitting(Threshold(), x, y, divisor=None)
    if key == "accepted":
        found = guess_and_check(fitting, limit=100_000, keep=100_000, stop=False, block=1000, chunk=1000)
        test = stats.kstest(found.weights[:, 0].numpy(), stats.uniform(-0.2, 0.5).cdf)
        share = volume(found.accepted, found.tried)
        return {"true": 0.25, "share": share.share, "low": share.low, "high": share.high, "ks_p": float(test.pvalue)}
    if key == "geometric":
        waits = [int(guess_and_check(fitting, block=64, seed=seed).waits[0]) for seed in range(2000)]
        seen = [sum(w == n for w in waits) for n in range(1, 12)] + [sum(w > 11 for w in waits)]
        expected = [2000 * 0.25 * 0.75**n for n in range(11)] + [2000 * 0.75**11]
        chi = stats.chisquare(seen, expected)
        return {"mean_wait": sum(waits) / len(waits), "true_mean": 4.0, "chi2_p": float(chi.pvalue)}
    if key == "estimators":
        rng, p = torch.Generator().manual_seed(0), 0.001
        runs = 20_000
        hits = torch.binomial(torch.full((runs,), 5000.0), torch.full((runs,), p), generator=rng)
        waits = torch.distributions.Geometric(torch.tensor(p)).sample((runs, 5)) + 1
        covered = [volume(int(k), 5000).low <= p <= volume(int(k), 5000).high for k in hits[:2000]]
        return {
            "true": p,
            "k / N": float((hits / 5000).mean()),
            "(k - 1) / (N - 1) at hit 5": float((4 / (waits.sum(1) - 1)).mean()),
            "1 / N at hit 1": float((1 / waits[:, 0]).mean()),
            "interval_covers": sum(covered) / len(covered),
        }
    generator = torch.Generator().manual_seed(0)
    centre = 2 * torch.rand(50, generator=generator, dtype=torch.float64) - 1
    scale = torch.rand(50, generator=generator, dtype=torch.float64) + 0.1
    path = pattern_path(
        lambda p: Quadratic(p, centre, scale), torch.zeros(50, dtype=torch.float64), least=1e-3, block=8
    )
    visits = list(path)
    last = visits[-1]
    error = float((last.point - centre).abs().max())
    return {"error": error, "rho": 2 * last.size, "moves": sum(v.moved for v in visits), "tried": last.tried}


# --- Toys, counts, speed ----------------------------------------------------------------------------------------------


def run_wedge(seed: str) -> Cell:
    """Guess and poison on one draw of the wedge."""
    found = wedge_study(guesses=500_000, seed=int(seed))
    if seed == "0":
        train, _ = wedge_task(seed=0)
        groups = {f"guessed, {w.units} units": (w.family, w.guessed) for w in found}
        groups |= {f"poisoned, {w.units} units": (w.family, w.poisoned) for w in found}
        boundaries_svg(groups, train.x, train.y, columns=6).save(RESULTS / "volume_wedge.svg")
    return {
        "rows": [
            {
                "units": w.units,
                "share": w.volume.share,
                "fits": w.volume.hits,
                "accuracy": float(w.accuracy.mean()) if len(w.accuracy) else None,
                "poisoned": float(w.poisoned_accuracy[0]) if len(w.poisoned_accuracy) else None,
                "poisoned_fit": len(w.poisoned_accuracy),
            }
            for w in found
        ]
    }


def run_slab(seed: str) -> Cell:
    """Volumes on one draw of the slabs."""
    started = time.process_time()
    found = slab_study(guesses=SLAB_GUESSES, seed=int(seed))
    if seed == "0":
        groups = {
            "fit the slabs": (found.family, found.weights),
            "linear": (found.family, found.weights[found.kinds.linear]),
            "robust": (found.family, found.weights[found.kinds.robust]),
        }
        picked = torch.arange(0, len(found.points), 2)
        boundaries_svg(groups, found.points.x[picked], found.points.y[picked]).save(RESULTS / "volume_slab.svg")
    cell: Cell = {"cpu_seconds": round(time.process_time() - started, 1)}
    for name in ("fits", "linear", "robust"):
        share = getattr(found, name)
        cell[name] = {
            "hits": share.hits,
            "guesses": share.guesses,
            "share": share.share,
            "low": share.low,
            "high": share.high,
        }
    return cell


def run_counts(key: str, data: Dataset) -> Cell:
    """Parameters of the LeNets, or losses of random ones that fit."""
    if key == "parameters":
        make = architecture_of("lenet", data)
        found = [make_family(make(width)).size for width in WIDTHS]
        ten = make_family(architecture_of("lenet", data, classes=10)(1.0)).size
        return {"widths": WIDTHS, "found": found, "published": COUNTS, "ten_classes": ten, "published_ten": 44426}
    lows = [low for low, _ in make_bins(0.3, 0.65, 0.05)]
    hits = torch.zeros(len(lows), dtype=torch.int64)
    fits = tried = 0
    for split in range(10):
        task = few_samples(data, 4, seed=split)
        fitting = make_fitting(architecture_of("lenet", data)(0.5), task.train.x, task.train.y)
        found = guess_and_check(fitting, make_bins(0.3, 0.65, 0.05), limit=20_000, stop=False, seed=split)
        hits, fits, tried = hits + found.hits, fits + found.accepted, tried + found.tried
    return {"lows": lows, "hits": hits.tolist(), "fits": fits, "tried": tried, "share_in_bins": int(hits.sum()) / fits}


@torch.no_grad()
def run_speed(count: str, data: Dataset) -> Cell:
    """Draw and evaluate networks, batched and one by one, in turn; CPU seconds of this process."""
    samples, neighbours = int(count), Neighbours()
    task = few_samples(data, samples, seed=0)
    module = architecture_of("lenet", data)(0.5)
    fitting = make_fitting(module, task.train.x, task.train.y)
    family, times = fitting.family, {"batched": [], "loop": [], "guess and check": []}

    def batched(seed: int) -> None:
        fitting.measure(family.draw(256, seed=seed))

    def loop(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(256):
            for parameter in module.parameters():
                parameter.uniform_(-1, 1, generator=generator)
            logits = module(task.train.x)
            norm = torch.stack([p.norm() / 3 for p in module.parameters() if p.ndim > 1]).prod()
            cross_entropy(logits / norm, task.train.y), (logits.argmax(1) == task.train.y).float().mean()

    def guess(seed: int) -> None:
        guess_and_check(fitting, limit=256, stop=False, seed=seed)

    for turn in range(12):
        for name, run in (("batched", batched), ("loop", loop), ("guess and check", guess)):
            started = time.process_time()
            run(turn)
            times[name].append(time.process_time() - started)
    rate = {name: round(256 / sorted(values[2:])[5]) for name, values in times.items()}
    ratios = {f"{name} / loop": rate[name] / rate["loop"] for name in ("batched", "guess and check")}
    return {**rate, **ratios, "neighbours": neighbours.cores()}


# --- MNIST ------------------------------------------------------------------------------------------------------------


def run_bins(count: str, data: Dataset, work: Path, splits: int, limit: int) -> Cell:
    """One number of samples of table 7.2."""
    rows = study(
        data,
        architecture_of("lenet", data),
        make_bins(0.45, 0.65, 0.05),
        samples=(int(count),),
        splits=splits,
        limit=limit,
        out=work / f"bins-{count}",
    )
    return {
        "splits": splits,
        "limit": limit,
        "rows": summary(rows),
        "seconds": sum(r["seconds"] for r in rows if r["low"] == 0.45),
    }


def run_widths(width: str, data: Dataset, work: Path, splits: int, limit: int) -> Cell:
    """One width of table 7.6."""
    rows = study(
        data,
        architecture_of("lenet", data),
        make_bins(0.45, 0.65, 0.05),
        widths=(float(width),),
        samples=(16,),
        optimisers=("guess-and-check",),
        splits=splits,
        limit=limit,
        out=work / f"width-{width}",
    )
    return {
        "splits": splits,
        "limit": limit,
        "rows": summary(rows),
        "seconds": sum(r["seconds"] for r in rows if r["low"] == 0.45),
    }


def run_poison(count: str, data: Dataset) -> Cell:
    """Three pairs of classes; the networks see 400 test images of each pair under wrong labels."""
    found = []
    for split in range(3):
        task = few_samples(data, int(count), seed=split)
        fitting = make_fitting(architecture_of("lenet", data)(0.5), task.train.x, task.train.y)
        picked = torch.randperm(len(task.test), generator=torch.Generator().manual_seed(split))[:400]
        result = poison(fitting, task.test[picked], epochs=200, lr=2e-3, runs=1, every=5, seed=split)
        found.append(float(result.accuracy[0]) if len(result.accuracy) else None)
    return {"accuracy": found, "test_images": 400}


def run_ten(key: str, data: Dataset) -> Cell:
    """One optimiser and seed of table 7.4."""
    name, seed = key.rsplit("-", 1)
    task = few_samples(data, 100, classes=10, seed=int(seed))
    fitting = make_fitting(architecture_of("lenet", data, classes=10)(1.0), task.train.x, task.train.y)
    started = time.process_time()
    found = SEARCHES[name](fitting, seed=int(seed))
    cell: Cell = {"fits": bool(found.accepted), "tried": found.tried, "accuracy": None}
    cell |= {"cpu_seconds": round(time.process_time() - started, 1)}
    if len(found.weights):
        with torch.no_grad():
            logits = torch.cat([fitting.family.logits(found.weights, part)[0] for part in task.test.x.split(500)])
        cell |= {"accuracy": float((logits.argmax(1) == task.test.y).double().mean()), "loss": float(found.loss[0])}
    return cell


def run_heads(seed: str, data: Dataset, episodes: int) -> Cell:
    """Train on five digits, learn heads for the other five; which five is drawn."""
    order = torch.randperm(10, generator=torch.Generator().manual_seed(int(seed)))
    base, new = order[:5], order[5:]
    rows = torch.isin(data.train.y, base).nonzero()[:, 0][:6000]
    label = torch.zeros(10, dtype=torch.int64)
    label[base] = torch.arange(5)
    torch.manual_seed(int(seed))
    model = hf.make_model("lenet", input_shape=(1, 28, 28), classes=5, seed=int(seed))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(3):
        for part in rows[torch.randperm(len(rows))].split(64):
            optimizer.zero_grad()
            cross_entropy(model(data.train.x[part]), label[data.train.y[part]]).backward()
            optimizer.step()
    extractor = copy.deepcopy(model)[:-1].eval()
    test = data.test[torch.isin(data.test.y, new)]
    with torch.no_grad():
        features = extractor(test.x)
        known = data.test[torch.isin(data.test.y, base)]
        base_accuracy = float((model.eval()(known.x).argmax(1) == label[known.y]).double().mean())
    drawn = make_episodes(test.y, episodes, seed=int(seed))
    cell: Cell = {"base_accuracy": base_accuracy, "episodes": episodes, "features": features.shape[1]}
    for name, head in (("sgd", gradient_head()), ("pattern-search", pattern_head(block=1024))):
        started = time.process_time()
        result = score(few_shot(features, drawn, head, seed=int(seed)))
        cell[name] = {"accuracy": result.accuracy, "error": result.error}
        cell[f"{name} cpu_seconds"] = round(time.process_time() - started, 1)
    return cell


# --- Results ----------------------------------------------------------------------------------------------------------

KEYS: dict[str, Sequence[str]] = {
    "closed": ("accepted", "geometric", "estimators", "quadratic"),
    "wedge": [str(seed) for seed in TOY_SEEDS],
    "slab": ("0", "1", "2"),
    "counts": ("parameters", "losses"),
    "speed": ("2", "4", "8", "16"),
    "bins": ("2", "4", "8"),
    "poison": ("2", "8", "32"),
    "ten": [f"{name}-{seed}" for seed in TEN_SEEDS for name in SEARCHES],
    "widths": ("0.2", "0.3", "0.4", "0.5"),
    "heads": [str(seed) for seed in HEAD_SEEDS],
}


def to_markdown(record: dict[str, Any]) -> str:
    """All parts that were measured."""
    tables = {
        "closed": _closed, "wedge": _wedge, "slab": _slab, "counts": _counts, "speed": _speed, "bins": _bins,
        "poison": _poison, "ten": _ten, "widths": _widths, "heads": _heads,
    }  # fmt: skip
    parts = ["# The volume of good minima", (__doc__ or "").split("\n\n")[0], "Accuracies in %, ± standard error."]
    for part, make in tables.items():
        cells = record.get(part)
        if cells:
            last = list(cells.values())[-1]["run"]
            parts += [f"## {part}", make(cells), describe_markdown(last)]
    return "\n\n".join(parts)


def _closed(cells: dict[str, Cell]) -> str:
    rows = [(key, ", ".join(f"{k}: {v:.4g}" for k, v in cell.items() if k != "run")) for key, cell in cells.items()]
    return markdown_table(("check", "figures"), rows)


def _wedge(cells: dict[str, Cell]) -> str:
    rows = []
    for i, units in enumerate(row["units"] for row in next(iter(cells.values()))["rows"]):
        each = [cell["rows"][i] for cell in cells.values()]
        known = [r["accuracy"] for r in each if r["accuracy"] is not None]
        bad = [r["poisoned"] for r in each if r["poisoned"] is not None]
        mean = torch.tensor(known, dtype=torch.float64)
        error = float(mean.std()) / len(known) ** 0.5 if len(known) > 1 else None
        shares = [r["share"] for r in each]
        span = f"{min(shares):.1e} to {max(shares):.1e}"
        worst = ", ".join(percent(b) for b in bad) or "none fit"
        rows.append((units, len(each), span, sum(r["fits"] for r in each), percent(float(mean.mean()), error), worst))
    header = ("hidden units", "seeds", "share that fits", "networks", "accuracy on fresh points", "poisoned, each seed")
    return markdown_table(header, rows) + "\n\n![boundaries](volume_wedge.svg)"


def _slab(cells: dict[str, Cell]) -> str:
    rows = []
    for name in ("fits", "linear", "robust"):
        each = [(key, cell[name]["hits"], cell[name]["guesses"]) for key, cell in cells.items()]
        for key, hits, guesses in [*each, ("all", sum(e[1] for e in each), sum(e[2] for e in each))]:
            v = volume(hits, guesses)
            rows.append((name, key, f"{guesses:,}", hits, f"{v.share:.2e}", f"{v.low:.1e}", f"{v.high:.1e}"))
    header = ("boundary", "points", "guesses", "hits", "volume", "lower end", "upper end")
    return markdown_table(header, rows) + "\n\n![boundaries](volume_slab.svg)"


def _counts(cells: dict[str, Cell]) -> str:
    lines = []
    if "parameters" in cells:
        c = cells["parameters"]
        lines.append(
            markdown_table(
                ("width", "parameters", "published"), zip(c["widths"], c["found"], c["published"], strict=True)
            )
        )
        lines.append(f"Ten classes, width 1: {c['ten_classes']} (published {c['published_ten']}).")
    if "losses" in cells:
        c = cells["losses"]
        lines.append(markdown_table(("loss from", "networks"), zip(c["lows"], c["hits"], strict=True)))
        lines.append(
            f"Of {c['fits']} random LeNets that fit 4 samples, {percent(c['share_in_bins'])} % lie in these bins."
        )
    return "\n\n".join(lines)


def _speed(cells: dict[str, Cell]) -> str:
    names = ("batched", "guess and check", "loop")
    ratios = ("batched / loop", "guess and check / loop")
    rows = [
        (key, *(c[name] for name in names), *(f"{c[name]:.1f}" for name in ratios), c["neighbours"])
        for key, c in cells.items()
    ]
    header = ("samples", *(f"{name}, networks a CPU second" for name in names), *ratios, "busy cores of others")
    return markdown_table(header, rows)


def _compared(rows: list[Cell], published: list[Any]) -> list[str]:
    found = []
    for row, known in zip(rows, published, strict=True):
        text = percent(row["accuracy"], row["error"]) + f" (n {row['splits']})"
        if row["accuracy"] is not None and row["error"] and known:
            sigma = (100 * row["accuracy"] - known[0]) / (row["error"] ** 2 * 1e4 + known[1] ** 2) ** 0.5
            text += f"; {known[0]} ± {known[1]}; {sigma:+.1f} errors"
        found.append(text)
    return found


def _bins(cells: dict[str, Cell]) -> str:
    rows = []
    for key, cell in cells.items():
        for name in ("guess-and-check", "sgd", "linear"):
            mine = [row for row in cell["rows"] if row["optimiser"] == name]
            rows.append((key, name, *_compared(mine, TABLE_2[int(key), name])))
    header = ("samples", "optimiser", *(f"loss ({low:g}, {low + 0.05:.2g}]" for low in EDGES))
    return "Ours; published; difference in combined standard errors.\n\n" + markdown_table(header, rows)


def _widths(cells: dict[str, Cell]) -> str:
    rows = [(key, *_compared(cell["rows"], TABLE_6[float(key)])) for key, cell in cells.items()]
    header = ("width", *(f"loss ({low:g}, {low + 0.05:.2g}]" for low in EDGES))
    return "Ours; published; difference in combined standard errors.\n\n" + markdown_table(header, rows)


def _poison(cells: dict[str, Cell]) -> str:
    rows = [(k, c["test_images"], ", ".join(percent(a) for a in c["accuracy"])) for k, c in cells.items()]
    return markdown_table(("samples", "poisoned test images", "accuracy on them, each split"), rows)


def _ten(cells: dict[str, Cell]) -> str:
    rows = []
    for name, published in TABLE_4.items():
        mine = [c for k, c in cells.items() if k.rsplit("-", 1)[0] == name]
        known = torch.tensor([c["accuracy"] for c in mine if c["accuracy"] is not None], dtype=torch.float64)
        if not mine:
            continue
        error = float(known.std()) / len(known) ** 0.5 if len(known) > 1 else None
        mean = float(known.mean()) if len(known) else None
        tried = sum(c["tried"] for c in mine) // len(mine)
        seconds = sum(c["cpu_seconds"] for c in mine) / len(mine)
        rows.append(
            (
                name,
                f"{len(known)} of {len(mine)}",
                percent(mean, error),
                f"{published[0]} ± {published[1]}",
                f"{tried:,}",
                f"{seconds:.0f}",
            )
        )
    header = ("optimiser", "seeds that fit", "test accuracy", "published", "networks tried", "CPU s")
    return markdown_table(header, rows)


def _heads(cells: dict[str, Cell]) -> str:
    rows = [
        (
            k,
            c["episodes"],
            percent(c["base_accuracy"]),
            *(percent(c[n]["accuracy"], c[n]["error"]) for n in ("sgd", "pattern-search")),
        )
        for k, c in cells.items()
    ]
    return markdown_table(
        ("network", "episodes", "accuracy on its classes", "head by SGD", "head by pattern search"), rows
    )


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist", help="MNIST: a name or a path that hf.load_data takes")
    parser.add_argument("--root", type=Path, help="folder with mnist, if --data is a name")
    parser.add_argument("--work", type=Path, default=Path("runs/volume"), help="folder for unfinished cells")
    parser.add_argument("--part", choices=KEYS, nargs="*", default=list(KEYS))
    parser.add_argument("--only", nargs="*", help="keys of the cells; all of the part if none is given")
    parser.add_argument("--splits", type=int, default=40, help="training sets of each cell of bins and widths")
    parser.add_argument("--limit", type=int, default=100_000, help="guesses for each training set of bins and widths")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--resume", action="store_true", help="leave out what is among the results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    needs = set(options.part) - {"closed", "wedge", "slab"}
    data = hf.load_data(options.data, root=options.root) if needs else None
    runs: dict[str, Callable[[str], Cell]] = {
        "closed": run_closed, "wedge": run_wedge, "slab": run_slab, "counts": partial(run_counts, data=data),
        "speed": partial(run_speed, data=data), "poison": partial(run_poison, data=data),
        "ten": partial(run_ten, data=data),
        "bins": partial(run_bins, data=data, work=options.work, splits=options.splits, limit=options.limit),
        "widths": partial(run_widths, data=data, work=options.work, splits=options.splits, limit=options.limit),
        "heads": partial(run_heads, data=data, episodes=options.episodes),
    }  # fmt: skip
    for part in options.part:
        done = read_results(NAME, options.out).get(part, {}) if options.resume else {}
        for key in options.only or KEYS[part]:
            if key in KEYS[part] and key not in done:
                with without_progress():
                    store(options.out, part, key, runs[part](key))
    report_claims(judge(read_results(NAME, options.out)))


if __name__ == "__main__":
    main()
