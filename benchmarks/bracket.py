"""How far complete search closes a bracket: that of the README, 500 inputs of the demo model at linf 0.1.

    python benchmarks/bracket.py open                    # what an audit without complete search leaves undecided
    python benchmarks/bracket.py search --deadline 1800  # branch and bound on that, as the audit does it
    python benchmarks/bracket.py open --network cnn --data cifar10.npz    # 100 inputs of a PGD-trained CNN at 2/255

The search takes the inputs in the order of the audit, in groups, with the time limits of its plans one after the
other, and stores every group. It may be stopped and goes on where it stopped; `--seconds` ends one start of it. One
thread, and all times, limits included, are processor time: the machine may be busy. Two cores have 1,800 such seconds
in 15 minutes.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from branch_and_bound import NETWORKS, adversarially_trained
from common import (
    RESULTS,
    describe_markdown,
    describe_run,
    load_average,
    markdown_table,
    read_results,
    trained_model,
    write_results,
)
from torch import nn

import holdfast as hf
from holdfast.audits.plan import GROUP, LONG, LONGEST, SHORT
from holdfast.certificates.complete.beta_crown import decide
from holdfast.data import Dataset, Split, cache_root
from holdfast.utils import clock

INPUTS = {"demo": 500, "cnn": 100}
NAMES = {"demo": "bracket", "cnn": "bracket_cifar"}
MARKS = (900, 1800, 3600, 7200)
"""Processor seconds at which the page counts; of two cores 7.5, 15, 30 and 60 minutes."""
Record = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Subject:
    """What is audited: the first `inputs` of `data` are drawn by the audit, all of it stands at their positions."""

    model: nn.Module
    data: str | Dataset
    test: Split
    threat: hf.Linf
    inputs: int
    title: str


def subject(options: argparse.Namespace) -> Subject:
    """The model, its data and the threat."""
    threat, count = hf.Linf(NETWORKS[options.network]), INPUTS[options.network]
    if options.network == "demo":
        title = f"The bracket of the README: the model of the recipe `mnist-mini-at`, {count} inputs of `mnist-mini`"
        test = hf.load_data("mnist-mini").test
        return Subject(trained_model("mnist-mini-at", options.models), "mnist-mini", test, threat, count, title)
    data = hf.load_data(str(options.data))
    model = adversarially_trained(options.network, data.train.x, data.train.y, options.models / f"{options.network}.pt")
    title = f"The bracket of a PGD-trained CNN, {count} inputs of CIFAR-10 (images went through JPEG)"
    return Subject(model, data, data.test, threat, count, title)


def run_open(options: argparse.Namespace) -> Record:
    """The bracket without complete search, and the undecided inputs, the most promising first."""
    own = subject(options)
    model, x, y, threat = own.model, own.test.x, own.test.y, own.threat
    start = time.process_time()
    how: Record = {"n": own.inputs, "budgets": 1, "progress": False, "certify_options": {"time_limit": 0.0}}
    found = hf.audit(model, own.data, threat, **how)
    level = found.levels[-1]
    left = [r.position for r in found.records if r.broken is None and (r.certified or 0.0) < threat.eps]
    margin = torch.cat([hf.certify(model, x[i], y[i], threat, "crown").margin for i in torch.tensor(left).split(16)])
    order = margin.argsort(descending=True, stable=True)
    return {
        "title": own.title,
        "threat": str(threat),
        "inputs": own.inputs,
        "certified": level.certified,
        "attacked": level.attacked,
        "positions": torch.tensor(left)[order].tolist(),
        "margins": margin[order].tolist(),
        "cpu": time.process_time() - start,
        "run": describe_run(("holdfast", "torch")),
    }


def run_search(record: Record, options: argparse.Namespace) -> None:
    """Decide group after group until a deadline; adds to the record and writes it after every group."""
    task = subject(options)
    model, x, y, threat = task.model, task.test.x, task.test.y, task.threat
    rows, began = record.setdefault("rows", []), time.process_time()
    for limit in options.limits:
        seen = {row["input"] for row in rows if row["limit"] == limit}
        decided = {row["input"] for row in rows if row["status"] != "unknown"}
        left = [i for i in record["open"]["positions"] if i not in decided | seen]
        for group in torch.tensor(left, dtype=torch.long).split(GROUP) if left else ():
            spent = sum(row["cpu"] for row in rows)
            if spent >= options.deadline or time.process_time() - began >= options.seconds:
                return
            start = time.process_time()
            with clock.timed_by(time.process_time), clock.until(start + options.deadline - spent):
                found = decide(model, x[group], y[group], threat, time_limit=limit)
            cpu = time.process_time() - start
            own = found.seconds / found.seconds.sum().clamp(min=1e-9) * cpu
            columns = (group.tolist(), found.status, found.parts.tolist(), found.margin.tolist(), own.tolist())
            names = ("input", "status", "parts", "margin", "cpu")
            rows += [dict(zip(names, row, strict=True)) | {"limit": limit} for row in zip(*columns, strict=True)]
            record["search"] = {"run": describe_run(("holdfast", "torch")), "load": load_average()}
            write_results(NAMES[options.network], record, to_markdown(record), options.out)
            count = sum(row["status"] != "unknown" for row in rows)
            total = len(record["open"]["positions"])
            print(f"{spent + cpu:.0f} CPU s: {count} of {total} decided, limit {limit:g}", flush=True)


def at(rows: list[Record], seconds: float) -> tuple[int, int]:
    """How many inputs are proved and broken after so many processor seconds."""
    spent, proved, broken = 0.0, 0, 0
    for row in rows:
        spent += row["cpu"]
        proved += row["status"] == "certified" and spent <= seconds
        broken += row["status"] == "broken" and spent <= seconds
    return proved, broken


def to_markdown(record: Record) -> str:
    """The page."""
    first, rows = record["open"], record.get("rows", [])
    inputs = first["inputs"]
    total, spent = len(first["positions"]), sum(row["cpu"] for row in rows)
    text = [
        f"# {first['title'].split(':')[0].split(',')[0]}",
        f"{first['title']}, {first['threat']}. Without complete search {first['certified']} are certified and "
        f"{first['attacked']} survive the attacks, in {first['cpu']:.0f} CPU s: {total} are undecided. Branch and "
        f"bound then decides these, in {spent:.0f} CPU s so far. One thread, processor time; a limit per input counts "
        "processor time too.",
    ]
    table = []
    for mark in (*(m for m in MARKS if m <= spent), spent):
        proved, broken = at(rows, mark)
        low, high = first["certified"] + proved, first["attacked"] - broken
        bracket = f"{low / inputs:.1%} to {high / inputs:.1%}"
        table.append((f"{mark:.0f}", f"{mark / 120:.1f}", proved, broken, total - proved - broken, bracket))
    head = ("CPU s", "minutes of two cores", "proved", "broken", "undecided", "bracket")
    text.append(markdown_table(head, table))
    decided = sorted(row["cpu"] for row in rows if row["status"] != "unknown")
    if decided:
        parts = sorted(row["parts"] for row in rows if row["status"] != "unknown")
        ninety = decided[len(decided) * 9 // 10]
        text.append(
            f"An input that was decided took {decided[len(decided) // 2]:.2f} CPU s in the median and {ninety:.2f} at "
            f"the ninth decile, in the try that decided it; {parts[len(parts) // 2]} parts in the median."
        )
    by_limit = []
    for limit in sorted({row["limit"] for row in rows}):
        mine = [row for row in rows if row["limit"] == limit]
        done = sum(row["status"] != "unknown" for row in mine)
        by_limit.append((f"{limit:g}", len(mine), done, f"{sum(row['cpu'] for row in mine):.0f}"))
    text.append(markdown_table(("limit, CPU s", "inputs tried", "decided", "CPU s"), by_limit))
    if "search" in record:
        load = record["search"]["load"]
        text.append(f"{describe_markdown(record['search']['run'])}\n- load average at the end: {load}")
    return "\n\n".join(text)


def main() -> None:
    """Parses the command line, measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("open", "search"))
    parser.add_argument("--deadline", type=float, default=1800.0, help="processor seconds of the whole search")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="processor seconds of this start of it")
    parser.add_argument(
        "--limits", type=float, nargs="+", default=[SHORT, LONG, LONGEST], help="seconds for each input"
    )
    parser.add_argument("--network", choices=INPUTS, default="demo")
    parser.add_argument("--data", type=Path, default=Path("cifar10.npz"), help="CIFAR-10 as .npz, for `cnn`")
    parser.add_argument("--models", type=Path, default=cache_root() / "benchmarks", help="folder of trained models")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = read_results(NAMES[options.network], options.out)
    if options.part == "open":
        record = {"open": run_open(options)}
        write_results(NAMES[options.network], record, to_markdown(record), options.out)
        return
    if "open" not in record:
        parser.error("run the part `open` first")
    run_search(record, options)


if __name__ == "__main__":
    main()
