"""Median smoothing in closed form: do the bounds hold as often as they say, and what do they gain over a mean?

    python benchmarks/order_statistics.py [--out FOLDER]

- ranks: how often the upper bound of a smoothed median holds, exactly, from the binomial distribution, with the rank of
  `order_ranks` and with the rank of the printed sum, which starts one term late. And simulated, for a function with
  eleven values, on three seeds.
- median: bounds of a smoothed median and of a smoothed mean of linear functions in ten dimensions that are clipped to
  ever wider ranges, and of functions without a range.

Ten CPU seconds, one thread. Two pictures are drawn beside the tables.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Judgement, describe_markdown, describe_run, markdown_table, report_claims, write_results
from scipy import special, stats

from holdfast.certificates.smoothing.percentile import mean_bounds, order_ranks, percentile_bounds, smallest_samples
from holdfast.utils.panels import line_keys, panel_at, panel_axes, panels_figure
from holdfast.utils.svg import STYLES, inner_rounds

NAME, SEEDS = "order_statistics", (0, 1, 2)
CASES = ((0.36, 0.25, 0.99999), (0.6, 1.0, 0.99), (1.2, 1.0, 0.99))  # epsilon, sigma, confidence; two are published
COPIES = (100, 200, 500, 1000, 2000, 5000, 10_000)
RANGES = (3.0, 10.0, 30.0, 100.0, 300.0)
RATIOS = tuple(i / 10 for i in range(1, 26))  # epsilon / sigma
REPEATS, N = 20_000, 1000


def printed_rank(n: int, high: float, confidence: float) -> int:
    """Least q with sum_{i = 1}^{q} C(n, i) p^i (1 - p)^(n - i) >= confidence, as the source prints it."""
    start = float(stats.binom.cdf(0, n, high))
    return next(q for q in range(1, n + 1) if float(stats.binom.cdf(q, n, high)) - start >= confidence)


def exact_coverage() -> list[dict[str, Any]]:
    """The probability that the upper bound holds, for both ranks."""
    rows = []
    for epsilon, sigma, confidence in CASES:
        high = float(special.ndtr(epsilon / sigma))
        for n in COPIES:
            if n < smallest_samples(epsilon, sigma, confidence=confidence):
                continue
            ours, printed = order_ranks(n, epsilon, sigma, confidence=confidence)[1], printed_rank(n, high, confidence)
            assert ours is not None
            covers = {
                name: float(stats.binom.cdf(q - 1, n, high)) for name, q in (("ours", ours), ("printed", printed))
            }
            rows.append({"epsilon": epsilon, "sigma": sigma, "confidence": confidence, "n": n, "rank": ours} | covers)
            rows[-1]["printed rank"] = printed
    return rows


def simulated_coverage(seed: int) -> dict[str, float]:
    """Share of repetitions in which the bounds hold for round(10 Phi(z)), z normal: eleven values, many ties."""
    epsilon, sigma, confidence = CASES[1]
    generator, high = torch.Generator().manual_seed(seed), float(special.ndtr(epsilon / sigma))
    truth = torch.round(10 * torch.tensor(high, dtype=torch.float64))  # the percentile p+ of a monotone function
    rank, printed = order_ranks(N, epsilon, sigma, confidence=confidence)[1], printed_rank(N, high, confidence)
    assert rank is not None
    hits = {"ours": 0, "printed": 0, "ours, continuous": 0, "printed, continuous": 0}
    for _ in range(REPEATS // 500):
        uniform = torch.rand(500, N, dtype=torch.float64, generator=generator).sort(1).values
        for name, q in (("ours", rank), ("printed", printed)):
            hits[name] += int((torch.round(10 * uniform[:, q - 1]) >= truth).sum())
            hits[f"{name}, continuous"] += int((uniform[:, q - 1] >= high).sum())
    return {name: count / REPEATS for name, count in hits.items()}


def widths(seed: int) -> list[dict[str, float]]:
    """Widths of both bounds for a linear function of slope 1, clipped, over the true range of its median 2 epsilon."""
    generator, sigma, rows = torch.Generator().manual_seed(seed), 1.0, []
    direction = torch.nn.functional.normalize(torch.randn(10, dtype=torch.float64, generator=generator), dim=0)
    plain = sigma * torch.randn(10_000, 10, dtype=torch.float64, generator=generator) @ direction
    for ratio in RATIOS:
        median = percentile_bounds(plain, ratio * sigma, sigma)
        row = {"epsilon / sigma": ratio, "median": float(median.upper - median.lower) / (2 * ratio * sigma)}
        for size in RANGES:
            values = plain.clamp(-size, size)
            mean = mean_bounds(values, ratio * sigma, sigma, low=-size, high=size)
            row[f"mean, range {size:g}"] = float(mean.upper - mean.lower) / (2 * ratio * sigma)
        rows.append(row)
    return rows


def without_range(seed: int) -> dict[str, list[float]]:
    """Bounds within 1/2 of functions of x + G at x = 2, sigma = 1, and the range of the true median there, if known."""
    generator = torch.Generator().manual_seed(seed)
    noisy = 2 + torch.randn(10_000, dtype=torch.float64, generator=generator)
    functions = {"cube": noisy**3, "exponential of the square": noisy.square().exp(), "reciprocal": 1 / noisy}
    bounds = {name: percentile_bounds(values, 0.5, 1.0) for name, values in functions.items()}
    return {name: [float(b.lower), float(b.upper)] for name, b in bounds.items()}


def true_medians() -> dict[str, list[float]]:
    """Least and largest median of the same functions over the moves of x by at most 1/2, by sampling the grid."""
    moves = torch.linspace(-0.499, 0.499, 21, dtype=torch.float64)
    normal = torch.tensor(special.ndtri((torch.arange(40_000, dtype=torch.float64).numpy() + 0.5) / 40_000))
    medians: dict[str, list[float]] = {"cube": [], "exponential of the square": [], "reciprocal": []}
    for move in moves:
        noisy = 2 + move + normal
        for name, values in (
            ("cube", noisy**3),
            ("exponential of the square", noisy.square().exp()),
            ("reciprocal", 1 / noisy),
        ):
            medians[name].append(float(values.median()))
    return {name: [min(found), max(found)] for name, found in medians.items()}


def picture(title: str, x_label: str, y_label: str, xs: list[float], lines: dict[str, list[float]], path: Path) -> None:
    """One panel with a line for each name, the vertical axis logarithmic."""
    panel = panel_at(0, 0, xs, [value for line in lines.values() for value in line], log=True)
    parts = panel_axes(panel, y_label, x_label, inner_rounds(min(xs), max(xs)))
    parts += [panel.line(xs, line, style, name) for (name, line), style in zip(lines.items(), STYLES, strict=False)]
    path.write_text(panels_figure(title, 1, 1, parts, line_keys(lines)))


def draw(record: dict[str, Any], folder: Path) -> None:
    """Both pictures."""
    rows = [row for row in record["ranks"] if row["confidence"] == CASES[0][2]]
    risk = {name: [1e5 * (1 - row[name]) for row in rows] for name in ("ours", "printed")}
    lines = {"rank of order_ranks": risk["ours"], "printed rank": risk["printed"], "allowed": [1.0] * len(rows)}
    xs = [math.log10(row["n"]) for row in rows]
    picture("Risk that a bound fails", "log10 of the copies", "risk / 1e-5", xs, lines, folder / f"{NAME}_risk.svg")
    table = record["median"]["0"]
    keys = ("median", "mean, range 3", "mean, range 10", "mean, range 100")
    lines = {key: [row[key] for row in table] for key in keys}
    path = folder / f"{NAME}_width.svg"
    picture("Width of the bounds", "epsilon / sigma", "width / (2 epsilon)", list(RATIOS), lines, path)


def judge(record: dict[str, Any]) -> Iterator[Judgement]:
    """What the figures say of the claims."""
    rows, slack = record["ranks"], 1e-12
    below = [row for row in rows if row["printed"] < row["confidence"] - slack]
    first = next(row for row in rows if (row["n"], row["confidence"]) == (2000, 0.99999))
    what = (
        f"{len(below)} of {len(rows)} settings fall short; n = 2000: {first['printed']:.6f} for {first['confidence']}"
    )
    yield "order-statistics-printed", "refuted" if below else "confirmed", what
    enough = all(row["ours"] >= row["confidence"] - slack for row in rows)
    error = 3 * math.sqrt(0.01 * 0.99 / REPEATS)
    seen = [cell["ours"] for cell in record["simulated"].values()]
    seen += [cell["ours, continuous"] for cell in record["simulated"].values()]
    good = enough and min(seen) >= CASES[1][2] - error
    what = (
        f"exact coverage at least the confidence in {len(rows)} settings; simulated {min(seen):.4f} to {max(seen):.4f}"
    )
    yield "order-statistics-corrected", "confirmed" if good else "refuted", what
    at_one = [next(row for row in rows if row["epsilon / sigma"] == 1.0) for rows in record["median"].values()]
    ratios = [row["median"] for row in at_one]
    tight = all(1 <= row["median"] <= 1.1 for row in at_one)
    what = f"width over 2 epsilon |w|: {', '.join(f'{r:.3f}' for r in ratios)} at epsilon = sigma, 10,000 copies"
    yield "median-tight-for-linear", "confirmed" if tight else "not decided at this size", what
    growing = all(row["mean, range 100"] > row["mean, range 10"] > row["mean, range 3"] for row in at_one)
    wider = all(row["mean, range 3"] > row["median"] for row in at_one)
    found = {size: [round(row[f"mean, range {size:g}"], 2) for row in at_one] for size in RANGES}
    what = (
        f"width of the mean's bounds over 2 epsilon by range: {found}; of the median's {[round(r, 2) for r in ratios]}"
    )
    yield "median-tighter-than-mean", "confirmed" if growing and wider else "not decided at this size", what
    truth, cells = record["true medians"], record["without a range"].values()
    holds = all(
        math.isfinite(b) and cell[name][0] <= truth[name][0] and truth[name][1] <= cell[name][1]
        for cell in cells
        for name in truth
        for b in cell[name]
    )
    what = f"bounds {list(cells)}; true medians {truth}"
    yield "median-needs-no-range", "confirmed" if holds else "refuted", what


def to_markdown(record: dict[str, Any]) -> str:
    """The tables to read."""
    head = ("epsilon", "sigma", "confidence", "n", "rank", "printed rank", "ours", "printed")
    rows = [
        tuple(row[key] if key not in ("ours", "printed") else f"{row[key]:.7f}" for key in head)
        for row in record["ranks"]
    ]
    lines = [
        "# Order statistics",
        "",
        describe_markdown(record["run"]),
        "",
        "## ranks: exact coverage of the upper bound",
        "",
    ]
    lines += [
        markdown_table((*head[:6], "coverage", "coverage, printed rank"), rows),
        "",
        "![risk](order_statistics_risk.svg)",
    ]
    lines += ["", f"Simulated, {REPEATS} repetitions of {N} copies, confidence {CASES[1][2]}, by seed:", ""]
    keys = list(record["simulated"]["0"])
    lines += [markdown_table(("seed", *keys), [(seed, *cell.values()) for seed, cell in record["simulated"].items()])]
    lines += ["", "## median: width of the bounds over 2 epsilon, slope 1, 10,000 copies, confidence 0.999", ""]
    shown = [
        (seed, row)
        for seed, rows in record["median"].items()
        for row in rows
        if row["epsilon / sigma"] in (0.5, 1.0, 2.0)
    ]
    columns = list(shown[0][1])
    lines += [markdown_table(("seed", *columns), [(s, *(f"{v:.3g}" for v in row.values())) for s, row in shown])]
    lines += ["", "![width](order_statistics_width.svg)", "", "Without a range, epsilon = sigma / 2, x = 2:", ""]
    truth = record["true medians"]
    table = [
        (
            name,
            f"{low:.3g} to {high:.3g}",
            *(f"{c[name][0]:.3g} to {c[name][1]:.3g}" for c in record["without a range"].values()),
        )
        for name, (low, high) in truth.items()
    ]
    return "\n".join([*lines, markdown_table(("function", "true medians", *(f"seed {s}" for s in SEEDS)), table)])


def main() -> None:
    """Everything: it takes seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "ranks": exact_coverage(),
        "simulated": {str(seed): simulated_coverage(seed) for seed in SEEDS},
        "median": {str(seed): widths(seed) for seed in SEEDS},
        "without a range": {str(seed): without_range(seed) for seed in SEEDS},
        "true medians": true_medians(),
        "run": describe_run(("holdfast", "torch", "scipy")),
    }
    write_results(NAME, record, to_markdown(record), options.out)
    draw(record, options.out)
    report_claims(judge(record))


if __name__ == "__main__":
    main()
