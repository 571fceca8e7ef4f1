"""What is found below the folder of runs, and what is not."""

import json
import os
import time
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.serve.listing import FILES, find_run, list_runs, read_file, read_run
from serve.made_runs import SECRET, progress, write


def test_every_kind_of_run_is_listed_and_nothing_else(runs):
    states = {run.name: (run.kind, run.state) for run in list_runs(runs)}
    assert states == {
        "group/live": ("audit", "running"),
        "first": ("audit", "finished"),
        "old": ("audit", "finished"),
        "broken": ("audit", "unreadable"),
        "failed": ("audit", "failed"),
        "killed": ("audit", "stopped"),
        "trained": ("train", "finished"),
        "elsewhere": ("train", "finished"),
    }
    assert list_runs(runs)[0].name == "group/live", "what is under way comes first"


def test_a_finished_run_has_its_answer(runs):
    found = {run.name: run for run in list_runs(runs)}
    for name in ("first", "old"):
        run = found[name]
        assert run.headline == "Between 70 % and 72 % hold."
        assert (run.model, run.data) == ("digits", "mnist-mini")
    (bracket,) = found["old"].brackets
    assert (bracket.threat, bracket.clean, bracket.certified, bracket.attacked) == ("linf:0.1", 190, 140, 144)
    assert found["first"].files == ("report.html", "audit.json", "results.csv", "model-card.md"), "the badge is a link"
    assert found["failed"].error == "disk full"


def test_a_newer_answer_is_read_again(tmp_path):
    write(tmp_path / "a" / "audit.json", {"headline": "one"})
    assert read_run("a", tmp_path / "a").headline == "one"
    write(tmp_path / "a" / "audit.json", {"headline": "another"})
    assert read_run("a", tmp_path / "a").headline == "another"


@pytest.mark.parametrize(("minutes", "state"), [(1, "running"), (6, "silent")])
def test_a_run_that_is_not_heard_of_is_silent(tmp_path, minutes, state):
    moment = datetime.now(UTC) - timedelta(minutes=minutes)
    write(tmp_path / "a" / "progress.json", progress(updated=moment.isoformat()))
    assert read_run("a", tmp_path / "a").state == state


@pytest.mark.parametrize(("minutes", "state"), [(1, "running"), (6, "stopped")])
def test_a_training_run_without_a_model_goes_on_or_has_stopped(tmp_path, minutes, state):
    then = time.time() - 60 * minutes
    for file, moment in (("run.json", then - 3600), ("history.csv", then)):
        write(tmp_path / "a" / file, {"data": "mnist-mini"})
        os.utime(tmp_path / "a" / file, (moment, moment))
    run = read_run("a", tmp_path / "a")
    assert (run.kind, run.state, run.data) == ("train", state, "mnist-mini")


def test_a_folder_that_is_a_run_itself_is_the_only_one(runs):
    assert [run.name for run in list_runs(runs / "first")] == ["first"]
    assert read_file(runs / "first", "first", "results.csv").startswith(b"position")


def test_only_known_files_of_listed_runs_are_read(runs):
    assert read_file(runs, "first", "report.html")
    for name, file in [
        ("first", "private.txt"),
        ("first", "badge.svg"),
        ("first", "../../secret.txt"),
        ("link", "report.html"),
        (".hidden", "audit.json"),
        ("", "report.html"),
        (".", "report.html"),
        ("first/.", "report.html"),
        ("group/../first", "report.html"),
        ("../outside", "report.html"),
        (os.fspath(runs / "first"), "report.html"),
        (os.fspath(runs.parent / "outside"), "report.html"),
        ("first\0", "report.html"),
        ("first/", "report.html"),
    ]:
        assert read_file(runs, name, file) is None, (name, file)
    assert find_run(runs, "first") == runs / "first"


def test_no_pipe_is_waited_for(tmp_path):
    write(tmp_path / "a" / "audit.json", {})
    os.mkfifo(tmp_path / "a" / "report.html")
    assert read_file(tmp_path, "a", "report.html") is None


def test_the_answer_never_holds_a_secret(runs):
    text = json.dumps([run.to_dict() for run in list_runs(runs)])
    assert SECRET not in text
    assert set(FILES) == {"report.html", "audit.json", "results.csv", "badge.svg", "model-card.md"}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
keys = st.sampled_from([*progress(), "threat", "inputs"])


@given(
    state=st.sampled_from(["running", "finished", "failed"]),
    changes=st.dictionaries(keys, values, max_size=6),
    bracket=st.dictionaries(st.sampled_from(["threat", "inputs", "clean", "certified", "attacked"]), values),
)
def test_any_progress_is_shown_or_refused(tmp_path_factory, state, changes, bracket):
    folder = tmp_path_factory.mktemp("any")
    write(folder / "progress.json", progress(state=state, brackets=[bracket]) | changes)
    run = read_run("a", folder)
    text = json.dumps(run.to_dict(), allow_nan=False, ensure_ascii=False).encode()
    assert json.loads(text)["name"] == "a"
    for now in run.brackets:
        assert all(count is None or 0 <= count <= now.inputs for count in (now.clean, now.certified, now.attacked))


@given(content=st.binary(max_size=60))
def test_any_bytes_are_no_progress(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("any")
    (folder / "progress.json").write_bytes(content)
    assert read_run("a", folder).state == "unreadable"
