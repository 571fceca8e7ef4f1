"""Adapters for the detectors that users have, and COCO's files."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from holdfast.apps.detection import (
    COCO_80,
    CocoTruth,
    SmoothedDetector,
    coco_ap,
    from_torchvision,
    from_ultralytics,
    read_coco,
    read_coco_detections,
    write_coco,
    write_coco_detections,
)
from holdfast.errors import InputError, StorageError, UnsupportedError

BOXES = torch.tensor([[1.0, 2, 8, 9], [3, 3, 5, 6], [0, 0, 4, 4]])
SCORES = torch.tensor([0.9, 0.5, 0.2])
LABELS = torch.tensor([1, 12, 90])
X = torch.rand(2, 3, 12, 16, generator=torch.Generator().manual_seed(0))


class FakeTorchvision(nn.Module):
    """Returns what torchvision's detectors return; for the second image nothing."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        assert isinstance(images, list)
        assert images[0].ndim == 3
        nothing = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
        full = {"boxes": BOXES, "scores": SCORES, "labels": LABELS}
        return [full if i != 1 else nothing for i in range(len(images))]


@dataclass
class FakeBoxes:
    xyxy: Tensor
    conf: Tensor
    cls: Tensor


@dataclass
class FakeResult:
    boxes: FakeBoxes | None


class FakeYolo:
    """Returns what Ultralytics' models return; remembers what it was called with."""

    def __call__(self, images: Tensor, **options: object) -> list[FakeResult]:
        self.images, self.options = images, options
        return [FakeResult(FakeBoxes(BOXES, SCORES, LABELS.float()))] * len(images)


def test_torchvision_outputs_become_detections():
    detector = from_torchvision(FakeTorchvision().eval())
    found = detector(X)
    assert [each.shape for each in found] == [(3, 7), (0, 7)]
    assert torch.equal(found[0][:, :4], BOXES)
    assert found[0][:, 4:].tolist() == torch.stack([SCORES, torch.ones(3), LABELS.float()], 1).tolist()
    assert [len(each) for each in from_torchvision(FakeTorchvision().eval(), objectness=0.4)(X)] == [2, 0]
    mapped = from_torchvision(FakeTorchvision().eval(), labels=COCO_80)(X)[0]
    assert mapped[:, 6].tolist() == [0, 79]  # id 12 is not used
    certified = SmoothedDetector(lambda images: detector(images[:1]) * len(images), n=60).certify(X[:1], 0.1)[0]
    assert torch.equal(certified.lower, certified.upper)


def test_coco_map_covers_80_classes():
    used = COCO_80[COCO_80 >= 0]
    assert (len(COCO_80), int((COCO_80 < 0).sum())) == (91, 11)
    assert used.tolist() == list(range(80))


def test_a_wrapper_whose_predictor_sets_the_mode_may_have_its_own_flag_at_training():
    class Wrapper(nn.Module):
        """As `ultralytics.YOLO`: a module that is never switched to eval mode itself."""

        predictor = None

        def forward(self, images, **_):
            return FakeYolo()(images)

    assert Wrapper().training
    assert [len(each) for each in from_ultralytics(Wrapper())(X)] == [3, 3]
    del Wrapper.predictor
    with pytest.raises(InputError, match="training mode"):
        from_ultralytics(Wrapper())


def test_ultralytics_results_become_detections_of_clipped_images():
    model = FakeYolo()
    found = from_ultralytics(model, conf=0.1, labels=COCO_80)(X * 3 - 1)
    assert (model.images.min(), model.images.max()) == (0, 1)
    assert model.options == {"verbose": False, "conf": 0.1}
    assert [each.shape for each in found] == [(2, 7), (2, 7)]
    assert from_ultralytics(model, objectness=0.6)(X)[1].tolist() == [[1, 2, 8, 9, SCORES[0].item(), 1, 1]]


def test_models_that_are_not_detectors_are_refused():
    with pytest.raises(InputError, match="training mode"):
        from_torchvision(FakeTorchvision())
    with pytest.raises(InputError, match="must be a function"):
        from_torchvision(3)
    with pytest.raises(InputError, match="image 0 lacks 'scores'"):
        from_torchvision(lambda images: [{"boxes": BOXES}] * len(images))(X)
    with pytest.raises(InputError, match=r"no \.boxes with \.xyxy"):
        from_ultralytics(lambda images, **_: [FakeResult(None)] * len(images))(X)
    with pytest.raises(InputError, match="labels up to 90, but `labels` maps 0 to 9"):
        from_torchvision(FakeTorchvision().eval(), labels=torch.arange(10))(X)
    nan = {"boxes": BOXES, "scores": SCORES * torch.nan, "labels": LABELS}
    broken = from_torchvision(lambda images: [nan] * len(images), objectness=0.5)
    with pytest.raises(InputError, match="NaN or infinite"):
        SmoothedDetector(broken, n=3).detect(X)


@pytest.fixture
def truth() -> CocoTruth:
    return CocoTruth(
        images=((7, "a.png"), (9, "b.png")),
        sizes=((12, 16), (10, 20)),
        truth=[(BOXES[:2], torch.tensor([1, 0])), (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))],
        categories=((3, "cat"), (18, "dog")),
    )


def test_coco_truth_comes_back(tmp_path: Path, truth: CocoTruth):
    write_coco(tmp_path / "t.json", truth)
    content = json.loads((tmp_path / "t.json").read_text())
    assert content["annotations"][0]["bbox"] == [1, 2, 7, 7]
    assert content["annotations"][0]["category_id"] == 18
    back = read_coco(tmp_path / "t.json")
    assert (back.images, back.sizes, back.categories) == (truth.images, truth.sizes, truth.categories)
    for (boxes, labels), (b, y) in zip(truth.truth, back.truth, strict=True):
        assert torch.equal(boxes, b)
        assert torch.equal(labels, y)
    content["annotations"][1]["iscrowd"] = 1
    content["categories"].reverse()  # labels follow the ids, not the order in the file
    (tmp_path / "t.json").write_text(json.dumps(content))
    assert read_coco(tmp_path / "t.json").truth[0][1].tolist() == [1]


def test_coco_detections_come_back(tmp_path: Path, truth: CocoTruth):
    found = [torch.tensor([[1.0, 2, 8, 9, 0.5, 0.5, 1]]), torch.tensor([[0.0, 0, 4, 4, 0.5, 1.0, 0]])]
    write_coco_detections(tmp_path / "d.json", found, truth)
    rows = json.loads((tmp_path / "d.json").read_text())
    assert rows[0] == {"image_id": 7, "category_id": 18, "bbox": [1, 2, 7, 7], "score": 0.25}
    back = read_coco_detections(tmp_path / "d.json", truth)
    assert back[0].tolist() == [[1, 2, 8, 9, 0.25, 1, 1]]
    assert torch.equal(back[1], found[1])
    with pytest.raises(InputError, match="label 5 of image 7 has no category"):
        write_coco_detections(tmp_path / "d.json", [torch.tensor([[1.0, 2, 8, 9, 1, 1, 5]]), found[1]], truth)
    with pytest.raises(InputError, match="list of 2 tensors"):
        write_coco_detections(tmp_path / "d.json", found[:1], truth)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"annotations": [{"bbox": [1, 2, -3, 4], "image_id": 7, "category_id": 3}]}, "width and height >= 0"),
        ({"annotations": [{"bbox": [1, 2, 3], "image_id": 7, "category_id": 3}]}, "annotation 0: 'bbox' must be"),
        ({"annotations": [{"bbox": [1, 2, 3, 4], "image_id": 8, "category_id": 3}]}, "image 8 or category 3 is not"),
        ({"annotations": [{"bbox": [1, 2, 3, 4], "image_id": "7", "category_id": 3}]}, "'image_id' must be a whole"),
        ({"images": "none"}, "'images' must be a list"),
        ({"categories": [{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]}, "the same id"),
    ],
)
def test_damaged_coco_files_are_refused(tmp_path: Path, truth: CocoTruth, change: dict[str, object], message: str):
    path = tmp_path / "t.json"
    write_coco(path, truth)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        read_coco(path)


def test_other_bad_files_are_refused(tmp_path: Path, truth: CocoTruth):
    path = tmp_path / "x.json"
    with pytest.raises(StorageError, match="cannot read"):
        read_coco(path)
    with pytest.raises(StorageError, match="cannot write"):
        write_coco(tmp_path / "none" / "x.json", truth)
    path.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        read_coco(path)
    path.write_text("[]")
    with pytest.raises(InputError, match="JSON object with images"):
        read_coco(path)
    assert [each.shape for each in read_coco_detections(path, truth)] == [(0, 7), (0, 7)]
    for content, message in (
        ({}, "JSON list of detections"),
        ([3], "detection 0 must be a JSON object"),
        ([{"image_id": 7, "category_id": 4, "bbox": [0, 0, 1, 1], "score": 1}], "category 4 is not among"),
        ([{"image_id": 7, "category_id": 3, "bbox": [0, 0, 1, 1]}], "'score' must be a number, got None"),
        ([{"image_id": 7, "category_id": 3, "bbox": [0, 0, 1, 1], "score": float("nan")}], "NaN or infinite"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(InputError, match=message):
            read_coco_detections(path, truth)


def test_coco_ap_says_what_to_install_or_gives_one(tmp_path: Path, truth: CocoTruth):
    found = [torch.cat([BOXES[:2], torch.ones(2, 2), torch.tensor([[1.0], [0.0]])], 1), torch.zeros(0, 7)]
    write_coco(tmp_path / "t.json", truth)
    write_coco_detections(tmp_path / "d.json", found, truth)
    if importlib.util.find_spec("pycocotools") is None:
        with pytest.raises(UnsupportedError, match="pip install pycocotools"):
            coco_ap(tmp_path / "t.json", tmp_path / "d.json")
    else:
        assert coco_ap(tmp_path / "t.json", tmp_path / "d.json") == pytest.approx({"AP": 1, "AP50": 1, "AP75": 1})
