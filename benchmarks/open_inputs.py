"""Inputs of the demo model that CROWN and PGD leave open, decided by Holdfast, alpha,beta-CROWN and Marabou.

    python benchmarks/open_inputs.py --by holdfast --inputs 40
    python benchmarks/open_inputs.py --by alpha-beta-CROWN --checkout <folder with complete_verifier>
    python benchmarks/open_inputs.py --by Marabou          # maraboupy from PyPI

linf 0.1; one thread; 30 seconds of processor time for each input, by which all three are measured. alpha,beta-CROWN
runs with its own defaults on the CPU; its clock is replaced by processor time, and what it needs to start is not
counted. Marabou gets one query for each other class, one after the other, and is ended after its processor time.
Holdfast accounts for rounding, the others do not. Inputs that the results hold already are left out: a run that was
stopped goes on.
"""

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, describe_run, markdown_table, read_results, run_for, store_cell, trained_model
from torch import Tensor, nn

import holdfast as hf
from holdfast.certificates.complete.beta_crown import decide
from holdfast.utils import clock

EPS, LIMIT, GRACE = 0.1, 30, 5
Row = dict[str, Any]
Task = tuple[nn.Module, Tensor, Tensor]


def open_inputs(model: nn.Module, x: Tensor, y: Tensor, count: int) -> list[int]:
    """The first inputs that are classified right, and neither proved by CROWN nor broken by PGD."""
    threat = hf.Linf(EPS)
    proved, broken = hf.certify(model, x, y, threat, "crown").certified, hf.attack(model, x, y, threat, "pgd").success
    with torch.no_grad():
        right = model(x).argmax(1) == y
    return [int(i) for i in (right & ~proved & ~broken).nonzero()[:count, 0]]


def by_holdfast(task: Task, options: argparse.Namespace) -> Row:
    """Branch and bound."""
    start = time.process_time()
    with clock.timed_by(time.process_time):
        found = decide(*task, hf.Linf(EPS), time_limit=LIMIT)
    names = {"certified": "holds", "broken": "violated", "unknown": "unknown"}
    return {"status": names[found.status[0]], "cpu": time.process_time() - start, "parts": int(found.parts[0])}


def by_alpha_beta_crown(task: Task, options: argparse.Namespace) -> Row:
    """A process of its own, from a configuration file with nothing but the task, the device and the time limit."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        torch.save(task[0].state_dict(), place / "weights.pt")
        torch.save({"x": task[1], "y": task[2]}, place / "data.pt")
        (place / "task.py").write_text(_TASK.format(folder=folder, model=_built(task[0]), eps=EPS))
        (place / "task.yaml").write_text(_CONFIG.format(folder=folder, eps=EPS, limit=LIMIT))
        text = _run(["--worker", "alpha-beta-CROWN", folder, str(options.checkout)])
    result = re.search(r"^Result: (\S+) in ([\d.]+) seconds", text, re.MULTILINE)
    if result is None:
        raise RuntimeError(f"alpha,beta-CROWN gave no result: {text[-500:]}")
    status = {"safe": "holds", "unsafe": "violated"}.get(result[1].split("-")[0], "unknown")
    return {"status": status, "cpu": float(result[2])}


def by_marabou(task: Task, options: argparse.Namespace) -> Row:
    """A process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        torch.onnx.export(task[0], (task[1],), str(place / "model.onnx"), dynamo=False, opset_version=11)
        torch.save({"x": task[1], "y": task[2]}, place / "data.pt")
        text = _run(["--worker", "Marabou", folder, ""], limit=LIMIT + GRACE)
    lines = [line for line in text.splitlines() if line.startswith("{")]
    row: Row = json.loads(lines[-1]) if lines else {"status": "unknown", "cpu": float(LIMIT)}
    return row


TOOLS: dict[str, Callable[[Task, argparse.Namespace], Row]] = {
    "holdfast": by_holdfast,
    "alpha-beta-CROWN": by_alpha_beta_crown,
    "Marabou": by_marabou,
}


def _run(arguments: list[str], limit: float = math.inf) -> str:
    """What a worker prints; `limit` seconds of processor time."""
    text, cpu, code = run_for([sys.executable, __file__, *arguments], limit)
    if code != 0 and cpu <= limit:  # a tool that fails has not tried
        raise RuntimeError(f"{arguments[1]} failed: {text[-500:]}")
    return text


def _built(model: nn.Module) -> str:
    """The expression that makes a sequence of layers."""
    return f"Sequential({', '.join(repr(layer) for layer in model.children())})"


_TASK = """
import torch
from torch.nn import *
def model():
    net = {model}
    net.load_state_dict(torch.load("{folder}/weights.pt"))
    return net.eval()
def data(spec=None):
    saved = torch.load("{folder}/data.pt")
    one = torch.ones(1, 1, 1, 1)
    return saved["x"], saved["y"], one, 0 * one, {eps} * one
"""
_CONFIG = """
general: {{device: cpu, root_path: "{folder}"}}
model: {{name: 'Customized("task.py", "model")'}}
data: {{dataset: 'Customized("task.py", "data")', num_outputs: 10}}
specification: {{epsilon: {eps}}}
bab: {{timeout: {limit}}}
"""


def work(tool: str, folder: str, checkout: str) -> None:
    """In the process of a tool."""
    torch.set_num_threads(1)
    if tool == "Marabou":
        print(json.dumps(_marabou(Path(folder))), flush=True)
        return
    import runpy

    begin, cpu = time.time(), time.process_time
    time.time = lambda: begin + cpu()  # its time limit is one of processor time
    home = Path(checkout) / "complete_verifier"
    os.chdir(home)
    sys.path.insert(0, str(home))
    sys.argv = ["abcrown.py", "--config", f"{folder}/task.yaml"]
    runpy.run_path("abcrown.py", run_name="__main__")


def _marabou(folder: Path) -> Row:
    from maraboupy import Marabou  # type: ignore[import-not-found]

    saved = torch.load(folder / "data.pt")
    x, y, start = saved["x"][0].flatten().tolist(), int(saved["y"][0]), time.process_time()
    for other in (k for k in range(10) if k != y):
        network = Marabou.read_onnx(str(folder / "model.onnx"))
        outputs = network.outputVars[0].flatten()
        for variable, value in zip(network.inputVars[0].flatten(), x, strict=True):
            network.setLowerBound(variable, max(0.0, value - EPS))
            network.setUpperBound(variable, min(1.0, value + EPS))
        network.addInequality([outputs[y], outputs[other]], [1, -1], 0)
        left = LIMIT - (time.process_time() - start)
        # Its own limit is one of wall time, which is long on a busy machine.
        settings = Marabou.createOptions(timeoutInSeconds=20 * max(1, int(left)), numWorkers=1, verbosity=0)
        answer = network.solve(verbose=False, options=settings)[0] if left > 0 else "timeout"
        if answer != "unsat":
            status = "violated" if answer == "sat" else "unknown"
            return {"status": status, "cpu": time.process_time() - start}
    return {"status": "holds", "cpu": time.process_time() - start}


def to_markdown(record: dict[str, Any]) -> str:
    """The page."""
    cells = record["tools"]
    shared = sorted(set.intersection(*({int(i) for i in cell["rows"]} for cell in cells.values())))
    text = [
        "# Open inputs of the demo model",
        f"linf {EPS}, {LIMIT} s of processor time for each input, one thread. Inputs that CROWN and PGD leave open. "
        "Holdfast accounts for rounding, the others do not. [Notes](notes/verify.md).",
        f"## All that were tried\n{_table(cells, None)}",
        f"## The {len(shared)} inputs that all have tried\n{_table(cells, shared)}",
    ]
    names = list(cells)
    every = sorted({int(i) for cell in cells.values() for i in cell["rows"]})
    rows = [[i, *(_verdict(cells[name]["rows"].get(str(i))) for name in names)] for i in every]
    return "\n\n".join([*text, "## Input by input", markdown_table(("input", *names), rows)])


def _table(cells: dict[str, Any], only: list[int] | None) -> str:
    table = []
    for name, cell in cells.items():
        rows = [row for i, row in cell["rows"].items() if only is None or int(i) in only]
        count = {s: sum(row["status"] == s for row in rows) for s in ("holds", "violated")}
        decided = sorted(row["cpu"] for row in rows if row["status"] in count)
        median = f"{decided[len(decided) // 2]:.1f}" if decided else ""
        total = sum(min(row["cpu"], LIMIT) for row in rows)
        table.append((name, len(rows), count["holds"], count["violated"], median, f"{total:.0f}"))
    head = ("tool", "inputs", "holds", "violated", "median CPU s of the decided", "CPU s in total")
    return markdown_table(head, table)


def _verdict(row: Row | None) -> str:
    return "" if row is None else f"{row['status']}, {row['cpu']:.1f} s"


def main() -> None:
    """Parses the command line, measures, prints and writes."""
    if sys.argv[1:2] == ["--worker"]:
        return work(*sys.argv[2:5])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=TOOLS, default="holdfast")
    parser.add_argument("--inputs", type=int, default=40)
    parser.add_argument("--checkout", type=Path, help="folder of alpha,beta-CROWN")
    parser.add_argument("--models", type=Path, help="folder of trained models")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, data = trained_model("mnist-mini-at", options.models), hf.load_data("mnist-mini")
    x, y = data.test.x[: 4 * options.inputs], data.test.y[: 4 * options.inputs]
    packages = ("holdfast", "torch", "maraboupy") if options.by == "Marabou" else ("holdfast", "torch")
    for i in open_inputs(model, x, y, options.inputs):
        rows = read_results("open_inputs", options.out).get("tools", {}).get(options.by, {}).get("rows", {})
        if str(i) in rows:
            continue
        rows[str(i)] = TOOLS[options.by]((model, x[i : i + 1], y[i : i + 1]), options)
        cell = {"rows": rows, "run": describe_run(packages)}
        store_cell("open_inputs", "tools", options.by, cell, to_markdown=to_markdown, folder=options.out)
    return None


if __name__ == "__main__":
    main()
