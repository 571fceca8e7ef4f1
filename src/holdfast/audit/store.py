"""Results of an audit, stored as they come: one SQLite file, one transaction per batch.

A killed audit loses the running batch at most. The file carries the fingerprint of the run (model, data, threat,
settings), so that results of two different runs can never be mixed.
"""

import json
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from holdfast.errors import InputError, StorageError

Stage = Literal["clean", "certify", "attack"]
TRUST = "trust"
SCHEMA_VERSION = 1
_APPLICATION_ID = 0x484F4C44  # "HOLD": tells our files from other SQLite files
_SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE outcome (
        stage TEXT NOT NULL, level INTEGER NOT NULL, position INTEGER NOT NULL,
        passed INTEGER NOT NULL, prediction INTEGER, by TEXT NOT NULL,
        PRIMARY KEY (stage, level, position)) WITHOUT ROWID""",
    """CREATE TABLE example (
        position INTEGER PRIMARY KEY, shape TEXT NOT NULL, dtype TEXT NOT NULL,
        x BLOB NOT NULL, x_adv BLOB NOT NULL)""",
    "CREATE TABLE batch (stage TEXT NOT NULL, level INTEGER NOT NULL, inputs INTEGER NOT NULL, seconds REAL NOT NULL)",
)


@dataclass(frozen=True)
class Outcome:
    """What one stage found for one input at one budget.

    Attributes:
        position: of the input in the data.
        passed: classified right ("clean"), certified ("certify"), or not broken ("attack").
        prediction: class given to the input ("clean") or to the adversarial example ("attack"); None for "certify".
        by: the method that decided; empty where none did.
    """

    position: int
    passed: bool
    prediction: int | None = None
    by: str = ""


@dataclass(frozen=True, eq=False)
class Example:
    """An input and the adversarial example found for it, arrays of one input's shape.

    `attribution`, of the same shape, says what of the input the model's answer rests on, on the way from the example.
    """

    position: int
    x: npt.NDArray[np.floating]
    x_adv: npt.NDArray[np.floating]
    attribution: npt.NDArray[np.floating] | None = None


class Store:
    """The results of one run. Open it with `with Store(path, fingerprint) as store`.

    Args:
        path: the SQLite file, created when missing; None keeps everything in memory.
        fingerprint: what decides the results, as JSON values. An existing file must carry the same one.
    """

    def __init__(self, path: Path | None, fingerprint: dict[str, Any], *, created: str = "") -> None:
        self.path = path
        self._where = "the results in memory" if path is None else f"the audit store '{path}'"
        with self._guarded("open"):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(":memory:" if path is None else path, timeout=1.0, isolation_level=None)
        try:
            with self._guarded("open"):
                self._open(fingerprint, created)
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def _open(self, fingerprint: dict[str, Any], created: str) -> None:
        # Two audits in one folder would do the same work twice and meet in the middle: the second one is refused.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                self._create(fingerprint, created)
        self._check_file()
        self._check_fingerprint(json.loads(self._meta("fingerprint")), fingerprint)

    def _create(self, fingerprint: dict[str, Any], created: str) -> None:
        for statement in _SCHEMA:
            self._db.execute(statement)
        self._db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        rows = [("fingerprint", json.dumps(fingerprint, default=repr)), ("created", created)]
        self._db.executemany("INSERT INTO meta VALUES (?, ?)", rows)

    def _check_file(self) -> None:
        if self._db.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
            raise StorageError(f"{self._where} is an SQLite file of another program; choose another folder")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version != SCHEMA_VERSION:
            raise StorageError(
                f"{self._where} has schema version {version}, this Holdfast reads {SCHEMA_VERSION}; "
                "choose another folder, or use the Holdfast that wrote it"
            )
        found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise StorageError(f"{self._where} is corrupt ({found}); delete the file to start again")

    def _check_fingerprint(self, stored: dict[str, Any], now: dict[str, Any]) -> None:
        now = json.loads(
            json.dumps(now, default=repr)
        )  # the form it has after a trip through the file: tuples are lists
        different = [key for key in {**stored, **now} if stored.get(key) != now.get(key)]
        if different:
            changes = "; ".join(f"{key}: was {stored.get(key)!r}, is {now.get(key)!r}" for key in different)
            raise InputError(
                f"{self._where} holds the results of another run and cannot be resumed ({changes}). "
                "Repeat the settings of that run, or choose another folder."
            )

    def _meta(self, key: str) -> str:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        if row is None:
            raise StorageError(f"{self._where} is corrupt (no '{key}'); delete the file to start again")
        return str(row[0])

    @property
    def created(self) -> str:
        """When the run was first started, as text."""
        with self._guarded("read"):
            return self._meta("created")

    def add(
        self, stage: Stage, level: int, outcomes: Sequence[Outcome], examples: Sequence[Example], *, seconds: float
    ) -> None:
        """Stores one batch: all of it or, when the process dies or the disk is full, nothing of it."""
        rows = [(stage, level, o.position, o.passed, o.prediction, o.by) for o in outcomes]
        blobs = [
            (e.position, json.dumps(e.x.shape), e.x.dtype.str, _pack(e.x), _pack(e.x_adv.astype(e.x.dtype)))
            for e in examples
        ]
        with self._guarded("write"), self._transaction():
            self._db.executemany("INSERT INTO outcome VALUES (?, ?, ?, ?, ?, ?)", rows)
            self._db.executemany("INSERT INTO example VALUES (?, ?, ?, ?, ?)", blobs)
            self._db.execute("INSERT INTO batch VALUES (?, ?, ?, ?)", (stage, level, len(rows), seconds))

    def add_trust(self, text: str, *, inputs: int, seconds: float) -> None:
        """Stores what tells whether the attack can be trusted, found on so many inputs."""
        with self._guarded("write"), self._transaction():
            self._db.execute("INSERT INTO meta VALUES (?, ?)", (TRUST, text))
            self._db.execute("INSERT INTO batch VALUES (?, 0, ?, ?)", (TRUST, inputs, seconds))

    def trust(self) -> str | None:
        """What `add_trust` stored, or None if nothing is stored yet."""
        with self._guarded("read"):
            row = self._db.execute("SELECT value FROM meta WHERE key = ?", (TRUST,)).fetchone()
        return None if row is None else str(row[0])

    def outcomes(self, stage: Stage, level: int) -> dict[int, Outcome]:
        """What is stored of a stage at a budget, by position."""
        query = "SELECT position, passed, prediction, by FROM outcome WHERE stage = ? AND level = ? ORDER BY position"
        with self._guarded("read"):
            return {row[0]: Outcome(row[0], bool(row[1]), *row[2:]) for row in self._db.execute(query, (stage, level))}

    def examples(self, positions: Sequence[int]) -> tuple[Example, ...]:
        """The stored adversarial examples of these inputs, in this order; inputs that have none are left out."""
        query = "SELECT shape, dtype, x, x_adv FROM example WHERE position = ?"
        found = []
        with self._guarded("read"):
            for position in positions:
                row = self._db.execute(query, (position,)).fetchone()
                if row is not None:
                    shape, dtype = tuple(json.loads(row[0])), np.dtype(row[1])
                    x, x_adv = (np.frombuffer(zlib.decompress(b), dtype).reshape(shape) for b in row[2:])
                    found.append(Example(position, x, x_adv))
        return tuple(found)

    def seconds(self) -> dict[str, float]:
        """Time spent in each stage, over all starts of the run."""
        with self._guarded("read"):
            return dict(self._db.execute("SELECT stage, sum(seconds) FROM batch GROUP BY stage ORDER BY min(rowid)"))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # A full disk may have ended the transaction already.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _guarded(self, verb: str) -> Iterator[None]:
        """Turns what SQLite, zlib and the file system throw into one error that says what can be done."""
        try:
            yield
        except (StorageError, InputError):
            raise
        except sqlite3.OperationalError as error:
            hint = "another audit is using it" if "locked" in str(error) else "check permissions and free space"
            raise StorageError(f"cannot {verb} {self._where}: {error}; {hint}. What is stored is kept.") from error
        except (sqlite3.Error, zlib.error, ValueError) as error:
            raise StorageError(f"{self._where} is corrupt ({error}); delete the file to start again") from error
        except OSError as error:
            raise StorageError(f"cannot {verb} {self._where}: {error}; check the path and permissions") from error


def _pack(values: npt.NDArray[np.floating]) -> bytes:
    return zlib.compress(np.ascontiguousarray(values).tobytes(), 6)
