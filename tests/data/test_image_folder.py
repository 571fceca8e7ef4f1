import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from holdfast.data import load_data
from holdfast.errors import InputError, StorageError, UnsupportedError

RNG = np.random.default_rng(11)


def image(path: Path, *, size: tuple[int, int] = (5, 7), mode: str = "RGB") -> np.ndarray:
    """Writes random pixels, size (width, height); returns them as (C, H, W)."""
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    pixels = RNG.integers(0, 256, (size[1], size[0], *channels), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """train and test folders with two classes."""
    for part, count in (("train", 3), ("test", 2)):
        for name in ("dog", "cat"):
            for i in range(count):
                image(tmp_path / "pets" / part / name / f"{i}.png")
    return tmp_path / "pets"


def test_train_and_test_folders(pets: Path) -> None:
    pixels = image(pets / "train" / "dog" / "9.PNG")
    (pets / "train" / "dog" / "notes.txt").write_text("not an image")
    (pets / ".hidden").mkdir()
    data = load_data(pets)
    assert (data.name, data.classes) == ("pets", ("cat", "dog"))
    assert data.train.x.shape == (7, 3, 7, 5)
    assert data.train.y.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert torch.equal((data.train.x[-1] * 255).round().byte(), torch.from_numpy(pixels.copy()))
    assert data.test.y.tolist() == [0, 0, 1, 1]


def test_class_folders_alone_are_split_by_seed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for i in range(10):
            image(tmp_path / name / f"{i}.png", mode="L")
    data = load_data(tmp_path, seed=4)
    assert data.train.x.shape == (16, 1, 7, 5)
    assert data.test.y.tolist() == [0, 0, 1, 1]
    assert torch.equal(data.test.x, load_data(tmp_path, seed=4).test.x)
    assert not torch.equal(data.test.x, load_data(tmp_path, seed=5).test.x)
    assert len(load_data(tmp_path, test_fraction=0.5).test) == 10


def test_grey_among_colour_becomes_colour_and_jpeg_is_read(tmp_path: Path) -> None:
    grey = image(tmp_path / "train" / "a" / "0.png", mode="L")
    image(tmp_path / "train" / "a" / "1.jpg")
    image(tmp_path / "test" / "a" / "0.jpeg", mode="L")
    data = load_data(tmp_path)
    assert data.train.x.shape == (2, 3, 7, 5)
    assert torch.equal((data.train.x[0] * 255).round().byte(), torch.from_numpy(grey).expand(3, 7, 5))
    assert data.classes == ("a",)


def test_palette_is_read_as_colour(tmp_path: Path) -> None:
    for name in ("train/a/0.png", "test/a/0.png"):
        image(tmp_path / name)
        with Image.open(tmp_path / name) as opened:
            opened.quantize(4).save(tmp_path / name)
    assert load_data(tmp_path).train.x.shape == (1, 3, 7, 5)


def boxes_csv(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["file,x0,y0,x1,y1", *lines]) + "\n")
    return path


def test_boxes_for_one_split(pets: Path, tmp_path: Path) -> None:
    lines = [f"test/{name}/{i}.png,{i},1,5,7" for name in ("dog", "cat") for i in range(2)]
    data = load_data(pets, boxes=boxes_csv(tmp_path / "boxes.csv", *lines))
    assert data.train.boxes is None
    assert data.test.boxes is not None
    assert data.test.boxes.tolist() == [[0, 1, 5, 7], [1, 1, 5, 7]] * 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["test/dog/0.png,0,0,1,1"], "no box for 'test/cat/0.png'"),
        (["test/dog/77.png,0,0,1,1"], "lists 'test/dog/77.png', but"),
        (["test/dog/0.png,0,0,1,x"], "line 2: x0, y0, x1, y1 must be numbers"),
        (["test/dog/0.png,0,0,1"], "line 2: x0, y0, x1, y1 must be numbers"),
        (["test/dog/0.png,0,0,1,nan"], "must be numbers"),
        (["test/dog/0.png,0,0,1,1"] * 2, "line 3: 'test/dog/0.png' is listed twice"),
        ([f"test/{c}/{i}.png,0,0,6,1" for c in ("cat", "dog") for i in (0, 1)], "of input 0 must satisfy"),
    ],
)
def test_bad_boxes_are_refused(pets: Path, tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_data(pets, boxes=boxes_csv(tmp_path / "boxes.csv", *lines))


def test_boxes_file_missing_or_without_columns(pets: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no file .*none\.csv"):
        load_data(pets, boxes=tmp_path / "none.csv")
    (tmp_path / "odd.csv").write_text("file,x0\n")
    with pytest.raises(InputError, match="no column 'y0'"):
        load_data(pets, boxes=tmp_path / "odd.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StorageError, match=r"cannot read .*binary\.csv"):
        load_data(pets, boxes=tmp_path / "binary.csv")


def test_first_image_of_another_size_is_named(pets: Path) -> None:
    image(pets / "test" / "cat" / "1.png", size=(6, 7))
    with pytest.raises(InputError, match=r"test/cat/1\.png' is 6 x 7 pixels but .*train/cat/0\.png' is 5 x 7"):
        load_data(pets)


def test_transparency_and_damage_are_refused(pets: Path) -> None:
    image(pets / "test" / "cat" / "1.png", mode="RGBA")
    with pytest.raises(InputError, match=r"1\.png' has the mode RGBA"):
        load_data(pets)
    (pets / "test" / "cat" / "1.png").write_bytes(b"nothing")
    with pytest.raises(StorageError, match=r"cannot read .*test/cat/1\.png"):
        load_data(pets)
    image(pets / "test" / "cat" / "1.png")
    content = (pets / "test" / "cat" / "1.png").read_bytes()
    (pets / "test" / "cat" / "1.png").write_bytes(content[:-30])
    with pytest.raises(StorageError, match=r"cannot read .*test/cat/1\.png"):
        load_data(pets)


def test_folders_that_do_not_fit(pets: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty' has no class folders"):
        load_data(tmp_path / "empty")
    image(pets / "test" / "mouse" / "0.png")
    with pytest.raises(InputError, match="has the class 'mouse', which the training folder has not: cat, dog"):
        load_data(pets)
    (tmp_path / "half" / "train" / "a").mkdir(parents=True)
    with pytest.raises(InputError, match="only one of the folders 'train' and 'test'"):
        load_data(tmp_path / "half")
    (tmp_path / "half" / "test" / "a").mkdir(parents=True)
    with pytest.raises(InputError, match="train/a' holds no images"):
        load_data(tmp_path / "half")


def test_without_pillow_the_error_says_what_to_install(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'holdfast\[images\]'"):
        load_data(pets)
