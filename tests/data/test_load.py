from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.data import cache_root, list_data, load_data
from holdfast.errors import InputError, StorageError

WriteIdx = Callable[..., dict[str, np.ndarray]]


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100", "svhn"])
def test_missing_set_says_how_to_get_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"holdfast data get {name}` to download it .* MB"):
        load_data(name)
    with pytest.raises(StorageError, match=f"data get {name} --root .*elsewhere"):
        load_data(name, root=tmp_path / "elsewhere")


@pytest.mark.parametrize("place", [".", "mnist", "MNIST/raw"])
def test_named_set_is_found_below_root(tmp_path: Path, write_idx: WriteIdx, place: str) -> None:
    write_idx(tmp_path / place)
    data = load_data("mnist", root=tmp_path)
    assert (data.name, len(data.train), data.classes) == ("mnist", 5, tuple("0123456789"))


def test_named_set_is_found_in_the_cache_and_as_npz(tmp_path: Path, write_idx: WriteIdx) -> None:
    write_idx(tmp_path / "cache" / "fashion-mnist")
    fashion = load_data("fashion-mnist")
    assert fashion.classes[9] == "Ankle boot"
    x, y = np.zeros((2, 3, 4, 6), dtype=np.uint8), np.array([1, 9])
    np.savez(tmp_path / "cifar10.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert load_data("cifar10", root=tmp_path).classes[9] == "truck"


def test_list_says_what_is_there(tmp_path: Path, write_idx: WriteIdx) -> None:
    def present() -> set[str]:
        return {info.name for info in list_data() if info.present}

    assert [info.name for info in list_data()] == [
        "mnist-mini", "two-moons", "digit-scenes", "mnist", "fashion-mnist", "cifar10", "cifar100", "svhn",
    ]  # fmt: skip
    assert present() == {"mnist-mini", "two-moons", "digit-scenes"}
    write_idx(tmp_path / "cache" / "mnist")
    assert present() == {"mnist-mini", "two-moons", "digit-scenes", "mnist"}
    assert {info.name: info.size for info in list_data()}["mnist"] == 11_594_722
    assert all(info.license and info.summary for info in list_data())


def test_name_wins_over_folder_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_idx: WriteIdx
) -> None:
    write_idx(tmp_path / "mnist-mini")
    monkeypatch.chdir(tmp_path)
    assert len(load_data("mnist-mini").train) == 10_000
    assert len(load_data("./mnist-mini").train) == 5


def test_unknown_names_and_paths(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown data set 'minst'.*Did you mean 'mnist'"):
        load_data("minst")
    with pytest.raises(StorageError, match="no file or folder"):
        load_data(tmp_path / "none.npz")
    (tmp_path / "a.xyz").write_text("")
    with pytest.raises(InputError, match=r"no known format; expected \.npz"):
        load_data(tmp_path / "a.xyz")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mnist-mini", {"n": 3}, "option 'n' is for two-moons"),
        ("cifar10", {"noise": 0.1}, "option 'noise' is for two-moons"),
        ("mnist", {"boxes": "b.csv"}, "option 'boxes' is for a folder of images"),
        ("two-moons", {"test_fraction": 0.1}, "option 'test_fraction' is for a folder of images"),
    ],
)
def test_option_without_meaning_is_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_data(name, **options)


def test_boxes_for_a_published_layout_are_refused(tmp_path: Path, write_idx: WriteIdx) -> None:
    write_idx(tmp_path)
    with pytest.raises(InputError, match="option 'boxes'"):
        load_data(tmp_path, boxes="b.csv")


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "HOME/.cache/holdfast"),
        ("linux", {"XDG_CACHE_HOME": "/x/y"}, "/x/y/holdfast"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "HOME/.cache/holdfast"),
        ("darwin", {"XDG_CACHE_HOME": "/x/y"}, "HOME/Library/Caches/holdfast"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/holdfast/Cache"),
        ("win32", {}, "HOME/AppData/Local/holdfast/Cache"),
        ("linux", {"HOLDFAST_CACHE": "~/mine"}, "HOME/mine"),
        ("darwin", {"HOLDFAST_CACHE": "/mine"}, "/mine"),
    ],
)
def test_cache_folder_follows_the_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, variables: dict[str, str], expected: str
) -> None:
    for name in ("HOLDFAST_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", platform)
    assert cache_root().as_posix() == expected.replace("HOME", tmp_path.as_posix())
    assert cache_root(tmp_path / "root") == tmp_path / "root"


def test_loading_twice_gives_the_same(tmp_path: Path, write_idx: WriteIdx) -> None:
    write_idx(tmp_path)
    first, second = load_data(str(tmp_path)), load_data(str(tmp_path))
    assert torch.equal(first.train.x, second.train.x)
    assert first.train.x.data_ptr() != second.train.x.data_ptr()
