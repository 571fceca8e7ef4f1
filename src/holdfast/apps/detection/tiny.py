"""A small detector of our own, so that the whole path can be run on a CPU: YOLO's idea with one box for each cell.

The image is divided into cells of 8 x 8 pixels. A convolutional network gives for each cell whether an object has its
centre there, the box around it, and its class (Redmon et al., "You only look once", 2016). About 60,000 parameters.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, smooth_l1_loss

from holdfast.apps.detection.boxes import Detector
from holdfast.apps.detection.suppression import nms
from holdfast.data import DetectionScenes
from holdfast.errors import InputError
from holdfast.random import Noise

STRIDE = 8  # pixels to a cell
ANCHOR = 16.0  # width and height of the box that a cell predicts from zeros, about the size of a digit


class TinyDetector(nn.Module):
    """Images (B, C, H, W) to a head (B, 5 + K, H / 8, W / 8): objectness, box, classes of each cell, as raw numbers."""

    def __init__(self, channels: int = 1, classes: int = 10, *, width: int = 48, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers: list[nn.Module] = []
            sizes = ((channels, 16, 2), (16, 32, 2), (32, width, 2), (width, width, 1), (width, width, 1))
            for inside, outside, stride in sizes:
                layers += [nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]
            self.net = nn.Sequential(*layers, nn.Conv2d(width, 5 + classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        """The raw head."""
        if x.ndim != 4 or x.shape[2] % STRIDE or x.shape[3] % STRIDE:
            raise InputError(f"images must be (B, C, H, W) with sides divisible by {STRIDE}, got {tuple(x.shape)}")
        return self.net(x)  # type: ignore[no-any-return]

    def candidates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All cells, with gradients: boxes (B, A, 4), logits of objectness (B, A), class logits (B, A, K)."""
        head = self(x)
        centre = _centres(head)
        flat = head.flatten(2).mT  # (B, A, 5 + K), cells row by row
        middle = centre + STRIDE * (flat[..., 1:3].sigmoid() * 2 - 1)  # up to a cell beyond the own one
        half = ANCHOR / 2 * flat[..., 3:5].clamp(-3, 3).exp()
        return torch.cat([middle - half, middle + half], 2), flat[..., 0], flat[..., 5:]

    def scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes and class logits of all cells: what the attack `dag` asks for."""
        boxes, _, classes = self.candidates(x)
        return boxes, classes


def tiny_detector(model: TinyDetector, *, objectness: float = 0.1, threshold: float = 0.4) -> Detector:
    """The model as a detector: boxes above `objectness`, without those that overlap a better one by `threshold`."""

    @torch.no_grad()
    def detect(images: Tensor) -> list[Tensor]:
        boxes, objects, classes = model.candidates(images)
        score, label = classes.softmax(2).max(2)
        columns = [boxes, objects.sigmoid()[..., None], score[..., None], label[..., None].to(boxes)]
        return nms(torch.cat(columns, 2), objectness=objectness, threshold=threshold)

    return detect


def train_tiny(
    scenes: DetectionScenes,
    *,
    sigma: float = 0.25,
    epochs: int = 20,
    batch: int = 32,
    lr: float = 2e-3,
    model: TinyDetector | None = None,
    seed: int = 0,
) -> TinyDetector:
    """Train on images with noise of standard deviation `sigma`, so that the smoothed detector still sees; in eval mode.

    The loss of a cell is the cross-entropy of its objectness and, where an object has its centre, of its class and
    the distance of its box. Adam; the learning rate falls along a cosine. 3,000 scenes, 20 epochs: about a minute.
    """
    if not sigma >= 0:
        raise InputError(f"sigma must be 0 (no noise) or positive, got {sigma}")
    model = TinyDetector(scenes.x.shape[1], len(scenes.classes), seed=seed) if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    steps = epochs * -(-len(scenes) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    noise = Noise.for_batch(seed, len(scenes), scenes.x.device)
    model.train()
    for epoch in range(epochs):
        this = noise.fork(epoch)
        for chosen in this.fork(0).bits(()).argsort().split(batch):
            part = scenes[chosen]
            noisy = part.x + sigma * this.fork(1)[chosen].normal(part.x.shape[1:], part.x.dtype)
            optimizer.zero_grad()
            detection_loss(model, noisy, part.boxes, part.labels).backward()
            optimizer.step()
            schedule.step()
    optimizer.zero_grad()
    return model.eval()


def detection_loss(model: TinyDetector, x: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
    """Loss of a batch with true boxes (B, M, 4) and labels (B, M), -1 where there is no object."""
    found, objects, classes = model.candidates(x)
    there = labels >= 0
    image = there.nonzero()[:, 0]
    truth, label = boxes[there], labels[there]
    columns, rows = x.shape[3] // STRIDE, x.shape[2] // STRIDE
    middle = (truth[:, :2] + truth[:, 2:]) / 2 / STRIDE
    cell = middle[:, 1].long().clamp(0, rows - 1) * columns + middle[:, 0].long().clamp(0, columns - 1)
    wanted = torch.zeros_like(objects)
    wanted[image, cell] = 1
    loss = binary_cross_entropy_with_logits(objects, wanted, reduction="sum")
    loss = loss + cross_entropy(classes[image, cell], label, reduction="sum")
    loss = loss + smooth_l1_loss(found[image, cell], truth, reduction="sum") / 2
    return loss / len(x)


def _centres(head: Tensor) -> Tensor:
    """Centres (A, 2) of the cells in pixels, row by row."""
    y, x = (STRIDE * (torch.arange(side, device=head.device) + 0.5) for side in head.shape[2:])
    return torch.cartesian_prod(y, x).flip(1).to(head.dtype)
