"""Test which gradients a backward pass is taken to hold."""

from dataclasses import replace

from dynamemo.graph.gradients import gradient_bytes, parameter_gradient_bytes
from dynamemo.graph.lowering import lower
from dynamemo.graph.networks import alexnet
from dynamemo.graph.problem import LinkRate
from dynamemo.graph.problem_of_trace import problem_of
from dynamemo.graph.types import Operation, Phase, Storage, StorageKind, Trace

ACTIVATION = StorageKind.ACTIVATION


def skipping() -> Trace:
    """Two linears and their sum: the gradient of the first's output waits for both readers."""
    storages = (
        Storage(0, 7, StorageKind.INPUT),
        Storage(1, 10, StorageKind.PARAMETER),
        Storage(2, 20, StorageKind.PARAMETER),
        Storage(3, 100, ACTIVATION),
        Storage(4, 200, ACTIVATION),
        Storage(5, 400, ACTIVATION),
    )
    return Trace(
        storages,
        (
            Operation(0, "a", Phase.FORWARD, (0, 1), (3,), (0, 1)),
            Operation(1, "b", Phase.FORWARD, (3, 2), (4,), (3, 2)),
            Operation(2, "c", Phase.FORWARD, (3, 4), (5,)),
            Operation(3, "c", Phase.BACKWARD, forward_index=2),
            Operation(4, "b", Phase.BACKWARD, (3, 2), forward_index=1),
            Operation(5, "a", Phase.BACKWARD, (0, 1), forward_index=0),
        ),
    )


def test_a_gradient_is_there_from_its_first_maker_to_its_reader() -> None:
    assert gradient_bytes(skipping()) == [0, 0, 0, 700, 300, 100]
    assert parameter_gradient_bytes(skipping()) == 30


def test_they_count_in_the_problem() -> None:
    problem = problem_of(skipping(), LinkRate(1.0), LinkRate(1.0))
    assert problem.lasting_bytes == 7 + 30 + 30
    assert [step.own_bytes - 67 for step in problem.steps] == [0, 0, 0, 700, 300, 100]


def test_backward_operations_that_name_no_forward_hold_none() -> None:
    trace = skipping()
    operations = tuple(replace(operation, forward_index=None) for operation in trace.operations)
    assert gradient_bytes(replace(trace, operations=operations)) == [0] * 6


def test_a_trace_that_names_gradients_is_believed() -> None:
    trace = lower(alexnet(2))
    assert set(gradient_bytes(trace)) == {0}
    assert parameter_gradient_bytes(trace) == 0
