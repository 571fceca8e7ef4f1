"""`holdfast detect`: certified detection of a detector of the user's own, with JSON."""

import json

import numpy as np
import pytest
import torch

import holdfast as hf

OWN = """
import torch
from torch import nn

class Brightest(nn.Module):
    '''A box around the brightest row, with the label 2.'''
    def __init__(self, form="tensors"):
        super().__init__()
        self.reach, self.form = nn.Parameter(torch.tensor(4.0)), form

    def forward(self, images):
        found = []
        for y in images.mean((1, 3)).argmax(1).float():
            box = torch.stack([torch.tensor(0.0), y - self.reach, torch.tensor(16.0), y + self.reach])
            found.append(torch.cat([box, torch.tensor([0.9, 1.0, 2.0])])[None])
        if self.form == "dictionaries":
            return [{"boxes": f[:, :4], "scores": f[:, 4], "labels": f[:, 6].long()} for f in found]
        return found if self.form == "tensors" else images.mean()
"""


@pytest.fixture
def scene(tmp_path):
    """A detector in a file, its weights, and two pictures of different size with a bright row each."""
    Image = pytest.importorskip("PIL.Image")
    (tmp_path / "own.py").write_text(OWN)
    torch.save({"model": {"reach": torch.tensor(4.0)}}, tmp_path / "own.pt")
    (tmp_path / "photos").mkdir()
    for name, height, row in (("a.png", 24, 10), ("b.png", 30, 20)):
        pixels = np.zeros((height, 16), dtype=np.uint8)
        pixels[row] = 230
        Image.fromarray(pixels).save(tmp_path / "photos" / name)
    return ["own.pt", "--architecture", "own.py:Brightest", "--data", "photos", "--samples", 300, "--threat", "l2:0.2"]


@pytest.mark.parametrize("form", ["tensors", "dictionaries"])
def test_detect_proves_the_box_of_each_picture(command, scene, tmp_path, form):
    truth = {
        "images": [{"id": 1, "file_name": "a.png", "height": 24, "width": 16}],
        "categories": [{"id": i, "name": str(i)} for i in range(3)],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 2, "bbox": [0, 6, 16, 8]}],
    }
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    shown = command("detect", *scene, "--arch-args", f"form={form}", "--truth", "truth.json", "--out", "d.json")
    words = " ".join(shown.split())
    assert "a.png 1 1 1" in words
    assert "proved: recall 100.0%, precision 100.0%" in words
    found = json.loads((tmp_path / "d.json").read_text())
    assert (found["threat"], found["samples"], found["proved_recall"]) == ("l2:0.2", 300, 1.0)
    a, b = (each["detections"][0] for each in found["pictures"])
    assert a["label"] == 2
    assert a["present"]
    assert a["at_least"]["top"] <= 6.0 <= a["at_most"]["top"]
    assert (b["found"]["box"], b["found"]["label"]) == ([0.0, 16.0, 16.0, 24.0], 2)


def test_detect_says_what_is_wrong_in_the_words_of_the_command_line(command, scene, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(hf.InputError, match=r"--samples 20 prove nothing .* smallest --samples that does is"):
        command("detect", *scene, "--samples", 20)
    with pytest.raises(hf.InputError, match="--threat must be an l2 ball"):
        command("detect", *scene, "--threat", "linf:0.1")
    with pytest.raises(hf.InputError, match="must return a list of 1 tensors"):
        command("detect", *scene, "--arch-args", "form=number")
    with pytest.raises(hf.InputError, match="there is no picture"):
        command("detect", *scene, "--data", "empty")
