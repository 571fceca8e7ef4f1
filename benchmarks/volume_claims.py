"""The published tables of learning without gradients, and what the results of volume.py say of the claims."""

import math
import statistics
from collections.abc import Iterator
from typing import Any

from common import Judgement, verdict_of

from holdfast.analyze.volume.volume_estimate import volume

Cell = dict[str, Any]
WIDTHS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
COUNTS = (1714, 3447, 6699, 11074, 14954, 21131, 26479, 34521, 43746)
EDGES = (0.45, 0.5, 0.55, 0.6)  # lower ends of the bins that are compared, each 0.05 wide

# Accuracy in % and its published standard error, by samples and optimiser, for the bins from (0.45, 0.5] up.
TABLE_2: dict[tuple[int, str], list[tuple[float, float] | None]] = {
    (8, "guess-and-check"): [(78.05, 0.72), (76.40, 0.79), (70.76, 0.74), (67.48, 0.78)],
    (8, "sgd"): [(81.85, 0.72), (79.70, 0.70), (79.74, 0.63), (76.51, 0.71)],
    (8, "linear"): [(67.36, 0.76), (63.46, 0.75), (58.65, 0.79), (54.87, 0.75)],
    (4, "guess-and-check"): [(70.89, 0.90), (68.27, 0.83), (65.63, 0.92), (62.38, 0.91)],
    (4, "sgd"): [(73.95, 0.85), (73.28, 0.85), (69.15, 0.84), (67.65, 0.84)],
    (4, "linear"): [(58.11, 0.88), (57.21, 0.91), (55.38, 0.88), (53.60, 0.83)],
    (2, "guess-and-check"): [(62.81, 0.90), (61.02, 0.84), (59.90, 0.91), (56.82, 0.95)],
    (2, "sgd"): [(63.42, 0.87), (64.38, 0.88), (63.82, 0.89), (62.33, 0.87)],
    (2, "linear"): [(54.11, 0.91), (54.21, 0.87), (53.13, 0.93), (51.59, 0.89)],
}
TABLE_4 = {"sgd": (78.67, 0.51), "pattern-search": (78.43, 0.46), "random-greedy": (78.51, 0.50)}
TABLE_6: dict[float, list[tuple[float, float]]] = {
    0.5: [(84.69, 0.54), (81.91, 0.62), (78.61, 0.65), (75.37, 0.63)],
    0.4: [(79.63, 0.65), (77.50, 0.64), (75.98, 0.66), (72.30, 0.77)],
    0.3: [(75.43, 0.63), (74.22, 0.66), (72.28, 0.72), (71.75, 0.67)],
    0.2: [(73.40, 0.60), (71.84, 0.60), (69.66, 0.64), (68.49, 0.58)],
}


def percent(value: float | None, error: float | None = None) -> str:
    """A share in %, with its error if there is one."""
    if value is None:
        return "none"
    return f"{100 * value:.2f}" + ("" if error is None else f" ± {100 * error:.2f}")


def judge(record: dict[str, Any]) -> Iterator[Judgement]:
    """What the parts that were measured say of the claims."""
    wedge, slab = record.get("wedge", {}).values(), record.get("slab", {}).values()
    if len(wedge) >= 3:
        yield from _judge_wedge(list(wedge))
    if len(slab) >= 3:
        text = ", ".join(f"{c['linear']['share']:.2e}" for c in slab)
        yield "volume-slab-linear", verdict_of([0.5e-4 < c["linear"]["share"] < 4e-4 for c in slab]), text
        found = volume(*(sum(c["robust"][name] for c in slab) for name in ("hits", "guesses")))
        rare = "refuted" if found.low > 1e-10 else "confirmed" if found.high < 1e-10 else "not decided at this size"
        yield "volume-slab-robust", rare, f"{found.hits} hits in {found.guesses:,}, at most {found.high:.1e}"
    if "estimators" in record.get("closed", {}):
        cell = record["closed"]["estimators"]
        near = abs(cell["1 / N at hit 1"] / cell["true"] - 1) < 0.1
        text = f"mean {cell['1 / N at hit 1']:.2e} for a volume of {cell['true']:g}"
        yield "volume-reciprocal-of-guesses", "confirmed" if near else "refuted", text
    poisoned = record.get("poison", {})
    if len(poisoned) >= 3:
        text = "; ".join(f"{key} samples {', '.join(map(str, cell['accuracy']))}" for key, cell in poisoned.items())
        none_right = [value == 0 for cell in poisoned.values() for value in cell["accuracy"]]
        yield "volume-poisoned-lenet", verdict_of(none_right), f"test accuracy with {text}"
    if "parameters" in record.get("counts", {}):
        cell = record["counts"]["parameters"]
        same = cell["found"] == list(COUNTS) and cell["ten_classes"] == cell["published_ten"]
        yield "volume-lenet-parameters", "confirmed" if same else "refuted", f"{cell['found']}"
    for samples, word in (("2", "two"), ("4", "four"), ("8", "eight")):
        if samples in record.get("bins", {}):
            yield from _judge_bins(samples, word, record["bins"][samples]["rows"])
    if len(record.get("widths", {})) >= 3:
        yield from _judge_widths(record["widths"])
    yield from _judge_ten(record.get("ten", {}))
    if len(record.get("heads", {})) >= 3:
        cells = record["heads"].values()
        pairs = [(c["pattern-search"], c["sgd"]) for c in cells]
        close = [abs(a["accuracy"] - b["accuracy"]) < 2 * math.hypot(a["error"], b["error"]) for a, b in pairs]
        text = "; ".join(
            f"{percent(a['accuracy'], a['error'])} against {percent(b['accuracy'], b['error'])}" for a, b in pairs
        )
        yield "volume-few-shot-heads", verdict_of(close), f"pattern search against SGD: {text}"


def _judge_wedge(cells: list[Cell]) -> Iterator[Judgement]:
    by_width = list(zip(*(cell["rows"] for cell in cells), strict=True))
    means = [statistics.fmean(row["accuracy"] for row in rows) for rows in by_width]
    text = ", ".join(f"{rows[0]['units']} units {percent(mean)}" for rows, mean in zip(by_width, means, strict=True))
    yield "volume-wedge-flat-in-width", verdict_of([max(means) - min(means) < 0.05]), text
    worst = [min(row["poisoned"] for row in cell["rows"] if row["poisoned"] is not None) for cell in cells]
    yield "volume-wedge-poisoned", verdict_of([w == 0 for w in worst]), ", ".join(percent(w) for w in worst)


def _sigmas(rows: list[Cell], published: list[Any]) -> list[float]:
    """Ours less the published accuracy, in combined standard errors; bins with fewer than ten splits are left out."""
    return [
        (100 * row["accuracy"] - known[0]) / math.hypot(100 * row["error"], known[1])
        for row, known in zip(rows, published, strict=True)
        if row["accuracy"] is not None and row["error"] and row["splits"] >= 10 and known
    ]


def _within(sigmas: list[float]) -> str:
    """Confirmed within two standard errors everywhere, refuted beyond three everywhere."""
    if all(abs(s) < 2 for s in sigmas):
        return "confirmed"
    return "refuted" if all(abs(s) > 3 for s in sigmas) else "not decided at this size"


def _judge_bins(samples: str, word: str, rows: list[Cell]) -> Iterator[Judgement]:
    mine = {name: [row for row in rows if row["optimiser"] == name] for name in ("guess-and-check", "sgd", "linear")}
    guess, sgd, linear = mine.values()
    sigmas = _sigmas(guess, TABLE_2[int(samples), "guess-and-check"])
    text = "; ".join(
        f"{name} {', '.join(percent(r['accuracy'], r['error']) for r in each)}" for name, each in mine.items()
    )
    yield f"volume-table-{word}-samples", _within(sigmas), text
    # Comparable: within two standard errors in every bin, and not on the same side in all of them.
    gaps = [
        (s["accuracy"] - g["accuracy"]) / math.hypot(s["error"], g["error"])
        for s, g in zip(sgd, guess, strict=True)
        if g["error"] and s["error"]
    ]
    one_side = all(g > 0 for g in gaps) or all(g < 0 for g in gaps)
    ahead = all(abs(g) > 2 for g in gaps)
    outcome = "refuted" if ahead else "not decided at this size" if one_side or max(map(abs, gaps)) > 2 else "confirmed"
    yield "volume-guess-comparable-to-sgd" + ("" if samples == "2" else f"-{word}"), outcome, text
    above = [
        (g["accuracy"] - v["accuracy"]) / math.hypot(g["error"], v["error"])
        for g, v in zip(guess, linear, strict=True)
        if g["error"] and v["error"]
    ]
    outcome = "confirmed" if min(above) > 2 else "refuted" if max(above) < 0 else "not decided at this size"
    yield f"volume-guess-above-linear-{word}", outcome, text


def _judge_widths(cells: dict[str, Cell]) -> Iterator[Judgement]:
    sigmas = [s for key, cell in cells.items() for s in _sigmas(cell["rows"], TABLE_6[float(key)])]
    lowest = ", ".join(
        f"width {key}: {percent(cell['rows'][0]['accuracy'], cell['rows'][0]['error'])}" for key, cell in cells.items()
    )
    yield "volume-table-widths", _within(sigmas), f"lowest bin, {lowest}; {max(map(abs, sigmas)):.1f} errors at most"
    ends = [cells[min(cells, key=float)]["rows"][0], cells[max(cells, key=float)]["rows"][0]]
    rise = (ends[1]["accuracy"] - ends[0]["accuracy"]) / math.hypot(ends[0]["error"], ends[1]["error"])
    outcome = "confirmed" if rise > 2 else "refuted" if rise < -2 else "not decided at this size"
    yield "volume-accuracy-grows-with-width", outcome, f"lowest bin, {lowest}: {rise:.1f} errors from end to end"


def _judge_ten(cells: dict[str, Cell]) -> Iterator[Judgement]:
    found = {name: [c["accuracy"] for key, c in cells.items() if key.rsplit("-", 1)[0] == name] for name in TABLE_4}
    if min(map(len, found.values())) < 3:
        return
    means = {name: statistics.fmean(values) for name, values in found.items()}
    text = ", ".join(f"{name} {percent(mean)}" for name, mean in means.items())
    close = [abs(means[name] - means["sgd"]) < 0.02 for name in ("pattern-search", "random-greedy")]
    yield "volume-table-ten-classes", verdict_of(close), text
