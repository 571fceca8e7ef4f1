"""What the benchmarks share: a description of the machine and the software, and one way to write results."""

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
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
    return [f"benchmarks/{Path(script).name}", *(Path(o).name if os.path.isabs(o) else o for o in options)]


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
