"""A copied package tree and fake distributions, in processes of their own: what a contributor and a stranger see."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def run_python(code: str, path: list[Path]) -> str:
    """Output of a Python process that sees the folders of `path` first; its errors are in the text of a failure."""
    return _run(["-c", textwrap.dedent(code)], path)


def _run(arguments: list[str], path: list[Path]) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "COLUMNS": "200"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_holdfast(*arguments: str, path: list[Path]) -> str:
    """Output of the command line in a process that sees the folders of `path` first."""
    return _run(["-m", "holdfast", *arguments], path)


def fake_distribution(folder: Path, name: str, code: str) -> Path:
    """A folder with an installed package of one module, whose entry point adds methods to Holdfast."""
    (folder / f"{name}.py").write_text(textwrap.dedent(code))
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[holdfast.methods]\n{name} = {name}\n")
    return folder


def copied_source(folder: Path) -> Path:
    """A copy of src, to which a contributor adds a file."""
    ignore = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(SOURCE, folder / "src", ignore=ignore))
