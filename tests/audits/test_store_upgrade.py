"""A store of schema version 2 gets its seals when it is opened, all of it or nothing."""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.audits import tables
from holdfast.audits.rows import Key
from holdfast.audits.store import Store

EARLIER = Path(__file__).parents[1] / "earlier" / "audit"
CLEAN = Key(0, 0, 0)


@pytest.fixture(params=["finished", "killed"])
def old(request, tmp_path):
    """A copy of a store of version 0.1.0; a killed one with its journal."""
    for path in (EARLIER / request.param).glob("audit.sqlite*"):
        shutil.copy(path, tmp_path)
    return tmp_path / "audit.sqlite"


def contents(path):
    """Version, fingerprint, and the rows of each table without their seals."""
    database = sqlite3.connect(path)
    version = database.execute("PRAGMA user_version").fetchone()[0]
    fingerprint = json.loads(database.execute("SELECT value FROM meta WHERE key = 'fingerprint'").fetchone()[0])
    rows = {}
    for table in tables.SEALED:
        found = database.execute(f"SELECT * FROM {table}")
        count = sum(column[0] != "seal" for column in found.description)
        rows[table] = [row[:count] for row in found]
    database.close()
    return version, fingerprint, rows


def test_all_rows_are_kept_and_get_seals(old):
    version, fingerprint, rows = contents(old)
    assert version == tables.BEFORE
    with Store(old, fingerprint) as store:
        assert len(store.outcomes(CLEAN)) == 10
        positions = [row[1] for row in rows["example"] if row[0] == 0]
        assert len(store.examples(0, positions)) == len(positions) > 0
        assert list(store.seconds(0)) == list(dict.fromkeys(row[1] for row in rows["batch"] if row[0] == 0))
    assert contents(old) == (tables.VERSION, fingerprint, rows)
    with Store(old, fingerprint) as store:
        assert len(store.outcomes(CLEAN)) == 10


def test_an_edit_after_the_upgrade_is_noticed(old):
    fingerprint = contents(old)[1]
    Store(old, fingerprint).__exit__()
    with sqlite3.connect(old) as database:
        database.execute("UPDATE outcome SET passed = 1 - passed")
    database.close()
    with Store(old, fingerprint) as store, pytest.raises(hf.StorageError, match="does not match its seal"):
        store.outcomes(CLEAN)


@pytest.mark.parametrize("table", tables.SEALED)
def test_an_upgrade_that_fails_changes_nothing(old, monkeypatch, table):
    before = contents(old)
    real = tables.sealed

    def full(key, name, *row):
        if name == table:
            raise sqlite3.OperationalError("database or disk is full")
        return real(key, name, *row)

    if not before[2][table]:
        pytest.skip("a killed audit has no rows there")
    with monkeypatch.context() as patch:
        patch.setattr(tables, "sealed", full)
        with pytest.raises(hf.StorageError, match="free space"):
            Store(old, before[1])
    assert contents(old) == before
    with Store(old, before[1]) as store:
        assert len(store.outcomes(CLEAN)) == 10


def test_the_store_of_another_run_is_not_upgraded(old):
    before = contents(old)
    with pytest.raises(hf.InputError, match=r"another run \(seed: was 0, is 1\)"):
        Store(old, {**before[1], "seed": 1})
    assert contents(old) == before


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TRIGGER t AFTER INSERT ON outcome BEGIN DELETE FROM outcome; END",
        "CREATE VIEW v AS SELECT * FROM outcome",
        "ALTER TABLE outcome ADD COLUMN seal TEXT NOT NULL DEFAULT ''",
        "DROP TABLE trust",
    ],
)
def test_other_tables_than_those_of_version_2_are_refused(old, change):
    fingerprint = contents(old)[1]
    with sqlite3.connect(old) as database:
        database.execute(change)
    database.close()
    with pytest.raises(hf.StorageError, match="its tables are not those that Holdfast makes"):
        Store(old, fingerprint)
