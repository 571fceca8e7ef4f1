"""The pool gives back what was put in, and uses places again."""

import torch

from holdfast.certificates.complete.parts import FIELDS, Parts
from holdfast.certificates.complete.pool import FIRST, Pool


def parts(count, start=0):
    number = torch.arange(start, start + count)
    values = number[:, None].float().expand(-1, 3)
    return Parts(number % 4, number.double(), values.to(torch.int8), values, values[:, :1], values[:, :0, None])


def test_parts_come_back_as_they_were_and_memory_stays_flat():
    pool = Pool(parts(5))
    pool.put(parts(FIRST, 5))
    places, task, bound = pool.light()
    assert sorted(bound.tolist()) == list(range(FIRST + 5))
    assert torch.equal(task, bound.long() % 4)
    taken = pool.take(places[bound < 10])
    assert sorted(taken.bound.tolist()) == list(range(10))
    assert torch.equal(taken.values[:, 0].double(), taken.bound)
    assert len(pool) == FIRST - 5
    size = pool.bytes
    for _ in range(50):
        some = pool.take(pool.light()[0][:10])
        pool.put(some)
    assert pool.bytes == size
    assert all(len(getattr(pool._rows, name)) <= 4 * FIRST for name in FIELDS)
