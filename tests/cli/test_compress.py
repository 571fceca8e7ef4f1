"""`holdfast compress` and `holdfast analyze subnetwork`."""

import json

import pytest
import torch

from holdfast.models import load_model, make_model, save_model
from holdfast.models.masked import masked
from holdfast.models.own import build_own


@pytest.fixture
def run(tmp_path):
    """The folder of a training that left a sub-network."""
    folder = tmp_path / "run"
    folder.mkdir()
    save_model(masked(make_model("lenet", seed=0), rate=0.95, gamma=0.0, seed=0), folder / "model.safetensors")
    return folder


X = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def test_a_run_becomes_a_compact_file_that_other_commands_take(command, run):
    shown = command("compress", run, "--onnx", run / "model.onnx")
    compact = run / "model.compact.safetensors"
    size = compact.stat().st_size
    assert f"{size:,} bytes instead of" in shown
    assert "2,209 of 44,190 weights (5.00%)" in shown
    model = load_model(run / "model.safetensors")
    assert torch.equal(load_model(compact)(X), model(X))
    assert torch.allclose(load_model(run / "model.onnx")(X), model(X), atol=1e-4)
    proofs = [
        command("certify", path, "--threat", "linf:0.001", "-n", 20, "--method", "ibp")
        for path in (compact, run / "model.safetensors")
    ]
    assert proofs[0].splitlines()[0] == proofs[1].splitlines()[0]
    assert 10 * size < sum(t.numel() * 4 for t in model.state_dict().values())


def test_bad_input_is_named(refused, run, tmp_path):
    assert "no finished model in the folder" in refused("compress", tmp_path)
    dense = tmp_path / "dense.safetensors"
    save_model(make_model("lenet", seed=0), dense)
    assert "no weight of the model can be packed" in refused("compress", dense)
    target = tmp_path / "there.safetensors"
    target.write_bytes(b"")
    assert "exists already" in refused("compress", run, "--out", target)
    target.write_bytes((run / "model.safetensors").read_bytes()[:-10])
    assert "is damaged" in refused("compress", target)


def test_the_pattern_of_a_sub_network_is_shown_and_drawn(command, run, tmp_path):
    shown = command(
        "analyze", "subnetwork", run / "model.safetensors", "--pictures", "seen", "--out", "p.json", "--draws", 3
    )
    rows = {row["layer"]: row for row in json.loads((tmp_path / "p.json").read_text())}
    assert sum(row["kept"] for row in rows.values()) == 2209
    assert rows["0.0"]["kept"] == rows["0.0"]["weights"] == 150
    assert "of a pass backward (counted, not timed)" in shown
    names = {path.name for path in (tmp_path / "seen").iterdir()}
    assert {"mask-0.3.png", "channels-0.3.svg", "mask-0.11.png"} <= names


OWN = """
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 5, stride=4), nn.Linear(144, 10)

    def forward(self, x):
        return self.head(self.conv(x).relu().flatten(1))
"""


def test_a_sub_network_of_ones_own_class_is_trained_compressed_and_certified(command, refused, tmp_path):
    (tmp_path / "mynet.py").write_text(OWN)
    own = ("--architecture", "mynet.py:Own")
    save_model(load_own(tmp_path), tmp_path / "start.safetensors")
    few = ("--set", "epochs=1", "--set", "validation=0.98", "--set", "evaluate.attack_steps=0")
    command(
        *("train", "mnist-mini-subnet", "--model", "start.safetensors", *own, *few, "--set", "prune.rate=0.8"),
        *("--out", "run", "-q"),
    )
    assert "holds weights but no architecture; give --architecture" in refused("compress", "run")
    assert "308 of 1,540 weights (20.00%)" in command("compress", "run", *own)
    ours, compact = (
        load_model(tmp_path / "run" / name, load_own(tmp_path))
        for name in ("model.safetensors", "model.compact.safetensors")
    )
    assert torch.equal(ours.eval()(X), compact(X))
    assert "certified" in command(
        "certify", "run/model.compact.safetensors", *own, "--threat", "linf:0.001", "-n", 5, "--method", "ibp"
    )


def load_own(folder):
    return build_own(f"{folder / 'mynet.py'}:Own")
