"""What is said of one input is true: the proof and the example bracket the distance to the boundary."""

import io
import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast as hf
from holdfast.errors import InputError
from holdfast.serve import predict
from holdfast.serve.subjects import Subject, list_models, open_subject
from holdfast.serve.upload import PIXELS, TooLarge, read_picture

Image = pytest.importorskip("PIL.Image")


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_the_parts_agree(digits, quick, norm):
    x, label = digits.input(3)
    answer = predict.try_input(digits, x, norm=norm, label=label)
    logits = digits.model(x[None])[0].detach()
    assert answer["prediction"] == str(int(logits.argmax()))
    assert answer["label"] == str(label)
    shares = [score["probability"] for score in answer["scores"]]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)
    assert shares[0] == pytest.approx(float(logits.softmax(0).max()), rel=1e-5)
    proved, broken = answer["certified"]["radius"], answer["adversarial"]["distance"]
    # A linear model: the margin over each class falls with the dual norm of the difference of the weights.
    weight = next(m for m in digits.model.modules() if isinstance(m, nn.Linear)).weight.detach()
    top = int(logits.argmax())
    others = [k for k in range(10) if k != top]
    dual = {"linf": 1, "l2": 2, "l1": float("inf")}[norm]
    exact = min(float((logits[top] - logits[k]) / (weight[top] - weight[k]).norm(dual)) for k in others)
    # Pixels have a range, which can only push the boundary further away.
    assert 0.5 * exact <= proved <= broken
    assert exact <= broken * 1.001
    assert answer["adversarial"]["prediction"] != answer["prediction"]
    for place in (answer, answer["adversarial"], answer["attribution"]):
        assert place["picture"].startswith("data:image/png;base64,")
    assert answer["attribution"]["error"] is None


def test_a_part_that_cannot_be_done_leaves_the_others(digits, quick):
    class Odd(nn.Module):
        def forward(self, x):
            return torch.stack([x.flatten(1).sum(1).sin(), x.flatten(1).var(1) + 1], 1)

    answer = predict.try_input(Subject("odd", Odd().eval(), digits.data), digits.input(0)[0])
    assert "radius" not in answer["certified"]
    assert answer["certified"]["error"]
    assert answer["scores"]


def test_the_search_for_a_proof_ends_in_time(digits, quick, monkeypatch):
    monkeypatch.setattr(predict, "SECONDS", -1.0)
    monkeypatch.setattr(predict, "certify", lambda *_: pytest.fail("no time was left"))
    found = predict.try_input(digits, digits.input(0)[0])["certified"]
    assert found["in_time"] is False
    assert found["by"] == "crown"


def test_points_have_no_pictures(quick):
    data = hf.load_data("two-moons", n=20)
    points = Subject("points", hf.make_model("mlp", input_shape=(2,), classes=2, hidden=[8], seed=0).eval(), data)
    answer = predict.try_input(points, points.input(0)[0], norm="l2")
    assert answer["picture"] is None
    assert answer["adversarial"].get("picture") is None
    assert answer["attribution"]["picture"] is None
    assert points.to_dict(start=0, count=2)["inputs"][1]["picture"] is None


def test_an_unknown_norm_and_position(digits):
    with pytest.raises(InputError, match="Did you mean 'linf'"):
        predict.try_input(digits, digits.input(0)[0], norm="linff")
    with pytest.raises(InputError, match="0 to 1999"):
        digits.input(2000)


def test_models_come_from_training_runs_whose_data_have_a_name(runs, digits):
    names = [model["name"] for model in list_models(runs, digits)]
    assert names == ["given", "trained"], "the data of the other run are a path"
    assert open_subject(runs, "trained", None) is open_subject(runs, "trained", None)
    assert open_subject(runs, "given", digits) is digits
    for name in ("elsewhere", "first", "link", "../outside", ""):
        assert open_subject(runs, name, digits) is None


def encoded(picture, kind="PNG", **how):
    file = io.BytesIO()
    picture.save(file, kind, **how)
    return file.getvalue()


@pytest.mark.parametrize(("kind", "mime"), [("PNG", "image/png"), ("JPEG", "image/jpeg")])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 20, 30)])
def test_a_picture_becomes_an_input(kind, mime, shape):
    x = read_picture(encoded(Image.new("RGB", (90, 60), (255, 0, 0)), kind), mime, shape)
    assert x.shape == shape
    assert x.dtype == torch.float32
    expected = torch.tensor([0.299]) if shape[0] == 1 else torch.tensor([1.0, 0, 0])
    assert torch.allclose(x, expected[:, None, None].expand(shape), atol=0.01)


def test_an_input_survives_the_way_through_a_picture(digits):
    x, _ = digits.input(5)
    pixels = (x[0] * 255).round().byte().numpy()
    assert torch.allclose(read_picture(encoded(Image.fromarray(pixels)), "image/png", (1, 28, 28)), x, atol=1e-6)


def test_what_is_transparent_is_black_and_the_camera_is_obeyed():
    assert read_picture(encoded(Image.new("RGBA", (8, 8), (255, 255, 255, 0))), "image/png", (1, 4, 4)).max() == 0
    picture = Image.new("L", (8, 8))
    picture.paste(255, (0, 0, 8, 4))  # the upper half is white; turned half round it is the lower
    exif = Image.Exif()
    exif[0x0112] = 3
    x = read_picture(encoded(picture, "JPEG", exif=exif, quality=95), "image/jpeg", (1, 2, 2))
    assert x[0, 0].max() < 0.1
    assert x[0, 1].min() > 0.9


def test_bombs_are_refused():
    small = encoded(Image.new("L", (8, 8)))
    for side in (2001, 12_000, 20_000):  # beyond our limit, beyond Pillow's warning, beyond Pillow's error
        head = b"IHDR" + struct.pack(">II", side, side) + small[24:29]
        bomb = small[:12] + head + struct.pack(">I", zlib.crc32(head)) + small[33:]
        with pytest.raises(TooLarge, match=f"{PIXELS:,}"):
            read_picture(bomb, "image/png", (1, 28, 28))


@given(cut=st.integers(0, 400), byte=st.integers(0, 255), kind=st.sampled_from(["PNG", "JPEG"]))
def test_damaged_pictures_are_refused_or_read(cut, byte, kind):
    whole = bytearray(encoded(Image.linear_gradient("L").resize((16, 16)), kind))
    whole[cut % len(whole)] = byte
    for content in (bytes(whole), bytes(whole[:cut])):
        try:
            x = read_picture(content, f"image/{kind.lower()}", (1, 8, 8))
        except InputError:
            continue
        assert x.shape == (1, 8, 8)
        assert 0 <= x.min() <= x.max() <= 1


def test_one_format_is_not_taken_for_another():
    with pytest.raises(InputError, match="no JPEG picture"):
        read_picture(encoded(Image.new("L", (8, 8))), "image/jpeg", (1, 8, 8))
    with pytest.raises(InputError, match="no PNG picture"):
        read_picture(encoded(Image.new("L", (8, 8)), "GIF"), "image/png", (1, 8, 8))
