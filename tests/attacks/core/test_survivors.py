"""Survivors: the best points, what they cost, and who leaves; against the same bookkeeping input by input."""

import torch

from holdfast.attacks.core.survivors import Survivors, group_size, survivors


def test_inputs_leave_in_groups_and_the_unbroken_ones_come_first():
    assert [group_size(n) for n in (0, 1, 15, 16, 40, 256)] == [1, 1, 1, 2, 4, 32]
    going = torch.tensor([False, True, False, True, False, True])
    assert survivors(going, 3, 1).tolist() == [1, 3, 5]
    assert survivors(going, 3, 2).tolist() == [1, 3, 5, 0]
    assert survivors(going, 3, 6) is None


def test_the_best_points_and_their_costs():
    torch.manual_seed(0)
    x, y = torch.zeros(40, 2), torch.zeros(40, dtype=torch.int64)
    s, steps = Survivors(x, y), 12
    points, values = torch.rand(steps, 40, 2), torch.rand(steps, 40)
    wrong = torch.rand(steps, 40) < 0.1
    for step in range(steps):
        s.count(gradients=2, queries=3)
        s.keep(points[step][s.row], values[step][s.row], wrong[step][s.row])
        (rows,) = s.leave(s.row)
        assert torch.equal(rows, s.row)
    result = s.result("name")
    for i in range(40):
        first = next((t for t in range(steps) if wrong[t, i]), None)
        best = int(values[:, i].argmax()) if first is None else first
        assert torch.equal(result.x_adv[i], points[best, i])
        assert bool(result.success[i]) == (first is not None)
        assert result.by[i] == ("" if first is None else "name")
        asked = steps if first is None else first + 1
        assert (int(result.gradients[i]), int(result.queries[i])) == (2 * asked, 3 * asked)
    assert s.resume() == (not bool(s.success.all()))
    assert torch.equal(s.row, (~s.success).nonzero()[:, 0])


def test_a_run_that_cannot_break_an_input_keeps_the_largest_loss():
    s = Survivors(torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64))
    s.keep(torch.tensor([[1.0], [1.0]]), torch.tensor([0.5, 0.5]))
    rows = s.keep(torch.tensor([[2.0], [2.0]]), torch.tensor([0.4, 0.6]))
    assert rows.tolist() == [1]
    assert s.x_adv.flatten().tolist() == [1.0, 2.0]
    assert not bool(s.success.any())
    assert not s.over
