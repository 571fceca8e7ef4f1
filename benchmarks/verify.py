"""Complete verification: how many public instances are decided, how fast, and that no verdict is wrong.

Every instance runs in a process of its own with one thread and is charged CPU seconds, start-up included. Instances
that the results already hold for the same limit are not run again, so that a run that was stopped goes on.

    python benchmarks/verify.py instances FOLDER --timeout 116

FOLDER holds instances.csv (suite, onnx, vnnlib, timeout_s, expected) and the files that it names.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, describe_markdown, describe_run, load_average, markdown_table, write_results

GRACE = 5.0
"""Seconds after the limit at which a process that has not answered is stopped."""
WAITING = 6.0
"""Wall seconds allowed for each CPU second: other processes may share the cores."""


def instances(given: argparse.Namespace) -> None:
    """The public instances: verdict against the expected one, CPU seconds, by suite."""
    folder = given.instances
    with (folder / "instances.csv").open() as file:
        asked = list(csv.DictReader(file))
    known = {} if given.fresh else _known(given)
    for row in asked:
        key = (Path(row["onnx"]).name, Path(row["vnnlib"]).name)
        if key in known or (given.suite and row["suite"] not in given.suite):
            continue
        answer, cpu, wall = _run(folder / row["onnx"], folder / row["vnnlib"], given.timeout)
        wrong = {answer, row["expected"]} == {"sat", "unsat"}
        known[key] = {
            "suite": row["suite"],
            "network": key[0],
            "property": key[1],
            "expected": row["expected"],
            "answer": answer,
            "wrong": wrong,
            "cpu_s": round(cpu, 2),
            "wall_s": round(wall, 2),
        }
        print(*known[key].values(), flush=True)
        names = [(Path(one["onnx"]).name, Path(one["vnnlib"]).name) for one in asked]
        rows = [known[name] for name in names if name in known]
        run = describe_run(["holdfast", "torch", "onnx", "numpy"])
        record = {"run": run, "timeout_s": given.timeout, "load": load_average(), "instances": rows}
        write_results("verify", record, _instances_markdown(record), given.out)


def _known(given: argparse.Namespace) -> dict[tuple[str, str], dict[str, Any]]:
    """Instances that were run before with the same limit, by network and property."""
    path = given.out / "verify.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    if record.get("timeout_s") != given.timeout:
        return {}
    return {(row["network"], row["property"]): row for row in record["instances"] if row["answer"] != "not run"}


def one(given: argparse.Namespace) -> None:
    """One instance, with a limit in CPU seconds: what `holdfast verify` does, by another clock."""
    from holdfast.cli.verify import verify
    from holdfast.utils import clock

    with clock.timed_by(time.process_time):
        verify(given.network, given.prop, timeout=given.timeout, results=given.results, seed=0)


def _run(network: Path, prop: Path, timeout: float) -> tuple[str, float, float]:
    """The answer, CPU seconds and wall seconds of one call of the command line."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answer.txt"
        command = [sys.executable, __file__, "one", str(network), str(prop)]
        command += ["--timeout", str(timeout), "--results", str(out)]
        before, start = os.times(), time.monotonic()
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=WAITING * timeout + GRACE,
                check=False,
            )
            failure = done.stderr.strip().splitlines()[-1:] if done.returncode else []
            answer = out.read_text().split("\n", 1)[0] if out.exists() else f"error: {failure}"
        except subprocess.TimeoutExpired:
            answer = "timeout"
        after, wall = os.times(), time.monotonic() - start
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return answer, cpu, wall


def _instances_markdown(record: dict[str, Any]) -> str:
    rows = record["instances"]
    suites = list(dict.fromkeys(row["suite"] for row in rows))
    lines = []
    for suite in [*suites, "all"]:
        own = [row for row in rows if suite in (row["suite"], "all")]
        decided = [row for row in own if row["answer"] in ("sat", "unsat")]
        cpu = [row["cpu_s"] for row in decided]
        median = f"{statistics.median(cpu):.1f}" if cpu else ""
        longest = f"{max(cpu):.1f}" if cpu else ""
        lines.append((suite, f"{len(decided)} / {len(own)}", sum(row["wrong"] for row in own), median, longest))
    header = ("suite", "decided", "wrong", "median CPU s of the decided", "longest")
    return "\n\n".join(
        [
            "# Public verification instances",
            describe_markdown(record["run"]) + f"\n- limit {record['timeout_s']:g} s, load {record['load']}",
            markdown_table(header, lines),
            "A CPU second counts start-up (torch, about 2 s). One process and one thread per instance.",
        ]
    )


def main() -> None:
    """Run a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    many = parts.add_parser("instances", help=instances.__doc__)
    many.add_argument("instances", type=Path, help="folder with instances.csv")
    many.add_argument("--suite", action="append", help="only this suite; may be given several times")
    many.add_argument("--timeout", type=float, default=116.0, help="CPU seconds for an instance")
    many.add_argument("--fresh", action="store_true", help="run instances again that are in the results")
    many.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    many.set_defaults(part=instances)
    single = parts.add_parser("one", help=one.__doc__)
    single.add_argument("network", type=Path)
    single.add_argument("prop", type=Path)
    single.add_argument("--timeout", type=float, default=116.0)
    single.add_argument("--results", type=Path)
    single.set_defaults(part=one)
    given = parser.parse_args()
    given.part(given)


if __name__ == "__main__":
    main()
