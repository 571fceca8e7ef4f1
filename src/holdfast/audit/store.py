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
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from holdfast.errors import InputError, StorageError

SCHEMA_VERSION = 2
_APPLICATION_ID = 0x484F4C44  # "HOLD": tells our files from other SQLite files
_SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE outcome (
        bracket INTEGER NOT NULL, step INTEGER NOT NULL, level INTEGER NOT NULL, position INTEGER NOT NULL,
        passed INTEGER NOT NULL, prediction INTEGER, by TEXT NOT NULL, size REAL,
        PRIMARY KEY (bracket, step, level, position)) WITHOUT ROWID""",
    """CREATE TABLE example (
        bracket INTEGER NOT NULL, position INTEGER NOT NULL, size REAL NOT NULL, shape TEXT NOT NULL,
        dtype TEXT NOT NULL, x BLOB NOT NULL, x_adv BLOB NOT NULL, PRIMARY KEY (bracket, position))""",
    """CREATE TABLE batch (
        bracket INTEGER NOT NULL, step TEXT NOT NULL, inputs INTEGER NOT NULL, seconds REAL NOT NULL,
        wall REAL NOT NULL)""",
    "CREATE TABLE trust (bracket INTEGER PRIMARY KEY, text TEXT NOT NULL)",
)


class Key(NamedTuple):
    """Which outcomes: of which threat, of which step of the plan, at which of its budgets."""

    bracket: int
    step: int
    level: int


@dataclass(frozen=True)
class Outcome:
    """What one stage found for one input at one budget.

    Attributes:
        position: of the input in the data.
        passed: classified right ("clean"), certified ("certify"), or not broken ("attack").
        prediction: class given to the input ("clean") or to the adversarial example ("attack"); None for "certify".
        by: the method that decided; empty where none did.
        size: largest radius proved ("certify") or size of the example ("attack"); None where there is none.
    """

    position: int
    passed: bool
    prediction: int | None = None
    by: str = ""
    size: float | None = None


@dataclass(frozen=True, eq=False)
class Example:
    """An input and the adversarial example found for it, if any: arrays of one input's shape.

    `attribution`, of the same shape, says what of the input the model's answer rests on, on the way from the example.
    """

    position: int
    x: npt.NDArray[np.floating]
    x_adv: npt.NDArray[np.floating] | None = None
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
        self,
        key: Key,
        name: str,
        outcomes: Sequence[Outcome],
        examples: Sequence[Example] = (),
        *,
        seconds: float,
        wall: float | None = None,
    ) -> None:
        """Stores one batch: all of it or, when the process dies or the disk is full, nothing of it.

        Of several examples of an input the smallest one is kept. `name` is that of the step, `seconds` the work of the
        batch, `wall` the time that passed for it if that is less, as on a cluster.
        """
        rows = [(*key, o.position, o.passed, o.prediction, o.by, o.size) for o in outcomes]
        sizes = {o.position: o.size or 0.0 for o in outcomes}
        blobs = [
            (key.bracket, e.position, sizes[e.position], json.dumps(e.x.shape), e.x.dtype.str, _pack(e.x), _pack_as(e))
            for e in examples
        ]
        timing = (key.bracket, name, len(rows), seconds, seconds if wall is None else wall)
        with self._guarded("write"), self._transaction():
            self._db.executemany("INSERT INTO outcome VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
            self._db.executemany(
                "INSERT INTO example VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (bracket, position) DO UPDATE "
                "SET size = excluded.size, x_adv = excluded.x_adv WHERE excluded.size < size",
                blobs,
            )
            self._db.execute("INSERT INTO batch VALUES (?, ?, ?, ?, ?)", timing)

    def add_trust(self, bracket: int, text: str, *, inputs: int, seconds: float) -> None:
        """Stores what tells whether the attack can be trusted, found on so many inputs."""
        with self._guarded("write"), self._transaction():
            self._db.execute("INSERT INTO trust VALUES (?, ?)", (bracket, text))
            self._db.execute("INSERT INTO batch VALUES (?, 'trust', ?, ?, ?)", (bracket, inputs, seconds, seconds))

    def trust(self, bracket: int) -> str | None:
        """What `add_trust` stored, or None if nothing is stored yet."""
        with self._guarded("read"):
            row = self._db.execute("SELECT text FROM trust WHERE bracket = ?", (bracket,)).fetchone()
        return None if row is None else str(row[0])

    def outcomes(self, key: Key) -> dict[int, Outcome]:
        """What is stored of a step at a budget, by position."""
        query = (
            "SELECT position, passed, prediction, by, size FROM outcome "
            "WHERE bracket = ? AND step = ? AND level = ? ORDER BY position"
        )
        with self._guarded("read"):
            return {row[0]: Outcome(row[0], bool(row[1]), *row[2:]) for row in self._db.execute(query, key)}

    def examples(self, bracket: int, positions: Sequence[int]) -> tuple[Example, ...]:
        """The stored adversarial examples of these inputs, in this order; inputs that have none are left out."""
        query = "SELECT shape, dtype, x, x_adv FROM example WHERE bracket = ? AND position = ?"
        found = []
        with self._guarded("read"):
            for position in positions:
                row = self._db.execute(query, (bracket, position)).fetchone()
                if row is not None:
                    shape, dtype = tuple(json.loads(row[0])), np.dtype(row[1])
                    x, x_adv = (np.frombuffer(zlib.decompress(b), dtype).reshape(shape) for b in row[2:])
                    found.append(Example(position, x, x_adv))
        return tuple(found)

    def seconds(self, bracket: int) -> dict[str, float]:
        """Time spent in each step on one threat, over all starts of the run."""
        query = "SELECT step, sum(seconds) FROM batch WHERE bracket = ? GROUP BY step ORDER BY min(rowid)"
        with self._guarded("read"):
            return dict(self._db.execute(query, (bracket,)))

    def wall(self) -> float:
        """Time that passed in all, over all starts of the run."""
        with self._guarded("read"):
            return float(self._db.execute("SELECT coalesce(sum(wall), 0.0) FROM batch").fetchone()[0])

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


def _pack_as(example: Example) -> bytes:
    assert example.x_adv is not None
    return _pack(example.x_adv.astype(example.x.dtype))


def _pack(values: npt.NDArray[np.floating]) -> bytes:
    return zlib.compress(np.ascontiguousarray(values).tobytes(), 6)
