"""Describe a layer network plainly, and order its layers for execution.

Covers layers, their edges and output shapes, and the two depth-first walks. Does not cover what a
layer computes, nor memory: `lowering` turns a network into a trace.

Invariants
----------
1. A layer's predecessors come before it in the list, so a network has no cycle.
2. No walk recurses.

Source: Wang et al., PPoPP 2018, algorithm 1 and figure 6. We differ: the walk keeps its own stack,
so depth is not bounded by the interpreter's; several sources and several losses are allowed.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod

from dynamemo.graph.errors import TraceError

#: Bytes of one element; the seed's networks are in single precision.
ELEMENT_BYTES = 4


class LayerKind(Enum):
    """Tell what a layer does, as far as memory is concerned."""

    DATA = "data"
    CONV = "convolution"
    POOL = "pooling"
    ACT = "activation"
    LRN = "local response normalization"
    BN = "batch normalization"
    DROPOUT = "dropout"
    FC = "fully connected"
    SOFTMAX = "softmax"
    #: Gives one tensor to several layers.
    FORK = "fork"
    #: Join: adds tensors of one shape.
    SUM = "sum"
    #: Join: places tensors side by side.
    CONCAT = "concatenation"


@dataclass(frozen=True, slots=True)
class Layer:
    """Describe one layer.

    Attributes
    ----------
    name
        Unique within its network.
    kind
        What it does.
    predecessors
        Indices of the layers it reads, in the order that backward walks them.
    shape
        Shape of its one output, batch first.
    """

    name: str
    kind: LayerKind
    predecessors: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its output."""
        return ELEMENT_BYTES * prod(self.shape)


@dataclass(frozen=True)  # Without slots: its edges are worked out once and cached.
class Network:
    """Hold the layers of a network; edges point from predecessors.

    Attributes
    ----------
    name
        For people.
    layers
        Each after its predecessors.
    """

    name: str
    layers: tuple[Layer, ...]

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the layers that read each layer, ascending."""
        lists: list[list[int]] = [[] for _ in self.layers]
        for index, layer in enumerate(self.layers):
            for predecessor in dict.fromkeys(layer.predecessors):
                lists[predecessor].append(index)
        return tuple(tuple(indices) for indices in lists)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the layers that each layer reads, once each, in the layer's order."""
        return tuple(tuple(dict.fromkeys(layer.predecessors)) for layer in self.layers)

    def validate(self) -> None:
        """Check that the network is well formed.

        Raises
        ------
        TraceError
            If a name is used twice, a predecessor does not come before its layer, or a layer that
            is not `LayerKind.DATA` reads nothing.
        """
        names: set[str] = set()
        for index, layer in enumerate(self.layers):
            if layer.name in names:
                raise TraceError(f"two layers of {self.name!r} are named {layer.name!r}")
            names.add(layer.name)
            late = [p for p in layer.predecessors if not 0 <= p < index]
            if late:
                raise TraceError(f"layer {layer.name!r} ({index}) reads {late}, not before it")
            if not layer.predecessors and layer.kind is not LayerKind.DATA:
                raise TraceError(f"layer {layer.name!r} reads nothing and is not a data layer")


def forward_order(network: Network) -> tuple[int, ...]:
    """Order the layers for forward: depth first, a join after all it reads.

    Returns
    -------
    tuple of int
        Every layer's index once.
    """
    starts = [index for index, sources in enumerate(network.predecessors) if not sources]
    return _walk(starts, network.successors, [len(p) for p in network.predecessors])


def backward_order(network: Network) -> tuple[int, ...]:
    """Order the layers for backward: a second walk, depth first from the loss over predecessors.

    It is not the reversed forward order where branches meet.

    Returns
    -------
    tuple of int
        Every layer's index once.
    """
    starts = [index for index, readers in enumerate(network.successors) if not readers]
    return _walk(starts[::-1], network.predecessors, [len(s) for s in network.successors])


def _walk(
    starts: list[int], following: tuple[tuple[int, ...], ...], expected: list[int]
) -> tuple[int, ...]:
    """Walk depth first; a layer is taken at its last expected visit and then its followers are."""
    waiting = list(expected)
    order = []
    stack = starts[::-1]
    while stack:
        index = stack.pop()
        waiting[index] -= 1
        if waiting[index] > 0:
            continue
        order.append(index)
        stack.extend(reversed(following[index]))
    return tuple(order)
