"""`holdfast explain`: counterfactuals beside the pictures, and what chance gives beside locality."""

import csv

import pytest
import torch

import holdfast as hf
from holdfast.data.draw import sample
from holdfast.explanations.core.counterfactuals import counterfactuals
from holdfast.explanations.evaluate.annotations import read_boxes
from holdfast.explanations.evaluate.locality import locality


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_pictures_show_the_nearest_input_of_another_class(command, means, tmp_path):
    command("explain", means, "--inputs", "0,3", "--method", "big", "--method", "saliency", "--out", "pics")
    rows = rows_of(tmp_path / "pics" / "explanations.csv")
    model, test = hf.load_model(means), hf.load_data("mnist-mini").test
    x, y = test.x[[0, 3]], test.y[[0, 3]]
    found = hf.explain(model, x, y, "big", index=torch.tensor([0, 3]))
    weight = next(p for name, p in model.named_parameters() if "weight" in name).detach()
    z = model(x).detach()
    own = z.argmax(1)
    for k, row in enumerate(row for row in rows if row["method"] == "big"):
        assert float(row["distance"]) == pytest.approx(float(found.distance[k]), rel=1e-4)
        at_boundary = model(found.boundary[k : k + 1])[0].detach()
        assert int(row["rival"]) != int(own[k])
        assert float(at_boundary[int(row["rival"])]) >= float(at_boundary.max()) - 1e-4
        # On a linear model no other class is nearer: the distances to the planes are known.
        gaps = (z[k, own[k]] - z[k]) / (weight[own[k]] - weight).norm(dim=1).clamp(min=1e-9)
        gaps[own[k]] = torch.inf
        assert float(row["distance"]) >= float(gaps.min()) * (1 - 1e-4)
        assert (tmp_path / "pics" / f"{row['input']:0>6}-big-counterfactual.png").is_file()
    assert all(row["distance"] == row["rival"] == "" for row in rows if row["method"] == "saliency")
    assert "counterfactual" not in "".join(p.name for p in (tmp_path / "pics").glob("*saliency*"))


def test_counterfactuals_of_inputs_without_a_boundary():
    model = torch.nn.Linear(3, 2).eval()
    model.weight.data.zero_()
    model.bias.data = torch.tensor([1.0, 0.0])
    x, y = torch.rand(2, 3), torch.zeros(2, dtype=torch.int64)
    (first, _) = counterfactuals(model, x, hf.explain(model, x, y, "bsm"), ["a", "b"])
    assert first.image is None
    assert first.rival == ""
    assert counterfactuals(model, x, hf.explain(model, x, y, "saliency"), ["a", "b"]) is None


def test_locality_stands_beside_what_chance_gives_and_what_the_methods_kept(command, means, tmp_path):
    lines = ["input,x0,y0,x1,y1", *(f"{i},7,7,21,21" for i in range(2000))]
    (tmp_path / "boxes.csv").write_text("\n".join(lines))
    how = ["--data", "mnist-mini", "--boxes", "boxes.csv", "-n", 6]
    shown = command("explain", "locality", means, *how, "--method", "big", "--out", "l.csv")
    assert "random weights" in shown
    assert "big: 6 of 6 keep their promise; boundary found for 6, mean distance" in shown
    assert "completeness error" in shown
    rows = rows_of(tmp_path / "l.csv")
    taken = sample("mnist-mini", 6)
    table = read_boxes(tmp_path / "boxes.csv").select(taken.index)
    direct = locality(hf.load_model(means), taken.x, taken.y, table, "big", steps=20)
    assert [float(row["f1"]) for row in rows] == pytest.approx(direct.scores.f1.tolist(), rel=1e-4)
    assert all(float(row["completeness_error"]) < 0.01 for row in rows)
    assert "random weights" not in command("explain", "locality", means, *how, "--method", "saliency", "--no-floor")
    with pytest.raises(hf.InputError, match="size of the image is known"):
        command("explain", "locality", means, *how, "--crop", 20)
    with pytest.raises(hf.InputError, match="--boxes"):
        command("explain", "locality", means, "--data", "digit-scenes", "--crop", 20)
