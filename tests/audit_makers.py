"""Audits with known numbers, for the tests of everything that is made of them."""

import numpy as np

from holdfast.attacks.core.indicators import Indicator
from holdfast.audits.bracket import Bracket, Record
from holdfast.audits.result import Audit
from holdfast.audits.rows import Example, Ran

TRUST = (
    Indicator("huge-budget", True, 0.5, "5 of 10 inputs: held & held"),
    Indicator("softmax", False, 0.0, "the model returns logits"),
)


def make_bracket(threat="linf:0.2", shape=(1, 5, 4), proved=True, examples=True, trust=(), skipped=()) -> Bracket:
    """Ten inputs, two budgets: one is wrong, two break at 0.1, one at 0.2; four are proved at 0.1, three at 0.2."""
    low = [None, 0.0, 0.0, 0.05, 0.0, 0.0, 0.1, 0.2, 0.2, 0.2] if proved else [None] + [0.0] * 9
    high = [0.0, 0.08, 0.1, 0.2, *[None] * 6]
    records = tuple(
        Record(
            *(i, i % 2, i % 2 if b != 0 else 1 - i % 2, c, "ibp" if c else "", b),
            *("clean" if b == 0 else "pgd" if b else "", 1 - i % 2 if b else None),
        )
        for i, (c, b) in enumerate(zip(low, high, strict=True))
    )
    x = np.random.default_rng(0).random((10, *shape), dtype=np.float32)
    found = [Example(i, x[i], np.clip(x[i] + 0.1, 0, 1)) for i in (1, 2, 3)] + [Example(4, x[4])]
    name = threat.partition(":")[0]
    return Bracket(
        threat=threat,
        threats=(f"{name}:0.1", threat),
        budgets=(0.1, 0.2),
        valid_range=(0.0, 1.0),
        records=records,
        seconds={"clean": 0.25, "certify ibp": 2.0, "attack pgd": 61.0},
        trust=trust,
        skipped=skipped,
        proved=proved,
        examples=tuple(found) if examples else (),
        steps=(
            *(Ran(1, "certify", "ibp", 2.0, 9, 3, 2) for _ in range(proved)),
            Ran(2, "attack", "pgd", 61.0, 9, 3, 0),
        ),
    )


def make(name="net", classes=("zero", "one"), groups=None, brackets=None, **options) -> Audit:
    return Audit(
        name=name,
        data="toy (test)",
        classes=classes,
        brackets=brackets or (make_bracket(**options),),
        settings={
            "plan": "quick",
            "steps": [
                {"stage": "certify", "method": "ibp", "options": {}},
                {"stage": "attack", "method": "pgd", "options": {"steps": 3}},
                {"stage": "attack", "method": "patch-pgd", "options": {}},
            ],
            "seed": 7,
        },
        versions={"holdfast": "0.1.0"},
        hashes={"model": "ab" * 32, "data": "cd" * 32},
        created="2030-01-01T00:00:00+00:00",
        groups=groups or {},
    )
