"""Data sets that need no download: a balanced excerpt of MNIST inside the package, and two moons made on the fly."""

from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.data.dataset import Arrays, Dataset, make_dataset
from holdfast.data.npz import read_npz
from holdfast.errors import InputError


def mnist_mini() -> Dataset:
    """10,000 training and 2,000 test images of MNIST, balanced over the ten digits, 1 x 28 x 28.

    For each digit these are the first 1,000 images of MNIST's training set and the first 200 of its test set, in file
    order, each part shuffled once. The pixels are the originals. License CC BY-SA 3.0; see mnist-mini.LICENSE.txt.
    """
    resource = resources.files("holdfast.data") / "mnist-mini.npz"
    return read_npz(resource, name="mnist-mini")


def two_moons(n: int = 1000, *, noise: float = 0.1, seed: int = 0) -> Dataset:
    """Two interleaved half circles in the unit square: `n` training and `n` test points, shape (n, 2), two classes.

    The curves are (cos t, sin t) and (1 - cos t, 1/2 - sin t) for t uniform on [0, pi], plus Gaussian noise of standard
    deviation `noise` in these coordinates. Both axes are then divided by 4 and centred, whatever the noise, so that
    circles stay circles and a radius of r in the square is one of 4 r here; points outside the square are clipped.

    >>> two_moons(4, noise=0.0).train.y.tolist()
    [0, 1, 0, 1]
    """
    if n < 2:
        raise InputError(f"two-moons needs n >= 2 points, one for each moon at least, got {n}")
    if not (np.isfinite(noise) and noise >= 0):
        raise InputError(f"the noise of two-moons must be a finite number >= 0, got {noise}")
    rng = np.random.default_rng(seed)
    parts = [_moons(n, noise, rng) for _ in range(2)]
    return make_dataset("two-moons", parts[0], parts[1], ("upper moon", "lower moon"))


def _moons(n: int, noise: float, rng: np.random.Generator) -> Arrays:
    t = rng.uniform(0, np.pi, n)
    y = np.arange(n) % 2
    upper = np.stack([np.cos(t), np.sin(t)], axis=1)
    lower = np.stack([1 - np.cos(t), 0.5 - np.sin(t)], axis=1)
    points: npt.NDArray[Any] = np.where(y[:, None] == 0, upper, lower) + rng.normal(0, 1, (n, 2)) * noise
    centre = np.array([0.5, 0.25])  # of the box [-1, 2] x [-1/2, 1] that encloses both curves
    return Arrays(((points - centre) / 4 + 0.5).clip(0, 1), y, "two-moons")
