"""Test the recorder by example: expiry, distance, iterations, traces, bounded state."""

import pytest

from dynamemo.graph.errors import InternalError
from dynamemo.graph.recorder import Recorder
from dynamemo.graph.types import Phase, StorageKind

ACTIVATION = StorageKind.ACTIVATION


def chain(recorder: Recorder, length: int) -> tuple[list[int], list[int]]:
    """Record `length` functions in a row, each retaining its input; returns storages and ops."""
    storages = [recorder.storage(4, ACTIVATION, "x0")]
    operations = []
    for index in range(length):
        output = recorder.storage(4, ACTIVATION, f"x{index + 1}")
        source = storages[-1]
        operations.append(recorder.forward(f"f{index}", (source,), (output,), retained=(source,)))
        storages.append(output)
    return storages, operations


def run_backward(recorder: Recorder, operations: list[int]) -> list[tuple[int, ...]]:
    """Run the backward of `operations` from the last to the first; returns what expired."""
    expired = []
    for operation in reversed(operations):
        recorder.begin_backward(operation)
        expired.append(recorder.end_backward(operation))
    return expired


def test_a_storage_expires_with_the_last_backward_that_needs_it() -> None:
    recorder = Recorder()
    x, y, mask = (recorder.storage(4, ACTIVATION) for _ in range(3))
    first = recorder.forward("f", (x,), (y,), retained=(x, x), attributes=(mask,))
    second = recorder.forward("g", (x, y), (), retained=(x,))
    recorder.begin_backward(second)
    assert recorder.end_backward(second) == ()
    recorder.begin_backward(first)
    assert recorder.end_backward(first) == (x, mask)
    assert recorder.is_expired(x)
    assert recorder.is_expired(mask)
    assert not recorder.is_expired(y)
    recorder.validate()


def test_a_new_forward_use_revives_an_expired_storage() -> None:
    recorder = Recorder()
    storages, operations = chain(recorder, 1)
    run_backward(recorder, operations)
    assert recorder.is_expired(storages[0])
    recorder.forward("again", (storages[0],), ())
    assert not recorder.is_expired(storages[0])


def test_a_second_traversal_reports_expiry_where_the_first_did() -> None:
    recorder = Recorder()
    x = recorder.storage(4, ACTIVATION)
    operations = [recorder.forward(name, (x,), (), retained=(x,)) for name in "fg"]
    assert run_backward(recorder, operations) == [(), (x,)]
    assert run_backward(recorder, operations) == [(), (x,)]


def test_forgetting_the_only_operation_that_needs_it_expires_a_storage() -> None:
    recorder = Recorder()
    storages, operations = chain(recorder, 2)
    recorder.forget_operation(operations[1])
    assert recorder.is_expired(storages[1])
    assert not recorder.is_expired(storages[0])


def test_a_forgotten_storage_is_not_reported() -> None:
    recorder = Recorder()
    storages, operations = chain(recorder, 2)
    recorder.forget_storage(storages[0])
    assert run_backward(recorder, operations) == [(storages[1],), ()]


def test_distance_in_forward_counts_back_to_the_last_use() -> None:
    recorder = Recorder()
    storages, _ = chain(recorder, 10)
    assert [recorder.distance(storage) for storage in storages] == [9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1]


def test_distance_in_backward_counts_to_the_next_pending_use() -> None:
    recorder = Recorder()
    x = recorder.storage(4, ACTIVATION)
    first = recorder.forward("f", (x,), (), retained=(x,))
    _, middle = chain(recorder, 5)
    last = recorder.forward("g", (x,), (), retained=(x,))
    run_backward(recorder, [last])
    recorder.begin_backward(middle[-1])
    assert recorder.position == middle[-1]
    assert recorder.distance(x) == middle[-1] - first


def test_touch_orders_uses_across_both_passes() -> None:
    recorder = Recorder()
    storages, operations = chain(recorder, 3)
    recorder.begin_backward(operations[2])
    assert recorder.last_touch(storages[2]) > recorder.last_touch(storages[3])
    recorder.touch(storages[0])
    assert recorder.last_touch(storages[0]) == recorder.clock


def test_iterations_end_when_forward_resumes() -> None:
    recorder = Recorder()
    for expected in range(3):
        _, operations = chain(recorder, 2)
        assert recorder.iterations == expected
        run_backward(recorder, operations)


def test_forwards_inside_a_backward_do_not_end_the_iteration() -> None:
    recorder = Recorder()
    _, operations = chain(recorder, 2)
    run_backward(recorder, operations[1:])
    recorder.begin_backward(operations[0])
    recorder.forward("nested", (), ())
    assert recorder.position == operations[0]
    recorder.end_backward(operations[0])
    assert recorder.iterations == 0


def test_forwards_between_two_backwards_of_one_graph_do_not_end_the_iteration() -> None:
    recorder = Recorder()
    _, operations = chain(recorder, 3)
    run_backward(recorder, operations[1:])
    recorder.forward("sum of gradients", (), ())
    run_backward(recorder, operations[:1])
    assert recorder.iterations == 0
    chain(recorder, 1)
    assert recorder.iterations == 1
    assert [o.label for o in recorder.trace().operations] == [
        *("f0", "f1", "f2", "f2", "f1", "sum of gradients", "f0")
    ]


def test_several_losses_over_one_forward_are_one_iteration() -> None:
    recorder = Recorder()
    _, operations = chain(recorder, 4)
    run_backward(recorder, operations[2:])
    run_backward(recorder, operations)
    assert recorder.iterations == 0


def test_the_trace_is_the_last_complete_iteration() -> None:
    recorder = Recorder()
    assert recorder.trace().operations == ()
    for label in ("a", "b"):
        x = recorder.storage(7, ACTIVATION, label)
        operation = recorder.forward(label, (x,), (), retained=(x,), elapsed_s=0.5)
        recorder.begin_backward(operation)
        recorder.end_backward(operation, transient_bytes=9, elapsed_s=0.25)
        recorder.forget_operation(operation)
        recorder.forget_storage(x)
    recorder.forward("c", (), ())
    trace = recorder.trace()
    trace.validate()
    assert [(o.label, o.phase) for o in trace.operations] == [
        ("b", Phase.FORWARD),
        ("b", Phase.BACKWARD),
    ]
    assert trace.storages[0].nbytes == 7
    assert trace.operations[1].forward_index == 0
    assert (trace.operations[1].transient_bytes, trace.operations[1].elapsed_s) == (9, 0.25)


def test_the_trace_of_a_long_iteration_is_cut() -> None:
    recorder = Recorder(max_operations=5)
    for _ in range(2):
        _, operations = chain(recorder, 8)
        run_backward(recorder, operations)
        recorder.validate()
    recorder.forward("next", (), ())
    assert len(recorder.trace().operations) == 5


def test_a_backward_left_by_an_exception_ends_with_its_node() -> None:
    recorder = Recorder()
    _, operations = chain(recorder, 2)
    recorder.begin_backward(operations[1])
    recorder.forget_operation(operations[1])
    assert not recorder.is_in_backward
    recorder.begin_backward(operations[0])
    recorder.abandon_backward()
    assert not recorder.is_in_backward
    chain(recorder, 1)
    assert recorder.iterations == 1


def test_an_outer_backward_closes_the_ones_left_inside_it() -> None:
    recorder = Recorder()
    _, operations = chain(recorder, 2)
    recorder.begin_backward(operations[0])
    recorder.begin_backward(operations[1])
    recorder.end_backward(operations[0])
    assert not recorder.is_in_backward


def test_state_does_not_grow_in_a_steady_loop() -> None:
    recorder = Recorder()

    def one_iteration() -> tuple[int, ...]:
        storages, operations = chain(recorder, 20)
        run_backward(recorder, operations)
        for operation in operations:
            recorder.forget_operation(operation)
        for storage in storages:
            recorder.forget_storage(storage)
        recorder.validate()
        parts = ("_storages", "_operations", "_previous", "_current", "_running")
        return tuple(len(getattr(recorder, part)) for part in parts)

    sizes = [one_iteration() for _ in range(20)]
    assert len(set(sizes[2:])) == 1
    assert sizes[-1][:2] == (0, 0)


def test_a_parameter_used_by_many_operations_keeps_no_ticks_of_dead_ones() -> None:
    recorder = Recorder()
    weight = recorder.storage(4, StorageKind.PARAMETER)
    for _ in range(3):
        operations = [recorder.forward("f", (weight,), (), retained=(weight,)) for _ in range(5)]
        for operation in operations:
            recorder.forget_operation(operation)
    recorder.validate()
    assert recorder.is_expired(weight)


def test_a_long_chain_needs_no_recursion() -> None:
    recorder = Recorder()
    _, operations = chain(recorder, 10_000)
    assert len(run_backward(recorder, operations)) == 10_000
    recorder.validate()


def test_unknown_ids_are_our_own_fault() -> None:
    recorder = Recorder()
    x = recorder.storage(4, ACTIVATION)
    recorder.forget_storage(x)
    recorder.forget_storage(x)
    recorder.forget_operation(99)
    operation = recorder.forward("f", (), ())
    with pytest.raises(InternalError, match="unknown storage 1"):
        recorder.forward("g", (x,), ())
    for ask in (recorder.is_expired, recorder.touch, recorder.last_touch, recorder.distance):
        with pytest.raises(InternalError, match="storage 1 is unknown"):
            ask(x)
    with pytest.raises(InternalError, match="operation 99 is unknown"):
        recorder.begin_backward(99)
    with pytest.raises(InternalError, match="is not running"):
        recorder.end_backward(operation)


def test_what_only_forward_read_is_traced_and_counts_as_no_use() -> None:
    recorder = Recorder()
    x, y, z = (recorder.storage(8, StorageKind.ACTIVATION) for _ in range(3))
    f = recorder.forward("f", (x,), (y,), signature="sig f", is_repeatable=True)
    g = recorder.forward("g", (), (z,), retained=(z,), makers=(f,), is_repeatable=True)
    foreign = recorder.forward("foreign", (), (), is_repeatable=True)
    h = recorder.forward("h", (), (), retained=(z,), makers=[foreign], is_repeatable=True)
    assert recorder.last_use(y) == f
    for operation in (h, g):
        recorder.begin_backward(operation)
        recorder.end_backward(operation)
    recorder.forward("f", (x,), ())
    trace = recorder.trace()
    trace.validate()
    assert [o.inputs for o in trace.operations] == [(x,), (y,), (), (), (z,), (z,)]
    # Nobody knows where the foreign memory is that h read.
    assert [o.is_repeatable for o in trace.operations] == [True, True, True, False, False, False]
    assert recorder.traced_signatures() == ("sig f", None, None, None, None, None)
    with pytest.raises(InternalError):
        recorder.forward("k", (), (), makers=(99,))
