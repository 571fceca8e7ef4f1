"""Results of an audit, stored as they come: one SQLite file, one transaction per batch.

A killed audit loses the running batch at most. The file carries the fingerprint of the run (model, data, threat,
settings), so that results of two different runs can never be mixed. Every row carries a seal, a checksum with the
fingerprint as its key: a row that was changed by hand, or brought from another store, is noticed when it is read. The
seal is no signature: somebody who knows the rule can forge it. So nothing that is read here decides how long an audit
takes.
"""

import hashlib
import json
import math
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
from holdfast.utils.limits import parse_json

SCHEMA_VERSION = 3
_APPLICATION_ID = 0x484F4C44  # "HOLD": tells our files from other SQLite files
_SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE outcome (
        bracket INTEGER NOT NULL, step INTEGER NOT NULL, level INTEGER NOT NULL, position INTEGER NOT NULL,
        passed INTEGER NOT NULL, prediction INTEGER, by TEXT NOT NULL, size REAL, seal TEXT NOT NULL,
        PRIMARY KEY (bracket, step, level, position)) WITHOUT ROWID""",
    """CREATE TABLE example (
        bracket INTEGER NOT NULL, position INTEGER NOT NULL, size REAL NOT NULL, shape TEXT NOT NULL,
        dtype TEXT NOT NULL, x BLOB NOT NULL, x_adv BLOB NOT NULL, seal TEXT NOT NULL,
        PRIMARY KEY (bracket, position))""",
    """CREATE TABLE batch (
        bracket INTEGER NOT NULL, step TEXT NOT NULL, inputs INTEGER NOT NULL, seconds REAL NOT NULL,
        wall REAL NOT NULL, seal TEXT NOT NULL)""",
    "CREATE TABLE trust (bracket INTEGER PRIMARY KEY, text TEXT NOT NULL, seal TEXT NOT NULL)",
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
        text = self._meta("fingerprint")
        self._check_fingerprint(parse_json(text, finite=False), fingerprint)
        self._key = hashlib.sha256(text.encode()).digest()
        self._check_times()

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
            raise self._corrupt(found)
        # A view or a trigger in the place of a table could run for ever.
        known = self._db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        if sorted(row[0] for row in known) != sorted(_SCHEMA):
            raise self._corrupt("its tables are not those that Holdfast makes")

    def _corrupt(self, reason: object) -> StorageError:
        return StorageError(f"{self._where} is corrupt ({reason}); delete the file to start again")

    def _check_fingerprint(self, stored: Any, now: dict[str, Any]) -> None:
        if not isinstance(stored, dict):
            raise self._corrupt("its fingerprint is not a table")
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
            raise self._corrupt(f"no '{key}'")
        return str(row[0])

    def _seal(self, *row: object) -> str:
        """Checksum of the values of a row."""
        found = hashlib.blake2b(key=self._key, digest_size=8)
        for value in row:
            part = value if isinstance(value, bytes) else repr(value).encode(errors="backslashreplace")
            found.update(len(part).to_bytes(8, "little") + part)
        return found.hexdigest()

    def _sealed(self, table: str, *row: object) -> tuple[object, ...]:
        return (*row, self._seal(table, *row))

    def _opened(self, table: str, row: Sequence[Any], what: str) -> Sequence[Any]:
        """The values of a row, after a look at its seal."""
        *values, seal = row
        if seal != self._seal(table, *values):
            raise StorageError(
                f"{self._where} was changed after it was written: {what} does not match its seal. Restore the file "
                "from a copy, or delete it to start again"
            )
        return values

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
        rows = [
            self._sealed("outcome", *key, o.position, int(o.passed), o.prediction, o.by, _real(o.size))
            for o in outcomes
        ]
        sizes = {o.position: o.size or 0.0 for o in outcomes}
        blobs = [
            self._sealed("example", key.bracket, e.position, float(sizes[e.position]), *_packed(e)) for e in examples
        ]
        with self._guarded("write"), self._transaction():
            self._db.executemany("INSERT INTO outcome VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
            self._db.executemany(
                "INSERT INTO example VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (bracket, position) DO UPDATE "
                "SET size = excluded.size, shape = excluded.shape, dtype = excluded.dtype, x = excluded.x, "
                "x_adv = excluded.x_adv, seal = excluded.seal WHERE excluded.size < size",
                blobs,
            )
            self._add_time(key.bracket, name, len(rows), seconds, seconds if wall is None else wall)

    def _add_time(self, bracket: int, name: str, inputs: int, seconds: float, wall: float) -> None:
        row = self._sealed("batch", bracket, name, inputs, float(seconds), float(wall))
        self._db.execute("INSERT INTO batch VALUES (?, ?, ?, ?, ?, ?)", row)

    def add_trust(self, bracket: int, text: str, *, inputs: int, seconds: float) -> None:
        """Stores what tells whether the attack can be trusted, found on so many inputs."""
        with self._guarded("write"), self._transaction():
            self._db.execute("INSERT INTO trust VALUES (?, ?, ?)", self._sealed("trust", bracket, text))
            self._add_time(bracket, "trust", inputs, seconds, seconds)

    def trust(self, bracket: int) -> str | None:
        """What `add_trust` stored, or None if nothing is stored yet."""
        with self._guarded("read"):
            row = self._db.execute("SELECT * FROM trust WHERE bracket = ?", (bracket,)).fetchone()
        if row is None:
            return None
        return str(self._opened("trust", row, f"whether to trust the attack on threat {bracket}")[1])

    def outcomes(self, key: Key) -> dict[int, Outcome]:
        """What is stored of a step at a budget, by position."""
        query = "SELECT * FROM outcome WHERE bracket = ? AND step = ? AND level = ? ORDER BY position"
        found = {}
        with self._guarded("read"):
            for row in self._db.execute(query, key):
                what = f"the outcome of input {row[3]} at level {key.level} of step {key.step} on threat {key.bracket}"
                _, _, _, position, passed, prediction, by, size, *_ = self._opened("outcome", row, what)
                found[position] = Outcome(position, bool(passed), prediction, by, size)
                if not _is_plain(found[position]):
                    raise self._corrupt(f"{what} is not one that Holdfast writes")
        return found

    def examples(self, bracket: int, positions: Sequence[int]) -> tuple[Example, ...]:
        """The stored adversarial examples of these inputs, in this order; inputs that have none are left out."""
        query = "SELECT * FROM example WHERE bracket = ? AND position = ?"
        found = []
        with self._guarded("read"):
            for position in positions:
                row = self._db.execute(query, (bracket, position)).fetchone()
                if row is not None:
                    what = f"the example of input {position} on threat {bracket}"
                    _, _, _, shape, dtype, *blobs = self._opened("example", row, what)
                    x, x_adv = (_unpack(blob, parse_json(shape), dtype) for blob in blobs)
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

    def _check_times(self) -> None:
        """The seals of all batches, once: their sums are looked at often."""
        for number, row in enumerate(self._db.execute("SELECT * FROM batch ORDER BY rowid")):
            what = f"the time of batch {number}"
            _, step, _, seconds, wall = self._opened("batch", row, what)
            if not (isinstance(step, str) and all(isinstance(t, float) and 0 <= t < math.inf for t in (seconds, wall))):
                raise self._corrupt(f"{what} is not one that Holdfast writes")

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
        except (sqlite3.Error, zlib.error, ValueError, TypeError, OverflowError) as error:
            raise self._corrupt(error) from error
        except OSError as error:
            raise StorageError(f"cannot {verb} {self._where}: {error}; check the path and permissions") from error


def _is_plain(outcome: Outcome) -> bool:
    """Whether the values have the types that an outcome has, and its size is a number."""
    size, prediction = outcome.size, outcome.prediction
    texts = isinstance(outcome.by, str) and isinstance(prediction, int | None)
    return texts and (size is None or (isinstance(size, float) and 0 <= size < math.inf))


def _real(size: float | None) -> float | None:
    return None if size is None else float(size)


def _packed(example: Example) -> tuple[str, str, bytes, bytes]:
    """Shape, dtype, input and example."""
    assert example.x_adv is not None
    x, x_adv = example.x, example.x_adv.astype(example.x.dtype)
    return json.dumps(x.shape), x.dtype.str, _pack(x), _pack(x_adv)


def _pack(values: npt.NDArray[np.floating]) -> bytes:
    return zlib.compress(np.ascontiguousarray(values).tobytes(), 6)


def _unpack(content: bytes, shape: list[int], dtype: str) -> npt.NDArray[np.floating]:
    """What `_pack` packed; never more of it than the shape has room for."""
    kind = np.dtype(dtype)
    values = zlib.decompressobj().decompress(content, math.prod(shape) * kind.itemsize + 1)
    return np.frombuffer(values, kind).reshape(shape)
