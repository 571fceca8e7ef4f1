"""kill -9 at random times, twenty times over: the same results as without, nothing lost and nothing done twice."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

KILLS = 20
SEED = 11
TABLES = {
    "outcome": "SELECT * FROM outcome ORDER BY bracket, step, level, position",
    "example": "SELECT * FROM example ORDER BY bracket, position",
    "batch": "SELECT bracket, step, inputs FROM batch ORDER BY rowid",
    "trust": "SELECT * FROM trust ORDER BY bracket",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs of the same audit: `whole`, and `killed` twenty times before it could come to its end."""
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    folder = tmp_path_factory.mktemp("kills")
    command = [sys.executable, str(Path(__file__).with_name("random_kills.py")), str(folder), str(SEED), str(KILLS)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder


def result(folder):
    """audit.json without the times."""
    body = json.loads((folder / "audit.json").read_text())
    del body["created"]
    for bracket in body["brackets"]:
        assert set(bracket.pop("seconds")) == {"clean", "certify crown", "attack pgd", "trust"} - (
            {"clean"} if bracket["threat"].startswith("l2") else set()
        )
        assert all(step.pop("seconds") > 0 for step in bracket["steps"])
    return body


def log(path):
    """(what happened, to which piece of work) in the order of time."""
    return [tuple(line.split(" ", 1)) for line in path.read_text().splitlines()]


def test_it_was_killed_as_often_as_it_says(folder):
    first, *tries, last = json.loads((folder / "codes.json").read_text())
    assert first == last == 0
    assert tries.count(-signal.SIGKILL) == KILLS
    assert set(tries) <= {-signal.SIGKILL, 0}


def test_same_results(folder):
    whole, killed = result(folder / "whole"), result(folder / "killed")
    assert killed == whole
    for bracket in whole["brackets"]:  # a case in which much could have gone wrong
        kinds = [(record["certified_by"], record["broken_by"]) for record in bracket["records"]]
        assert {("crown", ""), ("crown", "pgd"), ("", "clean")} <= set(kinds)


def test_same_rows_in_the_store(folder):
    """The same outcomes, and as many batches with as many inputs: what was stored was not worked on again."""
    rows = {}
    for name in ("whole", "killed"):
        database = sqlite3.connect(folder / name / "audit.sqlite")
        rows[name] = {table: database.execute(query).fetchall() for table, query in TABLES.items()}
        database.close()
    assert rows["killed"] == rows["whole"]
    assert all(rows["whole"].values())
    by_steps = [row for row in rows["whole"]["outcome"] if row[1] or not row[2]]  # the others are broken by probes
    assert sum(inputs for _, step, inputs in rows["whole"]["batch"] if step != "trust") == len(by_steps)


def test_no_batch_is_begun_again_once_it_is_stored(folder):
    stored = set()
    for what, work in log(folder / "killed.log"):
        assert not (what == "begin" and work in stored), f"done again: {work}"
        if what == "stored":
            stored.add(work)


def test_each_kill_costs_one_batch_at_most(folder):
    whole = [work for what, work in log(folder / "whole.log") if what == "begin" and not work.startswith("file")]
    killed = [work for what, work in log(folder / "killed.log") if what == "begin" and not work.startswith("file")]
    assert len(set(whole)) == len(whole) > 80
    assert set(killed) == set(whole)
    again = sum(Counter(killed).values()) - len(whole)
    assert 0 < again <= KILLS


def test_same_pictures(folder):
    names = sorted(path.name for path in (folder / "whole").glob("examples-*.npz"))
    assert names == ["examples-0.npz", "examples-1.npz"]
    for name in names:
        with np.load(folder / "whole" / name) as whole, np.load(folder / "killed" / name) as killed:
            assert sorted(whole.files) == sorted(killed.files)
            assert len(whole.files) > 0
            for key in whole.files:
                np.testing.assert_array_equal(killed[key], whole[key])


def test_the_folder_says_that_it_is_finished(folder):
    for name in ("whole", "killed"):
        assert json.loads((folder / name / "progress.json").read_text())["state"] == "finished"
        assert (folder / name / "report.html").stat().st_size > 1000
    # A kill may leave the journal of the store, emptied, and half of a file under a name that starts with a dot.
    written = {path.name for path in (folder / "whole").iterdir()}
    found = {path.name for path in (folder / "killed").iterdir() if path.name[0] != "."}
    assert found - {"audit.sqlite-journal"} == written
