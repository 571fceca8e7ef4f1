"""Can the tests fail? Changes the central line of each formula, one at a time, and runs the tests that should notice.

`mutants.toml` lists the changes: a wrong sign, factor, index, bound or a missing term. Each is applied to a copy of the
source in a temporary folder, never to the tree itself, and the tests named with it run on that copy, up to the first
failure. A mutant that no test notices survives: what it changes is not tested.

    python benchmarks/mutants.py                     # everything, one after the other
    python benchmarks/mutants.py --only dlr-no-ratio # one of them, or several, separated by commas; writes nothing
    python benchmarks/mutants.py --resume --minutes 9  # goes on with what is new or changed since, and stops in time
"""

import argparse
import ast
import hashlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutants.toml")
NAME, PACKAGES = "mutants", ("holdfast", "torch", "pytest", "hypothesis")
PRELOADED = [
    *("torch", "scipy.stats", "scipy.optimize", "rich.progress", "jinja2", "safetensors.torch", "pytest", "hypothesis"),
    *("sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"),  # torch loads these when first used
]
"""Imported once, by the process that starts all others; nothing of Holdfast, which every one imports from its copy."""
PROCESSES = multiprocessing.get_context("forkserver" if sys.platform != "win32" else "spawn")
Outcome = Literal["killed", "survived", "timeout", "broken"]
Cell = dict[str, Any]


@dataclass(frozen=True)
class Mutant:
    """One change of one line.

    Attributes:
        formula: what the line computes, with its source.
        file: path of the source from the root of the repository.
        old: text that occurs exactly once in the file.  new: what takes its place.
        tests: files or node ids that should notice.
    """

    id: str
    formula: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The source with the change; refuses text without exactly one old line, or no Python."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"mutant '{self.id}': its old text occurs {count} times in {self.file}, expected once")
        changed = text.replace(self.old, self.new)
        if changed == text:
            raise ValueError(f"mutant '{self.id}' changes nothing")
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as error:
            raise ValueError(f"mutant '{self.id}' is no Python: {error}") from error
        return changed

    def digest(self, by: str | None) -> str:
        """Of what a result depends on: the change, the source file, and the test that killed it or all its tests."""
        tests = [_source_of(by)] if by else [(ROOT / test.split("::")[0]).read_text() for test in self.tests]
        texts = [self.old, self.new, (ROOT / self.file).read_text(), *tests]
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _source_of(test: str) -> str:
    """The function of a node id such as tests/test_threats.py::test_text[linf:0.1]; empty if there is none any more."""
    path, _, name = test.partition("[")[0].partition("::")
    text = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
    return ast.get_source_segment(text, found[0]) or "" if found else ""


def read_mutants(path: Path = LIST) -> list[Mutant]:
    """The list: tables `source`, each with a file, its tests and its mutants, which may name other tests."""
    mutants = [
        Mutant(
            id=entry["id"],
            formula=entry.get("formula", source.get("formula", "")),
            file=source["file"],
            old=entry["old"],
            new=entry["new"],
            tests=tuple(entry.get("tests", source["tests"])),
        )
        for source in tomllib.loads(path.read_text())["source"]
        for entry in source["mutant"]
    ]
    twice = [name for name, count in Counter(m.id for m in mutants).items() if count > 1]
    if twice:
        raise ValueError(f"ids must be unique, found twice: {', '.join(twice)}")
    return mutants


@contextmanager
def copies(count: int) -> Iterator[list[Path]]:
    """Temporary copies of the source tree, with compiled files, so that each run compiles the changed one alone."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        roots = [Path(folder) / str(i) for i in range(count)]
        for root in roots:
            shutil.copytree(ROOT / "src", root / "src")
            subprocess.run([sys.executable, "-m", "compileall", "-q", str(root / "src")], check=True)
        yield roots


def run_tests(copy: Path, tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Exit code of pytest on the copy, None if time ran out, and what it printed at the end.

    A server that has imported torch once makes a new process for each run, which saves most of the time.
    """
    log = copy / "log"
    process = PROCESSES.Process(target=_run_pytest, args=(copy, tuple(tests), log))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return None, ""
    return process.exitcode, log.read_text()[-4000:]


def _run_pytest(copy: Path, tests: tuple[str, ...], log: Path) -> None:
    """In a process of its own: imports the copy, and nothing but the copy."""
    os.chdir(ROOT)
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC * (number == 1) | os.O_APPEND), number)
    os.environ["PYTHONPATH"] = str(copy / "src")  # for tests that start processes themselves
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the tests need none, and some load for seconds
    sys.dont_write_bytecode = True  # a compiled mutant must not outlive it
    sys.path.insert(0, str(copy / "src"))
    import pytest

    import holdfast

    if not Path(holdfast.__file__).is_relative_to(copy):
        sys.exit(f"the tests import {holdfast.__file__} instead of the copy in {copy}")
    sys.exit(int(pytest.main(["-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests])))


def judge(mutant: Mutant, copy: Path, seconds: float) -> Cell:
    """Applies the mutant to the copy, runs its tests, and puts the source back."""
    path, start = copy / mutant.file, time.perf_counter()
    path.write_text(mutant.applied((ROOT / mutant.file).read_text()))
    try:
        code, output = run_tests(copy, mutant.tests, seconds)
    finally:
        shutil.copy2(ROOT / mutant.file, path)
    # 1: a test failed. Other codes: pytest could not run the tests, so that nothing was shown.
    outcomes: dict[int | None, Outcome] = {0: "survived", 1: "killed", None: "timeout"}
    lines = (line for line in output.splitlines() if line.startswith("FAILED "))
    failed = [line.removeprefix("FAILED ").split(" - ")[0] for line in lines]
    return {
        "outcome": outcomes.get(code, "broken"),
        "by": failed[0] if failed else None,
        "seconds": round(time.perf_counter() - start, 1),
        "digest": mutant.digest(failed[0] if failed else None),
    }


def passes(test: str, copy: Path, passed: set[str], seconds: float) -> bool:
    """Whether a test passes without any mutant; `passed` has digests of tests, with all of the source, that did."""
    files = [*sorted((ROOT / "src").rglob("*.py")), ROOT / test.split("::")[0]]
    key = hashlib.sha256("\0".join([test, *(path.read_text() for path in files)]).encode()).hexdigest()[:16]
    if key not in passed and run_tests(copy, [test], seconds)[0] == 0:
        passed.add(key)
    return key in passed


def run_all(
    mutants: Sequence[Mutant], passed: set[str], *, jobs: int, seconds: float, until: float
) -> Iterator[tuple[Mutant, Cell]]:
    """Outcomes as they come; none is begun after `until` (of `time.monotonic`).

    A test kills a mutant only if it passes without it, or its failure would show nothing. That is checked for the test
    that failed, not for all tests of the list, most of which never run.
    """
    with copies(jobs) as roots, ThreadPoolExecutor(jobs) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for root in roots:
            free.put(root)

        def one(mutant: Mutant) -> Cell | None:
            if time.monotonic() > until:
                return None
            copy = free.get()
            try:
                cell = judge(mutant, copy, seconds)
                if cell["outcome"] == "killed" and not passes(cell["by"] or "", copy, passed, seconds):
                    raise SystemExit(f"{cell['by']} fails without any mutant")
                return cell
            finally:
                free.put(copy)

        for mutant, cell in zip(mutants, pool.map(one, mutants), strict=True):
            if cell is not None:
                yield mutant, cell


def to_markdown(record: Cell, mutants: Sequence[Mutant]) -> str:
    """Counts, survivors, and all mutants by formula."""
    from common import describe_markdown, markdown_table

    cells = record["mutants"]
    known = [mutant for mutant in mutants if mutant.id in cells]
    counts = Counter(cells[mutant.id]["outcome"] for mutant in known)
    left = [mutant for mutant in known if cells[mutant.id]["outcome"] != "killed"]
    survivors = [(m.id, m.formula, f"`{m.file}`", cells[m.id]["outcome"]) for m in left]
    formulas: dict[str, list[str]] = {}
    for mutant in known:
        formulas.setdefault(mutant.formula, []).append(cells[mutant.id]["outcome"])
    lines = [
        "# Mutants: can the tests fail?",
        "",
        describe_markdown(record["run"]),
        *([f"- {record['note']}"] if "note" in record else []),
        "",
        f"{len(known)} of {len(mutants)} mutants were run, over {len(formulas)} formulas: "
        + ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("killed", "survived", "timeout", "broken"))
        + ".",
        "",
        "## Not killed",
        "",
        markdown_table(("mutant", "formula", "file", "outcome"), survivors) if survivors else "None.",
        "",
        "## Not run yet",
        "",
        ", ".join(mutant.id for mutant in mutants if mutant.id not in cells) or "None.",
        "",
        "## By formula",
        "",
        markdown_table(
            ("formula", "mutants", "killed"),
            [(formula, len(all_), all_.count("killed")) for formula, all_ in sorted(formulas.items())],
        ),
    ]
    return "\n".join(lines)


def chosen(arguments: argparse.Namespace, mutants: Sequence[Mutant], cells: dict[str, Cell]) -> list[Mutant]:
    """What is asked for: the ids after --only, or all but, with --resume, those killed by the tests as they are now."""
    if arguments.only:
        wanted = arguments.only.split(",")
        unknown = set(wanted) - {mutant.id for mutant in mutants}
        if unknown:
            raise SystemExit(f"no such mutant in {LIST.name}: {', '.join(sorted(unknown))}")
        return [mutant for mutant in mutants if mutant.id in wanted]

    def settled(mutant: Mutant) -> bool:
        cell = cells.get(mutant.id, {})
        return bool(
            arguments.resume and cell.get("outcome") == "killed" and cell["digest"] == mutant.digest(cell["by"])
        )

    left = [mutant for mutant in mutants if not settled(mutant)]
    return sorted(left, key=lambda mutant: mutant.id in cells)  # what is new first


def main() -> None:
    """Command line."""
    from common import RESULTS, describe_run, read_results, write_results

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help="ids, separated by commas; nothing is written")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--seconds", type=float, default=120, help="time limit of each mutant")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no mutant after this time")
    parser.add_argument("--resume", action="store_true", help="skip those whose result still holds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    PROCESSES.set_forkserver_preload(PRELOADED)
    mutants, until = read_mutants(), time.monotonic() + 60 * arguments.minutes
    record = read_results(NAME, arguments.out)
    listed = {mutant.id for mutant in mutants}
    cells = {name: cell for name, cell in record.get("mutants", {}).items() if name in listed}
    left = chosen(arguments, mutants, cells)
    if not left:
        print("nothing is left to run")
    passed = set(record.get("passed", ()) if arguments.resume else ())
    limits = {"jobs": arguments.jobs, "seconds": arguments.seconds, "until": until}
    for mutant, cell in run_all(left, passed, **limits) if left else ():
        print(f"{cell['outcome']:9}{cell['seconds']:6.1f} s  {mutant.id}  {cell['by'] or ''}", flush=True)
        cells[mutant.id] = cell
        if not arguments.only:
            record = {"run": describe_run(PACKAGES), "mutants": dict(sorted(cells.items())), "passed": sorted(passed)}
            write_results(NAME, record, to_markdown(record, mutants), arguments.out)


if __name__ == "__main__":
    main()
