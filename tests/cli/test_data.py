"""`holdfast data corrupt`."""

import pytest
import torch

import holdfast as hf
from holdfast.audits.saved import load_audit
from holdfast.data.corruptions import corrupt
from holdfast.utils.png import encode_png


def test_corrupted_data_are_a_data_set(command, tmp_path):
    out = command("data", "corrupt", "mnist-mini", "--corruption", "pixelate", "--severity", 4, "--out", "shifted.npz")
    assert "with pixelate at severity 4" in out
    found, data = hf.load_data(str(tmp_path / "shifted.npz")), hf.load_data("mnist-mini")
    assert torch.equal(found.test.x, corrupt(data.test.x, "pixelate", 4))
    assert torch.equal(found.train.x, data.train.x)
    assert found.classes == data.classes


def test_the_file_is_written_whole_in_a_folder_that_is_made(command, refused, tmp_path, monkeypatch):
    words = ("data", "corrupt", "mnist-mini", "--corruption", "contrast", "--out")
    command(*words, "new/folder/a.npz")
    before = (tmp_path / "new" / "folder" / "a.npz").read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("holdfast.cli.data.np.savez_compressed", full)
    assert "No space left on device" in refused(*words, "new/folder/a.npz")
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["a.npz"]
    assert (tmp_path / "new" / "folder" / "a.npz").read_bytes() == before


def test_bad_input_is_refused(refused):
    options = ("data", "corrupt", "mnist-mini", "--corruption")
    assert "unknown corruption 'mist'" in refused(*options, "mist", "--out", "a.npz")
    assert "from 1 to 5, got 9" in refused(*options, "fog", "--severity", "9", "--out", "a.npz")
    assert "ends in .npz" in refused(*options, "fog", "--out", "a.csv")


def test_sets_of_some_classes_are_read_with_the_numbers_of_the_model(holdfast, tmp_path, means):
    """Sketches of threes and fives: as folders they are classes 0 and 1, as a list they are what they are."""
    pytest.importorskip("PIL")
    data, rows = hf.load_data("mnist-mini").test, []
    for digit in (3, 5):
        (tmp_path / "sketches" / str(digit)).mkdir(parents=True)
        for i, x in enumerate(data.x[data.y == digit][:6]):
            file = tmp_path / "sketches" / str(digit) / f"{i}.png"
            file.write_bytes(encode_png(x.numpy()))
            rows.append(f"{file.relative_to(tmp_path)},{digit}")
    (tmp_path / "sketches.csv").write_text("\n".join(["file,label", *rows]) + "\n")
    clean = []
    for name in ("sketches", "sketches.csv"):
        options = (
            "--threat",
            "linf:0.01",
            "--certify",
            "none",
            "--attack",
            "fgsm",
            "--out",
            tmp_path / f"{name}-audit",
        )
        code, _, err = holdfast("audit", means, "--data", tmp_path / name, *options)
        assert code == 0
        assert ("has 2 classes, the model 10; '3' counts as its class 0" in err) == (name == "sketches")
        clean.append(load_audit(tmp_path / f"{name}-audit").clean)
    assert clean[0] == 0
    assert clean[1] > 0.5
