"""Every way to search the levels finds the largest that is proved and the smallest that breaks, in few looks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.audits import search
from holdfast.audits.plan import Step
from holdfast.audits.rows import Outcome
from holdfast.audits.side import Side, make_side

TOP = 8
SIZES = tuple((i + 1) / TOP for i in range(TOP))
FINE = Step("certify", "ibp", fine=True)
COSTLY = Step("certify", "crown")
SAMPLES = Step("certify", "smoothing", fine=True)
ATTACK = Step("attack", "pgd")


class Oracle:
    """Stands in for a job: an input passes at the levels up to a limit of its own."""

    def __init__(self, limits):
        self.limits, self.looks = limits, []

    def run(self, key, step, side, wanted):
        self.looks += [(position, key.level) for position in wanted]
        return {position: self.outcome(step, side, position, key.level) for position in wanted}

    def outcome(self, step, side, position, level):
        limit = self.limits[position]
        passed, size = level <= limit, side.sizes[level - 1]
        if step.stage == "attack":
            return Outcome(position, passed, None, "" if passed else step.method, None if passed else size)
        proved = side.sizes[limit - 1] if step.settles_all_levels and limit else size if passed else 0.0
        return Outcome(position, passed, None, step.method if proved else "", proved)


def side_of(limits, finer=1):
    side = make_side(0, hf.Linf(1.0), TOP // finer, finer)
    assert side.sizes == pytest.approx(SIZES)
    side.right.extend(range(len(limits)))
    return side


LIMITS = st.lists(st.integers(0, TOP), min_size=1, max_size=12)


@pytest.mark.parametrize("step", [FINE, COSTLY, SAMPLES], ids=["halve", "climb", "once"])
@given(limits=LIMITS)
def test_certificates_find_the_largest_level_that_is_proved(step, limits):
    side, job = side_of(limits), Oracle(limits)
    assert search.certify(job, side, 1, step) == 0
    assert [side.within(side.sizes, i)[0] for i in side.right] == limits
    assert len(set(job.looks)) == len(job.looks), "no level of an input is looked at twice"
    if step is SAMPLES:
        assert job.looks == [(i, TOP) for i in side.right]
    if step is FINE:
        assert len(job.looks) <= 4 * len(limits)


@given(limits=LIMITS, finer=st.sampled_from([1, 2]))
def test_attacks_find_the_smallest_level_that_breaks(limits, finer):
    limits = [limit - limit % finer for limit in limits]
    side, job = side_of(limits, finer), Oracle(limits)
    assert search.attack(job, side, 1, ATTACK, test=False) == 0
    assert [side.within(side.sizes, i)[1] for i in side.right] == [
        limit + finer if limit < TOP else TOP + 1 for limit in limits
    ]
    assert len(set(job.looks)) == len(job.looks)
    assert job.looks[: len(limits)] == [(i, TOP) for i in side.right], "the largest level comes first"
    assert all(level % finer == 0 for _, level in job.looks)


def test_a_costly_certificate_tries_the_largest_level_first_where_that_pays():
    often = Oracle([TOP] * 60)
    search.certify(often, side_of(often.limits), 1, COSTLY)
    assert often.looks == [(i, TOP) for i in range(60)]
    seldom = Oracle([1] * 60)
    search.certify(seldom, side_of(seldom.limits), 1, COSTLY)
    tried = [position for position, level in seldom.looks if level == TOP]
    assert tried == list(range(search.PROBE))
    assert len(seldom.looks) == search.PROBE + 2 * 60


def test_the_first_attack_also_looks_at_the_largest_level_that_is_proved():
    for test, levels in ((False, [8, 6, 7]), (True, [8, 6, 7])):
        side, job = side_of([6]), Oracle([6])
        side.note("certify", Outcome(0, True, None, "ibp", SIZES[4]))
        search.attack(job, side, 1, ATTACK, test=test)
        assert [level for _, level in job.looks] == levels
    for test in (False, True):
        side, job = side_of([TOP]), Oracle([TOP])
        side.note("certify", Outcome(0, True, None, "ibp", SIZES[-1]))
        search.attack(job, side, 1, ATTACK, test=test)
        assert [level for _, level in job.looks] == [TOP] * test


def test_inputs_without_time_are_counted_once():
    class Late(Oracle):
        def run(self, key, step, side, wanted):
            return super().run(key, step, side, wanted[:1])

    side, job = side_of([3, 3, 3]), Late([3, 3, 3])
    assert search.certify(job, side, 1, FINE) == 2
    assert {position for position, _ in job.looks} == {0}


def test_a_stored_outcome_that_does_not_fit_its_level_is_refused():
    class Edited(Oracle):
        def outcome(self, step, side, position, level):
            return replace(super().outcome(step, side, position, level), size=2.0 if step is ATTACK else 0.01)

    for look, text in ((search.certify, "proved, but only up to"), (search.attack, "broken, but by an example")):
        limit = TOP if look is search.certify else 0
        step, how = (FINE, {}) if look is search.certify else (ATTACK, {"test": False})
        with pytest.raises(hf.StorageError, match=text):
            look(Edited([limit]), side_of([limit]), 1, step, **how)


def test_a_side_that_nothing_is_known_of():
    side = Side(0, tuple(hf.Linf(1.0).budgets(2)), (0.5, 1.0))
    assert side.within(side.sizes, 0) == (0, 3)
    assert side.so_far(7) == {
        "threat": "linf:1",
        "budget": 1.0,
        "inputs": 7,
        "clean": 0,
        "certified": 0,
        "attacked": 0,
    }


def test_an_example_inside_a_proof_is_a_contradiction():
    side = Side(0, tuple(hf.Linf(1.0).budgets(4)), (0.25, 0.5, 0.75, 1.0))
    side.note("certify", Outcome(0, True, None, "ibp", 0.5))
    side.note("certify", Outcome(0, False, None, "", 0.0))
    assert side.proved[0] == (0.5, "ibp")
    side.note("attack", Outcome(0, False, 1, "pgd", 0.51))
    assert not side.contradicted(0)
    side.note("attack", Outcome(0, False, 1, "pgd", 0.6))
    assert side.broken[0].size == 0.51
    side.note("attack", Outcome(0, False, 1, "pgd", 0.5))
    assert side.contradicted(0), "a proof of 0.5 covers an example of 0.5"
    side.note("certify", Outcome(1, True, None, "gloro", 0.61))
    side.note("attack", Outcome(1, False, 1, "pgd", 0.6))
    assert side.contradicted(1), "between two levels as well"
