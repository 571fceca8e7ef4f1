"""Compact files: the same network bit for bit, in few bytes; cut and changed files are refused."""

import json

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.errors import HoldfastError, InputError, StorageError
from holdfast.models import load_model, make_model, read_metadata
from holdfast.models.compact import save_compact
from holdfast.models.masked import binary_connect, masked, patterns, pruned

X = torch.rand(8, 1, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    network = masked(make_model("mlp", hidden=(64, 64), seed=0), rate=0.99, seed=0).train()
    for _ in range(3):
        network(X)
    return network.eval()


@pytest.fixture
def file(model, tmp_path):
    return save_compact(model, tmp_path / "small.safetensors", note="kept").path


def test_a_compact_file_gives_the_same_logits_bit_for_bit(model, tmp_path):
    found = save_compact(model, tmp_path / "small.safetensors", note="kept")
    again = load_model(found.path)
    assert torch.equal(again(X), model(X))
    assert torch.equal(again(X), pruned(model)(X))
    assert read_metadata(found.path) == {"note": "kept"}
    assert found.kept == sum(int(pattern.sum()) for pattern in patterns(model).values())
    assert found.weights == 784 * 64 + 64 * 64 + 640
    assert found.size == found.path.stat().st_size
    packed = sum(size for size, _ in found.tensors.values())
    assert 8 * packed / found.kept < 10  # a sign, and 8.1 bits of place at 1 %
    assert found.ratio > 30
    assert hf.certify(again, X[:2], again(X[:2]).argmax(1), "linf:0.0001").certified.dtype == torch.bool


@pytest.mark.parametrize("make", [lambda m: masked(m, rate=0.9, weights="kaiming-normal", seed=0), binary_connect])
def test_real_and_dense_binary_weights_come_back_too(make, tmp_path):
    network = make(make_model("lenet", seed=0)).eval()
    found = save_compact(network, tmp_path / "small.safetensors")
    assert torch.equal(load_model(found.path)(X), network(X))
    assert found.ratio > 4


def test_a_model_of_ones_own_is_loaded_into_its_plain_form(tmp_path):
    def own():
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

    network = masked(own(), rate=0.9, seed=0).eval()
    path = save_compact(network, tmp_path / "own.safetensors").path
    for given in (own(), pruned(masked(own(), rate=0.9, seed=0))):
        assert torch.equal(load_model(path, given)(X), network(X))
    with pytest.raises(InputError, match="no architecture"):
        load_model(path)


def test_cut_files_are_refused(file):
    content = file.read_bytes()
    for length in (0, 7, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(StorageError, match="damaged"):
            load_model(file)


def test_a_changed_bit_is_noticed(file):
    content = bytearray(file.read_bytes())
    for place in range(8 + int.from_bytes(content[:8], "little"), len(content), 100):
        content[place] ^= 4
        file.write_bytes(content)
        with pytest.raises(StorageError, match="checksum"):
            load_model(file)
        content[place] ^= 4


def rewritten(file, change):
    """The file with another record of packed tensors."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    record = json.loads(header["__metadata__"]["holdfast"])
    change(record["packed"])
    header["__metadata__"]["holdfast"] = json.dumps(record)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def first(record):
    return record["tensors"]["0.1.weight"]


@pytest.mark.parametrize(
    "change",
    [
        lambda record: first(record).update(shape=[2**40, 2**20]),
        lambda record: first(record).update(shape=[-1, 784]),
        lambda record: first(record).update(shape="large"),
        lambda record: first(record).update(dtype="save"),
        lambda record: first(record).update(kept=5),
        lambda record: first(record).update(code={"k": 60, "unary": 3}),
        lambda record: first(record).pop("kept"),
        lambda record: record["tensors"].clear(),
        lambda record: record.update(tensors=[1]),
        lambda record: record.update(checksum=1),
    ],
)
def test_records_that_lie_are_refused(file, change):
    rewritten(file, change)
    with pytest.raises(HoldfastError):
        load_model(file)


def test_a_dense_model_has_nothing_to_pack(tmp_path):
    with pytest.raises(InputError, match="no weight of the model can be packed"):
        save_compact(make_model("mlp", seed=0), tmp_path / "dense.safetensors")
    assert not list(tmp_path.iterdir())
