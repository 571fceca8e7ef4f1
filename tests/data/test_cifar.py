"""CIFAR's pickles: read when they hold arrays, refused when they hold anything else."""

import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.data import load_data
from holdfast.data.cifar import read_pickle
from holdfast.errors import HoldfastError, InputError, StorageError

RNG = np.random.default_rng(5)


def python2_text(text: bytes) -> bytes:
    return b"T" + struct.pack("<i", len(text)) + text


def python2_array(array: np.ndarray) -> bytes:
    """What Python 2 writes for a uint8 array: its byte strings have the opcode T, which Python 3 never writes."""
    dtype = (
        b"cnumpy\ndtype\n(" + python2_text(b"u1") + b"K\x00K\x01tR"
        b"(K\x03" + python2_text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    shape = b"(" + b"".join(b"J" + struct.pack("<i", size) for size in array.shape) + b"t"
    return (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + python2_text(b"b") + b"tR"
        b"(K\x01" + shape + dtype + b"\x89" + python2_text(array.tobytes()) + b"tb"
    )


def python2_batch(array: np.ndarray, labels: list[int], label_key: str) -> bytes:
    items = python2_text(b"data") + python2_array(array) + python2_text(label_key.encode())
    items += b"(" + b"".join(b"K" + bytes([label]) for label in labels) + b"l"
    return b"\x80\x02}(" + items + b"u."


def modern_batch(protocol: int) -> Callable[[np.ndarray, list[int], str], bytes]:
    def write(array: np.ndarray, labels: list[int], label_key: str) -> bytes:
        return pickle.dumps({"data": array, label_key: labels}, protocol=protocol)

    return write


WRITERS = {"python2": python2_batch} | {f"protocol{p}": modern_batch(p) for p in (3, 4, 5)}
Writer = Callable[[np.ndarray, list[int], str], bytes]


def cifar(writer: Writer = python2_batch, *, fine: bool = False) -> tuple[dict[str, bytes], np.ndarray]:
    """Files of a set with two images per batch, and the training images (N, 3072)."""
    train = ("train",) if fine else tuple(f"data_batch_{i}" for i in range(1, 6))
    key = "fine_labels" if fine else "labels"
    images = RNG.integers(0, 256, (2 * len(train), 3072), dtype=np.uint8)
    files = {name: writer(images[2 * i : 2 * i + 2], [i, 7], key) for i, name in enumerate(train)}
    files["test" if fine else "test_batch"] = writer(images[:1], [3], key)
    names = [f"name {i}".encode() for i in range(100 if fine else 10)]
    meta = {"fine_label_names" if fine else "label_names": names}
    files["meta" if fine else "batches.meta"] = pickle.dumps(meta, protocol=3)
    return files, images


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"some-folder/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_cifar10_folder(tmp_path: Path, writer: Writer) -> None:
    files, images = cifar(writer)
    write_folder(tmp_path / "cifar-10-batches-py", files)
    for path in (tmp_path, tmp_path / "cifar-10-batches-py"):
        data = load_data(path)
        assert data.train.x.shape == (10, 3, 32, 32)
        assert torch.equal((data.train.x * 255).round().byte().flatten(1), torch.from_numpy(images))
        assert data.train.y.tolist() == [0, 7, 1, 7, 2, 7, 3, 7, 4, 7]
        assert data.test.y.tolist() == [3]
        assert data.classes[9] == "name 9"
    assert load_data("cifar10", root=tmp_path).name == "cifar10"


def test_cifar100_archive(tmp_path: Path) -> None:
    files, images = cifar(fine=True)
    write_tar(tmp_path / "cifar-100-python.tar.gz", files)
    named, direct = load_data("cifar100", root=tmp_path), load_data(tmp_path / "cifar-100-python.tar.gz")
    assert named.train.x.shape == (2, 3, 32, 32)
    assert torch.equal(named.train.x, direct.train.x)
    assert named.train.x[1, 2, 31, 31].item() == pytest.approx(images[1, -1] / 255)
    assert named.classes[99] == direct.classes[99] == "name 99"


def test_folder_of_cifar100_is_told_from_images(tmp_path: Path) -> None:
    write_folder(tmp_path, cifar(fine=True)[0])
    assert len(load_data(tmp_path).classes) == 100


def test_without_meta_the_known_names_are_used(tmp_path: Path) -> None:
    files, _ = cifar()
    del files["batches.meta"]
    write_folder(tmp_path, files)
    assert load_data("cifar10", root=tmp_path).classes[0] == "airplane"
    assert load_data(tmp_path).classes[0] == "0"


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    files, _ = cifar()
    victim = tmp_path / "victim"
    files["data_batch_3"] = pickle.dumps({"data": Exploit(victim)}, protocol=protocol)
    write_folder(tmp_path / "set", files)
    with pytest.raises(InputError, match=r"data_batch_3: refused.*mkdir"):
        load_data(tmp_path / "set")
    assert not victim.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cbuiltins\neval\n(V1+1\ntR.",
        b"c__builtin__\nexec\n(V1\ntR.",
        b"cnumpy\nload\n(Vx\ntR.",
        b"cnumpy.core.multiarray\nfromfile\n(Vx\ntR.",
        b"\x8c\x05numpy\x8c\x0fdtype.__class__\x93.",
        b"Pname\n.",
        pickle.dumps({1, 2}, protocol=2),
    ],
)
def test_forbidden_names(content: bytes) -> None:
    with pytest.raises(InputError, match="refused"):
        read_pickle(content, "file")


def test_stand_ins_cannot_be_changed_by_a_pickle() -> None:
    for content in (b"cnumpy\nndarray\n}Vx\nK\x01sb.", b"cnumpy\ndtype\n(N}Vplain\nK\x01stb."):
        with pytest.raises(StorageError, match="not a readable pickle"):
            read_pickle(content, "file")
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    np.testing.assert_array_equal(read_pickle(pickle.dumps({"a": array}), "file")["a"], array)


@pytest.mark.parametrize("protocol", [3, 5])
@pytest.mark.parametrize("dtype", ["u1", "<i4", ">i8", "f8"])
def test_arrays_come_through(protocol: int, dtype: str) -> None:
    array = np.asfortranarray(np.arange(6, dtype=dtype).reshape(2, 3))
    read = read_pickle(pickle.dumps({b"a": array}, protocol=protocol), "file")["a"]
    np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([None]), np.zeros(1, dtype=[("f", "u1")])])
def test_arrays_of_other_things_are_refused(array: np.ndarray) -> None:
    with pytest.raises(StorageError, match="not a readable pickle"):
        read_pickle(pickle.dumps({"a": array}, protocol=4), "file")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"labels": [1]}, "'data' must be a uint8 array of shape .N, 3072., got NoneType"),
        ({"data": np.zeros((1, 10), dtype=np.uint8), "labels": [1]}, "got uint8 of shape"),
        ({"data": np.zeros((1, 3072)), "labels": [1]}, "got float64"),
        ({"data": np.zeros((1, 3072), dtype=np.uint8), "labels": [1, 2]}, "list of 1 integers"),
        ({"data": np.zeros((1, 3072), dtype=np.uint8), "labels": ["a"]}, "list of 1 integers"),
        ({"data": np.zeros((1, 3072), dtype=np.uint8), "labels": [10]}, "label 10 of input 0"),
        ([1, 2], "expected a pickled dictionary, got list"),
    ],
)
def test_bad_batch_is_refused_by_name(tmp_path: Path, batch: object, message: str) -> None:
    files, _ = cifar()
    files["test_batch"] = pickle.dumps(batch, protocol=3)
    write_folder(tmp_path, files)
    with pytest.raises(InputError, match=f"test_batch: .*{message}"):
        load_data("cifar10", root=tmp_path)


def test_incomplete_and_foreign_archives(tmp_path: Path) -> None:
    files, _ = cifar()
    del files["data_batch_4"]
    write_tar(tmp_path / "a.tar.gz", files)
    with pytest.raises(StorageError, match="no file 'data_batch_4'"):
        load_data(tmp_path / "a.tar.gz")
    write_tar(tmp_path / "b.tar.gz", {"readme": b"hello"})
    with pytest.raises(InputError, match=r"neither CIFAR-10 .* nor CIFAR-100"):
        load_data(tmp_path / "b.tar.gz")
    (tmp_path / "c.tar.gz").write_bytes((tmp_path / "a.tar.gz").read_bytes()[:2000])
    with pytest.raises(StorageError, match=r"cannot read .*c\.tar\.gz"):
        load_data(tmp_path / "c.tar.gz")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    where=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4),
    keep=st.floats(0.1, 1),
    name=st.sampled_from(sorted(WRITERS)),
)
def test_damaged_pickle_never_raises_a_foreign_error(where: list[tuple[float, int]], keep: float, name: str) -> None:
    content = bytearray(WRITERS[name](np.zeros((2, 6), dtype=np.uint8), [1, 2], "labels"))
    for position, value in where:
        content[int(position * len(content))] = value
    try:
        entry = read_pickle(bytes(content[: max(1, int(keep * len(content)))]), "file")
    except HoldfastError:
        return
    assert isinstance(entry, dict)
