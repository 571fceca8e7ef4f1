"""Stages: each works on the survivors of the earlier ones."""

import torch

from holdfast.attacks.core.stages import run_targets, untouched
from holdfast.random import Noise


def test_every_run_gets_the_targets_and_the_noise_of_its_survivors():
    x, y, noise = torch.rand(4, 2), torch.zeros(4, dtype=torch.int64), Noise(0, torch.tensor([7, 8, 9, 10]))
    targets = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    calls = []

    def run(x, y, noise, target):
        calls.append((noise.index.tolist(), target.tolist()))
        result = untouched(x)
        result.success[:] = target == 3
        return result

    merged = run_targets(x, y, noise, targets, [(0, run), (1, run)])
    assert calls == [([7, 8, 9, 10], [1, 3, 5, 7]), ([7, 9, 10], [2, 6, 8])]
    assert merged.queries.tolist() == [1, 1, 1, 1]
