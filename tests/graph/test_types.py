"""Test that `Trace.validate` accepts what is well formed and names what is not."""

import pytest

from dynamemo.graph.errors import TraceError
from dynamemo.graph.types import Operation, Phase, Storage, StorageKind, Trace

X = Storage(1, 4, StorageKind.INPUT)
Y = Storage(2, 8, StorageKind.ACTIVATION, "y")
F = Operation(0, "f", Phase.FORWARD, inputs=(1,), outputs=(2,), retained=(1,))


def test_accepts_a_forward_and_its_backward() -> None:
    backward = Operation(1, "f", Phase.BACKWARD, inputs=(1,), forward_index=0)
    trace = Trace((X, Y), (F, backward))
    trace.validate()
    assert trace.nbytes_by_id() == {1: 4, 2: 8}


@pytest.mark.parametrize(
    ("trace", "part"),
    [
        (Trace((X, X), ()), "twice"),
        (Trace((Storage(1, -1, StorageKind.INPUT),), ()), "-1 bytes"),
        (Trace((X,), (F,)), r"names storages \[2\]"),
        (Trace((X, Y), (F, F)), "has index 0, expected 1"),
        (Trace((), (Operation(0, "f", Phase.FORWARD, transient_bytes=-3),)), "-3 transient"),
        (Trace((), (Operation(0, "f", Phase.FORWARD, elapsed_s=-1.0),)), "took -1.0 s"),
        (Trace((), (Operation(0, "f", Phase.BACKWARD, forward_index=0),)), "names 0 as its"),
    ],
)
def test_refuses_what_is_not_well_formed(trace: Trace, part: str) -> None:
    with pytest.raises(TraceError, match=part):
        trace.validate()
