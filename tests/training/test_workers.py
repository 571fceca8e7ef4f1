"""Two processes on the loopback give the run of one: same batches, same attacks, same averages."""

import json
import os
import runpy
import socket
import subprocess
import sys

import pytest
import torch
from torch import nn

from holdfast import InputError
from holdfast.data import Dataset, Split
from holdfast.training import train
from holdfast.training.workers import Workers

SCRIPT = """
import sys
import torch
from torch import nn
from holdfast.data import Dataset, Split
from holdfast.training import train

def run(out, **options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2))
    saved = torch.load(sys.argv[1] + "/data.pt", weights_only=True)
    split = Split(saved["x"], saved["y"])
    return train(sys.argv[1] + "/run.toml", model, Dataset("toy", split, split, ("a", "b")), out=out, **options)

if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[3:] == ["whole"]:
        run(sys.argv[2])
    else:
        run(sys.argv[2], epochs=2)
        run(sys.argv[2], resume=True)
"""

# 61 inputs in batches of 20: the last batch has a single one, and the second process none of it.
RECIPE = """
threat = "linf:0.05"
epochs = 3
batch_size = 20
validation = 0
[objective]
name = "at"
[attack]
name = "pgd"
steps = 2
[optimizer]
lr = 0.2
clip_norm = 1.0
[augment]
crop = 1
[average]
name = "ema"
decay = 0.9
"""


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@pytest.fixture
def problem(toy_data, tmp_path):
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "script.py").write_text(SCRIPT)
    torch.save({"x": toy_data.train.x[:61], "y": toy_data.train.y[:61]}, tmp_path / "data.pt")
    return tmp_path


def launch(problem, out, *words, processes):
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_addr=127.0.0.1"]
    launcher.append(f"--master_port={free_port()}")
    command = [sys.executable, *launcher, str(problem / "script.py"), str(problem), str(out), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out / "checkpoints" / "last.pt", weights_only=True)


def test_two_processes_give_the_run_of_one(problem, monkeypatch):
    two = launch(problem, problem / "two", processes=2)
    monkeypatch.setattr(sys, "argv", ["script.py", str(problem), str(problem / "one")])
    runpy.run_path(str(problem / "script.py"), run_name="__main__")
    one = torch.load(problem / "one" / "checkpoints" / "last.pt", weights_only=True)
    assert len(two["history"]) == 3
    for row_one, row_two in zip(one["history"], two["history"], strict=True):
        assert row_two["train_loss"] == pytest.approx(row_one["train_loss"], abs=1e-5)
        assert row_two["train_accuracy"] == pytest.approx(row_one["train_accuracy"], abs=1e-5)
        assert row_two["gradient_norm"] == pytest.approx(row_one["gradient_norm"], abs=1e-4)
    for key, value in one["model"].items():
        assert torch.allclose(value, two["model"][key], atol=1e-5)
    assert json.loads((problem / "two" / "run.json").read_text())["processes"] == 2
    saved = torch.load(problem / "data.pt", weights_only=True)
    split = Split(saved["x"], saved["y"])
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2))
    data = Dataset("toy", split, split, ("a", "b"))
    with pytest.raises(InputError, match="saved by 2 processes and cannot be resumed by 1"):
        train(problem / "run.toml", model, data, out=problem / "two", resume=True)


@pytest.mark.parametrize("patterns", ["3", '"per-slot"'])
def test_two_processes_share_universal_patterns(patterns, problem, monkeypatch):
    """As one process up to the order of sums; interrupted and resumed, the same bits as without interruption."""
    objective = f'name = "upat"\npatterns = {patterns}\n'
    text = RECIPE.replace('name = "at"\n[attack]\nname = "pgd"\nsteps = 2\n', objective).replace(
        'threat = "linf:0.05"', ""
    )
    (problem / "run.toml").write_text(text)
    resumed = launch(problem, problem / "two", processes=2)
    if patterns == "3":
        whole = launch(problem, problem / "whole", "whole", processes=2)
        assert resumed["objective"].keys() == whole["objective"].keys() >= {"pyramid_1"}
        for part in ("model", "objective"):
            assert all(torch.equal(value, whole[part][key]) for key, value in resumed[part].items())
    monkeypatch.setattr(sys, "argv", ["script.py", str(problem), str(problem / "one")])
    runpy.run_path(str(problem / "script.py"), run_name="__main__")
    one = torch.load(problem / "one" / "checkpoints" / "last.pt", weights_only=True)
    assert one["objective"]["pyramid_1"].shape == (3 if patterns == "3" else 20, 1, 5, 4)
    assert one["objective"]["pyramid_1"].abs().max() > 0
    assert torch.allclose(one["objective"]["pyramid_1"], resumed["objective"]["pyramid_1"], atol=1e-6)
    for key, value in one["model"].items():
        assert torch.allclose(value, resumed["model"][key], atol=1e-5)


def test_shares_cover_the_batch_with_weights_that_add_up():
    for size in (1, 2, 3, 7):
        batch = torch.arange(size) + 10
        shares = [Workers(rank, 3).share(batch) for rank in range(3)]
        assert sum(fraction for _, fraction in shares) == pytest.approx(1)
        used = torch.cat([index for index, fraction in shares if fraction > 0])
        assert sorted(used.tolist()) == batch.tolist()
        assert all(len(index) > 0 for index, _ in shares)
