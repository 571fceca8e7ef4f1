"""What does the box add to the Lipschitz ball, in training and in proofs at l2?

Claims of Lee, "Robustness of deep neural networks to adversarial attack", 2021, chapter 3.2 (Lee, Lee and Park,
"Lipschitz-certifiable training with a tight outer bound", 2020) at a size for a CPU: two convolutions (8 and 16
channels) and two dense layers (4C3F there), 2,000 images of mnist-mini, 8 epochs with a linear rise of the budget over
5, l2 1.58, proofs in float64. Parts:

- train: BCP, LMT (which is training on the ellipsoid there), IBP on the box around the ball, the convex adversarial
  polytope (CAP, 50 projections) and plain training. On 500 test inputs: clean accuracy, accuracy under PGD, and
  verified accuracy at several budgets by the ellipsoid, by BCP and by Fast-Lin (which is CAP's bound; 60 inputs); tau,
  the mean fall of a difference of two logits that the bound allows, over the ball and with the box; the product of the
  norms of all layers, epoch by epoch.
- time: CPU time of two epochs on 1,000 images with the small CNN of Wong and Kolter, batches of 50: CAP, exact and with
  50 random projections, over BCP.

One thread. Every training is a cell; finished cells are left out.

    python benchmarks/outer_bounds.py [--part train time]
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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
from holdfast.analyze.bcp_boundary import tau

NAME = "outer_bounds"
SEEDS = (0, 1, 2)
EPS = 1.58
SWEEP = (0.4, 0.8, 1.2, EPS, 2.0, 2.4, 2.8)
SETTING: dict[str, Any] = {
    "data": "mnist-mini",
    "threat": f"l2:{EPS}",
    "epochs": 8,
    "batch_size": 50,
    "validation": 0.8,  # 2,000 of the 10,000 images are trained on
    "model": {"name": "cnn", "layers": [[8, 4, 2, 1], [16, 4, 2, 1]], "hidden": [100]},
    "optimizer": {"name": "adam", "lr": 1e-3, "clip_norm": 5.0},
    "learning_rate": {"name": "one-cycle", "initial": 1.0, "peak": 0.6},
    "budget": {"name": "linear", "start": 1, "end": 6},
    "evaluate": {"attack_steps": 0, "count": 200},
    "log": {"norms": True},
}
METHODS: dict[str, dict[str, Any]] = {
    "BCP": {"objective": {"name": "bcp"}},
    "LMT": {"objective": {"name": "lmt-ellipsoid"}},
    "IBP": {"objective": {"name": "ibp"}},
    "CAP": {"objective": {"name": "cap", "projections": 50}},
    "plain": {"objective": {"name": "standard"}, "budget": {"name": "constant"}},
}
TIMED: dict[str, dict[str, Any]] = {
    "BCP": {"name": "bcp"},
    "CAP": {"name": "cap"},
    "CAP, 50 projections": {"name": "cap", "projections": 50},
}
OWN = {"BCP": "bcp", "LMT": "gloro", "IBP": "ibp", "CAP": "fastlin", "plain": "bcp"}
CERTIFICATES = ("gloro", "bcp", "fastlin")


def measure(method: str, seed: int) -> dict[str, Any]:
    """Train one network and judge it."""
    began = time.process_time()
    found = hf.train({**SETTING, **METHODS[method], "seed": seed}, progress=False)
    seconds = time.process_time() - began
    model, test = found.model.eval(), hf.load_data("mnist-mini").test[:500]
    x, y, threat = test.x, test.y, hf.L2(EPS)
    with torch.no_grad():
        right = model(x).argmax(1) == y
    broken = hf.attack(model, x, y, threat, "pgd", steps=50).success
    cell: dict[str, Any] = {"clean": share(right), "pgd": share(~broken)}
    model, x = model.double(), x.double()  # the rounding of float32 hides what the box adds
    for certificate in CERTIFICATES:
        few = slice(0, 60 if certificate == "fastlin" else None)
        proofs = [hf.certify(model, x[few], y[few], hf.L2(eps), certificate).certified for eps in SWEEP]
        cell[certificate] = [share(p) for p in proofs]
    if OWN[method] in CERTIFICATES:
        cell["own"] = cell[OWN[method]][SWEEP.index(EPS)]
    else:
        cell["own"] = share(hf.certify(model, x, y, threat, OWN[method]).certified)
    size = tau(model, x, threat)
    cell |= {"tau": float(size.boxed.mean()), "tau without box": float(size.plain.mean())}
    norms = [row["norms"] for row in found.history]
    return {**cell, "norms": norms, "seconds": round(seconds, 1), "run": describe_run(("holdfast", "torch"))}


def measure_time(seed: int) -> dict[str, Any]:
    """CPU seconds of two epochs at the full budget, and their ratios."""
    short = {"epochs": 2, "validation": 0.9, "budget": {"name": "constant"}, "model": {"name": "small-star"}}
    short |= {"log": {}, "evaluate": {"attack_steps": 0, "count": 1, "certify": "none"}}
    seconds = {}
    for name, objective in TIMED.items():
        began = time.process_time()
        hf.train({**SETTING, **short, "objective": objective, "seed": seed}, progress=False)
        seconds[name] = round(time.process_time() - began, 2)
    ratios = {name: round(value / seconds["BCP"], 2) for name, value in seconds.items() if name != "BCP"}
    return {"seconds": seconds, "ratios": ratios, "run": describe_run(("holdfast", "torch"))}


def share(yes: Tensor) -> float:
    """In percent."""
    return round(100 * float(yes.double().mean()), 2)


# --- The record, and what it says of the claims -----------------------------------------------------------------------


def to_markdown(record: dict[str, Any]) -> str:
    """Means over the seeds, and the range."""
    text = ["# Balls and boxes", __doc__.split("\n\n    python")[0].partition("\n\n")[2]]
    run = next(iter(next(iter(record.values())).values()))["run"]
    text += [describe_markdown(run), "Means over the seeds, in parentheses the smallest and the largest value."]
    rows, curves = [], []
    for method in METHODS:
        cells = [c for key, c in record.get("train", {}).items() if key.rpartition(", ")[0] == method]
        if not cells:
            continue
        columns = [spread([c[name] for c in cells]) for name in ("clean", "pgd", "own", "tau", "tau without box")]
        first, last = ([c["norms"][i] for c in cells] for i in (0, -1))
        rows.append((method, len(cells), *columns, spread(first), spread(last), spread([c["seconds"] for c in cells])))
        for certificate in CERTIFICATES:
            means = np.mean([c[certificate] for c in cells], axis=0)
            curves.append((method, certificate, *(f"{value:.1f}" for value in means)))
    header = (
        "training",
        "seeds",
        "clean",
        "PGD",
        "verified, own bound",
        "tau",
        "tau without box",
        "norms, first epoch",
    )
    text += [markdown_table((*header, "norms, last epoch", "CPU s"), rows)]
    text += ["Verified accuracy by budget, means.", markdown_table(("training", "proof", *map(str, SWEEP)), curves)]
    if "time" in record:
        cells = record["time"]
        timed = [(seed, *c["seconds"].values(), *c["ratios"].values()) for seed, c in sorted(cells.items())]
        names = ("seed", *(f"{name}, CPU s" for name in TIMED), "CAP / BCP", "CAP with projections / BCP")
        text += ["## Time", markdown_table(names, timed)]
    return "\n\n".join(text)


def spread(values: list[float]) -> str:
    """Mean and range."""
    return f"{statistics.fmean(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def judge(record: dict[str, Any]) -> Iterator[Judgement]:
    """The verdicts that the finished cells allow."""
    timed = record.get("time", {})
    if len(timed) == len(SEEDS):
        ratios = [cell["ratios"]["CAP, 50 projections"] for cell in timed.values()]
        yield "outer-bounds-time", verdict_of([r >= 10 for r in ratios]), f"CAP with projections over BCP {ratios}"
    cells = record.get("train", {})
    if not all(f"{m}, {s}" in cells for m in METHODS for s in SEEDS):
        return

    def of(method: str, name: str) -> list[Any]:
        return [cells[f"{method}, {seed}"][name] for seed in SEEDS]

    bcp, lmt, ibp = of("BCP", "own"), of("LMT", "own"), of("IBP", "own")
    text = f"verified by their own bounds: BCP {bcp}, LMT {lmt}, IBP {ibp}, CAP {of('CAP', 'own')}"
    yield "outer-bounds-bcp-lmt", verdict_of([a > b for a, b in zip(bcp, lmt, strict=True)]), text
    yield "outer-bounds-ibp", verdict_of([a < 20 for a in ibp]), text
    boxed, plain = of("BCP", "tau"), of("BCP", "tau without box")
    less = [1 - a / b for a, b in zip(boxed, plain, strict=True)]
    yield "outer-bounds-tau", verdict_of([v > 0.25 for v in less]), f"less by {[f'{v:.1%}' for v in less]}"
    line, steep = [bend(row) for row in of("BCP", "bcp")], [drop(row) for row in of("CAP", "fastlin")]
    yield "outer-bounds-linear", verdict_of([v < 0.1 for v in line]), f"largest distance from a line {line}"
    gentle = [drop(row) for row in of("BCP", "bcp")]
    holds = [a > 2 * b for a, b in zip(steep, gentle, strict=True)]
    yield "outer-bounds-cap-collapses", verdict_of(holds), f"share lost from 1.58 to 2.0: CAP {steep}, BCP {gentle}"
    falls = [row[-1] < row[0] for row in of("BCP", "norms")]
    rises = [row[-1] > row[0] for row in of("plain", "norms")]
    ends = f"from {[f'{r[0]:.1f} to {r[-1]:.1f}' for r in of('BCP', 'norms')]} by BCP, "
    ends += f"{[f'{r[0]:.1f} to {r[-1]:.1f}' for r in of('plain', 'norms')]} by plain training"
    yield "outer-bounds-norms", verdict_of([a and b for a, b in zip(falls, rises, strict=True)]), ends
    last = [(a[-1], b[-1]) for a, b in zip(of("BCP", "norms"), of("LMT", "norms"), strict=True)]
    text = "; ".join(f"{a:.2f} against {b:.2f}" for a, b in last)
    yield "outer-bounds-norms-lmt", verdict_of([a > b for a, b in last]), f"product of norms, BCP and LMT: {text}"


def bend(curve: list[float]) -> float:
    """Largest distance of the curve from its least-squares line, as a share of its height at the smallest budget."""
    fitted = np.polynomial.Polynomial.fit(SWEEP, curve, 1)
    return round(float(np.abs(fitted(np.array(SWEEP)) - curve).max() / max(curve[0], 1e-9)), 3)


def drop(curve: list[float]) -> float:
    """Share of the verified accuracy at the training budget that is lost at the next one."""
    at = SWEEP.index(EPS)
    return round(1 - curve[at + 1] / max(curve[at], 1e-9), 3)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=("train", "time"), default=["train", "time"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tasks = [("train", f"{m}, {s}", partial(measure, m, s)) for s in SEEDS for m in METHODS]
    tasks += [("time", str(s), partial(measure_time, s)) for s in SEEDS]
    for part, key, task in tasks:
        if part in args.part and key not in read_results(NAME, args.out).get(part, {}):
            store_cell(NAME, part, key, task(), to_markdown=to_markdown, folder=args.out)
    report_claims(judge(read_results(NAME, args.out)))


if __name__ == "__main__":
    main()
