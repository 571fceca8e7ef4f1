"""The same content gives the same bytes: models, and the tables beside them, in any process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import holdfast as hf
from audit_makers import make
from holdfast.audits.plan import Step
from holdfast.utils.files import write_json

SCRIPT = """
import sys
from pathlib import Path
import torch
import holdfast as hf
from holdfast.data import Dataset, Split

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.rand(60, 1, 4, 3)
y = (x.mean((1, 2, 3)) > 0.5).long()
data = Dataset("toy", Split(x[:40], y[:40]), Split(x[40:], y[40:]), ("dark", "light"))
recipe = {
    "name": "toy", "threat": "linf:0.02", "epochs": 3, "batch_size": 16, "validation": 0.2,
    "model": {"name": "small-star", "layers": [[4, 3, 1, 1]], "hidden": [6], "normalize": [[0.5], 0.25]},
    "objective": {"name": "at"}, "attack": {"name": "pgd", "steps": 2},
    "optimizer": {"name": "sgd", "lr": 0.1}, "evaluate": {"attack_steps": 2},
}
folder, kind = Path(sys.argv[1]), sys.argv[2]
if kind == "resumed":
    hf.train({**recipe, "epochs": 1}, data=data, out=folder, progress=False)
    hf.train(recipe, data=data, out=folder, resume=True, progress=False)
else:
    hf.train(recipe, data=data, out=folder, progress=False)
"""


def test_a_resumed_training_writes_the_bytes_of_an_uninterrupted_one(tmp_path):
    """In processes whose hashes differ: sets and the tables of other languages come in another order there."""
    kinds = {"whole": "1", "resumed": "2"}
    for kind, seed in kinds.items():
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / kind), kind]
        subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True)
    for name in ("model.safetensors", "run.json", "recipe.toml"):
        contents = {(tmp_path / kind / name).read_bytes() for kind in kinds}
        assert len(contents) == 1, name
    # Two processes may agree by chance; the order is the sorted one.
    assert all(list(metadata_of(tmp_path / kind / "model.safetensors")) == ["format", "holdfast"] for kind in kinds)


def metadata_of(path):
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]


class Two(nn.Module):
    """Two layers, in the order given."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, 3))
        for i, parameter in enumerate(sorted(dict(self.named_parameters()))):
            nn.init.constant_(self.get_parameter(parameter), float(i))


def test_state_dicts_in_another_order_are_saved_as_the_same_bytes(tmp_path):
    first, second = Two(["one", "two"]), Two(["two", "one"])
    assert list(first.state_dict()) != list(second.state_dict())
    a = hf.save_model(first, tmp_path / "a.safetensors", epoch=1, data={"name": "x", "seed": 0})
    b = hf.save_model(second, tmp_path / "b.safetensors", data={"seed": 0, "name": "x"}, epoch=1)
    assert a.read_bytes() == b.read_bytes()


def test_saving_again_changes_no_byte(tmp_path):
    """The header of safetensors holds its metadata in an order that changes from call to call."""
    model = hf.make_model("small-star", seed=0)
    contents = set()
    for i in range(20):
        contents.add(hf.save_model(model, tmp_path / f"{i}.safetensors", a=1, b="ü\n\\x7f").read_bytes())
    assert len(contents) == 1
    loaded = hf.load_model(tmp_path / "0.safetensors")
    assert hf.save_model(loaded, tmp_path / "l.safetensors", b="ü\n\\x7f", a=1).read_bytes() in contents


def test_the_header_is_sorted_and_still_one_of_safetensors(tmp_path):
    from safetensors.torch import load_file

    model = Two(["one", "two"]).half()
    model.register_buffer('äöü"\\', torch.arange(3))
    path = hf.save_model(model, tmp_path / "m.safetensors", note="ü\u2028\x01\x7f")
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert list(header) == sorted(header)
    assert list(metadata_of(path)) == ["format", "holdfast"]
    read = load_file(path)
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())


def test_tables_in_another_order_are_written_as_the_same_bytes(tmp_path):
    one, other = {"a": 1, "b": {"c": 2, "d": [3]}}, {"b": {"d": [3], "c": 2}, "a": 1}
    write_json(tmp_path / "one.json", one)
    write_json(tmp_path / "other.json", other)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "other.json").read_bytes()
    options = {"steps": 3, "loss": "margin"}
    steps = [Step("attack", "pgd", found) for found in (options, dict(reversed(options.items())))]
    assert json.dumps(steps[0].to_dict()) == json.dumps(steps[1].to_dict())


def test_an_audit_that_is_read_and_written_again_keeps_its_bytes(tmp_path):
    audit = make(groups={"site": tuple("abcdefghij"), "age": tuple("0123456789")})
    audit.save(tmp_path / "a")
    from holdfast.audits import load_audit

    load_audit(tmp_path / "a").save(tmp_path / "b")
    for name in ("audit.json", "report.html", "model-card.md", "results.csv", "badge.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_nothing_is_left_beside_the_model(tmp_path):
    hf.save_model(hf.make_model("linear", seed=0), tmp_path / "m.safetensors")
    assert [path.name for path in Path(tmp_path).iterdir()] == ["m.safetensors"]
