"""What does training on polyhedral envelopes prove, beside adversarial training, KW, MMR and interval bounds?

Tables 3.6 to 3.9 of Liu, "Towards verifiable, generalizable and efficient robust deep neural networks", 2022, at a size
for a CPU: one hidden layer of 200 units (1024 there), 3,000 images of mnist-mini (60,000 there), 8 epochs (100 there),
the strengths of the source, PER of a quarter of each batch. The figures compare with each other and not with the
published ones. Parts:

- relu-linf, relu-l2: ReLU networks at linf 0.1 and l2 0.3.
- sigmoid-linf, tanh-linf: the same at linf 0.1 with smooth activations, whose certificate is CROWN.
- time: CPU time of PEC divided by the time of Fast-Lin on the small CNN of the source.

On 500 test inputs: clean error; error under PGD with 40 steps; certified errors (CRE) and mean one-shot radii (ACB) by
linear bounds (Fast-Lin, or CROWN), intervals and envelopes (PEC). For ReLU networks also the evaluations of the bounds
in a search for the largest radius of 40 inputs: bisection, and bisection whose lower end rises to the radius of PEC
(algorithm 3.5), to 1e-4. With one hidden layer the bounds inside are the same for L-PER and I-PER, so that both are one
method here. One thread. Every training is a cell; finished cells are left out.

    python benchmarks/envelopes.py [--part PART ...]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
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
from holdfast.bounding.graph.trace import trace
from holdfast.certificates.core.radius_search import bracket
from holdfast.certificates.pec import Envelope, envelope

NAME = "envelopes"
SEEDS = (0, 1, 2)
INPUTS, SEARCHED = 500, 40
BUDGETS = {"linf": ("linf:0.1", 0.4), "l2": ("l2:0.3", 1.2)}
"""Threat, and end of the search for a radius."""
Value = Callable[[str, str], float]
ATTACK = {"name": "pgd", "steps": 10}
SETTING: dict[str, Any] = {
    "data": "mnist-mini",
    "epochs": 8,
    "batch_size": 100,
    "validation": 0.7,  # 3,000 of the 10,000 images are trained on
    "optimizer": {"name": "adam", "lr": 2e-3, "clip_norm": 5.0},
    "learning_rate": {"name": "one-cycle", "peak": 0.3},
    "budget": {"name": "linear", "end": 5},
    "evaluate": {"attack_steps": 10, "count": 200},
}
PARTS = ("relu-linf", "relu-l2", "sigmoid-linf", "tanh-linf", "time")


def methods(part: str) -> dict[str, dict[str, Any]]:
    """The trainings of a part, by the names of the source."""
    beta = 1.0 if part.endswith("l2") else 0.1
    plain = {"objective": {"name": "standard"}, "budget": {"name": "constant"}}
    found: dict[str, dict[str, Any]] = {
        "plain": plain,
        "AT": {"objective": {"name": "at"}, "attack": ATTACK},
        "IBP": {"objective": {"name": "ibp", "kappa_end": 0.5}},
        "CROWN-IBP": {"objective": {"name": "crown-ibp", "kappa_end": 0.5}},
        "PER": {"objective": {"name": "per", "beta": beta, "share": 0.25}},
        "PER+at": {"objective": {"name": "per-at", "beta": beta, "share": 0.25}, "attack": ATTACK},
    }
    if part.startswith("relu"):
        found["KW"] = {"objective": {"name": "cap"}}
        found["MMR"] = {"objective": {"name": "mmr"}}
        found["MMR+at"] = {"objective": {"name": "mmr-at"}, "attack": ATTACK}
    return found


def train(part: str, method: str, seed: int) -> tuple[nn.Module, float]:
    """The model and the CPU seconds of its training."""
    activation, norm = part.split("-")
    model = {"name": "mlp", "hidden": [200], "activation": activation}
    changes = methods(part)[method]
    began = time.process_time()
    recipe = {**SETTING, "threat": BUDGETS[norm][0], "model": model, "seed": seed, **changes}
    return hf.train(recipe, progress=False).model.eval(), time.process_time() - began


def radii(model: nn.Module, x: Tensor, y: Tensor, threat: str, method: str, **options: Any) -> Tensor:
    """One-shot radii: the budget or nothing, or what the envelope leaves."""
    found = hf.certify(model, x, y, threat, method=method, **options)
    eps = torch.tensor(hf.threat(threat).budget, dtype=x.dtype)
    return found.radius if method == "pec" else torch.where(found.certified, eps, torch.zeros(()))


def evaluations(model: nn.Module, x: Tensor, y: Tensor, threat: str, top: float) -> dict[str, float]:
    """Evaluations of Fast-Lin's bounds for each input: bisection, and algorithm 3.5."""
    ball, graph = hf.threat(threat), trace(model, x, hf.threat(threat))

    def rises(x: Tensor, y: Tensor, eps: Tensor) -> tuple[Tensor, None]:
        return envelope(graph, x, y, ball, eps, Envelope())[0], None

    def asks(x: Tensor, y: Tensor, eps: Tensor) -> tuple[Tensor, None]:
        found = envelope(graph, x, y, ball, eps, Envelope())[0]
        return torch.where(found >= eps, eps, torch.zeros_like(eps)), None

    right = torch.ones(len(x), dtype=torch.bool)
    counts = {name: bracket(f, x, y, right, top, 1e-4) for name, f in (("lin", asks), ("pec", rises))}
    return {f"T_{name}": float(found.evaluations.double().mean()) for name, found in counts.items()}


def measure(part: str, method: str, seed: int) -> dict[str, Any]:
    """Train one network and judge it."""
    model, seconds = train(part, method, seed)
    smooth, norm = not part.startswith("relu"), part.split("-")[1]
    threat, top = BUDGETS[norm]
    test = hf.load_data("mnist-mini").test[:INPUTS]
    x, y = test.x, test.y
    with torch.no_grad():
        right = model(x).argmax(1) == y
    broken = hf.attack(model, x, y, threat, method="pgd", steps=40).success
    slopes = "adaptive" if smooth else "parallel"
    found = {
        "lin": radii(model, x, y, threat, "crown" if smooth else "fastlin"),
        "ibp": radii(model, x, y, threat, "ibp"),
        "pec": radii(model, x, y, threat, "pec", slopes=slopes),
    }
    cell: dict[str, Any] = {"clean": error(~right), "pgd": error(broken)}
    cell |= {f"CRE_{name}": error(r < hf.threat(threat).budget) for name, r in found.items() if name != "pec"}
    cell |= {f"ACB_{name}": round(float(r.mean()), 5) for name, r in found.items()}
    if not smooth:
        which = right.nonzero()[:SEARCHED, 0]
        cell |= evaluations(model, x[which], y[which], threat, top)
    return {**cell, "seconds": round(seconds, 1), "run": describe_run(("holdfast", "torch"))}


def error(wrong: Tensor) -> float:
    """Share in percent."""
    return round(100 * float(wrong.double().mean()), 2)


def measure_time(seed: int) -> dict[str, Any]:
    """CPU time of the envelope over the time of the bounds alone, on a CNN trained for three epochs."""
    changes = {"model": {"name": "small-star"}, "epochs": 3, "budget": {"name": "linear", "end": 2}}
    recipe = {**SETTING, "threat": "linf:0.1", "seed": seed, "objective": {"name": "at"}, "attack": ATTACK, **changes}
    model = hf.train(recipe, progress=False).model.eval()
    test = hf.load_data("mnist-mini").test[:10]

    def seconds(method: str, threat: str) -> float:
        began = time.process_time()
        hf.certify(model, test.x, test.y, threat, method=method)
        return time.process_time() - began

    cell: dict[str, Any] = {}
    for norm, threat in (("linf", "linf:0.05"), ("l2", "l2:0.3")):
        seconds("pec", threat)
        pairs = [(seconds("pec", threat), seconds("fastlin", threat)) for _ in range(5)]
        cell[norm] = round(statistics.median(a / b for a, b in pairs), 3)
    return {**cell, "run": describe_run(("holdfast", "torch"))}


# --- The record, and what it says of the claims -----------------------------------------------------------------------

COLUMNS = ("clean", "pgd", "CRE_lin", "CRE_ibp", "ACB_lin", "ACB_ibp", "ACB_pec", "T_lin", "T_pec", "seconds")


def to_markdown(record: dict[str, Any]) -> str:
    """One table for each part: means over the seeds, and the range."""
    text = ["# Training on envelopes", __doc__.split("\n\n    python")[0].partition("\n\n")[2]]
    run = next(iter(next(iter(record.values())).values()))["run"]
    text += [describe_markdown(run), "Means over the seeds, in parentheses the smallest and the largest value."]
    for part in (p for p in PARTS if p in record and p != "time"):
        cells = record[part]
        rows = []
        for method in methods(part):
            found = [cell for key, cell in cells.items() if key.rpartition(", ")[0] == method]
            if found:
                rows.append((method, len(found), *(_spread(found, name) for name in COLUMNS)))
        text += [f"## {part}", markdown_table(("method", "seeds", *COLUMNS), rows)]
    if "time" in record:
        rows = [(key, cell["linf"], cell["l2"]) for key, cell in sorted(record["time"].items())]
        text += ["## Time of PEC over the time of Fast-Lin", markdown_table(("seed", "linf 0.05", "l2 0.3"), rows)]
    return "\n\n".join(text)


def _spread(cells: list[dict[str, Any]], name: str) -> str:
    values = [cell[name] for cell in cells if name in cell]
    return f"{statistics.fmean(values):.4g} ({min(values):.4g} to {max(values):.4g})" if values else ""


Cells = dict[str, dict[str, Any]]


def judge(record: dict[str, Any]) -> Iterator[Judgement]:
    """The verdicts that the finished parts allow."""
    times: Cells = record.get("time", {})
    if len(times) == len(SEEDS):
        ratios = [cell[norm] for cell in times.values() for norm in ("linf", "l2")]
        yield "envelopes-no-cost", verdict_of([r <= 1.05 for r in ratios]), f"PEC over Fast-Lin {ratios}"
    for part in (part for part in PARTS if part != "time"):
        cells: Cells = record.get(part, {})
        yield from judge_part(part, cells, [m for m in methods(part) if all(f"{m}, {s}" in cells for s in SEEDS)])


def lookup(cells: Cells, seed: int, method: str, column: str) -> float:
    """One figure of one network."""
    return float(cells[f"{method}, {seed}"][column])


def judge_part(part: str, cells: Cells, done: list[str]) -> Iterator[Judgement]:
    """The verdicts on one kind of network and budget that the trainings which are `done` allow."""
    trained = [m for m in methods(part) if m != "plain"]
    rivals = [m for m in trained if not m.startswith("PER")]

    def asked(claim: str, holds: Callable[[Value], bool], shown: list[str]) -> Judgement:
        """Ask `holds(value)` of every seed, value(method, column); the columns `shown` are its figures.

        What PER proves beside the others is left open if it is less robust than AT under PGD on some seed: its penalty
        has then not had the time to work.
        """
        values = [partial(lookup, cells, seed) for seed in SEEDS]
        answers = [holds(value) for value in values]
        said = []
        for entry in shown:
            method, column = entry.split(":")
            said.append(f"{entry} " + ", ".join(f"{cells[f'{method}, {seed}'][column]:g}" for seed in SEEDS))
        beside = claim in ("certified-error", "clean-error", "intervals")
        early = beside and any(value("PER", "pgd") > 1.1 * value("AT", "pgd") for value in values)
        found = "not decided at this size" if early else verdict_of(answers)
        return f"envelopes-{part}-{claim}", found, "; ".join(said)

    if "plain" in done:
        yield asked("plain", lambda v: v("plain", "CRE_lin") >= 95, ["plain:CRE_lin", "plain:pgd"])
    if len(done) >= 3:
        shown = [f"{m}:{c}" for m in done for c in ("ACB_lin", "ACB_pec")]
        yield asked("radius", lambda v: all(v(m, "ACB_pec") >= v(m, "ACB_lin") for m in done), shown)
    if len(done) >= 3 and part.startswith("relu"):
        shown = [f"{m}:{c}" for m in done for c in ("T_lin", "T_pec")]
        yield asked("evaluations", lambda v: all(v(m, "T_pec") < v(m, "T_lin") for m in done), shown)
    if done != list(methods(part)):
        return
    yield asked(
        "certified-error",
        lambda v: (
            min(v("PER", "CRE_lin"), v("PER+at", "CRE_lin"))
            <= min(v(m, column) for m in rivals for column in ("CRE_lin", "CRE_ibp"))
        ),
        [f"{m}:CRE_lin" for m in trained] + ["IBP:CRE_ibp", "CROWN-IBP:CRE_ibp"],
    )
    yield asked(
        "intervals",
        lambda v: v("PER", "CRE_ibp") > 2 * v("IBP", "CRE_ibp") and v("IBP", "CRE_lin") > v("PER", "CRE_lin"),
        ["PER:CRE_ibp", "IBP:CRE_ibp", "PER:CRE_lin", "IBP:CRE_lin"],
    )
    if "KW" in trained:
        yield asked(
            "clean-error",
            lambda v: v("PER", "clean") < v("KW", "clean") and v("PER", "CRE_lin") <= v("KW", "CRE_lin"),
            ["PER:clean", "KW:clean", "PER:CRE_lin", "KW:CRE_lin"],
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--only", nargs="+", help="only these trainings")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for part in args.part:
        for seed in SEEDS:
            for method in ("",) if part == "time" else [m for m in methods(part) if not args.only or m in args.only]:
                key = f"{seed}" if part == "time" else f"{method}, {seed}"
                if key not in read_results(NAME, args.out).get(part, {}):
                    cell = measure_time(seed) if part == "time" else measure(part, method, seed)
                    store_cell(NAME, part, key, cell, to_markdown=to_markdown, folder=args.out)
    report_claims(judge(read_results(NAME, args.out)))


if __name__ == "__main__":
    main()
