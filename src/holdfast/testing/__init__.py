"""Contract suites for methods of your own: plain functions that raise an AssertionError, for any test runner.

Each suite takes a registered name, or a record that need not be registered, and says which contract is broken:

    from holdfast.testing import check_attack

    def test_my_attack_keeps_the_contract():
        check_attack("my-attack")

Where a suite has `threats`, they are for images of shape (2, 7, 5); one of each kind that the record names if none are
given. Further options are options of the method, for every call; counts such as `steps` are lowered if not given.
"""

from holdfast.testing.attack_suite import check_attack
from holdfast.testing.bounds_suite import check_bounds
from holdfast.testing.certificate_suite import check_certificate
from holdfast.testing.explanation_suite import check_explanation
from holdfast.testing.objective_suite import check_objective

__all__ = ["check_attack", "check_bounds", "check_certificate", "check_explanation", "check_objective"]
