"""The data that were given are the data that are audited."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf
from holdfast.audits import load_audit
from holdfast.cli import main

Image = pytest.importorskip("PIL.Image")
HOW = {"budget": "quick", "budgets": 1, "certify": None, "progress": False}


def brightness():
    """A model of the class that the mean of the red channel tells: class k from k / 10 on."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 5, 10))
    with torch.no_grad():
        centre = (torch.arange(10) + 0.5) / 10
        red = torch.zeros(60)
        red[:20] = 1 / 20
        model[1].weight.copy_(20 * centre[:, None] * red)
        model[1].bias.copy_(-10 * centre**2)
    return model.eval()


@pytest.fixture
def photos(tmp_path):
    """Ten classes with eight images each; of class k the first k are so dark that they count as class 0."""
    for label in range(10):
        folder = tmp_path / "photos" / f"class-{label}"
        folder.mkdir(parents=True)
        for i in range(8):
            red = 5 if i < label else 25 * label + 12
            pixels = np.zeros((4, 5, 3), np.uint8)
            pixels[..., 0] = red + i
            Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "photos"


@pytest.fixture
def holdfast(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    hf.save_model(hf.make_model("linear", input_shape=(3, 4, 5), seed=0), tmp_path / "linear.safetensors")

    def run(*args):
        monkeypatch.setattr(
            "sys.argv", ["holdfast", "audit", "linear.safetensors", "--budget", "quick", *map(str, args)]
        )
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return stop.value.code, " ".join(out.split()), err

    return run


def test_all_images_of_a_folder_are_audited(photos):
    result = hf.audit(brightness(), photos, "linf:0.001", **HOW)
    assert (result.inputs, result.total, result.drawn) == (80, 80, "all 80")
    assert result.clean == (8 + sum(max(0, 8 - k) for k in range(1, 10))) / 80
    assert result.data == "photos"


def test_a_few_images_show_every_class_and_the_audit_says_how_they_were_drawn(photos, tmp_path):
    result = hf.audit(brightness(), photos, "linf:0.001", n=20, seed=2, out=tmp_path / "run", **HOW)
    assert sorted(record.label for record in result.records) == sorted([*range(10)] * 2)
    words = "20 of 80, drawn by seed 2 with the classes balanced"
    assert (result.total, result.drawn) == (80, words)
    assert json.loads((tmp_path / "run" / "audit.json").read_text())["drawn"] == words
    assert load_audit(tmp_path / "run").drawn == words
    again = hf.audit(brightness(), photos, "linf:0.001", n=20, seed=2, out=tmp_path / "run", **HOW)
    assert again.records == result.records
    every = hf.audit(brightness(), photos, "linf:0.001", **HOW)
    positions = {record.position: record.prediction for record in every.records}
    assert [positions[record.position] for record in result.records] == [r.prediction for r in result.records]


def test_every_form_of_data_is_audited_alike(photos, tmp_path):
    x, y = (part for part in (hf.load_data(photos).whole.x, hf.load_data(photos).whole.y))
    np.savez(tmp_path / "own.npz", x=x.numpy(), y=y.numpy())
    rows = "".join(f"{path.relative_to(tmp_path)},{path.parent.name}\n" for path in sorted(photos.rglob("*.png")))
    (tmp_path / "own.csv").write_text("file,label\n" + rows)
    forms = [(x, y), (x.numpy(), y.numpy()), TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size=7)]
    forms += [photos, str(photos), tmp_path / "own.npz", tmp_path / "own.csv", hf.load_data(photos)]
    found = [hf.audit(brightness(), data, "linf:0.01", n=30, **HOW) for data in forms]
    assert all(one.records == found[0].records and one.drawn == found[0].drawn for one in found)
    assert len(found[0].records) == 30


def test_an_unreadable_image_is_named(holdfast, photos):
    (photos / "class-3" / "4.png").write_bytes(b"no picture")
    code, _, err = holdfast("--data", photos)
    assert code == 2
    assert "4.png" in err
    assert len(err.splitlines()) == 1


def test_images_of_several_sizes_are_refused(holdfast, photos):
    Image.fromarray(np.zeros((6, 5, 3), np.uint8)).save(photos / "class-3" / "4.png")
    code, _, err = holdfast("--data", photos)
    assert code == 2
    assert "4.png" in err
    assert "same size" in err


def test_labels_without_images_are_refused(holdfast, photos, tmp_path):
    (tmp_path / "own.csv").write_text("file,label\nphotos/class-0/0.png,0\nphotos/class-0/missing.png,0\n")
    code, _, err = holdfast("--data", "own.csv")
    assert code == 2
    assert "line 3: there is no image 'photos/class-0/missing.png'" in err
    x, y = torch.rand(3, 3, 4, 5), torch.zeros(5, dtype=torch.long)
    with pytest.raises(hf.InputError, match=r"one label for each input, got inputs of shape \(3, 3, 4, 5\) and labels"):
        hf.audit(brightness(), (x, y), "linf:0.1", **HOW)


def test_the_command_line_says_what_was_drawn(holdfast, photos):
    code, out, _ = holdfast("--data", photos, "--n", 7, "--budgets", 1, "--out", "run")
    assert code == 0
    assert "7 of 80, drawn by seed 0 with the classes balanced" in out
