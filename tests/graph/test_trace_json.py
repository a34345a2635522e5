"""Test that traces come back from JSON as they were, and that nothing else is taken."""

import json

import pytest

from dynamemo.graph.errors import TraceError
from dynamemo.graph.lowering import lower
from dynamemo.graph.networks import alexnet
from dynamemo.graph.problem import LinkRate
from dynamemo.graph.trace_json import FORMAT, Recording, dumps, loads
from dynamemo.graph.types import Trace
from tests.graph.test_problem_of_trace import small_trace


@pytest.mark.parametrize("trace", [Trace(), small_trace(), lower(alexnet(2))])
def test_what_is_written_is_read(trace: Trace) -> None:
    link = LinkRate(1e9, 1e-5)
    assert loads(dumps(trace)) == Recording(trace)
    assert loads(dumps(trace, outward=link, inward=link)) == Recording(trace, link, link)


def changed(**changes: object) -> str:
    return json.dumps(json.loads(dumps(small_trace())) | changes)


def operation(**changes: object) -> str:
    row = {"index": 0, "label": "f", "phase": "forward"} | changes
    return changed(operations=[row])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (b"\x80\x04K\x01.", "not JSON"),
        ("[]", "no object with"),
        ('{"format": "a"}', f'no object with "format": "{FORMAT}"'),
        (changed(version=2), "version 2 of the trace format is not known"),
        (changed(storages=None), "storages is missing or not a list"),
        (changed(operations=[7]), r"operations\[0\] is not an object"),
        (operation(phase="sideward"), r"operations\[0\].phase is 'sideward', expected a Phase"),
        (operation(colour="red"), r"unknown fields \['colour'\]"),
        (operation(index=True), r"operations\[0\].index is True"),
        (operation(inputs=[1.5]), r"operations\[0\].inputs is \[1.5\]"),
        (operation(inputs=[99]), r"names storages \[99\]"),
        (operation(elapsed_s=-1), "took -1.0 s"),
        (operation(elapsed_s=float("nan")), "NaN is not a number here"),
        (operation(elapsed_s="1"), "elapsed_s is '1'"),
        (operation(is_repeatable=1), "is_repeatable is 1"),
        (changed(operations=[{"index": 0, "phase": "forward"}]), "has no label"),
        (changed(outward={"bytes_per_s": 0}), "expected a bandwidth above 0"),
        (changed(inward=[]), "inward is not an object"),
    ],
)
def test_what_is_no_trace_is_refused_with_one_sentence(text: str | bytes, message: str) -> None:
    with pytest.raises(TraceError, match=message) as refused:
        loads(text)
    assert "\n" not in str(refused.value)
