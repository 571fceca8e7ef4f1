"""The whole audit: how long it takes, and how it compares with AutoAttack and CROWN run one after the other.

Parts, which can run at different times and with different interpreters, and are put together in one file of results:

- audit: three threats at once, budget "standard", with store and report, as the command `holdfast audit` does it;
- first: the same for the first threat alone;
- autoattack: the standard version of AutoAttack as its authors publish it, on the inputs that are classified right;
- crown: CROWN of auto_LiRPA on the same inputs, on the margins of the label over every other class;
- gap: a model of certified training at linf 0.1, certified against attacked accuracy;
- time: three models and three time limits, by the processor's clock; see audit_time.py.

All parts but the last two share the model (adversarial training, two convolutions and two dense layers), the inputs and
the number of threads. The peers together give a bracket for the first threat; that of the part "first" must be at least
as tight, in less time. Their time leaves out what only serves to check them. Every example of AutoAttack is checked for
the budget and for the class before it counts.

AutoAttack is not on PyPI: take a checkout of its repository (github.com/fra31/auto-attack). auto_LiRPA is installed as
bounds_speed.py says; run the part "crown" with the interpreter that has it.

    python benchmarks/audit.py --part audit first gap
    python benchmarks/audit.py --part autoattack --official CHECKOUT          # half an hour
    python benchmarks/audit.py --part crown
    python benchmarks/audit.py --part time --threads 1                        # an hour
    python benchmarks/audit.py --part audit first gap --n 20 --quick          # prints, writes nothing
"""

import argparse
import contextlib
import importlib
import io
import json
import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from audit_time import BUDGETS, PART, SUBJECTS, run_time, time_markdown, time_verdicts
from common import (
    RESULTS,
    Neighbours,
    describe_markdown,
    describe_run,
    markdown_table,
    read_results,
    store_cell,
    trained_model,
)
from torch import Tensor, nn

import holdfast as hf
from holdfast.data import Split

NAME = "audit"
PARTS = ("audit", "first", "autoattack", "crown", "gap", "time")
RECIPE, CERTIFIED = "mnist-mini-at", "mnist-mini-ibp"
THREATS: tuple[hf.Threat, ...] = (hf.Linf(0.1), hf.L2(1.0), hf.Patch(3, 3))
BATCH = 250  # of AutoAttack, which is its default too
BOX = 100  # inputs that auto_LiRPA gets at once, within the memory of a small machine
MINUTES, SPEED, GAP = 10, 3, 2  # the bars: at most so long, at least so many times as fast, at most so many points
PACKAGES = ("holdfast", "torch")

Cell = dict[str, Any]


@contextlib.contextmanager
def timed(cell: Cell) -> Iterator[None]:
    """Adds the seconds of the processor and of the clock to `cell`, and how many cores others kept busy."""
    neighbours, cpu, wall = Neighbours(), time.process_time(), time.perf_counter()
    yield
    cell["cpu_seconds"] = round(time.process_time() - cpu, 1)
    cell["wall_seconds"] = round(time.perf_counter() - wall, 1)
    cell["others"] = neighbours.cores()


def run_audit(model: nn.Module, part: Split, threats: tuple[hf.Threat, ...], engine: Literal["local", "ray"]) -> Cell:
    """One audit with its files; the bracket of each threat at its largest budget, and the seconds of each step."""
    cell: Cell = {"engine": engine}
    with tempfile.TemporaryDirectory() as folder, timed(cell):
        result = hf.audit(
            *(model, (part.x, part.y), list(threats)),
            n=len(part),
            budget="standard",
            out=Path(folder) / "run",
            engine=engine,
        )
    last = [bracket.levels[-1] for bracket in result.brackets]
    cell["brackets"] = {
        level.threat: {"certified": level.certified, "attacked": level.attacked, "inputs": level.inputs}
        for level in last
    }
    cell["clean"] = result.clean
    cell["steps"] = {step: round(seconds, 1) for step, seconds in result.seconds.items()}
    return cell


def run_autoattack(model: nn.Module, part: Split, threat: hf.Linf, checkout: Path) -> Cell:
    """The authors' standard evaluation of the inputs that are classified right; how many hold."""
    sys.path.insert(0, str(checkout))  # its name is that of a script in this folder, so it must come first
    package = importlib.import_module("autoattack")
    sys.path.remove(str(checkout))
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    attack = package.AutoAttack(
        model, norm="Linf", eps=threat.eps, seed=0, version="standard", device="cpu", verbose=False
    )
    right = part[_classes(model, part.x) == part.y]
    cell: Cell = {"commit": commit[:12]}
    with timed(cell), contextlib.redirect_stdout(io.StringIO()):
        x_adv = attack.run_standard_evaluation(right.x, right.y, bs=BATCH)
    inside = threat.distance(x_adv, right.x) <= threat.eps + 1e-6  # some room for rounding
    broken = (_classes(model, x_adv) != right.y) & inside
    return {**cell, "attacked": len(right) - int(broken.sum()), "inputs": len(part)}


def run_crown(model: nn.Module, part: Split, threat: hf.Linf) -> Cell:
    """CROWN on the margins of the inputs that are classified right, in batches; how many are proved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses names that newer Python and torch have deprecated
        lirpa = importlib.import_module("auto_LiRPA")
        right = part[_classes(model, part.x) == part.y]
        bounded = lirpa.BoundedModule(model, right.x[:BOX], bound_opts={"conv_mode": "patches"}, device="cpu")
    cell: Cell = {}
    certified = 0
    with timed(cell), torch.no_grad():
        for x, y in zip(right.x.split(BOX), right.y.split(BOX), strict=True):
            lower, upper = threat.box(x)
            inputs = lirpa.BoundedTensor(x, lirpa.PerturbationLpNorm(norm=math.inf, x_L=lower, x_U=upper))
            margins = bounded.compute_bounds(x=(inputs,), C=_margins(y), method="CROWN", bound_upper=False)[0]
            certified += int((margins > 0).all(1).sum())
    return {**cell, "certified": certified, "inputs": len(part)}


def _margins(y: Tensor, classes: int = 10) -> Tensor:
    """(B, classes - 1, classes): the rows e_label - e_other for every other class."""
    eye = torch.eye(classes)
    others = torch.stack([torch.cat([eye[:label], eye[label + 1 :]]) for label in y.tolist()])
    return eye[y][:, None] - others


@torch.no_grad()
def _classes(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(batch).argmax(1) for batch in x.split(BATCH)])


def run_part(name: str, options: argparse.Namespace) -> Cell:
    """Runs one part on the first inputs of the test split."""
    part = hf.load_data("mnist-mini").test[: options.n]
    overrides = {} if options.epochs is None else {"epochs": options.epochs}
    model = trained_model(CERTIFIED if name == "gap" else RECIPE, options.models, **overrides).requires_grad_(False)
    first = THREATS[0]
    assert isinstance(first, hf.Linf)
    if name == "autoattack":
        cell = run_autoattack(model, part, first, options.official)
    elif name == "crown":
        cell = run_crown(model, part, first)
    else:
        cell = run_audit(model, part, THREATS if name == "audit" else (first,), options.engine)
    packages = (*PACKAGES, "auto_LiRPA") if name == "crown" else PACKAGES
    return {**cell, "threads": torch.get_num_threads(), "run": describe_run(packages)}


# --- What it comes to -------------------------------------------------------------------------------------------------


def verdicts(cells: dict[str, Cell]) -> list[tuple[str, str, str, str]]:
    """Each bar that can be judged by now: what, measured, at least or at most, met."""
    rows = []
    first = str(THREATS[0])
    if "audit" in cells:
        minutes = cells["audit"]["wall_seconds"] / 60
        rows.append(("three threats, minutes", f"{minutes:.1f}", f"at most {MINUTES}", _yes(minutes <= MINUTES)))
    compared = [cells[name] for name in ("first", "autoattack", "crown") if name in cells]
    if len(compared) == 3 and len({(_inputs(cell), cell["threads"]) for cell in compared}) == 1:
        ours, attack, proof = compared
        for clock in ("wall", "cpu"):
            ratio = (attack[f"{clock}_seconds"] + proof[f"{clock}_seconds"]) / ours[f"{clock}_seconds"]
            rows.append(
                (f"{first}, times as fast ({clock})", f"{ratio:.1f}", f"at least {SPEED}", _yes(ratio >= SPEED))
            )
        mine = ours["brackets"][first]
        for side, theirs, met in (
            ("certified", proof["certified"], mine["certified"] >= proof["certified"]),
            ("attacked", attack["attacked"], mine["attacked"] <= attack["attacked"]),
        ):
            limit = "at least" if side == "certified" else "at most"
            rows.append((f"{first}, inputs {side}", str(mine[side]), f"{limit} {theirs}", _yes(met)))
    if "gap" in cells:
        level = cells["gap"]["brackets"][first]
        points = 100 * (level["attacked"] - level["certified"]) / level["inputs"]
        rows.append((f"{CERTIFIED}, {first}, gap in points", f"{points:.2f}", f"at most {GAP}", _yes(points <= GAP)))
    return rows


def _yes(met: bool) -> str:
    return "yes" if met else "no"


def to_markdown(record: dict[str, Any]) -> str:
    """The results as a page."""
    cells = {name: record[NAME][name] for name in PARTS if name in record.get(NAME, {})}
    times = [
        (name, _inputs(c), _how(c), c["wall_seconds"], c["cpu_seconds"], c["others"], _answer(c))
        for name, c in cells.items()
    ]
    steps = [(name, step, seconds) for name, c in cells.items() for step, seconds in c.get("steps", {}).items()]
    runs = {describe_markdown(c["run"]) for c in cells.values()}
    return "\n\n".join(
        [
            "# The audit",
            f"Test inputs of mnist-mini, a model of `{RECIPE}` (part gap: `{CERTIFIED}`).",
            *sorted(runs),
            markdown_table(("bar", "measured", "wanted", "met"), verdicts(cells)),
            "Others: cores that other processes kept busy meanwhile.",
            markdown_table(("part", "inputs", "how", "wall s", "CPU s", "others", "answer"), times),
            "Seconds of each step of our audits, over all threats.",
            markdown_table(("part", "step", "s"), steps),
            *(time_markdown(record[PART]) if PART in record else []),
        ]
    )


def _inputs(cell: Cell) -> int:
    levels: dict[str, Any] = cell.get("brackets", {})
    return int(next(iter(levels.values()))["inputs"] if levels else cell["inputs"])


def _how(cell: Cell) -> str:
    return "Ray, one process per core" if cell.get("engine") == "ray" else f"threads: {cell['threads']}"


def _answer(cell: Cell) -> str:
    if "brackets" in cell:
        return "; ".join(f"{t}: {b['certified']} to {b['attacked']}" for t, b in cell["brackets"].items())
    return f"{cell['certified']} certified" if "certified" in cell else f"{cell['attacked']} survive"


def main() -> None:
    """Parses the command line and runs the parts."""
    parser = argparse.ArgumentParser(description="Time the audit, and compare it with AutoAttack and CROWN.")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=["audit", "first", "gap"], help="(default: ours)")
    parser.add_argument("--budget", nargs="+", choices=BUDGETS, default=list(BUDGETS), help="of the part time")
    parser.add_argument("--model", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS), help="of the part time")
    parser.add_argument("--n", type=int, default=2000, help="test inputs (default: all 2,000)")
    parser.add_argument("--threads", type=int, default=2, help="(default: 2)")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="of our audits (default: local)")
    parser.add_argument("--official", type=Path, help="checkout of AutoAttack, for that part")
    parser.add_argument("--models", type=Path, help="folder of trained models (default: the cache of Holdfast)")
    parser.add_argument("--epochs", type=int, help="of the training (default: as the recipes say)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="print the results, write nothing")
    options = parser.parse_args()
    if "autoattack" in options.part and options.official is None:
        parser.error("the part autoattack needs --official CHECKOUT")
    torch.set_num_threads(options.threads)
    if "time" in options.part:
        run_times(options)
        options.part.remove("time")
    cells: dict[str, Cell] = {}
    for name in options.part:
        cells[name] = run_part(name, options)
        if options.quick:
            print(f"{name}: {json.dumps({k: v for k, v in cells[name].items() if k != 'run'})}", flush=True)
        else:
            store_cell(NAME, NAME, name, cells[name], to_markdown=to_markdown, folder=options.out)
    stored = {} if options.quick else read_results(NAME, options.out)
    rows = verdicts(cells or stored.get(NAME, {})) + time_verdicts(stored.get(PART, {}))
    print(markdown_table(("bar", "measured", "wanted", "met"), rows))


def run_times(options: argparse.Namespace) -> None:
    """Run the part "time", the short limits first."""
    for budget in options.budget:
        for name in options.model:
            cell = run_time(name, budget, options.models)
            if options.quick:
                print(f"{name}, {budget}: {json.dumps({k: v for k, v in cell.items() if k != 'run'})}", flush=True)
            else:
                store_cell(NAME, PART, f"{name}, {budget}", cell, to_markdown=to_markdown, folder=options.out)


if __name__ == "__main__":
    main()
