"""Test the seed's recompute strategies: its table of extra forwards and what lies behind it.

Source: Wang et al., PPoPP 2018; the closed forms are the seed's re-simulation.
"""

import pytest

from dynamemo.graph.liveness import MANAGED_KINDS, liveness
from dynamemo.graph.lowering import lower
from dynamemo.graph.network import LayerKind, Network
from dynamemo.graph.networks import (
    RESNET_50,
    RESNET_101,
    RESNET_152,
    NetworkBuilder,
    alexnet,
    resnet,
)
from dynamemo.graph.strategies import (
    Segment,
    Strategy,
    extra_forwards,
    memory_centric_layers,
    schedule,
    segments,
)
from dynamemo.graph.types import Phase

SPEED, MEMORY, COST = Strategy.SPEED_CENTRIC, Strategy.MEMORY_CENTRIC, Strategy.COST_AWARE


def activations(length: int) -> Network:
    """Build a convolution, `length` activations and a loss behind a last convolution."""
    builder = NetworkBuilder("activations")
    builder.data("DATA", (1, 1, 4, 4))
    builder.conv("CONV1", 1, 1)
    for index in range(length):
        builder.same(f"ACT{index}", LayerKind.ACT)
    builder.conv("CONV2", 1, 1)
    builder.same("SOFTMAX", LayerKind.SOFTMAX)
    return builder.build()


@pytest.mark.parametrize(
    ("network", "speed", "memory", "cost"),
    [
        (alexnet(200), 14, 23, 17),
        (resnet(RESNET_50, 16), 84, 118, 85),
        (resnet(RESNET_101, 16), 169, 237, 170),
    ],
    ids=lambda value: value.name if isinstance(value, Network) else None,
)
def test_extra_forwards_as_published(network: Network, speed: int, memory: int, cost: int) -> None:
    assert extra_forwards(network, SPEED) == speed
    assert extra_forwards(network, MEMORY) == memory
    assert extra_forwards(network, COST) == cost


@pytest.mark.parametrize(
    "blocks", [RESNET_50, RESNET_101, RESNET_152, (1, 1, 1, 1), (6, 32, 20, 6)]
)
def test_closed_forms_of_the_resnets(blocks: tuple[int, ...]) -> None:
    network = resnet(blocks, 1)
    count = sum(blocks)
    assert network.name == f"ResNet-{3 * count + 2}"
    assert extra_forwards(network, SPEED) == 3 + 5 * count + 1
    assert extra_forwards(network, MEMORY) == 4 + 7 * count + 2
    assert extra_forwards(network, COST) == extra_forwards(network, SPEED) + 1


@pytest.mark.parametrize("length", range(7))
def test_a_segment_costs_n_or_the_triangle_of_n(length: int) -> None:
    network = activations(length)
    assert extra_forwards(network, SPEED) == length
    assert extra_forwards(network, MEMORY) == length * (length + 1) // 2


def test_segments_are_runs_behind_a_kept_layer() -> None:
    network = alexnet(1)
    names = [
        (network.layers[s.checkpoint].name, [network.layers[i].name for i in s.layers])
        for s in segments(network)
    ]
    assert names == [
        ("CONV1", ["RELU1", "LRN1", "POOL1"]),
        ("CONV2", ["RELU2", "LRN2", "POOL2"]),
        ("CONV3", ["RELU3"]),
        ("CONV4", ["RELU4"]),
        ("CONV5", ["RELU5", "POOL5"]),
        ("FC1", ["RELU6", "DROP1"]),
        ("FC2", ["RELU7", "DROP2"]),
    ]


def test_cost_aware_saves_memory_only_in_the_first_segment_of_alexnet() -> None:
    network = alexnet(200)
    chosen = memory_centric_layers(network, COST)
    assert segments(network)[0] == Segment(1, tuple(sorted(chosen)))


def test_a_join_s_last_normalization_is_never_rebuilt() -> None:
    trace = schedule(resnet((1, 1, 1, 1), 1), MEMORY)
    rebuilt = {o.label for o in trace.operations if o.phase is Phase.RECOMPUTE}
    assert rebuilt
    assert not any(label.startswith("BN") and label[-1] in "cs" for label in rebuilt)


def test_the_exact_order_of_a_rebuilt_segment() -> None:
    labels = {
        strategy: [
            f"{o.label}{'*' if o.phase is Phase.RECOMPUTE else ''}"
            for o in schedule(activations(2), strategy).operations[6:]
        ]
        for strategy in (SPEED, MEMORY)
    }
    assert labels[SPEED] == [
        *("SOFTMAX", "ACT0*", "ACT1*", "CONV2", "ACT1", "ACT0", "CONV1", "DATA")
    ]
    assert labels[MEMORY] == [
        *("SOFTMAX", "ACT0*", "ACT1*", "CONV2", "ACT0*", "ACT1", "ACT0", "CONV1", "DATA")
    ]


@pytest.mark.parametrize("network", [alexnet(8), resnet((1, 2, 1, 1), 2)], ids=lambda n: n.name)
def test_recompute_never_needs_more_memory_than_keeping(network: Network) -> None:
    kept = liveness(lower(network)).peak(kinds=MANAGED_KINDS).live_bytes
    peaks = {}
    for strategy in Strategy:
        trace = schedule(network, strategy)
        trace.validate()
        peaks[strategy] = liveness(trace).peak(kinds=MANAGED_KINDS).live_bytes
    assert peaks[MEMORY] <= peaks[SPEED] <= kept
    assert peaks[MEMORY] <= peaks[COST] <= peaks[SPEED]
