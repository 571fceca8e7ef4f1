"""What the benchmarks share: a description of the machine and the software, and one way to write results."""

import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

RESULTS = Path(__file__).parent / "results"


def describe_run(packages: Iterable[str]) -> dict[str, Any]:
    """When, with which command, on which machine and with which versions of `packages` this process runs."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *_relative(sys.argv)]),
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"},
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}},
    }


def _relative(arguments: Sequence[str]) -> list[str]:
    """The command as it is typed at the root of the repository; folders of this machine are left out."""
    script, *options = arguments
    outside = [os.path.isabs(option) or option.startswith("..") for option in options]
    named = [Path(option).name if out else option for option, out in zip(options, outside, strict=True)]
    return [f"benchmarks/{Path(script).name}", *named]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with one line per row.

    >>> print(markdown_table(("a", "b"), [(1, 2)]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [header, *rows]
    text = ["| " + " | ".join(map(str, line)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(header), *text[1:]])


def describe_markdown(run: dict[str, Any]) -> str:
    """The same description as three lines of text."""
    machine, versions = run["machine"], run["versions"]
    return "\n".join(
        [
            f"- {run['date']}, `{run['command']}`",
            f"- {machine['cores']} cores, {machine['cpu']}, {machine['system']}",
            f"- {', '.join(f'{name} {version}' for name, version in versions.items())}",
        ]
    )


def write_results(name: str, record: dict[str, Any], markdown: str, folder: Path = RESULTS) -> None:
    """Writes `name`.json, with everything measured, and `name`.md, to be read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / f"{name}.md").write_text(markdown + "\n")


def read_results(name: str, folder: Path) -> dict[str, Any]:
    """What was measured so far, by part; empty if nothing was."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def store_cell(
    name: str,
    part: str,
    key: str,
    cell: dict[str, Any],
    *,
    to_markdown: Callable[[dict[str, Any]], str],
    folder: Path,
    silent: Sequence[str] = ("run",),
) -> None:
    """Puts one cell among the results, writes them anew, and prints the cell without its `silent` keys."""
    record = read_results(name, folder)
    record.setdefault(part, {})[key] = cell
    write_results(name, record, to_markdown(record), folder)
    print(f"{part}, {key}: {json.dumps({k: v for k, v in cell.items() if k not in silent})}", flush=True)


def report_claim(name: str, verdict: str, result: str) -> None:
    """Print what a run says of a claim in claims.toml, in the form that `holdfast claims run` reads."""
    print(f"{name}: {result}\nclaim {name}: {verdict}", flush=True)


class Figures:
    """What was measured in cells with keys such as "NAME seed=0", seed by seed; NaN where a cell is missing."""

    def __init__(self, record: dict[str, Any], seeds: Sequence[int] = (0, 1, 2)) -> None:
        self.record, self.seeds = record, seeds

    def of(self, part: str, name: str, key: str = "certified") -> list[float]:
        """A figure of a setting."""
        cells = self.record.get(part, {})
        return [cells.get(f"{name} seed={seed}", {}).get(key, math.nan) for seed in self.seeds]

    def gaps(self, parts: Sequence[str], names: Sequence[str], key: str = "certified") -> list[list[float]]:
        """How much each of `names` is above the next one, in each part."""
        pairs = [(part, a, b) for part in parts for a, b in pairwise(names)]
        return [minus(self.of(part, a, key), self.of(part, b, key)) for part, a, b in pairs]

    def show(self, part: str, names: Sequence[str], key: str = "certified") -> str:
        """The figures of several settings as text."""
        return f"{part}, {key}: " + "; ".join(f"{name} {numbers(self.of(part, name, key))}" for name in names)

    def table(self, part: str) -> str:
        """All figures of a part, one row for each setting."""
        cells = self.record[part]
        names = list(dict.fromkeys(key.rpartition(" seed=")[0] for key in cells))
        keys = list(dict.fromkeys(key for cell in cells.values() for key in cell if key != "run"))
        rows = [(name, *(numbers(self.of(part, name, key), known=True) for key in keys)) for name in names]
        return markdown_table(("setting", *(key.replace("_", " ") for key in keys)), rows)


def minus(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Differences, seed by seed."""
    return [round(x - y, 2) for x, y in zip(a, b, strict=True)]


def numbers(values: Sequence[float], *, known: bool = False) -> str:
    """Numbers, seed by seed; only those that are `known`, if that is asked for."""
    return ", ".join(f"{v:g}" for v in values if not (known and math.isnan(v)))


def sign(gaps: Sequence[Sequence[float]]) -> str:
    """Confirmed if every gap is above 0 in every seed, refuted if one of them is below 0 in every seed."""
    if any(math.isnan(gap) for each in gaps for gap in each):
        return "not decided at this size"
    if all(min(each) > 0 for each in gaps):
        return "confirmed"
    return "refuted" if any(max(each) < 0 for each in gaps) else "not decided at this size"


def within(values: Sequence[float], low: float, high: float) -> str:
    """Confirmed if all values lie in the range, refuted if none does."""
    inside = [low <= v <= high for v in values if not math.isnan(v)]
    if len(inside) < len(values) or len(set(inside)) > 1:
        return "not decided at this size"
    return "confirmed" if inside[0] else "refuted"


def run_for(command: Sequence[str], seconds: float) -> tuple[str, float, int]:
    """What a command prints, its processor time, and its exit code; it is ended when it has had so many seconds.

    Not by RLIMIT_CPU: that counts ticks, which run ahead of the processor time where other processes share the core.
    """
    with tempfile.TemporaryFile("w+") as out:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True)
        cpu = 0.0
        while process.poll() is None:
            cpu = max(cpu, _cpu_seconds(process.pid))
            if cpu > seconds:
                process.kill()
                process.wait()
                break
            time.sleep(0.1)
        out.seek(0)
        return out.read(), cpu, process.returncode


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process so far; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


Judgement = tuple[str, str, str]
"""Name of a claim, verdict, and the figures that it rests on."""


def report_claims(judgements: Iterable[Judgement]) -> None:
    """Print all that a run says of claims. The `judge` of a script makes them from its results, so that a test can
    compare the recorded verdicts with the recorded results.
    """
    for name, verdict, result in judgements:
        report_claim(name, verdict, result)


def verdict_of(holds: Sequence[bool]) -> str:
    """Confirmed if a claim holds for every seed, refuted if for none."""
    return "confirmed" if all(holds) else "not decided at this size" if any(holds) else "refuted"


def trained_model(recipe: str, cache: Path | None = None, **overrides: Any) -> "nn.Module":
    """The model of a shipped recipe, from the cache if it was trained before.

    Args:
        recipe: its name.
        cache: folder of trained models; "benchmarks" in the cache folder of Holdfast if none is given.
        **overrides: keys of the recipe; a model trained with them is kept apart.
    """
    # Imported here: a benchmark that trains nothing need not wait for torch.
    import holdfast as hf
    from holdfast.data import cache_root

    folder = cache or cache_root() / "benchmarks"
    changes = "".join(f"-{key}-{value}" for key, value in sorted(overrides.items()))
    path = folder / f"{recipe}{changes}.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        hf.save_model(hf.train(recipe, **overrides).model, path)
    return hf.load_model(path).eval()


def load_average() -> float | None:
    """Processes that wanted a core over the last minute, where the system says so; this one included."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def busy_seconds() -> float | None:
    """Core-seconds that all processes together have used since the machine started, where the system says so."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, *_ = map(int, stat.read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


class Neighbours:
    """How many cores other processes keep busy, on average, since this object was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time(), busy_seconds()

    def cores(self) -> float | None:
        """None where the system does not say."""
        wall, own, all_before = self._start
        all_now = busy_seconds()
        if all_before is None or all_now is None:
            return None
        others = (all_now - all_before) - (time.process_time() - own)
        return round(max(0.0, others) / (time.perf_counter() - wall), 2)


Cells = dict[str, dict[str, Any]]


def measure_cells(
    name: str,
    part: str,
    tasks: dict[str, Callable[[], dict[str, Any]]],
    *,
    to_markdown: Callable[[dict[str, Any]], str],
    folder: Path,
    packages: Sequence[str] = ("holdfast", "torch"),
) -> Cells:
    """Measure and store the cells that are not among the results yet; return those of all `tasks`, by key."""
    for key, measure in tasks.items():
        if key not in read_results(name, folder).get(part, {}):
            started = time.process_time()
            cell = measure()
            cell |= {"CPU s": round(time.process_time() - started, 1), "run": describe_run(packages)}
            store_cell(name, part, key, cell, to_markdown=to_markdown, folder=folder)
    found = read_results(name, folder)[part]
    return {key: found[key] for key in tasks}


def cells_page(title: str, notes: dict[str, str], record: dict[str, Any]) -> str:
    """A page with a table for each part: a row for each cell, a column for each figure; `notes` stand above."""
    text = [f"# {title}"]
    for part, cells in record.items():
        columns = [name for name in dict.fromkeys(n for cell in cells.values() for n in cell) if name != "run"]
        rows = [(key, *(cell.get(name, "") for name in columns)) for key, cell in cells.items()]
        text += [f"## {part}", notes.get(part, ""), markdown_table(("", *columns), rows)]
    runs = dict.fromkeys(describe_markdown(cell["run"]) for cells in record.values() for cell in cells.values())
    return "\n\n".join([*(line for line in text if line), "## Runs", "\n".join(runs)])


def all_or_none(holds: Sequence[bool]) -> str:
    """Confirmed if a claim holds for every seed, refuted if for none."""
    return "confirmed" if all(holds) else "not decided at this size" if any(holds) else "refuted"


def larger(values: Sequence[float], base: Sequence[float]) -> tuple[str, str]:
    """Are the first larger, seed by seed? The 95 % t interval of the difference decides; also returns its text."""
    from scipy import stats

    gains = [value - start for value, start in zip(values, base, strict=True)]
    mean, reach = statistics.mean(gains), math.inf
    if len(gains) > 1:
        reach = float(stats.t.ppf(0.975, len(gains) - 1)) * statistics.stdev(gains) / math.sqrt(len(gains))
    outcome = "confirmed" if mean > reach else "refuted" if mean < -reach else "not decided at this size"
    text = (
        f"{mean:+.3g} [{mean - reach:+.3g}, {mean + reach:+.3g}], larger on {sum(g > 0 for g in gains)} of {len(gains)}"
    )
    return outcome, text


def listed(values: Iterable[float], digits: int = 3) -> str:
    """Values by seed, with commas between.

    >>> listed([0.12345, 2.0])
    '0.123, 2'
    """
    return ", ".join(f"{value:.{digits}g}" for value in values)
