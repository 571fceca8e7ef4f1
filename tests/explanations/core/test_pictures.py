"""Pictures: colours that say what they should, files that other programs can read, and the commands that make them."""

import io
import re

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli.explain import app, parse_inputs
from holdfast.errors import HoldfastError, InputError
from holdfast.explanations.core.pictures import (
    AGAINST,
    FOR,
    HEAT,
    Panel,
    draw,
    enlarge,
    figure_svg,
    grey,
    heat_map,
    methods_figure,
    models_figure,
    overlay,
    save_figure,
    signed_map,
)
from holdfast.utils.png import encode_png


@pytest.fixture
def attribution():
    a = torch.zeros(2, 5, 7)
    a[0, 1, 2], a[1, 3, 4] = 1.0, -1.0
    return a


def test_colours_follow_the_sign(attribution):
    signed = signed_map(attribution)
    assert signed.shape == (3, 5, 7)
    assert signed[:, 1, 2] == pytest.approx(FOR)
    assert signed[:, 3, 4] == pytest.approx(AGAINST)
    assert signed[:, 0, 0] == pytest.approx((1, 1, 1))
    heat = heat_map(attribution)
    assert heat[:, 1, 2] == pytest.approx(heat[:, 3, 4])
    assert heat[:, 0, 0] == pytest.approx(HEAT[0])
    lightness = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in HEAT]
    assert lightness == sorted(lightness)
    cover = overlay(torch.ones(1, 5, 7), attribution)
    assert cover[:, 1, 2] == pytest.approx(FOR)
    assert cover[:, 0, 0] == pytest.approx((0.9, 0.9, 0.9))
    assert np.isfinite(signed_map(torch.zeros(1, 4, 4))).all()
    with pytest.raises(InputError, match="Did you mean 'signed'"):
        draw(torch.ones(1, 5, 7), attribution, "sined")
    with pytest.raises(InputError, match="one attribution"):
        signed_map(torch.zeros(4, 4))


def test_png_is_read_back_by_pillow():
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 6)) / 255
    with image.open(io.BytesIO(encode_png(pixels))) as read:
        assert np.array_equal(np.asarray(read), np.rint(pixels * 255).transpose(1, 2, 0))
    with image.open(io.BytesIO(encode_png(pixels[:1]))) as read:
        assert read.mode == "L"


def test_figures(tmp_path, attribution):
    model = nn.Sequential(nn.Flatten(), nn.Linear(70, 3)).eval()
    x = torch.rand(2, 2, 5, 7)
    y = model(x).argmax(1)
    rows = methods_figure(model, x, y, ["saliency", "integrated-gradients"], style="signed", names=["a<b", "c"])
    assert [[panel.title for panel in row] for row in rows][1] == ["c", "saliency", "integrated-gradients"]
    others = models_figure({"one": model, "two": model}, x, y, "saliency")
    assert np.array_equal(others[0][1].image, others[0][2].image)
    svg = figure_svg(rows)
    assert svg.count("<image") == 6
    assert "a&lt;b" in svg
    save_figure(rows, tmp_path / "new" / "f.svg")
    save_figure(rows, tmp_path / "new" / "f.png")
    assert (tmp_path / "new" / "f.png").read_bytes().startswith(b"\x89PNG")
    assert enlarge(np.zeros((3, 5, 7)), 20).shape == (3, 20, 28)
    assert grey(torch.rand(2, 3, 4)).shape == (3, 3, 4)
    for bad in ([], [[]]):
        with pytest.raises(InputError, match="at least one row"):
            figure_svg(bad)
    with pytest.raises(InputError, match=r"\.png or \.svg"):
        save_figure(rows, tmp_path / "f.gif")
    with pytest.raises(InputError, match="a name for each"):
        methods_figure(model, x, y, ["saliency"], names=["one"])
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(HoldfastError, match="cannot write"):
        save_figure([[Panel("t", np.zeros((3, 2, 2)))]], file / "f.png")


def test_inputs_from_text():
    assert parse_inputs("0,3,7", 8) == [0, 3, 7]
    assert parse_inputs("1-3,5", 8) == [1, 2, 3, 5]
    for bad in ("8", "a", "", "-1", "3-1"):
        with pytest.raises(InputError):
            parse_inputs(bad, 8)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two models and data with boxes, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("a", "b")):
        hf.save_model(
            hf.make_model("linear", input_shape=(1, 12, 10), classes=3, seed=seed), tmp_path / f"{name}.safetensors"
        )
    rng = np.random.default_rng(0)
    boxes = np.array([[1, 1, 5, 5]] * 6)
    arrays = {f"x_{part}": rng.random((6, 1, 12, 10), np.float32) for part in ("train", "test")}
    arrays |= {f"y_{part}": np.arange(6) % 3 for part in ("train", "test")}
    np.savez(tmp_path / "data.npz", **arrays, boxes_test=boxes)
    return tmp_path


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_draws_pictures(files):
    words = ["a.safetensors", "--data", "data.npz", "--method", "saliency", "--method", "integrated-gradients"]
    out = run(*words, "--inputs", "0,2", "--out", "pics", "--against", "b.safetensors")
    assert "4 explanations, 0 with a fallback" in out
    names = {path.name for path in (files / "pics").iterdir()}
    assert {"000000-saliency.png", "000002-integrated-gradients.png", "methods.svg", "models-saliency.svg"} <= names
    rows = (files / "pics" / "explanations.csv").read_text().splitlines()
    assert rows[0].startswith("input,method,ok")
    assert len(rows) == 5
    assert run("pictures", *words, "--inputs", "1", "--out", "more").count("methods.svg") == 1


def test_the_command_scores_locality(files):
    words = ["locality", "a.safetensors", "--data", "data.npz", "--method", "saliency", "--n", "5"]
    out = run(*words, "--out", "l.csv")
    assert re.search(r"saliency +f1 +0\.\d{3} +0\.\d{3} to 0\.\d{3} +0\.\d{3} +5", out)
    assert re.search(r"inputs of 'data': (all 5|5 of \d+, drawn by seed 0 with the classes balanced); 0 set aside", out)
    assert len((files / "l.csv").read_text().splitlines()) == 6
    (files / "boxes.csv").write_text("input,x0,y0,x1,y1\n0,1,1,5,5\n1,2,2,2,2\n")
    out = run(*words, "--boxes", "boxes.csv")
    assert "4 set aside" in out
    assert "set aside: input 1, the box is empty" in out
    with pytest.raises(InputError, match=r"must end in \.csv"):
        run(*words, "--out", "l.txt")
