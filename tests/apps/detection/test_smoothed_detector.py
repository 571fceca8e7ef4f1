"""The smoothed detector: certificates of detectors whose truth is known, and attempts to break them."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

import holdfast as hf
from holdfast.apps.detection import CertifiedDetections, Encoding, SmoothedDetector
from holdfast.errors import InputError

BOXES = torch.tensor([[1.0, 2, 10, 12, 0.9, 0.8, 3], [20, 5, 30, 14, 0.7, 0.9, 1]])
X = torch.rand(3, 1, 16, 40, generator=torch.Generator().manual_seed(0))


def fixed(images: Tensor) -> list[Tensor]:
    """A detector that sees the same two objects everywhere."""
    return [BOXES] * len(images)


def components(images: Tensor) -> list[Tensor]:
    """A real one without gradients: a box around each bright region; label by its shape, tall or wide."""
    found = []
    for image in images[:, 0].numpy():
        smooth = ndimage.uniform_filter(image, 3)
        places, count = ndimage.label(smooth > 0.5)
        boxes = []
        for i, (rows, columns) in enumerate(ndimage.find_objects(places, count)):
            area = int((places[rows, columns] == i + 1).sum())
            if area >= 4:
                height, width = rows.stop - rows.start, columns.stop - columns.start
                corners = [columns.start, rows.start, columns.stop, rows.stop]
                boxes.append([*corners, min(1.0, area / 40), 1.0, float(width > height)])
        found.append(torch.tensor(boxes, dtype=torch.float32).view(-1, 7))
    return found


def two_objects() -> Tensor:
    image = torch.zeros(1, 1, 32, 32)
    image[..., 1:9, 3:7] = 1.0
    image[..., 23:28, 10:22] = 0.9
    return image


def by_slot(bins: Tensor, values: Tensor) -> dict[tuple[int, int], Tensor]:
    """Rows of `values` by bin and place within the bin."""
    return {(int(b), int((bins[:i] == b).sum())): values[i] for i, b in enumerate(bins)}


def test_a_fixed_detector_has_certificates_without_width():
    detector = SmoothedDetector(fixed, 0.25, n=200)
    for certified in detector.certify(X, 0.3):
        assert torch.equal(certified.lower, certified.upper)
        assert certified.lower[:, :4].tolist() == BOXES[[1, 0], :4].tolist()
        assert certified.label.tolist() == [1, 3]
        assert bool(certified.present.all())
        assert not bool(certified.empty.any())
        assert torch.equal(certified.detections, BOXES[[1, 0]])
        assert (certified.n, certified.sigma, certified.epsilon, certified.confidence) == (200, 0.25, 0.3, 0.999)
    assert [each.tolist() for each in detector.detect(X)] == [BOXES[[1, 0]].tolist()] * 3
    assert detector.certify(X[:1], 0.3, objectness=0.8)[0].label.tolist() == [3]


def test_no_boxes_are_certified_as_none():
    nothing = SmoothedDetector(lambda images: [torch.zeros(0, 7)] * len(images), n=50)
    certified = nothing.certify(X, 0.1)[2]
    assert len(certified) == 0
    assert certified.label.shape == certified.empty.shape == (0,)
    assert [each.shape for each in nothing.detect(X)] == [(0, 7)] * 3


def moving(images: Tensor) -> list[Tensor]:
    """A box whose left edge is linear in the image, w.x: its smoothed bounds are known exactly."""
    edge = (images * weights(images)).flatten(1).sum(1)
    return [torch.tensor([[e, 0.0, e + 5, 5.0, 1.0, 1.0, 0.0]]) for e in edge.tolist()]


def weights(images: Tensor) -> Tensor:
    w = torch.linspace(-1, 2, images[0].numel()).view(images.shape[1:])
    return 3 * w / w.norm()


def test_a_linear_detector_moves_as_far_as_its_certificate_says():
    detector = SmoothedDetector(moving, 0.2, n=3000, encoding=Encoding("none"))
    x, w = X[:1], weights(X)
    certified = detector.certify(x, 0.15, 0.99)[0]
    value = float((x * w).sum())
    # Exactly value -+ epsilon ||w|| with infinitely many samples.
    assert certified.lower[0, 0].item() == pytest.approx(value - 0.45, abs=0.06)
    assert certified.upper[0, 0].item() == pytest.approx(value + 0.45, abs=0.06)
    assert certified.lower[0, 0] < value - 0.45 + 0.02
    moved = detector.detect((x + 0.15 * w / w.norm()).clamp(0, 1))[0]
    assert moved[0, 0] <= certified.upper[0, 0]
    wider = detector.certify(x, 0.3, 0.99)[0]
    assert bool((wider.lower[:, :4] <= certified.lower[:, :4]).all())
    assert bool((wider.upper[:, :4] >= certified.upper[:, :4]).all())


@pytest.mark.parametrize("encoding", [Encoding(), Encoding("none", "objectness")])
def test_attacked_connected_components_stay_inside_their_bounds(encoding):
    x, epsilon = two_objects(), 0.4
    smoothed = SmoothedDetector(components, 0.25, n=400, encoding=encoding)
    certified = smoothed.certify(x, epsilon, 0.999)[0]
    assert int(certified.present.sum()) == 2
    assert sorted(certified.label[certified.present].tolist()) == [0, 1]
    # Candidates by random search: directions that change the answer of the bare detector most, then a fresh estimate.
    threat = hf.L2(epsilon - 1e-4)
    directions = torch.randn(40, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    region = torch.zeros(32, 32)
    region[9:11, 3:7], region[21:23, 10:22] = 1, 1  # where more ink makes a box grow
    directions[:20] = (region * directions[:20].abs()) + 0.02 * directions[20:]
    directions[20:30] = -x * directions[20:30].abs()  # less ink on the objects
    start = x.expand_as(directions)
    tries = threat.project(start + 10 * directions, start)
    change = [float((a[:, :4].sum() - components(x)[0][:, :4].sum()).abs()) for a in components(tries)]
    for i in [int(np.argmax(change)), 0, 19, 20]:
        other = dataclasses.replace(smoothed, n=300, seed=7 + i)
        attacked = other.certify(tries[i : i + 1], 0.0, 0.5)[0]
        medians = by_slot(attacked.bins, attacked.median[:, [0, 1, 2, 3, 6]])
        for slot, bounds in by_slot(certified.bins, torch.stack([certified.lower, certified.upper], 1)).items():
            median = medians.pop(slot, torch.full((5,), torch.inf))
            assert bool((median >= bounds[0]).all())
            assert bool((median <= bounds[1]).all())
        assert all(bool((rest == torch.inf).all()) for rest in medians.values())  # slots not listed stay empty


def test_seed_decides_and_batches_do_not_matter():
    x = two_objects()
    one = SmoothedDetector(components, 0.25, n=60, seed=3)
    first, again = one.draw(x)[0], dataclasses.replace(one, batch=7).draw(x)[0]
    assert torch.equal(first.found.values, again.found.values)
    assert torch.equal(first.found.image, again.found.image)
    other = dataclasses.replace(one, seed=4).draw(x)[0]
    assert not torch.equal(first.found.values, other.found.values)
    both = one.draw(torch.cat([x, x.flip(3)]))
    assert torch.equal(both[0].found.values, first.found.values)


def test_noise_is_not_clipped_and_has_its_size():
    seen = []

    def watch(images: Tensor) -> list[Tensor]:
        seen.append(images.clone())
        return [torch.zeros(0, 7)] * len(images)

    SmoothedDetector(watch, 0.3, n=50).detect(X)
    noise = torch.cat(seen).view(3, 50, *X.shape[1:]) - X[:, None]
    assert noise.std().item() == pytest.approx(0.3, rel=0.02)
    assert torch.cat(seen).max() > 1.2
    assert torch.cat(seen).min() < -0.2


def test_a_denoiser_runs_first_and_is_part_of_the_detector():
    plain = SmoothedDetector(moving, 0.2, n=40)
    halved = SmoothedDetector(moving, 0.2, n=40, denoiser=lambda images: images / 2)
    expected = SmoothedDetector(lambda images: moving(images / 2), 0.2, n=40)
    assert torch.equal(halved.detect(X)[0], expected.detect(X)[0])
    assert not torch.equal(halved.detect(X)[0], plain.detect(X)[0])


def test_bad_input_is_refused():
    for sigma in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="sigma"):
            SmoothedDetector(fixed, sigma)
    with pytest.raises(InputError, match="n and batch must be at least 1"):
        SmoothedDetector(fixed, n=0)
    with pytest.raises(InputError, match=r"images must have shape \(B, C, H, W\)"):
        SmoothedDetector(fixed, n=5).detect(X[0])
    with pytest.raises(InputError, match="the smallest n that does is 148"):
        SmoothedDetector(fixed, 0.25, n=20).certify(X, 0.36, 0.99999)
    broken = BOXES.clone()
    broken[0, 0] = torch.nan
    with pytest.raises(InputError, match="NaN or infinite values"):
        SmoothedDetector(lambda images: [broken] * len(images), n=5).detect(X)
    with pytest.raises(InputError, match="list of 5 tensors"):
        SmoothedDetector(lambda images: [BOXES], n=5).detect(X[:1])
    with pytest.raises(InputError, match="epsilon"):
        SmoothedDetector(fixed, n=50).certify(X, -0.1)


def test_what_the_bounds_of_a_slot_prove_of_it():
    inf = torch.inf
    lower = torch.tensor([[1.0, 1, 2, 2, 3], [1.0, 1, 2, 2, 0], [1.0, 1, 2, 2, 5], [inf, inf, inf, inf, inf]])
    upper = torch.tensor([[1.5, 1, 3, 2, 3], [1.5, 1, 3, 2, 4], [inf, inf, inf, inf, inf], [inf, inf, inf, inf, inf]])
    found = CertifiedDetections(lower, upper, torch.zeros(4, 7), torch.zeros(4), 0.1, 0.25, 100, 0.999)
    assert found.label.tolist() == [3, -1, -1, -1]  # proved; one of several; perhaps none; never there
    assert found.present.tolist() == [True, True, False, False]
    assert found.empty.tolist() == [False, False, False, True]


def test_one_confidence_for_all_slots_of_an_image():
    def follows(images: Tensor) -> list[Tensor]:
        """One box whose corner moves with the first pixel."""
        corners = images[:, 0, 0, :1] + torch.tensor([0.0, 0.0, 9.0, 9.0])
        return [torch.cat([row, torch.ones(3)])[None] for row in corners]

    (draws,) = SmoothedDetector(follows, 0.25, n=2000, seed=5).draw(two_objects())
    each, together = draws.certify(0.1, 0.99), draws.certify(0.1, 0.99, slots=200)
    by_hand = draws.certify(0.1, 1 - 0.01 / (2 * 5 * 200))
    assert torch.equal(together.lower, by_hand.lower)
    assert torch.equal(together.upper, by_hand.upper)
    assert bool((together.lower <= each.lower).all())
    assert bool((together.lower < each.lower).any())
    assert (each.familywise, together.familywise, together.confidence) == (False, True, 0.99)
    assert each.seed == together.seed == 5
    with pytest.raises(InputError, match="the most that the detector can fill, got 0"):
        draws.certify(0.1, 0.99, slots=0)
    with pytest.raises(InputError, match="prove nothing"):
        draws.certify(1.0, 0.99999, slots=10**9)
