"""Formats that hold plain arrays: idx, npz, mat."""

import contextlib
import gzip
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.data import load_data
from holdfast.data.svhn import read_mat
from holdfast.errors import HoldfastError, InputError, StorageError

RNG = np.random.default_rng(3)
WriteIdx = Callable[..., dict[str, np.ndarray]]
ANY_DAMAGE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("gz", [True, False])
def test_idx_folder(tmp_path: Path, write_idx: WriteIdx, gz: bool) -> None:
    arrays = write_idx(tmp_path / "mine", gz=gz)
    data = load_data(tmp_path / "mine")
    assert data.name == "mine"
    assert data.train.x.shape == (5, 1, 6, 4)
    assert torch.equal((data.test.x[:, 0] * 255).round().byte(), torch.from_numpy(arrays["t10k-images-idx3-ubyte"]))
    assert data.train.y.tolist() == [0, 1, 2, 9, 4]
    assert len(data.classes) == 10


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], "announces 120 values"),
        (lambda content: content + b"x", "holds 121"),
        (lambda content: b"\x00\x00\x0d\x03" + content[4:], "begins with 00 00 0d 03"),
        (lambda content: b"", "begins with nothing"),
        (lambda content: content[:9], "begins with 00 00 08 03"),
    ],
)
def test_damaged_idx_is_refused(
    tmp_path: Path, write_idx: WriteIdx, damage: Callable[[bytes], bytes], message: str
) -> None:
    write_idx(tmp_path, gz=False)
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(StorageError, match=message) as caught:
        load_data(tmp_path)
    assert "train-images-idx3-ubyte" in str(caught.value)


@pytest.mark.parametrize("content", [b"not gzip", gzip.compress(bytes(500), mtime=0)[:-9]], ids=["text", "cut"])
def test_damaged_gzip_is_refused(tmp_path: Path, write_idx: WriteIdx, content: bytes) -> None:
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(content)
    with pytest.raises(StorageError, match=r"t10k-labels-idx1-ubyte\.gz.*Get the file again"):
        load_data(tmp_path)


def test_idx_label_beyond_the_named_classes(tmp_path: Path, write_idx: WriteIdx) -> None:
    arrays = write_idx(tmp_path / "mnist", gz=False)
    labels = tmp_path / "mnist" / "train-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1] + b"\x0b")
    assert len(arrays["train-labels-idx1-ubyte"]) == 5
    with pytest.raises(InputError, match="label 11 of input 4 is outside the classes 0 to 9"):
        load_data("mnist", root=tmp_path)


def npz(path: Path, **changes: np.ndarray | None) -> Path:
    arrays = {
        "x_train": RNG.integers(0, 256, (4, 3, 6, 5), dtype=np.uint8),
        "y_train": np.array([0, 1, 1, 0]),
        "x_test": RNG.integers(0, 256, (2, 3, 6, 5), dtype=np.uint8),
        "y_test": np.array([1, 2]),
    }
    np.savez(path, **{key: array for key, array in (arrays | changes).items() if array is not None})
    return path


def test_npz_layouts_agree(tmp_path: Path) -> None:
    x = RNG.integers(0, 256, (4, 3, 6, 5), dtype=np.uint8)
    test = x[:2]
    first = load_data(npz(tmp_path / "a.npz", x_train=x, x_test=test))
    last = load_data(npz(tmp_path / "b.npz", x_train=x.transpose(0, 2, 3, 1), x_test=test.transpose(0, 2, 3, 1)))
    floats = load_data(npz(tmp_path / "c.npz", x_train=x / 255, x_test=test / 255))
    assert first.train.x.shape == (4, 3, 6, 5)
    assert torch.equal(first.train.x, last.train.x)
    assert torch.allclose(first.train.x, floats.train.x, atol=1e-7)
    assert first.name == "a"
    assert first.classes == ("0", "1", "2")


def test_npz_grey_and_points(tmp_path: Path) -> None:
    grey = load_data(npz(tmp_path / "g.npz", x_train=np.zeros((4, 6, 5)), x_test=np.zeros((2, 6, 5))))
    points = load_data(npz(tmp_path / "p.npz", x_train=np.zeros((4, 7)), x_test=np.zeros((2, 7))))
    assert grey.train.x.shape == (4, 1, 6, 5)
    assert points.test.x.shape == (2, 7)


def test_npz_layout_must_be_said_where_it_is_not_plain(tmp_path: Path) -> None:
    odd = {"x_train": np.zeros((4, 3, 6, 3)), "x_test": np.zeros((2, 3, 6, 3))}
    with pytest.raises(InputError, match="where the channels are"):
        load_data(npz(tmp_path / "a.npz", **odd))
    assert load_data(npz(tmp_path / "b.npz", layout=np.array("NCHW"), **odd)).train.x.shape == (4, 3, 6, 3)
    assert load_data(npz(tmp_path / "c.npz", layout=np.array("NHWC"), **odd)).train.x.shape == (4, 3, 3, 6)
    with pytest.raises(InputError, match="got 'HWCN'"):
        load_data(npz(tmp_path / "d.npz", layout=np.array("HWCN"), **odd))


def test_npz_boxes_and_classes(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", boxes_test=np.array([[0, 0, 5, 6], [1, 2, 3, 4]]), classes=np.array(["a", "b", "c"]))
    data = load_data(path)
    assert data.train.boxes is None
    assert data.test.boxes is not None
    assert data.test.boxes.tolist() == [[0, 0, 5, 6], [1, 2, 3, 4]]
    assert data.classes == ("a", "b", "c")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "no array 'y_test'; expected x_train, .*, or x and y, found x_train, y_train, x_test"),
        ({"x_train": np.full((4, 3, 6, 5), np.nan)}, "train split: input 0 holds NaN"),
        ({"y_test": np.array([1])}, "test split: y must have shape"),
        ({"x_train": np.zeros((4, 2, 3, 6, 5))}, "x_train must have shape"),
        ({"classes": np.array(["a", "b"])}, "test split: label 2 of input 1 is outside the classes 0 to 1"),
        ({"classes": np.array([1, 2, 3])}, "classes must be a one-dimensional array of strings"),
    ],
)
def test_bad_npz_is_refused(tmp_path: Path, changes: dict[str, np.ndarray | None], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_data(npz(tmp_path / "bad.npz", **changes))
    assert "bad.npz" in str(caught.value)


def test_npz_without_splits_is_told_which_of_x_and_y_it_lacks(tmp_path: Path) -> None:
    np.savez(tmp_path / "bare.npz", x=np.zeros((4, 1, 6, 5)))
    with pytest.raises(InputError, match=r"bare\.npz' has no array 'y'; expected .*, or x and y, found x$"):
        load_data(tmp_path / "bare.npz")


def test_npz_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    path = npz(tmp_path / "objects.npz", y_train=np.array([0, 1, None, 0], dtype=object))
    with pytest.raises(StorageError, match=r"objects\.npz.*allow_pickle"):
        load_data(path)


def test_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(StorageError, match=r"cannot read .*text\.npz"):
        load_data(tmp_path / "text.npz")
    with (tmp_path / "single.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(InputError, match="holds a single array"):
        load_data(tmp_path / "single.npz")


@ANY_DAMAGE
@given(data=st.data())
def test_damaged_npz_never_raises_a_foreign_error(tmp_path: Path, data: st.DataObject) -> None:
    path = npz(tmp_path / "fuzz.npz")
    damage(path, data)


def svhn(folder: Path) -> dict[str, np.ndarray]:
    arrays = {}
    for name, count in (("train", 4), ("test", 2)):
        arrays[name] = RNG.integers(0, 256, (6, 5, 3, count), dtype=np.uint8)
        y = np.array([[10], [1], [9], [10]], dtype=np.uint8)[:count]
        scipy.io.savemat(folder / f"{name}_32x32.mat", {"X": arrays[name], "y": y})
    return arrays


def test_svhn_folder_or_either_file(tmp_path: Path) -> None:
    arrays = svhn(tmp_path)
    data = load_data(tmp_path)
    assert data.train.x.shape == (4, 3, 6, 5)
    assert data.train.x[2, 1, 3, 4].item() == pytest.approx(arrays["train"][3, 4, 1, 2] / 255)
    assert data.train.y.tolist() == [0, 1, 9, 0]
    assert len(data.classes) == 10
    assert torch.equal(load_data(tmp_path / "test_32x32.mat").test.x, data.test.x)
    assert load_data("svhn", root=tmp_path).name == "svhn"


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"])
def test_mat_reader_agrees_with_the_writer(dtype: str, compressed: bool) -> None:
    written = {"a": RNG.integers(0, 100, (3, 4, 5)).astype(dtype), "long_name_b": np.array([[1], [2]], dtype=dtype)}
    others = {"text": "hello", "cell": np.array([1, "x"], dtype=object), "z": np.array([[1j]]), "s": {"f": 1}}
    file = io.BytesIO()
    scipy.io.savemat(file, written | others, do_compression=compressed)
    read = read_mat(file.getvalue())
    assert read.keys() == written.keys()
    for name, array in written.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def test_short_element_longer_than_four_bytes_is_refused(tmp_path: Path) -> None:
    svhn(tmp_path)
    file = tmp_path / "train_32x32.mat"
    content = bytearray(file.read_bytes())
    content[130] = 9
    file.write_bytes(bytes(content))
    with pytest.raises(StorageError, match="short element of 9 bytes"):
        load_data(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"X": np.zeros((6, 5, 3, 2), dtype=np.uint8)}, "no numeric array 'y'"),
        ({"X": [[1]], "y": [[1]]}, r"\(H, W, C, N\)"),
    ],
)
def test_svhn_with_wrong_variables_is_refused(tmp_path: Path, content: dict[str, object], message: str) -> None:
    svhn(tmp_path)
    scipy.io.savemat(tmp_path / "test_32x32.mat", content)
    with pytest.raises(InputError, match=message):
        load_data(tmp_path)


def test_svhn_without_its_twin_is_refused(tmp_path: Path) -> None:
    svhn(tmp_path)
    (tmp_path / "test_32x32.mat").unlink()
    with pytest.raises(StorageError, match=r"no file .*test_32x32\.mat"):
        load_data(tmp_path / "train_32x32.mat")


def test_truncated_mat_is_refused(tmp_path: Path) -> None:
    svhn(tmp_path)
    file = tmp_path / "train_32x32.mat"
    for length in (0, 50, 200, len(file.read_bytes()) - 5):
        file.write_bytes(file.read_bytes()[:length])
        with pytest.raises(StorageError, match=r"cannot read .*train_32x32\.mat"):
            load_data(tmp_path)
        svhn(tmp_path)


@ANY_DAMAGE
@given(data=st.data())
def test_damaged_mat_never_raises_a_foreign_error(tmp_path: Path, data: st.DataObject) -> None:
    svhn(tmp_path)
    damage(tmp_path / "train_32x32.mat", data)


def damage(path: Path, data: st.DataObject) -> None:
    """Overwrite a few bytes: the file loads, or one of our errors says why not."""
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    with contextlib.suppress(HoldfastError):
        assert len(load_data(path).train) > 0
