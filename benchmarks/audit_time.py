"""Part "time" of audit.py: does an audit keep its time limit, and does more time narrow the bracket?

Three models, trained for a few minutes on mnist-mini so that the question is open: the convolutional network of the
demo, a ResNet with batch norm of about 80,000 parameters and a ResNet-18. Each is audited with the plan "quick" and
with three time limits. The clock is the processor time of the process, with one thread, so that neighbours on the
machine change nothing.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import describe_markdown, describe_run, markdown_table, trained_model
from torch import Tensor, nn

import holdfast as hf
from holdfast.data import cache_root
from holdfast.models import count_parameters
from holdfast.utils import clock

PART = "time"
LIMITS = {"30s": 30.0, "2m": 120.0, "10m": 600.0}
BUDGETS = ("quick", *LIMITS)
LATE, GRACE = 0.1, 1.0  # a run may take a tenth of its limit longer, and a second

Cell = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model to audit: how it comes about, the threat, and how many inputs."""

    make: Callable[[Path | None], nn.Module]
    threat: hf.Threat
    n: int


def _resnet(folder: Path | None, name: str, images: int, **options: Any) -> nn.Module:
    """A ResNet after two epochs of FGSM training with budget 0.05, from the cache if it was trained before."""
    path = (folder or cache_root() / "benchmarks") / f"audit-time-{name}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        model = hf.make_model("resnet18", input_shape=(1, 28, 28), classes=10, seed=0, **options)
        train = hf.load_data("mnist-mini").train[:images]
        _fit(model, train.x, train.y)
        hf.save_model(model.eval(), path)
    return hf.load_model(path).eval()


def _fit(model: nn.Module, x: Tensor, y: Tensor, eps: float = 0.05) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    for rows in (rows for _ in range(2) for rows in torch.randperm(len(x), generator=generator).split(50)):
        start = x[rows].clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(start), y[rows]), start)
        x_adv = (x[rows] + eps * gradient.sign()).clamp(0, 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x_adv), y[rows]).backward()
        optimizer.step()


SUBJECTS = {
    "demo CNN": Subject(lambda folder: trained_model("mnist-mini-at", folder), hf.Linf(0.1), 500),
    "ResNet, 80,000": Subject(
        lambda folder: _resnet(folder, "small", 5000, blocks=(1, 1, 1), channels=(16, 32, 64)), hf.Linf(0.05), 200
    ),
    "ResNet-18": Subject(lambda folder: _resnet(folder, "18", 600), hf.Linf(0.05), 20),
}


def run_time(name: str, budget: str, folder: Path | None) -> Cell:
    """One audit by the clock of the processor; the bracket at the largest budget."""
    subject = SUBJECTS[name]
    model, data = subject.make(folder), hf.load_data("mnist-mini")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out, clock.timed_by(time.process_time):
        cpu, wall = time.process_time(), time.perf_counter()
        result = hf.audit(model, data, subject.threat, budget=budget, n=subject.n, out=Path(out) / "run")
        cell: Cell = {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}
    level = result.brackets[0].levels[-1]
    return {
        **{key: round(value, 1) for key, value in cell.items()},
        "parameters": count_parameters(model),
        "threat": str(subject.threat),
        "inputs": level.inputs,
        "clean": result.levels[0].attacked,
        "certified": level.certified,
        "attacked": level.attacked,
        "verdict": result.verdict.level if result.verdict else "not probed",
        "steps": {step: round(seconds, 1) for step, seconds in result.seconds.items()},
        "run": describe_run(("holdfast", "torch")),
    }


def time_verdicts(cells: dict[str, Cell]) -> list[tuple[str, str, str, str]]:
    """Each bar that can be judged by now: what, measured, wanted, met."""
    rows = []
    for name in SUBJECTS:
        mine = {budget: cells[f"{name}, {budget}"] for budget in BUDGETS if f"{name}, {budget}" in cells}
        for budget in mine.keys() & LIMITS.keys():
            seconds, most = mine[budget]["cpu_seconds"], (1 + LATE) * LIMITS[budget] + GRACE
            rows.append((f"{name}, {budget}: CPU s", str(seconds), f"at most {most:g}", _yes(seconds <= most)))
        for less, more in pairwise(budget for budget in LIMITS if budget in mine):
            a, b = mine[less], mine[more]
            nested = a["certified"] <= b["certified"] and b["attacked"] <= a["attacked"]
            rows.append((f"{name}, {more}: bracket", _bracket(b), f"inside {_bracket(a)} of {less}", _yes(nested)))
        for budget in (budget for budget in LIMITS if budget in mine and "quick" in mine):
            reached, most = mine[budget]["attacked"], mine["quick"]["attacked"]
            rows.append(
                (f"{name}, {budget}: attacked", str(reached), f"at most {most} of quick", _yes(reached <= most))
            )
    return sorted(rows, key=lambda row: [row[0].startswith(name) for name in SUBJECTS], reverse=True)


def time_markdown(cells: dict[str, Cell]) -> list[str]:
    """The section of the page."""
    rows = [
        (
            *(key.rpartition(", ")[0], c["parameters"], f"{c['threat']}, {c['inputs']}", key.rpartition(", ")[2]),
            *(c["cpu_seconds"], c["wall_seconds"], c["clean"], _bracket(c), c["verdict"]),
        )
        for key, c in cells.items()
    ]
    header = ("model", "parameters", "threat, inputs", "budget", "CPU s", "wall s", "clean", "bracket", "attack")
    steps = [(key, "; ".join(f"{step} {s:g}" for step, s in c["steps"].items())) for key, c in cells.items()]
    missing = [f"{name}, {budget}" for name in SUBJECTS for budget in BUDGETS if f"{name}, {budget}" not in cells]
    return [
        "## The time limit is kept",
        "Inputs that are right unchanged, and how many of them hold: certified to attacked, at the largest budget. The "
        "clock is the processor time of the process, with one thread.",
        *sorted({describe_markdown(c["run"]) for c in cells.values()}),
        markdown_table(("bar", "measured", "wanted", "met"), time_verdicts(cells)),
        *([f"Not measured yet: {'; '.join(missing)}."] if missing else []),
        markdown_table(header, rows),
        "CPU seconds of each step.",
        markdown_table(("audit", "steps"), steps),
    ]


def _bracket(cell: Cell) -> str:
    return f"{cell['certified']} to {cell['attacked']}"


def _yes(met: bool) -> str:
    return "yes" if met else "no"
