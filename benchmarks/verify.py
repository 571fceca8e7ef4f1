"""Complete verification: how many public instances are decided, how fast, and that no verdict is wrong.

Every instance runs in a process of its own with one thread and is charged CPU seconds, start-up included. Instances
that the results already hold for the same limit are not run again, so that a run that was stopped goes on.

    python benchmarks/verify.py instances FOLDER --timeout 116

FOLDER holds instances.csv (suite, onnx, vnnlib, timeout_s, expected) and the files that it names.

The same instances by a peer, in an environment that has it and what Holdfast needs:

    python benchmarks/verify.py peers FOLDER --by alpha-beta-CROWN --checkout FOLDER2 --timeout 60
    python benchmarks/verify.py peers FOLDER --by Marabou --timeout 60

alpha,beta-CROWN (FOLDER2 holds complete_verifier) runs with the settings of its authors for each benchmark where it
has some, on the CPU, with batches of at most 1,024 and 100 restarts of its attack, both made for GPUs; its clock is
replaced by processor time. Networks and properties are unpacked before it starts. Marabou (maraboupy from PyPI) is
stopped after its processor time. The page compares what is decided within the limit of the peers.
"""

import argparse
import csv
import gzip
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    describe_markdown,
    describe_run,
    load_average,
    markdown_table,
    read_results,
    run_for,
    store_cell,
    write_results,
)

GRACE = 5.0
"""Seconds after the limit at which a process that has not answered is stopped."""
WAITING = 6.0
"""Wall seconds allowed for each CPU second: other processes may share the cores."""
PEERS = ("alpha-beta-CROWN", "Marabou")
SETTINGS = {
    "acasxu": "vnncomp21/acasxu",
    "cersyve": "vnncomp25/cersyve",
    "cifar10_resnet": "vnncomp21/cifar10-resnet",
    "collins_rul_cnn": "vnncomp23/collins-rul-cnn",
    "cora_mnist": "vnncomp25/cora",
    "dist_shift_2023": "vnncomp23/dist-shift",
    "eran": "vnncomp21/eran_mlp",
    "linearizenn_2024": "vnncomp24/linearizenn",
    "reach_prob_density": "vnncomp22/reach_probability",
    "rl_benchmarks": "vnncomp22/lunarlander",
    "sri_resnet_a": "vnncomp22/resnet_A",
    "test": "vnncomp21/test",
    "verivital": "vnncomp21/verivital",
}
"""Files of the peer's own settings. Where they need Gurobi (mnist_fc, sat_relu) or CPLEX (oval21), its defaults run."""


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
        record |= {"peers": read_results("verify", given.out).get("peers", {})}
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


def peers(given: argparse.Namespace) -> None:
    """The same instances by a peer: its answers and CPU seconds."""
    with (given.instances / "instances.csv").open() as file:
        asked = list(csv.DictReader(file))
    for row in asked:
        key = f"{Path(row['onnx']).name} {Path(row['vnnlib']).name}"
        cell = read_results("verify", given.out).get("peers", {}).get(given.by, {"rows": {}})
        if key in cell["rows"] or (given.suite and row["suite"] not in given.suite):
            continue
        with tempfile.TemporaryDirectory() as folder:
            names = [_unpacked(given.instances / row[kind], Path(folder)) for kind in ("onnx", "vnnlib")]
            answer, cpu = _peer(given, row["suite"], names)
        wrong = {answer, row["expected"]} == {"sat", "unsat"}
        cell["rows"][key] = {"suite": row["suite"], "answer": answer, "wrong": wrong, "cpu_s": round(cpu, 2)}
        print(key, answer, f"{cpu:.1f}", flush=True)
        cell |= {
            "timeout_s": given.timeout,
            "run": describe_run(["torch", "onnx", "maraboupy"]),
            "load": load_average(),
        }
        store_cell(
            *("verify", "peers", given.by, cell), to_markdown=_instances_markdown, folder=given.out, silent=tuple(cell)
        )


def _unpacked(path: Path, folder: Path) -> Path:
    target = folder / path.name.removesuffix(".gz")
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as source, target.open("wb") as out:
        shutil.copyfileobj(source, out)
    return target


def _peer(given: argparse.Namespace, suite: str, names: list[Path]) -> tuple[str, float]:
    """Answer and CPU seconds of a peer; the system stops it a little after its limit."""
    if given.by == "Marabou":
        command = ["Marabou", *map(str, names), "--timeout", str(int(WAITING * given.timeout))]
        command[0] = str(Path(sys.executable).with_name("Marabou"))
    else:
        settings = _settings(given, suite, names)
        command = [sys.executable, __file__, "worker", str(settings), str(given.checkout)]
    text, cpu, _ = run_for(command, given.timeout + GRACE)
    return _answer(given.by, text, cpu, given.timeout), cpu


def _answer(by: str, text: str, cpu: float, limit: float) -> str:
    if by == "Marabou":
        found = re.search(r"^(sat|unsat|timeout)\s*$", text, re.MULTILINE | re.IGNORECASE)
        answer = found[1].lower() if found else ""
    else:
        found = re.search(r"^Result: (\S+)", text, re.MULTILINE)
        answer = found[1].split("-")[0] if found else ""
        answer = {"safe": "unsat", "unsafe": "sat"}.get(answer, answer)
    if answer:
        return answer
    if cpu >= limit:
        return "timeout"
    lines = [line for line in text.splitlines() if re.search(r"Error|Exception|error", line)]
    return f"error: {lines[-1][:120] if lines else 'no output'}"


def _settings(given: argparse.Namespace, suite: str, names: list[Path]) -> Path:
    """The peer's own settings for a suite, for this network, property and limit."""
    import yaml

    own = given.checkout / "complete_verifier" / "exp_configs" / f"{SETTINGS.get(suite, '')}.yaml"
    settings = yaml.safe_load(own.read_text()) if suite in SETTINGS else {}
    general = {
        k: v for k, v in settings.get("general", {}).items() if k not in ("csv_name", "root_path", "results_file")
    }
    settings["general"] = general | {"device": "cpu", "root_path": ""}
    settings["model"] = settings.get("model", {}) | {"onnx_path": str(names[0])}
    settings["specification"] = {"vnnlib_path": str(names[1])}
    settings.pop("data", None)
    settings["bab"] = settings.get("bab", {}) | {"timeout": given.timeout}
    solver, attack = settings.setdefault("solver", {}), settings.setdefault("attack", {})
    solver["batch_size"] = min(solver.get("batch_size", 64), 1024)
    if "pgd_restarts" in attack:
        attack["pgd_restarts"] = min(attack["pgd_restarts"], 100)
    path = names[0].with_suffix(".yaml")
    path.write_text(yaml.safe_dump(settings))
    return path


def worker(given: argparse.Namespace) -> None:
    """In the process of alpha,beta-CROWN."""
    import runpy

    import torch

    torch.set_num_threads(1)
    begin, cpu = time.time(), time.process_time
    time.time = lambda: begin + cpu()  # its time limit is one of processor time
    home = given.checkout / "complete_verifier"
    os.chdir(home)
    sys.path.insert(0, str(home))
    sys.argv = ["abcrown.py", "--config", str(given.settings)]
    runpy.run_path("abcrown.py", run_name="__main__")


def _peers_markdown(record: dict[str, Any]) -> str:
    """Decided instances and CPU seconds, ours cut to the peer's limit."""
    ours = {f"{row['network']} {row['property']}": row for row in record["instances"]}
    parts = []
    for name, cell in record.get("peers", {}).items():
        limit, lines = cell["timeout_s"], []
        shared = {key: row for key, row in cell["rows"].items() if key in ours}
        for suite in [*dict.fromkeys(row["suite"] for row in shared.values()), "all"]:
            keys = [key for key, row in shared.items() if suite in (row["suite"], "all")]
            mine, theirs = [_cut(ours[key], limit) for key in keys], [_cut(shared[key], limit) for key in keys]
            count = [sum(done for done, _ in side) for side in (mine, theirs)]
            seconds = [sum(cpu for _, cpu in side) for side in (mine, theirs)]
            wrong = sum(shared[key]["wrong"] for key in keys)
            errors = sum(shared[key]["answer"].startswith("error") for key in keys)
            lines.append((suite, len(keys), *count, wrong, errors, *(f"{s:.0f}" for s in seconds)))
        header = ("suite", "instances", "decided, ours", "decided, theirs", "wrong, theirs", "failed, theirs")
        parts += [
            f"## Beside {name}, {limit:g} CPU s each",
            markdown_table((*header, "CPU s, ours", "CPU s, theirs"), lines),
            describe_markdown(cell["run"])
            + f"\n- load {cell['load']}; ours were run apart, as the top of the page says",
        ]
    return "\n\n".join(parts)


def _cut(row: dict[str, Any], limit: float) -> tuple[bool, float]:
    """Whether an instance is decided within a limit, and the seconds up to it."""
    decided = row["answer"] in ("sat", "unsat") and row["cpu_s"] <= limit + GRACE
    return decided, min(row["cpu_s"], limit)


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
            _peers_markdown(record),
        ]
    ).strip()


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
    beside = parts.add_parser("peers", help=peers.__doc__)
    beside.add_argument("instances", type=Path)
    beside.add_argument("--by", choices=PEERS, required=True)
    beside.add_argument("--checkout", type=Path, help="folder of alpha,beta-CROWN")
    beside.add_argument("--suite", action="append")
    beside.add_argument("--timeout", type=float, default=60.0)
    beside.add_argument("--out", type=Path, default=RESULTS)
    beside.set_defaults(part=peers)
    process = parts.add_parser("worker", help=worker.__doc__)
    process.add_argument("settings", type=Path)
    process.add_argument("checkout", type=Path)
    process.set_defaults(part=worker)
    given = parser.parse_args()
    given.part(given)


if __name__ == "__main__":
    main()
