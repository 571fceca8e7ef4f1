"""Work spread over a Ray cluster: the same answers as here, whatever the order and whoever dies."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.audits.engine import local
from holdfast.audits.ray_engine import ray_engine
from holdfast.audits.task import Task
from holdfast.bounding import Ascent

ray = pytest.importorskip("ray")

module = import_module("holdfast.audits.ray_engine")
THREAT = hf.Linf(0.1)
BATCH = 6


class Probe(nn.Module):
    """A linear model that says who worked and how often, and does as the first feature of an input tells it.

    Above 2 it takes as many tenths of a second; a file holds it up as long as it is there.
    """

    def __init__(self, folder, gate=None):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.folder, self.gate = str(folder), gate and str(gate)

    def forward(self, x):
        with open(os.path.join(self.folder, "log"), "a") as log:
            log.write(f"{os.getpid()} {float(x[0, 0]):g} {torch.get_num_threads()}\n")
        if x[0, 0] > 2:
            time.sleep(float(x[0, 0]) / 10)
        while self.gate and os.path.exists(self.gate):
            time.sleep(0.02)
        return self.linear(x)


def log_of(folder):
    """(process, first feature, threads) of each call of the probe."""
    path = folder / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), float(value), int(threads)) for pid, value, threads in map(str.split, lines)]


def wait_for(condition, seconds=180):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def engine():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        # Workers find the classes of this file, which is on no path, in the object itself.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        started = ray_engine(workers=2)
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
        yield started
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def small_model():
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
    return model


def mixed_tasks(model, count=4):
    """For each of `count` batches: classify, prove by two certificates, attack."""
    x = torch.rand(count * BATCH, 1, 3, 4, generator=torch.Generator().manual_seed(5))
    y = model(x).argmax(1)
    kinds = [
        ("clean", "", {}, None),
        ("certify", "crown", {}, THREAT),
        ("certify", "alpha-crown", {"ascent": Ascent(iterations=3)}, THREAT),
        ("attack", "pgd", {"steps": 5, "restarts": 2}, THREAT),
    ]
    for start in range(0, len(x), BATCH):
        part = slice(start, start + BATCH)  # views of one tensor, as a caller may well hand over
        for stage, method, options, threat in kinds:
            yield Task(stage, method, options, 7, threat, torch.arange(len(x))[part], x[part], y[part])


def clean_task(position, first):
    """One input for the probe, whose first feature is `first`."""
    x = torch.tensor([[first, 0.2, 0.3, 0.4]])
    return Task("clean", "", {}, 0, None, torch.tensor([position]), x, torch.tensor([0]))


def summary(pairs):
    """Results by stage, method and first position, to the last bit and without the times."""
    return {
        (task.stage, task.method, int(task.index[0])): (
            found.outcomes,
            [(e.position, e.x.tobytes(), e.x_adv.tobytes()) for e in found.examples],
        )
        for task, found in pairs
    }


def test_same_results_as_local_to_the_last_bit(engine):
    model = small_model()
    tasks = list(mixed_tasks(model))
    here, there = list(local(model, tasks)), list(engine(model, iter(tasks)))
    assert summary(there) == summary(here)
    assert len(there) == len(tasks) == 16
    assert {id(task) for task, _ in there} == {id(task) for task in tasks}  # the caller's own, not a copy
    broken = [outcome for task, found in here if task.stage == "attack" for outcome in found.outcomes]
    assert 0 < sum(outcome.passed for outcome in broken) < len(broken)
    assert all(found.seconds > 0 for _, found in there)


def test_an_audit_is_the_same_on_a_cluster(engine, tmp_path):
    """The whole of it, into a store that a local audit then goes on with."""
    model = small_model()
    x = torch.rand(24, 1, 3, 4, generator=torch.Generator().manual_seed(5))
    y = (model(x).argmax(1) + (torch.arange(24) % 8 == 0)) % 3
    options = {"budget": "quick", "budgets": 2, "batch_size": 8, "progress": False, "attack": "pgd", "certify": "crown"}
    options |= {"attack_options": {"steps": 5}}
    here, there, again = (
        json.loads(hf.audit(model, (x, y), ["linf:0.1", "l2:0.3"], out=folder, engine=where, **options).to_json())
        for folder, where in ((tmp_path / "a", "local"), (tmp_path / "b", engine), (tmp_path / "b", "local"))
    )
    del here["created"]
    assert there.pop("created") == again.pop("created")
    for one, other, third in zip(here["brackets"], there["brackets"], again["brackets"], strict=True):
        assert other["seconds"] == third["seconds"]
        assert other["steps"] == third["steps"]
        del one["seconds"], other["seconds"], third["seconds"]
        for step in (*one["steps"], *other["steps"], *third["steps"]):
            del step["seconds"]
    assert there == here == again
    assert {record["broken_by"] for record in here["brackets"][0]["records"]} > {"clean", ""}


def test_results_come_as_they_are_done_with_few_tasks_ahead(engine, tmp_path):
    """The first task takes 1.5 seconds, the others none: they overtake it, and no more than four are taken ahead."""
    asked = []

    def tasks():
        for position in range(12):
            asked.append(position)
            yield clean_task(position, 15.0 if position == 0 else 0.5)

    order = []
    for task, found in engine(Probe(tmp_path).eval(), tasks()):
        order.append(int(task.index[0]))
        assert found.outcomes[0].position == order[-1]
        assert len(asked) <= len(order) + 3  # two processors, two tasks each, one of which has just been done
    assert sorted(order) == list(range(12))
    assert order.index(0) > 0
    log = log_of(tmp_path)
    assert len(log) == 12
    assert {threads for _, _, threads in log} == {1}
    assert os.getpid() not in {pid for pid, _, _ in log}


def test_a_model_that_changed_is_sent_again(engine):
    model = small_model()
    tasks = [task for task in mixed_tasks(model, 2) if task.stage == "clean"]
    before = summary(engine(model, tasks))
    model[3].bias.data += torch.tensor([9.0, 0.0, 0.0])
    after = summary(engine(model, tasks))
    assert after == summary(local(model, tasks)) != before


def test_a_worker_killed_in_the_middle_changes_nothing(engine, tmp_path):
    """Both workers stand before the gate; one of them is killed, and its batch is done once more by another."""
    gate = tmp_path / "gate"
    gate.touch()
    model = Probe(tmp_path, gate).eval()
    tasks = [clean_task(position, position / 10) for position in range(6)]
    killed = []

    def kill():
        try:
            wait_for(lambda: len(log_of(tmp_path)) == 2)
            killed.append(log_of(tmp_path)[0])
            os.kill(killed[0][0], signal.SIGKILL)  # a process that Ray started for this test
            wait_for(lambda: len(log_of(tmp_path)) == 3)
        finally:
            gate.unlink()  # else the workers, and so this test, would wait for ever

    killer = threading.Thread(target=kill)
    killer.start()
    there = list(engine(model, tasks))
    killer.join()
    log = log_of(tmp_path)
    assert len(there) == 6
    model.gate = None
    assert summary(there) == summary(local(model, tasks))
    again = [pid for pid, value, _ in log if value == killed[0][1]]
    assert len(again) == 2  # the lost batch was done twice, the others once
    assert again[0] == killed[0][0] != again[1]
    assert len(log) == 7


@pytest.mark.parametrize(("kind", "error"), [(0, hf.InputError), (1, hf.UnsupportedError)])
def test_an_error_of_a_task_is_that_of_local(engine, kind, error):
    """Inputs that are no numbers, and a layer that no certificate has a rule for."""
    model = nn.Sequential(*small_model(), nn.Softmin(1)).eval()
    tasks = list(mixed_tasks(model, 1))
    bad = replace(tasks[kind], x=tasks[kind].x * (float("nan") if kind == 0 else 1))
    with pytest.raises(error) as here:
        list(local(model, [bad]))
    with pytest.raises(error) as there:
        list(engine(model, [bad]))
    assert type(there.value) is type(here.value)
    assert str(there.value) == str(here.value)
    assert "in work" in str(there.value.__cause__)  # where it happened, over there
    assert len(list(engine(model, tasks[:1]))) == 1


def test_closing_cancels_what_is_outstanding(engine, tmp_path):
    asked = []

    def tasks():
        for position in range(50):
            asked.append(position)
            yield clean_task(position, 4.0)

    results = engine(Probe(tmp_path).eval(), tasks())
    next(results)
    results.close()
    worked = len(log_of(tmp_path))
    assert worked <= len(asked) <= 5
    time.sleep(1.0)  # long enough for two more tasks of 0.4 seconds on each worker
    assert len(log_of(tmp_path)) <= worked + 1


def test_a_batch_that_kills_every_worker_ends_with_an_error(engine):
    class Deadly(nn.Module):
        def forward(self, x):
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RETRIES", 0)
        with pytest.raises(hf.HoldfastError, match=r"batch that starts at input 17 .*smaller batch_size"):
            list(engine(Deadly().eval(), [clean_task(17, 0.1)]))


def test_a_worker_with_other_versions_is_refused(engine, monkeypatch):
    model = small_model()
    monkeypatch.setattr(module, "_versions", lambda: {"holdfast": "0", "torch": "0"})
    with pytest.raises(hf.UnsupportedError, match=r"a worker has .* install the same"):
        list(engine(model, mixed_tasks(model, 1)))


def test_what_the_cluster_does_not_have_is_said(engine, monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", dict)
    with pytest.raises(hf.UnsupportedError, match="has no CPU"):
        list(engine(small_model(), mixed_tasks(small_model(), 1)))


def test_a_second_engine_shares_the_cluster_and_leaves_it_running(engine):
    model = small_model()
    tasks = list(mixed_tasks(model, 1))
    second = ray_engine(workers=1)
    assert summary(second(model, tasks)) == summary(local(model, tasks))
    del second
    assert ray.is_initialized()
    assert summary(engine(model, tasks)) == summary(local(model, tasks))


def test_ray_that_is_missing_or_asked_for_nonsense(monkeypatch):
    with pytest.raises(hf.InputError, match="workers must be at least 1, got 0"):
        ray_engine(workers=0)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(hf.UnsupportedError, match=r"pip install 'holdfast\[ray\]'"):
        ray_engine()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_a_cluster_that_cannot_be_reached(monkeypatch, address):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(hf.InputError, match=f"cannot join a Ray cluster at '{address}'"):
        ray_engine(address)


def test_the_connection_ends_with_the_last_use(monkeypatch):
    """Without a real cluster: what is asked of Ray, and when."""
    calls = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(options["address"]))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    engine = ray_engine()
    results = engine(small_model(), [])
    del engine
    assert calls == ["local"]  # the results are still to come
    del results
    assert calls == ["local", "shutdown"]
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    ray_engine()
    ray_engine("local")
    assert calls[2:] == ["auto", "shutdown", "local", "shutdown"]


JOIN = """
import sys, torch
from holdfast.audits.ray_engine import ray_engine
from holdfast.audits.task import Task
task = Task("clean", "", {}, 0, None, torch.tensor([3]), torch.ones(1, 2), torch.tensor([1]))
model = torch.nn.Linear(2, 2).eval()
torch.nn.init.eye_(model.weight), torch.nn.init.constant_(model.bias, 0.0)
((_, found),) = ray_engine(sys.argv[1])(model, [task])
print(found.outcomes)
"""


def test_a_cluster_that_was_joined_is_left_running(engine):
    """Another process joins by the address, works, and ends; the workers of this one are still there."""
    address = ray.get_runtime_context().gcs_address
    joined = subprocess.run([sys.executable, "-c", JOIN, address], capture_output=True, text=True, check=False)
    assert "Outcome(position=3, passed=False, prediction=0" in joined.stdout, joined.stderr
    model = small_model()
    tasks = [task for task in mixed_tasks(model, 1) if task.stage == "clean"]
    assert summary(engine(model, tasks)) == summary(local(model, tasks))
