"""Test execution order and lowering: the seed's figures 4 and 6, depth, malformed networks.

Source: Wang et al., PPoPP 2018, algorithm 1, figures 4 and 6.
"""

import pytest

from dynamemo.graph.errors import InternalError, TraceError
from dynamemo.graph.liveness import liveness
from dynamemo.graph.lowering import FIGURE_4_RULES, Lowering, lower
from dynamemo.graph.network import Layer, LayerKind, Network, backward_order, forward_order
from dynamemo.graph.networks import NetworkBuilder, figure_4, figure_6, resnet
from dynamemo.graph.strategies import Strategy, extra_forwards
from dynamemo.graph.types import Phase

#: The figure's names of the tensors that the lowering labels by layer.
FIGURE_4_NAMES = {
    "DATA.y": "t0",
    "CONV1.y": "t1",
    "CONV2.y": "t2",
    "POOL.y": "t3",
    "FC.y": "t4",
    "SOFTMAX.y": "prob",
    "SOFTMAX.dx": "t5",
    "FC.dx": "t6",
    "POOL.dx": "t7",
    "CONV1.dx": "t8",
    "CONV2.dx": "t9",
}
FIGURE_4_OUT = [
    "t0",
    "t0 t1",
    "t0 t1 t3",
    "t0 t1 t3 t2",
    "t0 t1 t3 t2 t4",
    "t0 t1 t3 t2 prob",
    "t0 t1 t3 t2 t5",
    "t0 t1 t3 t6",
    "t0 t7 t6",
    "t0 t6 t8",
    "t8 t9",
    "",
]
FIGURE_4_NEEDS = {
    7: ("FC", "t5 t6 t2 t3"),
    8: ("POOL", "t1 t3 t7 t6"),
    9: ("CONV1", "t7 t8 t0"),
    10: ("CONV2", "t6 t9 t0"),
    11: ("DATA", "t8 t9"),
}


def chain(length: int) -> Network:
    """Build alternating convolutions and activations, `length` layers with data and loss."""
    builder = NetworkBuilder("chain")
    builder.data("DATA", (1, 1, 1, 1))
    for index in range(length - 2):
        if index % 2:
            builder.same(f"L{index}", LayerKind.ACT)
        else:
            builder.conv(f"L{index}", 1, 1)
    builder.same("SOFTMAX", LayerKind.SOFTMAX)
    return builder.build()


def test_the_order_of_figure_6() -> None:
    network = figure_6()
    step: dict[str, list[int]] = {}
    for index, layer in enumerate(forward_order(network) + backward_order(network)):
        step.setdefault(network.layers[layer].name, []).append(index + 1)
    assert {name: tuple(steps) for name, steps in step.items()} == {
        "a": (1, 20),
        "b": (2, 19),
        "c": (3, 14),
        "e": (4, 13),
        "d": (5, 18),
        "f": (6, 17),
        "g": (7, 15),
        "h": (8, 16),
        "i": (9, 12),
        "j": (10, 11),
    }


def test_the_sets_of_figure_4() -> None:
    trace = lower(figure_4(), FIGURE_4_RULES)
    trace.validate()
    lives = liveness(trace)
    name = {storage.id: FIGURE_4_NAMES[storage.label] for storage in trace.storages}
    labels = [operation.label for operation in trace.operations]
    assert labels[:6] == ["DATA", "CONV1", "POOL", "CONV2", "FC", "SOFTMAX"]
    assert labels[6:] == ["SOFTMAX", "FC", "POOL", "CONV1", "CONV2", "DATA"]
    for step, expected in enumerate(FIGURE_4_OUT):
        assert {name[id] for id in lives.out_set(step)} == set(expected.split())
    assert lives.in_set(0) == frozenset()
    for step in range(1, 12):
        assert lives.in_set(step) == lives.out_set(step - 1)


@pytest.mark.parametrize("step", FIGURE_4_NEEDS)
def test_what_the_backward_of_figure_4_needs(step: int) -> None:
    trace = lower(figure_4(), FIGURE_4_RULES)
    operation = trace.operations[step]
    names = {s.id: FIGURE_4_NAMES[s.label] for s in trace.storages}
    label, expected = FIGURE_4_NEEDS[step]
    assert operation.label == label
    assert {names[id] for id in (*operation.inputs, *operation.outputs)} == set(expected.split())


def test_a_chain_of_ten_thousand_layers_needs_no_recursion() -> None:
    network = chain(10_000)
    assert forward_order(network) == tuple(range(10_000))
    assert backward_order(network) == tuple(reversed(range(10_000)))
    lives = liveness(lower(network))
    assert len(lives.curve()) == 20_000
    assert extra_forwards(network, Strategy.SPEED_CENTRIC) == 4_999


def test_a_run_of_two_thousand_dropped_layers_needs_no_recursion() -> None:
    builder = NetworkBuilder("run")
    builder.data("DATA", (1, 1))
    for index in range(2_000):
        builder.same(f"ACT{index}", LayerKind.ACT)
    builder.fc("FC", 1)
    assert extra_forwards(builder.build(), Strategy.SPEED_CENTRIC) == 2_000


def test_the_deepest_resnet_lowers() -> None:
    trace = lower(resnet((6, 32, 788, 6), 1))
    trace.validate()
    assert sum(operation.phase is Phase.BACKWARD for operation in trace.operations) > 8_000


def test_several_readers_without_a_fork() -> None:
    builder = NetworkBuilder("two readers")
    data = builder.data("DATA", (1, 2))
    shared = builder.same("ACT", LayerKind.ACT)
    builder.sum("SUM", (shared, data))
    builder.sum("TWICE", (shared, shared))
    trace = lower(builder.build())
    trace.validate()
    assert trace.operations[-2].label == "ACT"
    assert len(trace.operations[-2].inputs) == 4


@pytest.mark.parametrize(
    ("layers", "part"),
    [
        (
            [Layer("a", LayerKind.DATA, (), (1,)), Layer("a", LayerKind.ACT, (0,), (1,))],
            "named 'a'",
        ),
        ([Layer("a", LayerKind.ACT, (0,), (1,))], "not before it"),
        ([Layer("a", LayerKind.ACT, (), (1,))], "reads nothing"),
    ],
)
def test_refuses_a_malformed_network(layers: list[Layer], part: str) -> None:
    with pytest.raises(TraceError, match=part):
        Network("bad", tuple(layers)).validate()


def test_refuses_an_input_too_small() -> None:
    builder = NetworkBuilder("small")
    builder.data("DATA", (1, 3, 4, 4))
    with pytest.raises(ValueError, match="input is too small"):
        builder.conv("CONV", 8, 7)


def test_reading_a_dropped_output_is_our_own_fault() -> None:
    network = chain(4)
    lowering = Lowering(network)
    lowering.forward(0)
    del lowering.output[0]
    with pytest.raises(InternalError, match="'DATA' is read but not there"):
        lowering.forward(1)
