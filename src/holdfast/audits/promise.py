"""Which inputs a complete search should try first: those for which a cheap bound falls short by the least."""

import torch

from holdfast.audits.job import Job
from holdfast.certificates import certify
from holdfast.errors import OutOfTime, UnsupportedError
from holdfast.threats import Threat
from holdfast.utils import clock

TOGETHER = 16  # inputs between two looks at the clock


def promise(job: Job, threat: Threat, positions: list[int]) -> dict[int, float]:
    """CROWN's margin of each input over the threat set: the nearer to zero, the fewer splits are to be expected.

    Inputs for which there is no time have no entry; nor has any if the network is one that CROWN does not cover.
    """
    found: dict[int, float] = {}
    for index in torch.tensor(positions, dtype=torch.long).split(TOGETHER) if positions else ():
        if clock.over():
            break
        try:
            margin = certify(job.model, *job.take(index), threat.select(index), "crown").margin
        except (UnsupportedError, OutOfTime):
            break
        found.update(zip(index.tolist(), margin.tolist(), strict=True))
    return found
