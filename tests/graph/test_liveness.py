"""Test liveness against a search through all operations, on random traces."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamemo.graph.liveness import FreeRule, StepMemory, liveness
from dynamemo.graph.types import Operation, Phase, Storage, StorageKind, Trace

KINDS = [StorageKind.ACTIVATION, StorageKind.GRADIENT, StorageKind.PARAMETER]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw a well-formed trace of a few operations over a few storages."""
    count = draw(st.integers(1, 6))
    sizes = st.integers(0, 9)
    storages = tuple(Storage(i, draw(sizes), draw(st.sampled_from(KINDS))) for i in range(count))
    ids = st.lists(st.integers(0, count - 1), max_size=3).map(tuple)
    operations = tuple(
        Operation(
            index,
            "f",
            draw(st.sampled_from([Phase.FORWARD, Phase.BACKWARD])),
            inputs=draw(ids),
            outputs=draw(ids),
            retained=draw(ids),
            attributes=draw(ids),
            transient_bytes=draw(sizes),
        )
        for index in range(draw(st.integers(0, 8)))
    )
    trace = Trace(storages, operations)
    trace.validate()
    return trace


def is_outliving(trace: Trace, storage: Storage, freed: FreeRule) -> bool:
    """Tell whether a storage is kept past its last use, by looking at every operation."""
    retaining = [o for o in trace.operations if storage.id in (*o.retained, *o.attributes)]
    by_graph = any(operation.phase is Phase.FORWARD for operation in retaining)
    return (
        storage.kind is StorageKind.PARAMETER
        or freed is FreeRule.NEVER
        or (freed is FreeRule.GRAPH_END and by_graph)
    )


def expected_live(trace: Trace, step: int, freed: FreeRule) -> set[int]:
    """Find what is live while a step runs, by looking at every operation."""
    live = set()
    for storage in trace.storages:
        uses = [o.index for o in trace.operations if storage.id in o.storage_ids()]
        if not uses:
            continue
        is_older = storage.id in trace.operations[uses[0]].inputs
        is_born = is_older or uses[0] <= step
        if is_born and (step <= uses[-1] or is_outliving(trace, storage, freed)):
            live.add(storage.id)
    return live


@settings(max_examples=150, deadline=None)
@given(trace=traces(), freed=st.sampled_from(FreeRule))
def test_sets_and_curve_agree_with_a_search(trace: Trace, freed: FreeRule) -> None:
    lives = liveness(trace, freed=freed)
    nbytes = trace.nbytes_by_id()
    curve = lives.curve()
    assert len(curve) == len(trace.operations)
    for step, operation in enumerate(trace.operations):
        live = expected_live(trace, step, freed)
        assert lives.live_set(step) == live
        live_bytes = sum(nbytes[id] for id in live) + operation.transient_bytes
        assert curve[step] == StepMemory(step, live_bytes, len(live))
        assert lives.in_set(step) | set(operation.storage_ids()) == live
        assert lives.out_set(step) == live - set(lives.freed_after()[step])
    assert lives.peak().live_bytes == max((memory.live_bytes for memory in curve), default=0)


@given(trace=traces())
def test_freeing_later_never_needs_less(trace: Trace) -> None:
    rules = (FreeRule.LAST_USE, FreeRule.GRAPH_END, FreeRule.NEVER)
    peaks = [liveness(trace, freed=rule).peak().live_bytes for rule in rules]
    assert peaks == sorted(peaks)


def test_a_kind_left_out_is_not_counted() -> None:
    storages = (Storage(0, 5, StorageKind.INPUT), Storage(1, 7, StorageKind.ACTIVATION))
    trace = Trace(storages, (Operation(0, "f", Phase.FORWARD, inputs=(0,), outputs=(1,)),))
    lives = liveness(trace)
    assert lives.curve() == [StepMemory(0, 12, 2)]
    assert lives.curve(kinds={StorageKind.ACTIVATION}) == [StepMemory(0, 7, 1)]


def test_an_empty_trace_has_no_peak() -> None:
    assert liveness(Trace()).peak() == StepMemory(-1, 0, 0)
