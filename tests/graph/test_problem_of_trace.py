"""Test how a problem is found in a trace."""

import pytest

from dynamemo.graph.forecast import forecast
from dynamemo.graph.liveness import liveness
from dynamemo.graph.lowering import lower
from dynamemo.graph.network import Network
from dynamemo.graph.networks import alexnet, resnet
from dynamemo.graph.problem import LinkRate, Problem, Rebuild, Technique
from dynamemo.graph.problem_of_trace import MAX_CHAIN, problem_of
from dynamemo.graph.types import Operation, Phase, Storage, StorageKind, Trace

LINK = LinkRate(1e9, 1e-5)
ACTIVATION, ATTRIBUTE = StorageKind.ACTIVATION, StorageKind.ATTRIBUTE


def found(trace: Trace) -> Problem:
    trace.validate()
    return problem_of(trace, LINK, LINK)


@pytest.mark.parametrize("network", [alexnet(8), resnet((1, 2, 1, 1), 2)], ids=lambda n: n.name)
def test_keeping_everything_needs_what_liveness_says(network: Network) -> None:
    trace = lower(network)
    problem = found(trace)
    data = sum(s.nbytes for s in trace.storages if s.kind is StorageKind.INPUT)
    kinds = frozenset(StorageKind) - {StorageKind.INPUT}
    curve = [memory.live_bytes + data for memory in liveness(trace).curve(kinds=kinds)]
    kept = forecast(problem, (Technique.KEEP,) * len(problem.tensors), 1 << 60)
    assert list(kept.memory) == curve
    assert problem.lasting_bytes == data


def small_trace(*, repeatable: tuple[bool, ...] = (True, True, True)) -> Trace:
    """Linear, normalization, relu over data x: backward needs x, the linear's output, and y."""
    storages = (
        Storage(1, 10, StorageKind.INPUT),
        Storage(2, 100, StorageKind.PARAMETER),
        Storage(3, 40, ACTIVATION, is_movable=True),
        Storage(4, 50, ACTIVATION),
        Storage(5, 8, ATTRIBUTE),
        Storage(6, 60, ACTIVATION),
        Storage(7, 6, ATTRIBUTE, is_noise=True),
    )
    operations = (
        Operation(0, "linear", Phase.FORWARD, (1, 2), (3,), (1, 2), is_repeatable=repeatable[0]),
        Operation(
            1, "norm", Phase.FORWARD, (3,), (4,), (3,), (5,), 7, 2.0, is_repeatable=repeatable[1]
        ),
        Operation(
            2, "drop", Phase.FORWARD, (4,), (6,), (6,), (7,), 9, 1.0,
            is_repeatable=repeatable[2], replay_s=0.5,
        ),
        Operation(3, "drop", Phase.BACKWARD, (6,), attributes=(7,), elapsed_s=1.0, own_bytes=333),
        Operation(4, "norm", Phase.BACKWARD, (3,), attributes=(5,), transient_bytes=5),
        Operation(5, "linear", Phase.BACKWARD, (1, 2)),
    )  # fmt: skip
    return Trace(storages, operations)


def test_tensors_steps_and_what_lasts() -> None:
    problem = found(small_trace())
    assert problem.first_backward == 3
    assert problem.lasting_bytes == 110
    assert [step.own_bytes for step in problem.steps] == [110, 117, 119, 333, 115, 110]
    assert [t.key for t in problem.tensors] == [3, 4, 5, 7, 6]
    linear, norm, mean, mask, drop = problem.tensors
    assert (linear.made_at, linear.last_forward_use, linear.uses) == (0, 1, (4,))
    assert linear.is_movable
    assert linear.rebuild is None  # it reads training data
    assert norm.uses == ()
    assert mean.rebuild == Rebuild(2.0, (0,), 50 + 7)
    assert mask.rebuild is None
    # Through the normalization, whose output backward does not need.
    assert drop.rebuild == Rebuild(2.5, (0, 3), 50 + 8 + 7)


def test_what_is_not_repeatable_is_not_rebuilt() -> None:
    assert found(small_trace(repeatable=(True, False, True))).tensors[4].rebuild is None
    assert found(small_trace(repeatable=(True, True, False))).tensors[4].rebuild is None


def test_a_chain_ends() -> None:
    def trace(length: int) -> Trace:
        storages = tuple(Storage(i, 1, ACTIVATION) for i in range(length + 1))
        first = Operation(0, "f", Phase.FORWARD, (), (0,), (0,), is_repeatable=True)
        chain = [
            Operation(i, "f", Phase.FORWARD, (i - 1,), (i,), is_repeatable=True)
            for i in range(1, length + 1)
        ]
        backward = Operation(length + 1, "f", Phase.BACKWARD, (length,))
        return Trace(storages, (first, *chain, backward))

    assert found(trace(MAX_CHAIN - 1)).tensors[-1].rebuild is not None
    assert found(trace(MAX_CHAIN)).tensors[-1].rebuild is None


def test_a_second_forward_after_backward_is_one_more_use() -> None:
    storages = (Storage(1, 1, ACTIVATION), Storage(2, 1, ACTIVATION))
    operations = (
        Operation(0, "f", Phase.FORWARD, (), (1,), (1,)),
        Operation(1, "f", Phase.BACKWARD, (1,)),
        Operation(2, "g", Phase.FORWARD, (1,), (2,), (1, 2)),
        Operation(3, "g", Phase.BACKWARD, (1, 2)),
    )
    first, second = found(Trace(storages, operations)).tensors
    assert (first.last_forward_use, first.uses) == (0, (1, 2, 3))
    assert (second.made_at, second.last_forward_use, second.uses) == (2, 2, (3,))


def test_what_was_there_before_lasts_and_forbids_a_rebuild() -> None:
    storages = (Storage(1, 5, ACTIVATION), Storage(2, 7, ACTIVATION))
    operations = (
        Operation(0, "f", Phase.FORWARD, (1,), (2,), (1, 2), is_repeatable=True),
        Operation(1, "f", Phase.BACKWARD, (1, 2)),
    )
    problem = found(Trace(storages, operations))
    assert problem.lasting_bytes == 5
    assert [(t.key, t.rebuild) for t in problem.tensors] == [(2, None)]


def test_a_storage_written_twice_is_not_rebuilt() -> None:
    storages = (Storage(1, 5, ACTIVATION),)
    operations = (
        Operation(0, "f", Phase.FORWARD, (), (1,), is_repeatable=True),
        Operation(1, "g", Phase.FORWARD, (), (1,), (1,), is_repeatable=True),
        Operation(2, "g", Phase.BACKWARD, (1,)),
    )
    assert found(Trace(storages, operations)).tensors[0].rebuild is None
