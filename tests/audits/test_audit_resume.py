"""A killed audit loses nothing; a damaged or foreign store is refused, never repaired by guessing."""

import resource
import runpy
import signal
import sqlite3
import subprocess
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from audits.sealing import reseal
from holdfast.audits import audit, load_audit
from holdfast.audits.rows import Example, Key, Outcome
from holdfast.audits.store import Store

WORKER = Path(__file__).with_name("killed_audit.py")
SHARED = runpy.run_path(str(WORKER))
THREAT = hf.Linf(0.15)
KEY = Key(0, 1, 1)
tasks = import_module("holdfast.audits.task")
evidence = import_module("holdfast.audits.evidence")


def run(out, threat=THREAT, **changes):
    model, data = SHARED["task"]()
    return audit(model, data, threat, out=out, **{**SHARED["OPTIONS"], **changes})


@pytest.fixture
def calls(monkeypatch):
    """How many inputs each call of the attack gets."""
    seen, real = [], tasks.run_attack

    def spy(model, x, *args, **kwargs):
        seen.append(len(x))
        return real(model, x, *args, **kwargs)

    monkeypatch.setattr(tasks, "run_attack", spy)
    return seen


@pytest.mark.parametrize("after", [2, 7])
def test_killed_audit_goes_on_where_it_stopped(tmp_path, calls, after):
    whole = run(tmp_path / "whole")
    total = len(calls)
    assert total > after + 1
    command = [sys.executable, str(WORKER), str(tmp_path / "killed"), str(after)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "stuck\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "audit.json").exists()

    calls.clear()
    resumed = run(tmp_path / "killed")
    assert len(calls) == total - after
    assert resumed.records == whole.records
    assert resumed.levels == whole.levels
    assert resumed.settings == whole.settings
    assert whole.trust
    assert resumed.trust == whole.trust
    assert [e.position for e in resumed.examples] == [e.position for e in whole.examples]
    assert whole.examples
    for mine, other in zip(resumed.examples, whole.examples, strict=True):
        np.testing.assert_array_equal(mine.x_adv, other.x_adv)


def test_a_finished_audit_is_read_not_repeated(tmp_path, calls):
    first = run(tmp_path)
    calls.clear()
    again = run(tmp_path)
    assert calls == []
    assert again.to_json() == first.to_json()


def test_kill_between_attack_and_indicators(tmp_path, calls, monkeypatch):
    """All batches are stored, the indicators are not: only they are made up for, and then kept."""
    whole = run(None)

    def kill(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(evidence, "probe", kill)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    calls.clear()
    resumed = run(tmp_path)
    assert calls == []
    assert resumed.trust == whole.trust
    monkeypatch.setattr(evidence, "probe", kill)
    again = run(tmp_path)
    assert again.trust == whole.trust
    assert again.seconds == resumed.seconds
    assert list(again.seconds) == ["clean", "certify crown", "attack pgd", "trust"]


@pytest.mark.parametrize("text", ["{", "[1]", '[{"name": "softmax"}]'])
def test_indicators_that_cannot_be_read_are_refused(tmp_path, text):
    run(tmp_path)
    with sqlite3.connect(tmp_path / "audit.sqlite") as database:
        database.execute("UPDATE trust SET text = ?", (text,))
    database.close()
    with pytest.raises(hf.StorageError, match="does not match its seal"):
        run(tmp_path)
    reseal(tmp_path / "audit.sqlite")
    with pytest.raises(hf.StorageError, match="indicators that cannot be read"):
        run(tmp_path)


def test_resume_with_another_batch_size_is_allowed(tmp_path):
    assert run(tmp_path).records == run(tmp_path, batch_size=3).records


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed: was 0, is 1"),
        ({"n": 20}, "n: was 60, is 20"),
        ({"budgets": 2}, "budgets: was 3, is 2"),
        ({"threat": hf.Linf(0.2)}, "threats: was ['linf:0.15'], is ['linf:0.2']"),
        ({"certify": None}, "steps: was [{'stage': 'certify', 'method': 'crown'"),
        ({"attack_options": {"steps": 6}}, "'steps': 6"),
        ({"budget": "thorough"}, "plan: was 'standard', is 'thorough'"),
    ],
)
def test_resume_with_other_settings_is_refused(tmp_path, changes, named):
    before = run(tmp_path).to_json()
    with pytest.raises(hf.InputError, match="results of another run") as caught:
        run(tmp_path, **changes)
    assert named in str(caught.value)
    assert run(tmp_path).to_json() == before


def test_resume_with_another_model_or_other_data_is_refused(tmp_path):
    run(tmp_path)
    model, (x, y) = SHARED["task"]()
    model[1].bias.data[0] += 1e-6
    with pytest.raises(hf.InputError, match="model: was"):
        audit(model, (x, y), THREAT, out=tmp_path, **SHARED["OPTIONS"])
    model, (x, y) = SHARED["task"]()
    with pytest.raises(hf.InputError, match="data: was"):
        audit(model, (x.roll(1, 0), y.roll(1, 0)), THREAT, out=tmp_path, **SHARED["OPTIONS"])


def test_model_hash_sees_structure_but_not_memory_addresses():
    from torch import nn

    from holdfast.utils.hashes import hash_model

    class Custom(nn.Module):
        def extra_repr(self):
            return f"at {hex(id(self))}"

    assert hash_model(Custom()) == hash_model(Custom())
    assert hash_model(nn.Sequential(nn.ReLU())) != hash_model(nn.Sequential(nn.Tanh()))


@pytest.mark.parametrize("damage", ["text", "middle", "truncated"])
def test_corrupt_store_is_refused(tmp_path, damage):
    run(tmp_path)
    path = tmp_path / "audit.sqlite"
    raw = path.read_bytes()
    damaged = {
        "text": b"not a database at all" * 100,
        "middle": raw[:4096] + b"\xff" * 8192 + raw[12288:],
        "truncated": raw[: len(raw) // 2],
    }[damage]
    path.write_bytes(damaged)
    with pytest.raises(hf.StorageError, match="corrupt"):
        run(tmp_path)
    assert path.read_bytes() == damaged


def test_corrupt_picture_is_refused(tmp_path):
    run(tmp_path)
    with sqlite3.connect(tmp_path / "audit.sqlite") as database:
        database.execute("UPDATE example SET x_adv = x'00'")
    database.close()
    with pytest.raises(hf.StorageError, match="corrupt"):
        run(tmp_path)


def test_foreign_and_newer_stores_are_refused(tmp_path):
    path = tmp_path / "audit.sqlite"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE recipes (cake TEXT)")
    database.commit()
    with pytest.raises(hf.StorageError, match="another program"):
        run(tmp_path)
    database.close()
    run(tmp_path / "new")
    database = sqlite3.connect(tmp_path / "new" / "audit.sqlite")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(hf.StorageError, match="schema version 99"):
        run(tmp_path / "new")


def test_store_without_its_fingerprint_is_refused(tmp_path):
    run(tmp_path)
    with sqlite3.connect(tmp_path / "audit.sqlite") as database:
        database.execute("DELETE FROM meta")
    database.close()
    with pytest.raises(hf.StorageError, match="no 'fingerprint'"):
        run(tmp_path)


def test_two_audits_in_one_folder_are_refused(tmp_path):
    with Store(tmp_path / "audit.sqlite", {"a": 1}), pytest.raises(hf.StorageError, match="another audit is using it"):
        Store(tmp_path / "audit.sqlite", {"a": 1})


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(hf.StorageError, match="check the path"):
        run(tmp_path / "file")


def test_full_disk_keeps_what_is_stored(tmp_path):
    """The file may not grow beyond a limit, which SQLite sees as a full disk."""
    path = tmp_path / "audit.sqlite"
    noise = np.random.default_rng(0).random((3, 64, 64), dtype=np.float32)
    with Store(path, {"a": 1}) as store:
        store.add(KEY, "attack", [Outcome(0, False, 2, "pgd", 0.1)], [Example(0, noise, noise)], seconds=1.0)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4096, hard))
        try:
            with pytest.raises(hf.StorageError, match="free space"):
                store.add(KEY, "attack", [Outcome(1, False, 2, "pgd", 0.1)], [Example(1, noise, noise)], seconds=1.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        store.add(KEY, "attack", [Outcome(2, True)], seconds=1.0)
    with Store(path, {"a": 1}) as store:
        assert store.outcomes(KEY) == {0: Outcome(0, False, 2, "pgd", 0.1), 2: Outcome(2, True)}
        assert store.seconds(0) == {"attack": 2.0}
        assert store.wall() == 2.0
        (example,) = store.examples(0, [0, 1, 2])
        np.testing.assert_array_equal(example.x_adv, noise)


def test_full_disk_while_the_report_is_written(tmp_path):
    result = run(None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(hf.StorageError, match="free space"):
            result.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_load_audit_gives_back_what_was_saved(tmp_path):
    saved = run(tmp_path)
    loaded = load_audit(tmp_path)
    assert loaded.to_json() == saved.to_json()
    assert loaded.to_html() == saved.to_html() == (tmp_path / "report.html").read_text(encoding="utf-8")
    assert [asdict(r) for r in loaded.records] == [asdict(r) for r in saved.records]
    assert loaded.trust == saved.trust != ()
    assert loaded.verdict == saved.verdict
    (tmp_path / "examples-0.npz").unlink()
    assert load_audit(tmp_path).examples == ()


def test_load_audit_refuses_what_is_not_one(tmp_path):
    with pytest.raises(hf.StorageError, match="no finished audit"):
        load_audit(tmp_path)
    run(tmp_path)
    good = (tmp_path / "audit.json").read_text()
    for text, complaint in [
        ("{", "cannot read"),
        ("[]", "schema version None"),
        (good.replace('"schema_version": 2', '"schema_version": 7'), "schema version 7"),
        (good.replace('"broken_by"', '"broken_bye"'), "not a complete audit"),
        (good.replace('"fired"', '"fire"'), "not a complete audit"),
    ]:
        (tmp_path / "audit.json").write_text(text)
        with pytest.raises(hf.StorageError, match=complaint):
            load_audit(tmp_path)
    (tmp_path / "audit.json").write_text(good)
    (tmp_path / "examples-0.npz").write_bytes(b"PK nonsense")
    with pytest.raises(hf.StorageError, match=r"examples-0\.npz"):
        load_audit(tmp_path)
