"""Data as users have them, and which of their inputs are looked at."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from holdfast.data import load_data
from holdfast.data.draw import draw, sample
from holdfast.data.given import as_dataset
from holdfast.errors import InputError, StorageError

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def photos(tmp_path):
    """A folder of ten classes with eight images each, 5 x 4 pixels, whose red tells class and number."""
    for label in range(10):
        folder = tmp_path / "photos" / f"class-{label}"
        folder.mkdir(parents=True)
        for i in range(8):
            Image.fromarray(np.full((4, 5, 3), 10 * label + i, np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "photos"


def numbers(x):
    return (x[:, 0, 0, 0] * 255).round().long()


def test_all_images_of_a_folder_are_looked_at(photos):
    found = sample(photos)
    assert found.total == len(found.x) == 80
    assert sorted(numbers(found.x).tolist()) == [10 * label + i for label in range(10) for i in range(8)]
    assert found.drawn == "all 80"
    assert len(load_data(photos).test) == 20  # training on the folder still holds out a part


def test_a_few_of_a_folder_show_every_class(photos):
    found = sample(photos, 10, seed=3)
    assert found.y.tolist() == list(range(10))
    assert found.drawn == "10 of 80, drawn by seed 3 with the classes balanced"
    assert torch.equal(numbers(found.x) // 10, found.y)
    assert sample(photos, 10, seed=4).index.tolist() != found.index.tolist()


def test_a_larger_draw_contains_a_smaller_one():
    y = torch.tensor([0] * 50 + [1] * 7 + [2] * 3)
    draws = [set(draw(y, n, seed=1).tolist()) for n in (1, 5, 9, 12, 30, 60, 99)]
    assert all(small <= large for small, large in itertools.pairwise(draws))
    assert [len(d) for d in draws] == [1, 5, 9, 12, 30, 60, 60]
    assert torch.bincount(y[draw(y, 9)]).tolist() == [3, 3, 3]
    assert torch.bincount(y[draw(y, 30)]).tolist() == [20, 7, 3]


class Pictures(TorchDataset):
    classes = ("no", "yes")

    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, i):
        return Image.fromarray(np.full((self.sizes[i], 3), 51, np.uint8)), i % 2


def test_every_form_of_data_gives_the_same_inputs():
    x, y = torch.rand(6, 1, 2, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    forms = [
        (x, y),
        [x, y],
        (x.numpy(), y.numpy()),
        TensorDataset(x, y),
        DataLoader(TensorDataset(x, y), batch_size=4),
    ]
    for form in forms:
        found = sample(form)
        assert torch.equal(found.x, x), form
        assert found.y.tolist() == y.tolist()
        assert found.total == 6


def test_pictures_and_bytes_become_pixels():
    found = sample(Pictures([4, 4, 4]))
    assert found.x.shape == (3, 1, 4, 3)
    assert torch.allclose(found.x, torch.tensor(0.2))
    assert found.classes == ("no", "yes")
    bytes_ = sample((np.full((2, 1, 2, 2), 255, np.uint8), np.array([0, 1])))
    assert bool((bytes_.x == 1).all())


def test_an_archive_with_x_and_y_is_taken_whole(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.zeros((5, 3, 4, 4), np.float32), y=np.arange(5) % 2)
    found = sample(tmp_path / "d.npz", 4)
    assert (found.total, found.classes, found.y.bincount().tolist()) == (5, ("0", "1"), [2, 2])


def test_a_list_of_images_names_its_labels(photos):
    rows = [f"class-{label}/{i}.png,{'cat' if label % 2 else 'ant'}" for label in (1, 2) for i in range(3)]
    (photos / "list.csv").write_text("file,label\n" + "\n".join(rows) + "\n")
    found = sample(photos / "list.csv")
    assert found.classes == ("ant", "cat")
    assert found.y.tolist() == [1, 1, 1, 0, 0, 0]
    assert numbers(found.x).tolist() == [10, 11, 12, 20, 21, 22]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,label\na.png,1\n", "must have the columns 'file' and 'label', found name, label"),
        ("file,label\nnone.png,1\n", r"line 2: there is no image 'none\.png'"),
        ("file,label\nclass-0/0.png,\n", "line 2: a file and a label are needed"),
        ("file,label\nclass-0/0.png,1\nclass-0/1.png,cat\n", "must all be whole numbers from 0, or all be names"),
        ("file,label\n", "lists no images"),
    ],
)
def test_bad_lists_are_refused(text, message, photos):
    (photos / "list.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        load_data(photos / "list.csv")


def test_unreadable_and_mixed_images_are_named(photos):
    (photos / "class-3" / "5.png").write_bytes(b"no picture")
    with pytest.raises(StorageError, match=r"5\.png"):
        sample(photos)
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(photos / "class-3" / "5.png")
    with pytest.raises(InputError, match=r"5\.png.*all images must have the same size"):
        sample(photos)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "data must be a data set, its name, a path"),
        ((torch.rand(2, 3),), r"got \(Tensor\)"),
        (("a", "b"), r"got \(str, str\)"),
        (Pictures([4, 5]), "item 1 of the data has shape .*: resize or crop them first"),
        (Pictures([]), "the data are empty"),
    ],
)
def test_other_things_are_refused(data, message):
    with pytest.raises(InputError, match=message):
        as_dataset(data)


def test_splits_and_counts_are_checked():
    with pytest.raises(InputError, match=r"unknown split 'tets'\. Did you mean 'test'"):
        sample("mnist-mini", 5, split="tets")
    with pytest.raises(InputError, match="at least one input"):
        sample("mnist-mini", 0)
