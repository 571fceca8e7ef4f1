"""A store that was changed by hand: a resumed audit ends, with a result or with an error that says what was changed.

Edits are random: outcomes flipped, deleted, copied, moved to other levels, sizes that are negative, infinite or no
numbers; with the old seals, and with new ones that hide the edit.
"""

import json
import random
import shutil
import sqlite3
from importlib import import_module

import pytest
import torch
from torch import nn

import holdfast as hf
from audits.sealing import reseal
from clock import within
from holdfast.audits.rows import Key, Outcome
from holdfast.audits.store import Store

SECONDS = 30.0  # an audit takes a tenth of one
TABLES = {
    "outcome": ("bracket", "step", "level", "position", "passed", "prediction", "by", "size"),
    "example": ("bracket", "position", "size", "shape", "dtype", "x", "x_adv"),
    "batch": ("bracket", "step", "inputs", "seconds", "wall"),
    "trust": ("bracket", "text"),
    "meta": ("key", "value"),
}
VALUES = (
    *(
        0,
        1,
        2,
        -1,
        7,
        10**6,
        2**62,
        0.0,
        0.01,
        0.05,
        1e-300,
        1e308,
        float("inf"),
        float("-inf"),
        None,
        b"",
        b"\0" * 100,
    ),
    *("", "x", "[1]", "[[[[", "{}", "[1000000000]", "<f4", "O", "nan"),
)


def audit(folder, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 3)).eval()
    x = torch.rand(8, 1, 3, 3)
    y = model(x).argmax(1)
    y[0] = (y[0] + 1) % 3
    options = {"budget": "quick", "budgets": 3, "n": 8, "progress": False, **options}
    return hf.audit(model, (x, y), hf.Linf(0.08), out=folder, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished audit, and its answer."""
    folder = tmp_path_factory.mktemp("store") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        trust = import_module("holdfast.attacks.core.indicators")
        for name, cost in (("STEPS", 4), ("POINTS", 4), ("QUERIES", 10)):
            patch.setattr(trust, name, cost)
        return folder, audit(folder).records


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the finished run: its folder and its store."""
    shutil.copytree(finished[0], tmp_path / "run")
    for name in ("audit.json", "progress.json"):
        (tmp_path / "run" / name).unlink()
    return tmp_path / "run", tmp_path / "run" / "audit.sqlite"


def edit(path, *commands):
    with sqlite3.connect(path) as database:
        for command, *values in commands:
            database.execute(command, values)
    database.close()


def attempt(folder):
    """The answer of the audit, or its error; it must be one of ours, and come in time."""
    with within(SECONDS):
        try:
            return audit(folder), None
        except hf.HoldfastError as error:
            return None, error


def random_edit(path, chance):
    """One to three random edits."""
    with sqlite3.connect(path) as database:
        for _ in range(chance.choice((1, 1, 2, 3))):
            table = chance.choice(("outcome", "outcome", "outcome", "outcome", *TABLES))
            column, value = chance.choice(TABLES[table]), chance.choice(VALUES)
            key = "rowid" if table in ("example", "batch", "trust", "meta") else "position"
            where = chance.choice(("1", f"{key} % 3 = {chance.randrange(3)}", f"{key} = {chance.randrange(8)}"))
            kind = chance.choice(("change", "change", "flip", "delete", "copy", "move"))
            command = {
                "change": f"UPDATE OR REPLACE {table} SET {column} = ? WHERE {where}",
                "flip": f"UPDATE outcome SET passed = 1 - passed WHERE position % 2 = {chance.randrange(2)}",
                "delete": f"DELETE FROM {table} WHERE {where}",
                "copy": "INSERT OR REPLACE INTO outcome SELECT bracket, step, 1 + (level + 1) % 3, position, passed, "
                "prediction, by, size, seal FROM outcome WHERE step > 0",
                "move": f"UPDATE OR IGNORE outcome SET level = {chance.randrange(5)} WHERE {where}",
            }[kind]
            try:
                database.execute(command, (value,) if kind == "change" else ())
            except sqlite3.Error:  # what the table does not take
                continue
    database.close()


@pytest.mark.parametrize("forged", [False, True], ids=["old seals", "new seals"])
@pytest.mark.parametrize("start", range(0, 60, 10))
def test_any_edit_of_the_store_ends_in_a_result_or_in_an_error(finished, tmp_path, start, forged):
    """With the old seals a result is always the right one: rows that were deleted are worked out again."""
    for seed in range(start, start + 10):
        folder = tmp_path / str(seed)
        shutil.copytree(finished[0], folder)
        random_edit(folder / "audit.sqlite", random.Random(seed))
        if forged:
            reseal(folder / "audit.sqlite")
        answer, error = attempt(folder)
        assert answer is None or forged or answer.records == finished[1]
        # The fingerprint may be that of another run; and a real attack may break a forged proof.
        assert error is None or isinstance(error, hf.StorageError) or forged or "another run" in str(error)


def test_most_of_these_edits_are_noticed(finished, tmp_path):
    noticed = 0
    for seed in range(30):
        folder = tmp_path / str(seed)
        shutil.copytree(finished[0], folder)
        random_edit(folder / "audit.sqlite", random.Random(seed))
        noticed += attempt(folder)[0] is None
    assert 15 <= noticed < 30


FLIPS = {
    "all passed": "UPDATE outcome SET passed = 1 WHERE step > 0",
    "none passed": "UPDATE outcome SET passed = 0 WHERE step > 0",
    "no radius": "UPDATE outcome SET size = 0 WHERE step > 0",
    "small radii": "UPDATE outcome SET size = 1e-9 WHERE step > 0",
    "large examples": "UPDATE outcome SET size = 10 WHERE step > 0 AND passed = 0",
    "no size": "UPDATE outcome SET size = NULL",
    "negative": "UPDATE outcome SET size = -1.0 WHERE size IS NOT NULL",
    "infinite": "UPDATE outcome SET size = 9e999 WHERE size IS NOT NULL",
    "texts": "UPDATE outcome SET size = 'x', prediction = 'y', passed = 'z'",
    "classes": "UPDATE outcome SET prediction = 10 WHERE step = 0",
}


@pytest.mark.parametrize("flip", FLIPS)
def test_outcomes_that_contradict_their_level_are_named_even_with_new_seals(copy, flip):
    """The first three made the search for the largest proof look at one level for ever."""
    folder, store = copy
    edit(store, (FLIPS[flip],))
    with within(SECONDS), pytest.raises(hf.StorageError, match=r"does not match its seal.*delete it to start again"):
        audit(folder)
    reseal(store)
    answer, error = attempt(folder)
    assert answer is not None or ("input" in str(error) and "start again" in str(error))


@pytest.mark.parametrize("flip", ["all passed", "no radius", "large examples", "negative", "classes"])
def test_contradictions_are_storage_errors(copy, flip):
    folder, store = copy
    edit(store, (FLIPS[flip],))
    reseal(store)
    with within(SECONDS), pytest.raises(hf.StorageError, match=r"contradicts itself|not one that Holdfast writes"):
        audit(folder)


def test_a_proof_and_an_example_that_contradict_each_other_are_named(copy):
    folder, store = copy
    with sqlite3.connect(store) as database:
        (position,) = database.execute("SELECT position FROM outcome WHERE step > 1 AND passed = 0").fetchone()
    database.close()
    edit(
        store,
        ("UPDATE outcome SET passed = 1, size = 0.08, by = 'ibp' WHERE step = 1 AND position = ?", position),
    )
    reseal(store)
    with within(SECONDS), pytest.raises(hf.StorageError, match=f"input {position} is certified by 'ibp'.*broken by"):
        audit(folder)


def test_the_message_says_which_outcome_was_changed(copy):
    folder, store = copy
    edit(store, ("UPDATE outcome SET passed = 1 - passed WHERE step = 1 AND position = 5",))
    with pytest.raises(hf.StorageError, match="the outcome of input 5 at level 2 of step 1 on threat 0 does not match"):
        audit(folder)


def test_rows_of_another_store_are_noticed(copy, tmp_path):
    """The same rows, with their seals, from the audit of another model."""
    folder, store = copy
    audit(tmp_path / "other", seed=1)
    with sqlite3.connect(tmp_path / "other" / "audit.sqlite") as database:
        rows = database.execute("SELECT * FROM outcome").fetchall()
    database.close()
    edit(
        store, ("DELETE FROM outcome",), *(("INSERT INTO outcome VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", *r) for r in rows)
    )
    with pytest.raises(hf.StorageError, match="does not match its seal"):
        audit(folder)


@pytest.mark.parametrize("table", ["outcome", "example", "batch", "trust"])
def test_a_deleted_table_or_a_view_in_its_place_is_refused(copy, table):
    """A view can be a query that never ends."""
    folder, store = copy
    endless = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n, n, n, n, n, n, n, n, n FROM c"
    edit(store, (f"DROP TABLE {table}",))
    with within(SECONDS), pytest.raises(hf.StorageError, match="its tables are not those that Holdfast makes"):
        audit(folder)
    edit(store, (f"CREATE VIEW {table} AS {endless}",))
    with within(SECONDS), pytest.raises(hf.StorageError, match="its tables are not those that Holdfast makes"):
        audit(folder)


def test_a_trigger_is_refused(copy):
    folder, store = copy
    edit(store, ("CREATE TRIGGER t AFTER INSERT ON outcome BEGIN DELETE FROM outcome; END",))
    edit(store, ("DELETE FROM outcome WHERE step = 1",))
    with within(SECONDS), pytest.raises(hf.StorageError, match="its tables are not those"):
        audit(folder)


def test_deleted_rows_are_worked_out_again(copy, finished):
    folder, store = copy
    for where in ("step = 0", "step = 1 AND position < 4", "level = 1", "1"):
        edit(store, (f"DELETE FROM outcome WHERE {where}",), ("DELETE FROM example WHERE position = 2",))
        assert audit(folder).records == finished[1]


@pytest.mark.parametrize("value", [[1], 3, "text", None])
def test_a_fingerprint_that_is_none_is_refused(copy, value):
    folder, store = copy
    edit(store, ("UPDATE meta SET value = ? WHERE key = 'fingerprint'", json.dumps(value)))
    with pytest.raises(hf.StorageError, match="its fingerprint is not a table"):
        audit(folder)


def test_what_is_stored_comes_back_with_whole_numbers_in_the_place_of_reals():
    with Store(None, {"a": 1}) as store:
        outcomes = [Outcome(0, True, None, "ibp", 1), Outcome(1, False, 2, "pgd", 0.5), Outcome(2, True)]
        store.add(Key(0, 1, 1), "certify ibp", outcomes, seconds=1)
        assert store.outcomes(Key(0, 1, 1)) == {outcome.position: outcome for outcome in outcomes}
        assert (store.wall(), store.seconds(0)) == (1.0, {"certify ibp": 1.0})
