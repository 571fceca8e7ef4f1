"""Claims of the literature that were checked here: what each says, what came out, and the command that repeats it.

benchmarks/claims.toml holds one table `[[claim]]` for each. A command takes `--out FOLDER` and prints its
verdict as a line `claim ID: VERDICT`, so that a repeated run can be compared with the recorded one.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal, TypeVar

from holdfast.errors import HoldfastError, InputError, StorageError, did_you_mean
from holdfast.utils.limits import read_text
from holdfast.utils.options import build

FILE = Path("benchmarks") / "claims.toml"
T = TypeVar("T")
Outcome = Literal["confirmed", "refuted", "not decided at this size", "not run"]


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        id: short name, such as "auction-closed-forms".
        source: author, work, and the section or table.
        statement: the claim, in our words.
        setup: model, data and sizes of the run.
        command: repeats the run, at the root of the repository; takes `--out FOLDER`.
        result: what came out, with intervals.
        verdict: what the run says of the claim; "not run" needs a `reason`.
        date: day of the run, as 2026-11-18.
        seeds: how many random seeds the result rests on; 0 for a deterministic check.
        minutes: CPU minutes that the command takes, as recorded, rounded up; 0 if they were not.
        small: a command of a few seconds that reaches the same verdict on a smaller case, where there is one.
        reason: why it was not run: hardware or data that cannot be had.
    """

    id: str
    source: str
    statement: str
    setup: str
    command: str
    verdict: Outcome
    result: str = ""
    date: str = ""
    seeds: int = 0
    minutes: float = 0.0
    small: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.id):
            raise InputError(f"claim '{self.id}': an id has lower-case letters, digits and hyphens")
        needed = ("reason",) if self.verdict == "not run" else ("result", "date")
        for name in ("source", "statement", "setup", "command", *needed):
            if not getattr(self, name):
                raise InputError(f"claim '{self.id}': '{name}' is missing")


@dataclass(frozen=True)
class Erratum:
    """What a source has wrong where code follows it: what is printed, what is right, and the test that shows it."""

    source: str
    printed: str
    instead: str
    test: str


@dataclass(frozen=True)
class Gap:
    """What a source has that is not here, or only in part, and why."""

    source: str
    what: str
    why: str


def read_claims(path: Path) -> tuple[Claim, ...]:
    """All claims of a file, checked."""
    claims = read_entries(path, "claim", Claim)
    ids = [claim.id for claim in claims]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise InputError(f"'{path}' has two claims with the id '{twice[0]}'")
    return claims


def read_entries(path: Path, key: str, kind: type[T]) -> tuple[T, ...]:
    """The tables `[[key]]` of the file: claims, errata or gaps."""
    try:
        table = tomllib.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read the claims in '{path}': {error}") from error
    return tuple(build(kind, entry, f"{key} {i}") for i, entry in enumerate(table.get(key, [])))


def repository(start: Path | None = None) -> Path | None:
    """The nearest folder, from the current one upwards, that holds benchmarks/claims.toml."""
    here = (start or Path.cwd()).resolve()
    return next((folder for folder in (here, *here.parents) if (folder / FILE).is_file()), None)


def load_claims() -> tuple[Claim, ...]:
    """The claims of the repository around the current folder, else those that the package was built with."""
    root = repository()
    if root is not None:
        return read_claims(root / FILE)
    packaged = Path(str(files("holdfast"))) / FILE.name
    beside = Path(str(files("holdfast"))).parents[1] / FILE  # a package that is used from its repository
    return read_claims(packaged if packaged.is_file() else beside)


def find_claim(claims: Sequence[Claim], name: str) -> Claim:
    """The claim with the id `name`."""
    for claim in claims:
        if claim.id == name:
            return claim
    raise InputError(f"there is no claim '{name}'. " + did_you_mean(name, [claim.id for claim in claims]))


def run_claim(claim: Claim, root: Path, *, small: bool = False, results: Path | None = None) -> str:
    """Repeat a claim at the root of the repository and return the verdict that the command printed.

    What the command prints is passed on. Results go to a folder ID in `results` (runs/claims at the root if none is
    given), where benchmarks keep finished parts: a command that was stopped goes on where it was. Delete the folder to
    start anew. A command that runs tests prints no verdict: the tests assert the recorded one. Nor does `holdfast
    train`, for claims that were not run.
    """
    if small and not claim.small:
        raise InputError(f"claim '{claim.id}' has no small version; run it without --small ({claim.minutes:g} CPU min)")
    words = shlex.split(claim.small if small else claim.command)
    out = (results or root / "runs" / "claims") / (claim.id + ("-small" if small else ""))
    command = [sys.executable if words[0] == "python" else words[0], *words[1:]]
    asserted = "pytest" in words
    command += [] if asserted else ["--out", str(out)]
    verdict: str = claim.verdict if asserted else ""
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            found = re.fullmatch(rf"claim {re.escape(claim.id)}: (.+)", line.strip())
            verdict = found[1] if found else verdict
    if process.returncode:
        raise HoldfastError(f"the command of claim '{claim.id}' failed with exit code {process.returncode}: {command}")
    if not verdict and words[:2] == ["holdfast", "train"]:
        raise HoldfastError(
            f"trained, in '{out}'; compare what 'holdfast certify' and 'holdfast attack' say of it by hand"
        )
    if not verdict:
        raise HoldfastError(f"the command printed no line 'claim {claim.id}: VERDICT'; see {words[1]}")
    return verdict
