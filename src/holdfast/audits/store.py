"""Results of an audit, stored as they come: one SQLite file, one transaction per batch.

A killed audit loses the running batch at most. The file carries the fingerprint of the run (model, data, threat,
settings), so that results of two different runs can never be mixed. Every row carries a seal, a checksum with the
fingerprint as its key: a row that was changed by hand, or brought from another store, is noticed when it is read. The
seal is no signature: somebody who knows the rule can forge it. So nothing that is read here decides how long an audit
takes.
"""

import json
import math
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

from holdfast.audits import tables
from holdfast.audits.rows import Example, Key, Outcome, Ran, packed, unpacked
from holdfast.errors import InputError, StorageError
from holdfast.utils.limits import parse_json
from holdfast.utils.resume import check_same

NUMBER = " #"
"""Stands between the name of a step and its number in the plan, in the table of batches."""


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
                tables.create(self._db)
                rows = [("fingerprint", json.dumps(fingerprint, default=repr)), ("created", created)]
                self._db.executemany("INSERT INTO meta VALUES (?, ?)", rows)
        version = self._check_file()
        text = self._meta("fingerprint")
        stored = parse_json(text, finite=False)
        if not isinstance(stored, dict):
            raise self._corrupt("its fingerprint is not a table")
        check_same(stored, fingerprint, self._where)
        self._key = tables.seal_key(text)
        if version == tables.BEFORE:
            with self._transaction():
                tables.upgrade(self._db, self._key)
        self._check_times()

    def _check_file(self) -> int:
        """The version of the file, after a look at its tables."""
        if self._db.execute("PRAGMA application_id").fetchone()[0] != tables.APPLICATION_ID:
            raise StorageError(f"{self._where} is an SQLite file of another program; choose another folder")
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if version not in (tables.VERSION, tables.BEFORE):
            raise StorageError(
                f"{self._where} has schema version {version}, this Holdfast reads {tables.VERSION} and "
                f"{tables.BEFORE}; choose another folder, or use the Holdfast that wrote it"
            )
        found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise self._corrupt(found)
        if not tables.has_tables(self._db, version):
            raise self._corrupt("its tables are not those that Holdfast makes")
        return version

    def _corrupt(self, reason: object) -> StorageError:
        return StorageError(f"{self._where} is corrupt ({reason}); delete the file to start again")

    def _meta(self, key: str) -> str:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        if row is None:
            raise self._corrupt(f"no '{key}'")
        return str(row[0])

    def _sealed(self, table: str, *row: object) -> tuple[object, ...]:
        return tables.sealed(self._key, table, *row)

    def _opened(self, table: str, row: Sequence[Any], what: str) -> Sequence[Any]:
        """The values of a row, after a look at its seal."""
        *values, seal = row
        if seal != self._sealed(table, *values)[-1]:
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

    def note_rough(self) -> None:
        """Note that attacks of the run computed gradients in bfloat16."""
        with self._guarded("write"), self._transaction():
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('rough', 'bfloat16')")

    @property
    def rough(self) -> bool:
        """Whether attacks of the run, at any start of it, computed gradients in bfloat16."""
        with self._guarded("read"):
            return self._db.execute("SELECT 1 FROM meta WHERE key = 'rough'").fetchone() is not None

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
        """Store one batch: all of it or, when the process dies or the disk is full, nothing of it.

        The smallest example of each input is kept.

        Args:
            key: which outcomes.
            name: name of the step.
            outcomes: one for each input.
            examples: for the inputs that broke.
            seconds: the work of the batch.
            wall: the time that passed for it, if that is less, as on a cluster.
        """
        rows = [
            self._sealed("outcome", *key, o.position, int(o.passed), o.prediction, o.by, _real(o.size))
            for o in outcomes
        ]
        sizes = {o.position: o.size or 0.0 for o in outcomes}
        blobs = [
            self._sealed("example", key.bracket, e.position, float(sizes[e.position]), *packed(e)) for e in examples
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
        """Store what tells whether the attack can be trusted; it took `seconds` on so many `inputs`."""
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
                if not found[position].is_plain:
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
                    found.append(unpacked(position, shape, dtype, *blobs))
        return tuple(found)

    def seconds(self, bracket: int) -> dict[str, float]:
        """Time spent in each method on one threat, over all starts of the run."""
        total: dict[str, float] = {}
        for row, seconds in self._seconds(bracket).items():
            name = row.partition(NUMBER)[0]
            total[name] = total.get(name, 0.0) + seconds
        return total

    def _seconds(self, bracket: int) -> dict[str, float]:
        query = "SELECT step, sum(seconds) FROM batch WHERE bracket = ? GROUP BY step ORDER BY min(rowid)"
        with self._guarded("read"):
            return dict(self._db.execute(query, (bracket,)))

    def steps(self, bracket: int, names: Sequence[str], largest: float) -> tuple[Ran, ...]:
        """What each step did at one threat whose largest budget is `largest`; `names` are all steps of the plan.

        Steps of one name share the time of a run that an earlier version began: it did not tell them apart.
        """
        query = """SELECT step, count(DISTINCT position), count(DISTINCT CASE WHEN passed = 0 THEN position END),
            count(DISTINCT CASE WHEN passed = 0 AND prediction IS NOT NULL THEN position END),
            count(DISTINCT CASE WHEN size >= ? AND prediction IS NULL THEN position END),
            count(DISTINCT CASE WHEN size > 0 AND prediction IS NULL THEN position END)
            FROM outcome WHERE bracket = ? AND step > 0 GROUP BY step ORDER BY step"""
        seconds, found = self._seconds(bracket), []
        own = {row.partition(NUMBER)[2]: row for row in seconds}
        with self._guarded("read"):
            for number, inputs, broken, met, proved, partly in self._db.execute(query, (largest, bracket)):
                row = own.get(str(number), names[number - 1])
                stage, _, method = row.partition(NUMBER)[0].partition(" ")
                took = seconds.pop(row, 0.0) + seconds.pop(names[number - 1], 0.0)
                result = (broken, 0, 0) if stage == "attack" else (proved, partly - proved, met)
                found.append(Ran(number, stage, method, took, inputs, *result))
        return tuple(found)

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
        """Turn what SQLite, zlib and the file system throw into one error that says what can be done."""
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


def began_with_the_first(path: Path) -> bool:
    """Whether version 0.1.0 made the store, which took the first n inputs; False if there is none, or none to read."""
    if not path.is_file():
        return False
    try:
        with closing(sqlite3.connect(path, timeout=1.0)) as db:
            row = db.execute("SELECT value FROM meta WHERE key = 'fingerprint'").fetchone()
        stored = parse_json(row[0], finite=False) if row else None
    except (sqlite3.Error, ValueError, TypeError):
        return False  # opening the store says what is wrong with it
    return isinstance(stored, dict) and "drawn" not in stored


def _real(size: float | None) -> float | None:
    return None if size is None else float(size)
