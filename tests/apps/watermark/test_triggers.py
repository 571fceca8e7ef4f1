"""Trigger sets: what is drawn, what is refused, and what a file gives back."""

import pickle

import numpy as np
import pytest
import torch

from holdfast.apps.watermark import (
    TriggerSet,
    abstract_images,
    content_triggers,
    load_triggers,
    noise_triggers,
    save_triggers,
    unrelated_triggers,
)
from holdfast.apps.watermark.triggers import _FONT, draw_text
from holdfast.data import Split
from holdfast.errors import InputError, StorageError


@pytest.fixture(scope="module")
def source():
    generator = torch.Generator().manual_seed(0)
    return Split(torch.rand(60, 3, 9, 25, generator=generator), torch.arange(60) % 6)


def make(scheme, source, **options):
    if scheme == "content":
        return content_triggers(source, 6, **options)
    if scheme == "noise":
        return noise_triggers(source, 6, **options)
    return unrelated_triggers(source.x, (3, 9, 25), 6, **options)


@pytest.mark.parametrize("scheme", ["content", "noise", "unrelated"])
@pytest.mark.parametrize("label", [2, None])
def test_the_seed_decides_and_values_are_pixels(scheme, label, source):
    before = source.x.clone()
    a, b, c = (make(scheme, source, label=label, count=20, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.y, b.y)
    assert not torch.equal(a.x, c.x)
    assert a.x.shape == (20, 3, 9, 25)
    assert a.x.min() >= 0
    assert a.x.max() <= 1
    assert (a.y == 2).all() if label == 2 else a.y.unique().numel() > 2
    assert a.random_labels is (label is None)
    assert a.scheme == scheme
    assert torch.equal(source.x, before)


def test_no_trigger_keeps_the_label_it_had(source):
    triggers = content_triggers(source, 6, label=2, count=50, text="A")
    own = [int(source.y[(source.x[:, :, 5:] == x[:, 5:]).flatten(1).all(1)][0]) for x in triggers.x]
    assert len(own) == 50
    assert 2 not in own


def test_content_changes_the_pixels_of_the_text_alone(source):
    triggers = content_triggers(source, 6, count=10, text="Ab-1", level=0.25)
    ink = torch.zeros(9, 25, dtype=torch.bool)
    ink[:5, :15] = draw_text("AB-1")
    assert (triggers.x[:, :, ink] == 0.25).all()
    rest = triggers.x[:, :, ~ink]
    assert all((source.x[:, :, ~ink] == x).flatten(1).all(1).any() for x in rest)


def test_noise_is_one_image_for_all():
    grey = Split(torch.full((8, 1, 6, 6), 0.5), torch.zeros(8, dtype=torch.int64))
    triggers = noise_triggers(grey, 3, label=1, count=8, level=0.01)
    added = triggers.x - 0.5
    assert (added == added[0]).all()
    assert added.std() == pytest.approx(0.01, rel=0.5)


@pytest.mark.parametrize(("channels", "to"), [(1, 3), (3, 1), (3, 3)])
def test_unrelated_images_are_brought_to_the_shape(channels, to):
    images = torch.full((5, channels, 7, 4), 0.25)
    triggers = unrelated_triggers(images, (to, 10, 12), 4, label=1, count=5)
    torch.testing.assert_close(triggers.x, torch.full((5, to, 10, 12), 0.25))


def test_abstract_images_differ_and_are_smooth():
    x = abstract_images(4, (1, 28, 28), seed=1)
    assert x.shape == (4, 1, 28, 28)
    assert torch.equal(x, abstract_images(4, (1, 28, 28), seed=1))
    assert (x[0] - x[1]).abs().mean() > 0.1
    assert x.diff(dim=3).abs().mean() < 0.3 * x.std()


def test_the_signs_of_the_font_differ():
    drawn = {sign: draw_text(f"{sign}A")[:, :3].int().flatten().tolist() for sign in _FONT}
    assert len({tuple(bits) for bits in drawn.values()}) == len(_FONT) == 38
    assert sum(drawn[" "]) == 0


def test_a_file_gives_back_the_same(source, tmp_path):
    triggers = content_triggers(source, 6, label=None, count=7)
    path = save_triggers(triggers, tmp_path / "t.npz")
    again = load_triggers(path)
    assert torch.equal(again.x, triggers.x)
    assert torch.equal(again.y, triggers.y)
    assert (again.classes, again.scheme, again.random_labels) == (6, "content", True)
    with pytest.raises(InputError, match="is there already"):
        save_triggers(triggers, path)
    assert save_triggers(triggers, path, force=True) == path
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]


def test_files_that_are_none_are_refused(source, tmp_path):
    triggers = content_triggers(source, 6, count=3)
    with pytest.raises(InputError, match=r"\.npz"):
        save_triggers(triggers, tmp_path / "t.pt")
    with pytest.raises(StorageError, match="there is no file"):
        load_triggers(tmp_path / "none.npz")
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(StorageError, match="corrupt"):
        load_triggers(tmp_path / "bad.npz")
    np.savez(tmp_path / "few.npz", x=np.zeros((1, 1, 2, 2)))
    with pytest.raises(StorageError, match="y is not"):
        load_triggers(tmp_path / "few.npz")
    np.savez(tmp_path / "code.npz", x=np.array([{"a": 1}], dtype=object), y=np.zeros(1))
    with pytest.raises(StorageError, match="pickle"):
        load_triggers(tmp_path / "code.npz")
    (tmp_path / "code2.npz").write_bytes(pickle.dumps([1]))
    with pytest.raises(StorageError):
        load_triggers(tmp_path / "code2.npz")
    with pytest.raises(StorageError, match="cannot write"):
        save_triggers(triggers, tmp_path / "none" / "t.npz")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": 6}, "outside the classes 0 to 5"),
        ({"label": -2}, "outside the classes 0 to 5"),
        ({"count": 0}, "between 1 and 50"),
        ({"count": 51}, "between 1 and 50"),
        ({"text": "no_underscore"}, "with '_'"),
        ({"text": " "}, "must hold letters"),
        ({"text": "TOO LONG FOR THIS"}, "take a shorter text"),
        ({"level": 1.5}, "level"),
    ],
)
def test_bad_options_are_refused(options, message, source):
    with pytest.raises(InputError, match=message):
        content_triggers(source, 6, **({"count": 5} | options))


def test_bad_trigger_sets_are_refused():
    x, y = torch.rand(4, 1, 3, 3), torch.tensor([0, 1, 2, 3])
    assert len(TriggerSet(x, y, 4, "noise", False)) == 4
    with pytest.raises(InputError, match="label 3 of input 3 is outside the classes 0 to 2"):
        TriggerSet(x, y, 3, "noise", False)
    with pytest.raises(InputError, match="outside the valid range"):
        TriggerSet(x + 1, y, 4, "noise", False)
    with pytest.raises(InputError, match="must be one of content"):
        TriggerSet(x, y, 4, "text", False)
    with pytest.raises(InputError, match="level"):
        noise_triggers(Split(x, y), 5, level=0)
    with pytest.raises(InputError, match="images of shape"):
        content_triggers(Split(torch.rand(4, 5), y), 5, count=2)
