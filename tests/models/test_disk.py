"""Saving and loading: round trips, atomic writes, and refusals that name the thing."""

import json
import os
import pickle
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import holdfast
from holdfast.errors import InputError, StorageError
from holdfast.models import disk as files
from holdfast.models import get_architecture, load_model, make_model, read_metadata, save_model

SMALL = {"input_shape": (1, 8, 12), "classes": 3, "seed": 0}


def small_model(**options: object) -> nn.Module:
    return make_model("cnn-2layer", **{**SMALL, **options}).eval()


def assert_same(a: nn.Module, b: nn.Module) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert list(first) == list(second)
    assert all(torch.equal(first[k], second[k]) and first[k].dtype == second[k].dtype for k in first)


def is_plain(model: nn.Module) -> bool:
    return all(t.device.type == "cpu" for t in model.state_dict().values()) and not model.training


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cnn-2layer", {"input_shape": (3, 8, 12), "normalize": ((0.1, 0.2, 0.3), 0.5), "activation": "tanh"}),
        ("mlp", {"input_shape": (2,), "hidden": (4, 3)}),
        ("resnet18", {"channels": (2, 3, 4, 5), "input_shape": (1, 8, 8), "last_batch_norm": True}),
        ("vit-ti", {"dim": 8, "depth": 1, "heads": 2, "mlp_dim": 8, "input_shape": (1, 8, 8), "positions": "sincos"}),
    ],
)
def test_round_trip_rebuilds_the_model(tmp_path: Path, name: str, options: dict) -> None:
    model = make_model(name, seed=1, **options)
    x = torch.rand(4, *options["input_shape"])
    model(x)  # moves the running statistics of batch norms
    path = save_model(model, tmp_path / "m.safetensors", epoch=3)
    loaded = load_model(path)
    assert_same(loaded, model)
    assert is_plain(loaded)
    assert get_architecture(loaded) == get_architecture(model)
    assert all(p.requires_grad for p in loaded.parameters())
    torch.testing.assert_close(loaded(x), model.eval()(x))
    assert read_metadata(path) == {"epoch": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_dtype_survives_and_mode_is_untouched(tmp_path: Path) -> None:
    model = small_model().double().train()
    path = save_model(model, str(tmp_path / "m.safetensors"))
    assert model.training
    assert_same(load_model(str(path)), model)


def test_the_loaded_model_does_not_depend_on_the_file(tmp_path: Path) -> None:
    model = small_model()
    path = save_model(model, tmp_path / "m.safetensors")
    loaded = load_model(path)
    path.write_bytes(b"")
    assert_same(loaded, model)


def test_the_file_says_what_made_it(tmp_path: Path) -> None:
    path = save_model(small_model(), tmp_path / "m.safetensors", recipe="at", eps=0.1)
    with files.safe_open(path, framework="pt") as file:
        record = json.loads(file.metadata()["holdfast"])
    assert record["version"] == holdfast.__version__
    assert record["architecture"][0] == "cnn-2layer"
    assert record["metadata"] == {"recipe": "at", "eps": 0.1}


def test_foreign_module_needs_the_module_back(tmp_path: Path) -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    path = save_model(model, tmp_path / "m.safetensors")
    with pytest.raises(InputError, match="no architecture; build the model and give it as model="):
        load_model(path)
    other_shared = nn.Linear(3, 3)
    other = nn.Sequential(other_shared, nn.ReLU(), other_shared)
    assert load_model(path, other) is other
    assert_same(other, model)
    assert not other.training
    assert read_metadata(path) == {}


def test_plain_safetensors_from_elsewhere(tmp_path: Path) -> None:
    model = small_model()
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    assert_same(load_model(tmp_path / "m.safetensors", small_model(seed=9)), model)
    assert read_metadata(tmp_path / "m.safetensors") == {}


@pytest.mark.parametrize("stage", ["save_file", "replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    path = save_model(small_model(), tmp_path / "m.safetensors")
    before = path.read_bytes()

    def fail(source, target, *rest):
        if stage == "save_file":
            Path(target).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(files if stage == "save_file" else os, stage, fail)
    with pytest.raises(StorageError, match="No space left"):
        save_model(small_model(seed=2), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_save_refuses(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"use '.*m\.safetensors'"):
        save_model(small_model(), tmp_path / "m.pt")
    with pytest.raises(InputError, match="must be JSON"):
        save_model(small_model(), tmp_path / "m.safetensors", data={1, 2})
    with pytest.raises(InputError, match=r"torch\.nn\.Module, got dict"):
        save_model({}, tmp_path / "m.safetensors")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="holds no state dict"):
        save_model(nn.ReLU(), tmp_path / "m.safetensors")
    with pytest.raises(StorageError, match="Is the folder there"):
        save_model(small_model(), tmp_path / "none" / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_changed_model_is_not_saved_under_its_old_name(tmp_path: Path) -> None:
    model = small_model()
    model[-1] = nn.Linear(256, 7)
    with pytest.raises(InputError, match="it was changed after make_model"):
        save_model(model, tmp_path / "m.safetensors")
    del model.architecture
    save_model(model, tmp_path / "m.safetensors")
    assert load_file(tmp_path / "m.safetensors")["7.weight"].shape == (7, 256)


def test_state_dict_goes_into_a_given_model(tmp_path: Path) -> None:
    model = small_model()
    torch.save(model.state_dict(), tmp_path / "m.pt")
    target = small_model(seed=5).train()
    assert load_model(tmp_path / "m.pt", target) is target
    assert_same(target, model)
    assert is_plain(target)


@pytest.mark.parametrize("suffix", ["pt", "pth"])
def test_checkpoint_with_architecture_rebuilds(tmp_path: Path, suffix: str) -> None:
    model = small_model()
    checkpoint = {"architecture": model.architecture, "state_dict": model.state_dict(), "epoch": 3}
    torch.save(checkpoint, tmp_path / f"m.{suffix}")
    assert_same(load_model(tmp_path / f"m.{suffix}"), model)


class Runs:
    """A pickle that writes a file when it is loaded by an unsafe reader."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def test_pickled_code_is_refused_and_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    torch.save(nn.Linear(2, 2), tmp_path / "whole.pt")
    torch.save({"weight": Runs(trap)}, tmp_path / "evil.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Runs(trap)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(nn.Linear(2, 2), torch.rand(1, 2)).save(tmp_path / "script.pt")
    for name in ("whole", "evil", "plain", "script"):
        with pytest.raises(InputError, match=r"holdfast\.models\.save_model\(model, 'model\.safetensors'\)"):
            load_model(tmp_path / f"{name}.pt", nn.Linear(2, 2))
    assert not trap.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "got list"),
        ({}, "holds no state dict"),
        ({"weight": torch.ones(1), "epoch": 3}, "got a table of 'weight', 'epoch'"),
        ({"architecture": "mlp", "state_dict": {"w": torch.ones(1)}}, r"not a pair \(name, options\)"),
        ({"architecture": ("mpl", {}), "state_dict": {"w": torch.ones(1)}}, "Did you mean 'mlp'"),
        ({"architecture": ("mlp", {"hidden": [[1]]}), "state_dict": {"w": torch.ones(1)}}, "cannot be built"),
        ({"architecture": ("mlp", {"name": "x"}), "state_dict": {"w": torch.ones(1)}}, "cannot be built"),
        ({"state_dict": {"w": torch.ones(1)}}, "no architecture"),
    ],
)
def test_odd_checkpoints_are_refused(tmp_path: Path, content: object, words: str) -> None:
    torch.save(content, tmp_path / "m.pt")
    with pytest.raises(InputError, match=words):
        load_model(tmp_path / "m.pt")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("0.bias"), r"lacks '0\.bias' \(1 missing\)"),
        (lambda s: s.update(extra=torch.ones(1)), r"has 'extra', which the model has not \(1 unknown\)"),
        (lambda s: s.update({"0.bias": torch.ones(9)}), r"'0\.bias' has shape \(9,\), the model needs \(4,\)"),
    ],
)
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_weights_that_do_not_fit_change_nothing(tmp_path: Path, change, words: str, suffix: str) -> None:
    state = dict(small_model().state_dict())
    change(state)
    path = tmp_path / f"m.{suffix}"
    torch.save(state, path) if suffix == "pt" else save_file(state, path)
    target, twin = small_model(seed=7).train(), small_model(seed=7)
    with pytest.raises(InputError, match=words):
        load_model(path, target)
    assert_same(target, twin)
    assert target.training


def test_weights_of_another_recipe_are_refused(tmp_path: Path) -> None:
    path = save_model(small_model(), tmp_path / "m.safetensors")
    # Same keys and shapes, another function: only the recipe tells them apart.
    with pytest.raises(InputError, match=r"'activation': 'relu'.*'activation': 'tanh'"):
        load_model(path, small_model(activation="tanh"))


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "m.onnx"])
def test_missing_and_damaged_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError, match="there is no model file"):
        load_model(tmp_path / name)
    for content in (b"", b"hello world" * 10, b"\x80" * 64):
        (tmp_path / name).write_bytes(content)
        with pytest.raises((StorageError, InputError), match=name):
            load_model(tmp_path / name)


@given(st.data())
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_truncated_files_are_storage_errors(tmp_path: Path, data: st.DataObject) -> None:
    model = small_model()
    whole = {"pt": tmp_path / "whole.pt", "safetensors": tmp_path / "whole.safetensors"}
    torch.save(model.state_dict(), whole["pt"])
    save_model(model, whole["safetensors"])
    suffix = data.draw(st.sampled_from(["pt", "safetensors"]))
    content = whole[suffix].read_bytes()
    path = tmp_path / f"cut.{suffix}"
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(StorageError, match="damaged"):
        load_model(path, small_model(seed=3))


@pytest.mark.parametrize("record", ["{", "[1]"])
def test_damaged_record(tmp_path: Path, record: str) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "m.safetensors", {"holdfast": record})
    with pytest.raises(StorageError, match="damaged"):
        load_model(tmp_path / "m.safetensors")


def test_other_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"ends in \.safetensors, \.pt, \.pth, \.onnx"):
        load_model(tmp_path / "m.h5")
    with pytest.raises(StorageError, match="no model file"):
        read_metadata(tmp_path / "m.safetensors")
    (tmp_path / "m.onnx").write_bytes(b"")
    with pytest.raises(InputError, match="without model="):
        load_model(tmp_path / "m.onnx", nn.Linear(1, 1))
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "holdfast.models.onnx.convert", raising=False)
    with pytest.raises(InputError, match=r"pip install 'holdfast\[onnx\]'"):
        load_model(tmp_path / "m.onnx")
