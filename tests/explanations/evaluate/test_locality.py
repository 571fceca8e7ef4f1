"""Locality against hand-made attributions, and boxes that are wrong in every way."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast as hf
from holdfast.errors import InputError, StorageError
from holdfast.explanations.evaluate.annotations import box_masks, box_table, read_boxes
from holdfast.explanations.evaluate.locality import SCORES, locality, masks_for, mean_of, protocol, scores
from holdfast.utils.intervals import clopper_pearson


def mask_of(*box, height=6, width=8):
    mask = torch.zeros(1, height, width, dtype=torch.bool)
    mask[0, box[1] : box[3], box[0] : box[2]] = True
    return mask


def test_the_perfect_and_the_useless_attribution():
    mask = mask_of(2, 1, 5, 4)
    perfect = scores(mask[:, None].float(), mask)
    assert [float(getattr(perfect, name)) for name in SCORES] == [1] * 5
    outside = scores((~mask)[:, None].float(), mask)
    assert float(outside.precision) == 0
    assert float(outside.pointing) == 0
    assert torch.isnan(outside.recall)
    negative = scores(-mask[:, None].float(), mask)
    assert torch.isnan(negative.precision)
    assert float(negative.recall) == 0
    assert torch.isnan(negative.f1)
    assert float(negative.energy) == 1


def test_scores_by_hand():
    a = torch.zeros(1, 1, 6, 8)
    a[0, 0, 0, 0], a[0, 0, 1, 2], a[0, 0, 2, 3], a[0, 0, 5, 7] = 3.0, 2.0, -1.0, -4.0
    found = scores(a, mask_of(2, 1, 5, 4))
    assert float(found.precision) == pytest.approx(2 / 5)
    assert float(found.recall) == pytest.approx(2 / 3)
    assert float(found.f1) == pytest.approx(2 * (2 / 5) * (2 / 3) / (2 / 5 + 2 / 3))  # harmonic, not geometric
    assert float(found.energy) == pytest.approx(3 / 10)
    assert float(found.pointing) == 0
    torch.testing.assert_close(scores(7 * a, mask_of(2, 1, 5, 4)).f1, found.f1)


def test_channels_are_added_up_first_unless_told_otherwise():
    a = torch.zeros(1, 2, 6, 8)
    a[0, :, 1, 2] = torch.tensor([2.0, -1.0])
    a[0, 0, 0, 0] = 1.0
    mask = mask_of(2, 1, 5, 4)
    assert float(scores(a, mask).recall) == 1
    assert float(scores(a, mask, per_channel=True).recall) == pytest.approx(2 / 3)
    assert float(scores(a, mask).precision) == pytest.approx(1 / 2)
    assert float(scores(a, mask, per_channel=True).precision) == pytest.approx(2 / 3)


@given(seed=st.integers(0, 999))
@settings(max_examples=8)
def test_chance_gives_the_share_of_the_box_and_one_half(seed):
    torch.manual_seed(seed)
    mask = mask_of(2, 3, 30, 20, height=40, width=32).expand(40, -1, -1)
    found = scores(torch.randn(40, 1, 40, 32), mask)
    assert float(found.precision.mean()) == pytest.approx(float(mask.float().mean()), abs=0.02)
    assert float(found.recall.mean()) == pytest.approx(0.5, abs=0.02)
    full = scores(torch.randn(2, 3, 4, 5), torch.ones(2, 4, 5, dtype=torch.bool))
    torch.testing.assert_close(full.precision, torch.ones(2))


def test_scores_refuse_other_shapes_and_take_an_empty_batch():
    with pytest.raises(InputError, match="expected attributions"):
        scores(torch.rand(2, 3, 4, 5), torch.ones(2, 5, 4, dtype=torch.bool))
    assert scores(torch.rand(0, 3, 4, 5), torch.ones(0, 4, 5, dtype=torch.bool)).f1.shape == (0,)


def test_bad_boxes_are_set_aside_one_by_one():
    nan = float("nan")
    boxes = torch.tensor(
        [[2, 1, 5, 4], [5, 1, 2, 4], [9, 0, 12, 3], [-3, -3, 3, 3], [0, 0, 8, 6], [nan, 0, 1, 1], [1.2, 1, 1.4, 6]]
    )
    found = box_masks(box_table(boxes), 7, 6, 8, max_area=0.8)
    assert torch.equal(found.inside[0], mask_of(2, 1, 5, 4)[0])
    assert found.problem[0] == found.problem[3] == ""
    assert int(found.inside[3].sum()) == 9  # cut off at the edge
    for i, words in (
        (1, "empty"),
        (2, "outside the image of 8 x 6"),
        (4, "covers 100%"),
        (5, "not finite"),
        (6, "no pixel"),
    ):
        assert words in found.problem[i]


class Corner(nn.Module):
    """Looks at the upper left quarter of an image of 1 x 6 x 8."""

    def forward(self, x):
        z = x[:, 0, :3, :4].sum((1, 2))
        return torch.stack([z, 3 - z], 1)


def test_locality_of_a_model_that_looks_at_one_corner():
    x = 0.2 + 0.2 * torch.rand(6, 1, 6, 8)
    y = torch.zeros(6, dtype=torch.long)
    boxes = torch.tensor([[0.0, 0, 4, 3]]).repeat(6, 1)
    boxes[4] = torch.tensor([4, 3, 8, 6])
    boxes[5] = torch.tensor([3, 3, 3, 6])
    found = locality(Corner().eval(), x, y, boxes, "saliency")
    assert found.scores.f1[:4].tolist() == [1] * 4
    assert found.scores.precision[4] == 0
    assert torch.isnan(found.scores.precision[5])
    assert "empty" in found.problem[5]
    assert found.problem[:5] == ("",) * 5
    assert found.means["precision"].count == 5
    assert found.means["precision"].mean == pytest.approx(0.8)
    same = locality(Corner().eval(), x, y, masks_for(boxes, x).inside, "saliency")
    torch.testing.assert_close(same.scores.f1, found.scores.f1, equal_nan=True)
    assert same.problem[5] == "the mask is empty"


def test_masks_for_refuses_what_does_not_fit():
    x = torch.rand(2, 1, 6, 8)
    for bad in (torch.rand(3, 4), torch.rand(2, 3), torch.rand(2, 6, 8), torch.ones(2, 8, 6, dtype=torch.bool)):
        with pytest.raises(InputError):
            masks_for(bad, x)
    with pytest.raises(InputError, match="needs images"):
        masks_for(torch.rand(2, 4), torch.rand(2, 5))


def test_mean_and_its_error():
    found = mean_of(torch.tensor([1.0, 2.0, float("nan"), 3.0]))
    assert (found.mean, found.count) == (2, 3)
    assert found.error == pytest.approx(1 / 3**0.5)
    assert found.interval == pytest.approx((2 - 1.96 / 3**0.5, 2 + 1.96 / 3**0.5))
    assert mean_of(torch.tensor([])).count == 0


def test_a_share_has_the_exact_interval_even_where_all_inputs_agree():
    """1.96 standard errors of values that are all 1 are nothing, as if the share were known."""
    found = mean_of(torch.ones(20), share=True)
    assert found.interval == pytest.approx((0.025 ** (1 / 20), 1.0))
    assert mean_of(torch.tensor([1.0, 0, 0, float("nan")]), share=True).interval == clopper_pearson(1, 3)
    x = torch.rand(6, 1, 6, 8)
    inside = torch.zeros(6, 6, 8, dtype=torch.bool)
    inside[:, :3, :4] = True
    linear = nn.Sequential(nn.Flatten(), nn.Linear(48, 2)).eval()
    means = locality(linear, x, torch.zeros(6, dtype=torch.long), inside, "saliency").means
    hits = round(6 * means["pointing"].mean)
    assert hits in (0, 6), "a linear model has the same saliency everywhere"
    assert means["pointing"].interval == clopper_pearson(hits, 6)


def test_protocol_puts_models_side_by_side():
    x = 0.5 + 0.05 * torch.randn(8, 1, 6, 8).clamp(-3, 3)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(48, 2)).eval()
    y = linear(x).argmax(1)
    boxes = torch.tensor([[1.0, 1, 5, 5]]).repeat(8, 1)
    rows = protocol({"linear": linear}, x, y, boxes, threat=hf.Linf(0.3), methods=("saliency",))
    assert [row["model"] for row in rows] == ["linear", "random weights"]
    assert rows[0]["accuracy"] == 1
    assert rows[0]["robust"] < 1
    assert rows[0]["f1"].count == 8
    plain = protocol({"linear": linear}, x, y, boxes, methods={"integrated-gradients": {"steps": 2}}, floor=False)
    assert len(plain) == 1
    assert plain[0]["robust"] is None


def test_boxes_from_csv(tmp_path):
    path = tmp_path / "boxes.csv"
    path.write_text("input,x0,y0,x1,y1\n0,1,1,3,3\n0,5,2,7,4\n2,0,0,4,4\n9,0,0,1,1\n")
    found = box_masks(read_boxes(path), 4, 6, 8)
    assert int(found.inside[0].sum()) == 8  # the union of two
    assert found.problem == ("", "no box", "", "no box")
    for text, message in (
        ("input,x0,y0,x1\n", "no column 'y1'"),
        ("input,x0,y0,x1,y1\n0,a,1,2,3\n", "line 2"),
        ("input,x0,y0,x1,y1\n-1,0,1,2,3\n", "must be >= 0"),
        ("input,x0,y0,x1,y1\n0,1\n", "line 2"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            read_boxes(path)
    with pytest.raises(StorageError, match="cannot read the boxes"):
        read_boxes(tmp_path / "none.csv")


def test_boxes_from_coco(tmp_path):
    path = tmp_path / "boxes.json"
    images = [{"id": 7, "width": 16, "height": 12}, {"id": 3, "width": 8, "height": 6}]
    notes = [{"image_id": 7, "bbox": [4, 2, 6, 6]}, {"image_id": 3, "bbox": [0, 0, 0, 4]}]
    path.write_text(json.dumps({"images": images, "annotations": notes}))
    found = box_masks(read_boxes(path), 2, 6, 8)
    assert torch.equal(found.inside[0], mask_of(2, 1, 5, 4)[0])  # half the size of its image
    assert "empty" in found.problem[1]
    for bad in (
        "{",
        '{"images": []}',
        json.dumps({"images": [], "annotations": [{"image_id": 1, "bbox": [1, 2, 3, 4]}]}),
    ):
        path.write_text(bad)
        with pytest.raises(InputError, match="not a COCO file"):
            read_boxes(path)


def crop_mask(mask, resize, crop):
    """A mask of pixels (H, W) resized to the nearest pixel and cropped around its centre, as image libraries do it."""
    height, width = mask.shape
    scale = resize / min(height, width)
    size = (int(height * scale), int(width * scale))
    resized = nn.functional.interpolate(mask[None, None].float(), size, mode="nearest")[0, 0] > 0
    top, left = round((size[0] - crop) / 2), round((size[1] - crop) / 2)
    return resized[top : top + crop, left : left + crop]


@pytest.mark.parametrize(("height", "width"), [(60, 80), (90, 50), (40, 40)])
def test_boxes_follow_a_resize_and_a_crop(tmp_path, height, width):
    box = (10, 5, 35, 30)
    path = tmp_path / "boxes.csv"
    path.write_text(f"input,x0,y0,x1,y1,width,height\n0,{','.join(map(str, box))},{width},{height}\n")
    for resize, crop in ((80, 60), (60, 60), (120, 80)):
        table = read_boxes(path).cropped(resize, crop)
        found = box_masks(table, 1, crop, crop).inside[0]
        wanted = crop_mask(mask_of(*box, height=height, width=width)[0], resize, crop)
        assert int((found ^ wanted).sum()) <= 4 * crop  # a pixel along each side
        assert abs(float(found.double().mean() - wanted.double().mean())) < 0.06
        half = box_masks(table, 1, crop // 2, crop // 2).inside[0]  # and once more resized, for the network
        assert abs(float(half.double().mean() - found.double().mean())) < 0.05


def test_boxes_that_the_crop_cuts_off_are_smaller_or_set_aside(tmp_path):
    coco = {
        "images": [{"id": k, "width": 100, "height": 50} for k in range(3)],
        "annotations": [
            {"image_id": 0, "bbox": [0, 10, 50, 20]},  # half of it is cut off: the crop shows columns 25 to 75
            {"image_id": 1, "bbox": [0, 0, 20, 50]},  # all of it
            {"image_id": 2, "bbox": [20, 0, 60, 50]},  # it fills the crop
        ],
    }
    path = tmp_path / "boxes.json"
    path.write_text(json.dumps(coco))
    table = read_boxes(path).cropped(None, 50)
    assert table.boxes[0].tolist() == [-25, 10, 25, 30]
    found = box_masks(table, 3, 50, 50, max_area=0.8)
    assert int(found.inside[0].sum()) == 25 * 20
    assert "outside" in found.problem[1]
    assert "100%" in found.problem[2]
    whole = read_boxes(path).cropped(25, None)  # half the size, nothing is lost
    assert torch.equal(whole.boxes, read_boxes(path).boxes / 2)
    with pytest.raises(InputError, match="at least 1 pixel"):
        read_boxes(path).cropped(0, None)
