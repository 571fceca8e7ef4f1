"""Contract suites for methods of your own: plain functions that raise an AssertionError, for any test runner.

Each suite takes a registered name, or a record that need not be registered, and says which contract is broken:

    from holdfast.testing import check_attack

    def test_my_attack_keeps_the_contract():
        check_attack("my-attack")
"""

from holdfast.testing.attack_suite import check_attack
from holdfast.testing.bounds_suite import check_bounds
from holdfast.testing.certificate_suite import check_certificate
from holdfast.testing.explanation_suite import check_explanation
from holdfast.testing.objective_suite import check_objective

__all__ = ["check_attack", "check_bounds", "check_certificate", "check_explanation", "check_objective"]
