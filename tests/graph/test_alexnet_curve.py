"""Test the seed's AlexNet curve, batch 200: every step of liveness and of recompute.

Source: Wang et al., PPoPP 2018; the numbers are in ``data/alexnet_batch_200.csv``.
"""

import csv
from pathlib import Path

import pytest

from dynamemo.graph.liveness import MANAGED_KINDS, FreeRule, StepMemory, liveness
from dynamemo.graph.lowering import lower
from dynamemo.graph.networks import alexnet
from dynamemo.graph.strategies import Strategy, largest_layer_bytes, schedule
from dynamemo.graph.types import Phase, Trace

MIB = 1 << 20
#: The printed numbers have two decimals.
ROUNDING_MIB = 0.006

with (Path(__file__).parent / "data" / "alexnet_batch_200.csv").open() as file:
    ROWS = list(csv.DictReader(line for line in file if not line.startswith("#")))


def steps(trace: Trace) -> list[tuple[str, StepMemory]]:
    """List label and managed memory of each step that is not a recompute; step 0 reads the data."""
    curve = liveness(trace).curve(kinds=MANAGED_KINDS)
    return [
        (operation.label, memory)
        for operation, memory in zip(trace.operations, curve, strict=True)
        if operation.phase is not Phase.RECOMPUTE
    ]


LIVENESS = steps(lower(alexnet(200)))
RECOMPUTE = steps(schedule(alexnet(200), Strategy.COST_AWARE))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['step']}-{row['layer']}")
@pytest.mark.parametrize("column", ["liveness", "recompute"])
def test_every_step_is_as_published(row: dict[str, str], column: str) -> None:
    computed = {"liveness": LIVENESS, "recompute": RECOMPUTE}[column]
    label, memory = computed[int(row["step"])]
    assert label == row["layer"]
    assert memory.live_count == int(row[f"{column}_tensors"])
    assert memory.live_bytes / MIB == pytest.approx(float(row[f"{column}_mib"]), abs=ROUNDING_MIB)


def test_without_freeing_every_tensor_has_its_own_memory() -> None:
    baseline = liveness(lower(alexnet(200)), freed=FreeRule.NEVER).peak(kinds=MANAGED_KINDS)
    assert baseline.live_count == 36
    assert baseline.live_bytes / MIB == pytest.approx(2189.437, abs=0.001)


def test_the_peak_of_liveness() -> None:
    peak = liveness(lower(alexnet(200))).peak(kinds=MANAGED_KINDS)
    assert peak.step == 32
    assert peak.live_bytes / MIB == pytest.approx(1489.355, abs=0.001)


def test_the_peak_with_recompute_counts_the_rebuilding_too() -> None:
    trace = schedule(alexnet(200), Strategy.COST_AWARE)
    peak = liveness(trace).peak(kinds=MANAGED_KINDS)
    assert peak.live_bytes / MIB == pytest.approx(886.23, abs=ROUNDING_MIB)
    before = max(range(len(RECOMPUTE)), key=lambda step: RECOMPUTE[step][1].live_bytes)
    assert before == 44


def test_the_largest_layer_in_distinct_tensors() -> None:
    assert largest_layer_bytes(alexnet(200)) / MIB == pytest.approx(664.67, abs=ROUNDING_MIB)


@pytest.mark.parametrize(
    ("name", "mib"), [("CONV1", 221.56), ("CONV2", 142.38), ("CONV3", 49.51), ("CONV4", 49.51)]
)
def test_output_sizes(name: str, mib: float) -> None:
    layer = next(layer for layer in alexnet(200).layers if layer.name == name)
    assert layer.nbytes / MIB == pytest.approx(mib, abs=ROUNDING_MIB)
