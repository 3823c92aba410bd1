"""How state machines of the cache are run."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

_CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def run_machine(machine: type[RuleBasedStateMachine], examples: int, steps: int, fixed: bool) -> None:
    """`fixed` plays the same examples every time."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=fixed,
            database=None,
            suppress_health_check=_CHECKS,
        ),
    )
