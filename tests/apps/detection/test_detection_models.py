"""The small detector, the denoiser, and the attack."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import holdfast as hf
from holdfast.apps.detection import (
    DnCNN,
    Encoding,
    SmoothedDetector,
    TinyDetector,
    average_precision,
    certified_curve,
    count,
    curve,
    dag,
    tiny_detector,
    train_denoiser,
    train_tiny,
)
from holdfast.data import Dataset, DetectionScenes, detection_scenes, mnist_mini
from holdfast.errors import InputError

SIGMA = 0.2
SCENES = {"size": 32, "most": 1, "scale": (0.8, 1.0)}  # small, so that a second of training will do


@pytest.fixture(scope="module")
def zeros_and_ones() -> Dataset:
    data = mnist_mini()
    return Dataset("01", data.train[data.train.y < 2], data.test[data.test.y < 2], ("0", "1"))


@pytest.fixture(scope="module")
def scenes(zeros_and_ones: Dataset) -> DetectionScenes:
    return detection_scenes(24, **SCENES, split="test", digits=zeros_and_ones)


@pytest.fixture(scope="module")
def trained(zeros_and_ones: Dataset) -> TinyDetector:
    train = detection_scenes(400, **SCENES, digits=zeros_and_ones)
    return train_tiny(train, sigma=SIGMA, epochs=6, batch=16, lr=1e-2, model=TinyDetector(1, 2, width=24))


def test_the_head_is_convolutional_and_small():
    model = TinyDetector(3, 5).eval()
    assert sum(p.numel() for p in model.parameters()) < 100_000
    boxes, objects, classes = model.candidates(torch.rand(2, 3, 32, 56))
    assert (boxes.shape, objects.shape, classes.shape) == ((2, 28, 4), (2, 28), (2, 28, 5))
    assert bool((boxes[..., 2:] > boxes[..., :2]).all())
    centre = (boxes[0, :, :2] + boxes[0, :, 2:]) / 2
    cells = torch.tensor([[8 * c + 4.0, 8 * r + 4.0] for r in range(4) for c in range(7)])
    assert bool(((centre - cells).abs() <= 8).all())
    again = TinyDetector(3, 5).eval()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    with pytest.raises(InputError, match="divisible by 8"):
        model(torch.rand(1, 3, 30, 56))


def test_the_whole_path_on_digit_scenes(trained, scenes):
    detector, truth = tiny_detector(trained), scenes.objects()
    noisy = scenes.x + SIGMA * torch.randn(scenes.x.shape, generator=torch.Generator().manual_seed(0))
    assert count(detector(noisy), truth).recall > 0.5
    assert all(torch.equal(a, b) for a, b in zip(detector(noisy), detector(noisy), strict=True))
    draws = SmoothedDetector(detector, SIGMA, n=60).draw(scenes.x)
    plain = average_precision(curve(draws, truth))
    proved = [average_precision(certified_curve(draws, truth, eps, 0.99)) for eps in (0.05, 0.2)]
    assert plain > 0.35
    assert plain > proved[0] > proved[1]
    assert proved[0] > 0.05
    # What the attack leaves lies above what is proved.
    x_adv = dag(trained.scores, scenes.x, truth, hf.L2(0.05), sigma=SIGMA, steps=3, samples=2)
    attacked = curve(SmoothedDetector(detector, SIGMA, n=60, seed=1).draw(x_adv), truth)
    assert average_precision(attacked) >= proved[0]


def test_training_without_noise_and_bad_sigma(scenes):
    model = train_tiny(scenes[:4], sigma=0.0, epochs=1, model=TinyDetector(1, 2, width=8))
    assert not model.training
    with pytest.raises(InputError, match="sigma must be 0"):
        train_tiny(scenes[:4], sigma=-1.0)


def test_the_attack_stays_in_the_ball_and_raises_its_loss(trained, scenes):
    x, truth, threat = scenes.x[:6], scenes.objects()[:6], hf.L2(1.0)
    x_adv = dag(trained.scores, x, truth, threat, steps=6)
    assert bool(threat.contains(x_adv, x).all())
    assert bool((threat.distance(x_adv, x) > 0.5).all())
    assert torch.equal(dag(trained.scores, x, truth, threat, steps=6), x_adv)
    assert all(p.grad is None or not p.grad.any() for p in trained.parameters())
    right, wrong = (sum(float(p) for p in true_scores(trained, images, truth)) for images in (x, x_adv))
    assert wrong < 0.9 * right
    empty = [(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))] * 6
    assert torch.equal(dag(trained.scores, x, empty, threat, steps=2), x)  # nothing to attack, no gradient


@torch.no_grad()
def true_scores(model: TinyDetector, images: Tensor, truth) -> list[Tensor]:
    """Probability of the true class in the cell of each object."""
    _, _, classes = model.candidates(images)
    scores = []
    for i, (boxes, labels) in enumerate(truth):
        middle = ((boxes[:, :2] + boxes[:, 2:]) / 16).long()
        cell = middle[:, 1] * (images.shape[3] // 8) + middle[:, 0]
        scores += [*classes[i].softmax(1)[cell, labels]]
    return scores


FREQUENCY = 60.0


def ripple_scores(images: Tensor) -> tuple[Tensor, Tensor]:
    """One box, and a class margin 0.3 + cos(phase) that changes its sign with every small step along one direction."""
    direction = torch.ones_like(images[0]) / math.sqrt(images[0].numel())
    phase = FREQUENCY * ((images - 0.5) * direction).flatten(1).sum(1) + 0.5
    margin = 0.3 + phase.cos()
    boxes = torch.tensor([2.0, 2, 9, 9]).expand(len(images), 1, 4)
    return boxes, torch.stack([margin, -margin], 1)[:, None]


def ripple(images: Tensor) -> list[Tensor]:
    boxes, logits = ripple_scores(images)
    rows = torch.cat([boxes, torch.ones(len(images), 1, 2), logits.argmax(2)[..., None].float()], 2)
    return [*rows]


def test_the_bare_detector_falls_where_the_smoothed_one_stands():
    x = torch.full((8, 1, 12, 12), 0.5)
    truth = [(torch.tensor([[2.0, 2, 9, 9]]), torch.tensor([0]))] * 8
    smoothed = SmoothedDetector(ripple, 0.5, n=200, encoding=Encoding("none"))
    for detect in (ripple, smoothed.detect):
        assert count(detect(x), truth).found == 8
    bare = dag(ripple_scores, x, truth, hf.L2(0.1))
    assert count(ripple(bare), truth).found == 0
    averaged = dag(ripple_scores, x, truth, hf.L2(0.1), sigma=0.5)
    for attacked in (bare, averaged):
        assert count(smoothed.detect(attacked), truth).found == 8


def test_bad_attacks_are_refused(trained, scenes):
    x, truth = scenes.x[:2], scenes.objects()[:2]
    with pytest.raises(InputError, match="within an L2 ball"):
        dag(trained.scores, x, truth, hf.Linf(0.1))
    with pytest.raises(InputError, match="2 images but true boxes for 1"):
        dag(trained.scores, x, truth[:1], hf.L2(0.1))
    with pytest.raises(InputError, match="need sigma >= 0"):
        dag(trained.scores, x, truth, hf.L2(0.1), sigma=-0.5)
    with pytest.raises(InputError, match="one class only"):
        dag(TinyDetector(1, 1).eval().scores, x, truth, hf.L2(0.1))


def test_the_denoiser_starts_as_the_identity_and_learns():
    images = mnist_mini().train.x[:160]
    model = DnCNN(depth=3, width=8).eval()
    assert torch.equal(model(images[:3]), images[:3])
    before = model.net[0].weight.clone()
    trained = train_denoiser(images[:128], 0.4, model=model, epochs=5, batch=16, lr=1e-2)
    assert trained is model
    assert not trained.training
    assert not torch.equal(trained.net[0].weight, before)
    held_out = images[128:]
    noisy = held_out + 0.4 * torch.randn(held_out.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(trained(noisy), trained(noisy))
        assert mse_loss(trained(noisy), held_out).item() < 0.6 * 0.4**2
    assert DnCNN(3).net[3].weight.shape == DnCNN(3).net[2].weight.shape[:1]  # published size: 64 channels, batch norm
    assert sum(isinstance(m, torch.nn.Conv2d) for m in DnCNN(3).modules()) == 17


def test_bad_denoisers_are_refused():
    with pytest.raises(InputError, match="depth >= 2"):
        DnCNN(depth=1)
    with pytest.raises(InputError, match="sigma"):
        train_denoiser(torch.rand(4, 1, 8, 8), 0.0)
