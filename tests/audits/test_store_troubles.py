"""Full disks, two audits on one store, stores of other versions: an error that says so, and nothing lost."""

import json
import resource
import runpy
import sqlite3
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.audits import audit
from holdfast.audits.engine import local
from holdfast.audits.rows import Example, Key, Outcome
from holdfast.audits.store import Store
from holdfast.audits.tables import VERSION

SHARED = runpy.run_path(str(Path(__file__).with_name("random_kills.py")))
COMMANDS = 5  # of SQL in one batch: begin, outcomes, examples, time, commit
OPTIONS = {**SHARED["OPTIONS"], "batch_size": 10}
FULL = sqlite3.OperationalError("database or disk is full")


class Watched:
    """The local engine, with a list of the work that it did; calls `before` with the number of each task."""

    def __init__(self, before=lambda number: None):
        self.done, self.before = [], before

    def __call__(self, model, tasks):
        for task in tasks:
            self.before(len(self.done))
            ((_, found),) = local(model, [task])
            yield task, found
            self.done.append((task.stage, task.method, str(task.threat), tuple(task.index.tolist())))


def run(folder, engine):
    model, data = SHARED["case"]()
    return audit(model, data, [hf.threat(t) for t in SHARED["THREATS"]], out=folder, engine=engine, **OPTIONS)


def answer(result):
    """The result without the times."""
    body = json.loads(result.to_json())
    for bracket in body["brackets"]:
        for part in (bracket, *bracket["steps"]):
            del part["seconds"]
    return body["brackets"]


@cache
def untroubled():
    engine = Watched()
    return answer(run(None, engine)), engine.done


@pytest.fixture
def whole():
    """An audit without troubles: its answer, and the work that it took."""
    return untroubled()  # once, but within a test: the probes are as short as in the others


@pytest.fixture
def limit():
    """Sets the largest size that a file may have, which SQLite and the file system take for a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("batches", [0, 9, 25])
def test_disk_full_in_the_middle(tmp_path, whole, limit, batches):
    """The store cannot grow from some batch on: an error, later the same result, and no batch is done again."""
    path = tmp_path / "audit.sqlite"
    first = Watched(lambda number: limit(path.stat().st_size) if number == batches else None)
    with pytest.raises(hf.StorageError, match=r"free space.*What is stored is kept"):
        run(tmp_path, first)
    limit(None)
    assert len(first.done) >= batches
    assert not (tmp_path / "audit.json").exists()

    second = Watched()
    answered, work = whole
    assert answer(run(tmp_path, second)) == answered
    assert first.done + second.done == work
    assert second.done


def test_disk_full_when_the_results_are_written(tmp_path, whole, limit, monkeypatch):
    """Everything is in the store, and the files come with the next call, which does no work."""
    first, last = Watched(), len(whole[1]) - 1
    first.before = lambda number: limit((tmp_path / "audit.sqlite").stat().st_size * 4) if number == last else None
    with monkeypatch.context() as context:
        # A report that is larger than what is left on the disk.
        context.setattr(hf.audit.__globals__["Audit"], "to_html", lambda self: "x" * 2_000_000)
        with pytest.raises(hf.StorageError, match="free space"):
            run(tmp_path, first)
    limit(None)
    assert first.done == whole[1]
    assert not (tmp_path / "report.html").exists()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    second = Watched()
    assert answer(run(tmp_path, second)) == whole[0]
    assert second.done == []
    assert (tmp_path / "report.html").exists()


class Failing:
    """A connection whose n-th command fails because the disk is full."""

    def __init__(self, connection, fail_at):
        self.connection, self.left = connection, fail_at

    def __getattr__(self, name):
        if name in ("execute", "executemany"):
            self.left -= 1
            if self.left == 0:
                raise FULL
        return getattr(self.connection, name)


@given(st.lists(st.integers(1, 8), max_size=6), st.integers(0, 3))
def test_a_batch_is_stored_whole_or_not_at_all(failures, good):
    """Whichever command fails: exactly the batches whose `add` came back are there, and a later one can be added."""
    key, picture = Key(0, 1, 1), np.ones((1, 2, 2), np.float32)
    kept = {}
    with Store(None, {"a": 1}) as store:
        real = store._db
        for position, fail_at in enumerate([0] * good + failures + [0]):
            outcome = Outcome(position, False, 2, "pgd", 0.5)
            store._db = Failing(real, fail_at)
            with suppress(hf.StorageError):
                store.add(key, "attack pgd", [outcome], [Example(position, picture, picture)], seconds=1.0)
                kept[position] = outcome
            store._db = real
        assert not real.in_transaction
        assert store.outcomes(key) == kept
        assert [example.position for example in store.examples(0, range(20))] == sorted(kept)
        assert store.seconds(0) == {"attack pgd": float(len(kept))}
        assert len(kept) == good + 1 + sum(fail_at > COMMANDS for fail_at in failures)


def test_a_second_audit_on_a_store_in_use_is_refused(tmp_path, whole):
    """From this process and from another one; the first audit goes on as if nothing had happened."""
    refused = []

    def second(number):
        if number != 5:
            return
        with pytest.raises(hf.StorageError, match="another audit is using it") as caught:
            run(tmp_path, Watched())
        script = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0.1).execute('SELECT * FROM meta')"
        command = [sys.executable, "-c", script, str(tmp_path / "audit.sqlite")]
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        refused.extend([str(caught.value), other.stderr])

    first = Watched(second)
    assert answer(run(tmp_path, first)) == whole[0]
    assert first.done == whole[1]
    here, there = refused
    assert str(tmp_path / "audit.sqlite") in here
    assert "database is locked" in there


def test_a_store_can_be_used_again_as_soon_as_the_first_audit_ended(tmp_path, whole):
    class Stopped(Exception):
        pass

    def stop(number):
        if number == 10:
            raise Stopped

    first, second = Watched(stop), Watched()
    with pytest.raises(Stopped):
        run(tmp_path, first)
    assert answer(run(tmp_path, second)) == whole[0]
    assert first.done + second.done == whole[1]


@pytest.mark.parametrize("version", [0, 1, VERSION + 1])
def test_a_store_of_another_version_is_refused_and_left_alone(tmp_path, version):
    """As the first version of Holdfast wrote it: the message names both versions and the way out."""
    path = tmp_path / "audit.sqlite"
    database = sqlite3.connect(path)
    database.executescript(f"""
        CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
        CREATE TABLE outcome (stage TEXT NOT NULL, level INTEGER NOT NULL, position INTEGER NOT NULL,
            passed INTEGER NOT NULL, prediction INTEGER, by TEXT NOT NULL,
            PRIMARY KEY (stage, level, position)) WITHOUT ROWID;
        INSERT INTO meta VALUES ('fingerprint', '{{"seed": 0}}'), ('created', '2025-01-01T00:00:00+00:00');
        INSERT INTO outcome VALUES ('clean', 0, 0, 1, 2, '');
        PRAGMA application_id = {0x484F4C44};
        PRAGMA user_version = {version};
    """)
    database.close()
    before = path.read_bytes()
    with pytest.raises(hf.StorageError, match=f"schema version {version}, this Holdfast reads {VERSION}") as caught:
        run(tmp_path, Watched())
    assert "choose another folder" in str(caught.value)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["audit.sqlite"]
