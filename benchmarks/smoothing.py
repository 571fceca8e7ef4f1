"""Randomised smoothing: does the confidence hold, what does adaptive sampling save, how much is certified?

Parts, which can run at different times and are put together in one file of results:

- coverage: 10,000 simulated runs for each probability, with the fixed and the adaptive scheme, in the worst case: the
  radius asked for is the true one, so that every proof is false; and with a rule that never gives up before the cap.
  An exact binomial test compares with alpha.
- samples: MNIST models trained with Gaussian noise of 0.25 and 0.5, certified at four radii. Adaptive sampling against
  100,000 samples of each input, drawn by a plain loop written here: certified accuracy, samples, CPU seconds.
- curves: certified accuracy over the radius, Gaussian augmentation and SmoothAdv, in one plot, with models trained for
  GloRo and BCP if their files are given.

One thread. Models are small-star networks, trained on the full training set by the recipes `mnist-mini-gaussian` and
`mnist-mini-smoothadv`; test inputs are evenly spaced over the test set.

    python benchmarks/smoothing.py --part coverage                                    # a minute
    python benchmarks/smoothing.py --part samples --data ROOT --models MODELS         # hours: the plain loop
    python benchmarks/smoothing.py --part curves --data ROOT --models MODELS --gloro FILE --bcp FILE
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, Neighbours, describe_markdown, describe_run, markdown_table, read_results, store_cell
from scipy import stats
from torch import Tensor, nn

import holdfast as hf
from holdfast.certificates.smoothing.stopping import stopping
from holdfast.data import Dataset
from holdfast.utils.intervals import binomial_lower, looks

NAME = "smoothing"
PARTS = ("coverage", "samples", "curves")
PACKAGES = ("holdfast", "torch")
N, N0, ALPHA = 100_000, 100, 0.001
RADII = (0.25, 0.5, 0.75, 1.0)
GRID = tuple(round(0.125 * i, 3) for i in range(17))
SIGMAS = (0.25, 0.5)
Cell = dict[str, Any]


def store(folder: Path, part: str, key: str, cell: Cell) -> None:
    """Puts one cell among the results."""
    store_cell(NAME, part, key, {**cell, "run": describe_run(PACKAGES)}, to_markdown=to_markdown, folder=folder)


# --- Coverage ---------------------------------------------------------------------------------------------------------


def simulate(p: float, alpha: float, runs: int, rng: np.random.Generator) -> Tensor:
    """Lower bounds (runs,) of adaptive runs whose probability is p and whose target is p too."""
    test = stopping(looks(N, alpha), torch.tensor([p], dtype=torch.float64))
    hits, drawn = torch.zeros(runs, dtype=torch.int64), torch.zeros(runs, dtype=torch.int64)
    lower = torch.zeros(runs, dtype=torch.float64)
    while len(active := test.undecided(hits, drawn, lower).nonzero()[:, 0]):
        goal = test.next_look(drawn[active])
        hits[active] += torch.from_numpy(rng.binomial((goal - drawn[active]).numpy(), p))
        drawn[active] = goal
        lower[active] = torch.maximum(lower[active], test.lower(hits[active], goal))
    return lower


def every_look(p: float, alpha: float, runs: int, rng: np.random.Generator) -> Tensor:
    """The largest lower bound (runs,) over all looks up to the cap: what the most obstinate rule could claim."""
    plan, hits, before = looks(N, alpha), np.zeros(runs, dtype=np.int64), 0
    best = torch.zeros(runs, dtype=torch.float64)
    for size, share in zip(plan.sizes, plan.alphas, strict=True):
        hits, before = hits + rng.binomial(size - before, p, runs), size
        best = torch.maximum(best, binomial_lower(torch.from_numpy(hits), size, share))
    return best


def coverage(folder: Path, runs: int = 10_000) -> None:
    """How often the statement is wrong, and the p-value of "no more often than alpha"."""
    rng = np.random.default_rng(0)
    for alpha in (ALPHA, 0.05):
        for p in (0.55, 0.8413, 0.97725, 0.99865):
            fixed = binomial_lower(torch.from_numpy(rng.binomial(N, p, runs)), N, alpha)
            adapted, obstinate = simulate(p, alpha, runs, rng), every_look(p, alpha, runs, rng)
            for scheme, lower in (("fixed", fixed), ("adaptive", adapted), ("all looks", obstinate)):
                wrong = int((lower > p).sum())
                value = stats.binomtest(wrong, runs, alpha, alternative="greater").pvalue
                cell = {"wrong": wrong, "runs": runs, "alpha": alpha, "p_value": round(float(value), 4)}
                store(folder, "coverage", f"{scheme}, alpha {alpha}, p {p}", cell)


# --- Models and inputs ------------------------------------------------------------------------------------------------


def train(objective: str, sigma: float, data: Dataset, models: Path) -> nn.Module:
    """The model of a recipe on the full data; a run that was interrupted goes on."""
    folder = models / f"{objective}-{sigma}"
    if (folder / "model.safetensors").exists():
        return hf.load_model(folder / "model.safetensors").eval()
    overrides: dict[str, Any] = {"objective.sigma": sigma, "batch_size": 128}
    if objective == "smoothadv":
        overrides["threat"] = f"l2:{2 * sigma}"
    resume = (folder / "recipe.toml").exists()
    return hf.train(f"mnist-mini-{objective}", data=data, out=folder, resume=resume, **overrides).model.eval()


def spaced(data: Dataset, inputs: int) -> tuple[Tensor, Tensor]:
    """Test inputs, evenly spaced, and their labels."""
    step = max(1, len(data.test) // inputs)
    return data.test.x[::step][:inputs], data.test.y[::step][:inputs]


def percent(share: Tensor) -> float:
    """A share of inputs in percent."""
    return round(100 * float(share.double().mean()), 2)


# --- Samples ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def plain(model: nn.Module, x: Tensor, y: Tensor, sigma: float, batch: int = 1000) -> Tensor:
    """Radii (B,) by the fixed scheme as it is usually written: input by input, N0 samples and then N more."""
    torch.manual_seed(0)
    radii = []
    for one, label in zip(x, y.tolist(), strict=True):
        counts = torch.zeros(2, 10, dtype=torch.int64)
        for stage, total in enumerate((N0, N)):
            for start in range(0, total, batch):
                copies = one.expand(min(batch, total - start), *one.shape)
                counts[stage] += model(copies + sigma * torch.randn_like(copies)).argmax(1).bincount(minlength=10)
        guess = int(counts[0].argmax())
        lower = stats.beta.ppf(ALPHA, counts[1, guess], N - int(counts[1, guess]) + 1) if counts[1, guess] else 0.0
        radii.append(sigma * stats.norm.ppf(lower) if guess == label and lower > 0.5 else 0.0)
    return torch.tensor(radii, dtype=torch.float64)


def adaptive(model: nn.Module, x: Tensor, y: Tensor, sigma: float, radii: tuple[float, ...]) -> tuple[Tensor, float]:
    """Radii proved (B,) and samples per input, those of the selection included, of one adaptive run for all `radii`."""
    drawn = torch.zeros(1)

    def watch(counts: Any, left: Tensor) -> None:
        nonlocal drawn
        drawn = counts.drawn

    options: dict[str, Any] = {"sigma": sigma, "n": N, "n0": N0, "alpha": ALPHA, "radii": radii[1:], "watch": watch}
    result = hf.certify(model, x, y, hf.L2(radii[0]), "smoothing", **options)
    return result.radius, float(drawn.double().mean()) + N0


def samples(sigma: float, data: Dataset, models: Path, folder: Path, inputs: int) -> None:
    """Both schemes on one model; the plain loop runs once, since its samples serve all radii."""
    model, (x, y), others = train("gaussian", sigma, data, models), spaced(data, inputs), Neighbours()
    started = time.process_time()
    fixed = plain(model, x, y, sigma)
    plain_seconds = time.process_time() - started
    reach = sigma * stats.norm.ppf(ALPHA ** (1 / N))
    # A radius beyond the reach of N samples takes none and is refused; the grid leaves it out in the same way.
    asked = [(radius,) for radius in RADII if radius < 0.99 * reach]
    for radii in [*asked, tuple(radius for (radius,) in asked)]:
        started = time.process_time()
        found, drawn = adaptive(model, x, y, sigma, radii)
        seconds = time.process_time() - started
        cell = {
            "sigma": sigma,
            "radii": radii,
            "inputs": len(x),
            "certified, adaptive": [percent(found > radius) for radius in radii],
            "certified, fixed": [percent(fixed > radius) for radius in radii],
            "samples": round(drawn),
            "share of samples": round(drawn / (N + N0), 4),
            "cpu_seconds": round(seconds, 1),
            "plain_cpu_seconds": round(plain_seconds, 1),
            "cpu_ratio": round(seconds / plain_seconds, 4),
            "others": others.cores(),
        }
        store(folder, "samples", f"sigma {sigma}, l2 {', '.join(map(str, radii))}", cell)


# --- Curves -----------------------------------------------------------------------------------------------------------


def curve(objective: str, sigma: float, data: Dataset, models: Path, folder: Path, inputs: int) -> None:
    """Certified accuracy of a smoothed classifier over the grid, by adaptive sampling."""
    model, (x, y) = train(objective, sigma, data, models), spaced(data, inputs)
    started = time.process_time()
    found, drawn = adaptive(model, x, y, sigma, GRID)
    cell = {"certified": [percent(found > radius) for radius in GRID], "samples": round(drawn), "inputs": len(x)}
    cell |= {"cpu_seconds": round(time.process_time() - started), "alpha": ALPHA}
    store(folder, "curves", f"{objective}, sigma {sigma}", cell)


def other_curve(method: str, file: Path, data: Dataset, folder: Path, inputs: int | None) -> None:
    """Certified accuracy of a model trained for another certificate, on the first test inputs or on all."""
    model, x, y = hf.load_model(file).eval(), data.test.x[:inputs], data.test.y[:inputs]
    started = time.process_time()
    proved = [percent(hf.certify(model, x, y, hf.L2(radius), method).certified) for radius in GRID]
    cell = {"certified": proved, "inputs": len(x), "cpu_seconds": round(time.process_time() - started), "alpha": 0.0}
    store(folder, "curves", method, cell)


COLOURS = ("#1f6feb", "#0b3d91", "#d1242f", "#8b1a1a", "#2da44e", "#bf8700")


def draw(cells: dict[str, Cell]) -> str:
    """The curves as an SVG picture."""
    left, top, width, height = 60, 20, 560, 320

    def place(radius: float, accuracy: float) -> str:
        return f"{left + width * radius / GRID[-1]:.1f},{top + height * (1 - accuracy / 100):.1f}"

    parts = [f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#888"/>']
    for tick in range(0, 101, 20):
        y = top + height * (1 - tick / 100)
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick} %</text>')
    for radius in GRID[::4]:
        x = left + width * radius / GRID[-1]
        parts.append(f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{radius:g}</text>')
    middle = left + width / 2
    parts.append(f'<text x="{middle}" y="{top + height + 38}" text-anchor="middle">l2 radius</text>')
    for i, (key, cell) in enumerate(cells.items()):
        colour = COLOURS[i % len(COLOURS)]
        points = " ".join(place(*point) for point in zip(GRID, cell["certified"], strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 20}" y="{top + height - 14 - 18 * i}" fill="{colour}">{key}</text>')
    size = f'width="{left + width + 20}" height="{top + height + 50}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


# --- Tables -----------------------------------------------------------------------------------------------------------


def to_markdown(record: dict[str, Any]) -> str:
    """The results as a page."""
    lines = ["# Randomised smoothing", "", "Made by benchmarks/smoothing.py; its docstring says what is done."]
    if "coverage" in record:
        header = ("scheme", "wrong", "runs", "alpha", "p-value of wrong <= alpha")
        rows = [(key, c["wrong"], c["runs"], c["alpha"], c["p_value"]) for key, c in record["coverage"].items()]
        lines += ["", "## coverage", "", markdown_table(header, rows)]
    if "samples" in record:
        lines += ["", "## samples", "", _samples(record["samples"])]
    if "curves" in record:
        header = ("model", *(f"{radius:g}" for radius in GRID))
        rows = [(key, *c["certified"]) for key, c in record["curves"].items()]
        lines += ["", "## curves", "", "Certified accuracy in percent, by l2 radius.", "", markdown_table(header, rows)]
        lines += ["", f"![certified accuracy by radius]({NAME}.svg)"]
    runs = {describe_markdown(cell["run"]) for cells in record.values() for cell in cells.values()}
    return "\n".join([*lines, "", "## Runs", "", *sorted(runs)])


def _samples(cells: dict[str, Cell]) -> str:
    header = ("asked for", "inputs", "adaptive %", "fixed %", "samples", "share", "CPU s", "plain CPU s", "ratio")
    rows = [
        (
            *(key, c["inputs"], c["certified, adaptive"], c["certified, fixed"], c["samples"]),
            *(c["share of samples"], c["cpu_seconds"], c["plain_cpu_seconds"], c["cpu_ratio"]),
        )
        for key, c in cells.items()
    ]
    return markdown_table(header, rows)


# --- Command line -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--data", type=Path, help="folder with mnist")
    parser.add_argument("--models", type=Path, help="folder for the runs")
    parser.add_argument("--sigma", type=float, nargs="*", default=SIGMAS)
    parser.add_argument("--inputs", type=int, default=500, help="test inputs of the parts samples and curves")
    parser.add_argument("--gloro", type=Path, help="a model trained for GloRo, for the plot")
    parser.add_argument("--bcp", type=Path, help="a model trained for BCP, for the plot")
    parser.add_argument("--others", type=int, help="test inputs of these two (default: all)")
    parser.add_argument("--runs", type=int, default=10_000, help="of the part coverage")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "coverage":
        coverage(options.out, options.runs)
        return
    data = hf.load_data("mnist", root=options.data)
    for sigma in options.sigma:
        if options.part == "samples":
            samples(sigma, data, options.models, options.out, options.inputs)
        else:
            for objective in ("gaussian", "smoothadv"):
                curve(objective, sigma, data, options.models, options.out, options.inputs)
    if options.part == "curves":
        for method in ("gloro", "bcp"):
            if (file := getattr(options, method)) is not None:
                other_curve(method, file, data, options.out, options.others)
        cells = read_results(NAME, options.out)["curves"]
        (options.out / f"{NAME}.svg").write_text(draw(cells))


if __name__ == "__main__":
    main()
