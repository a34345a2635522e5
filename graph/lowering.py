"""Lower a layer network to a trace by the seed's rules of aliasing and of what backward reads.

Covers one output and one input gradient per layer. Does not cover weights, their gradients and
workspaces: the seed's figures leave them out.

The rules, by kind, are data (`BackwardRule`). Two sets are in use and differ at the softmax only:
`RELEASED_RULES` is the released code's, which the AlexNet curve and the table of extra forwards
follow; `FIGURE_4_RULES` is that of the example in figure 4.

Interpretations, each needed to meet a printed number:

- A fork's output is a tensor of its own and is kept. Were it an alias of what it forks, the prefix
  behind ResNet's stem would be asked for once more (120 instead of 118 extra forwards).
- A layer has one input gradient, also where it reads several layers of one shape (figure 4, t6); it
  is as large as what it reads first.
- A data layer's backward reads the gradients that arrive at it and makes none.

Source: Wang et al., PPoPP 2018, figure 4, and its released code. We differ: dropout's
mask is a storage here (kind ATTRIBUTE), and a recompute reads it instead of drawing a new one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from dynamemo.graph.errors import InternalError
from dynamemo.graph.network import (
    ELEMENT_BYTES,
    LayerKind,
    Network,
    backward_order,
    forward_order,
)
from dynamemo.graph.types import Operation, Phase, Storage, StorageKind, Trace


class GradientPlace(Enum):
    """Tell where a layer's input gradient is written."""

    #: Memory of its own.
    OWN = "own"
    #: Over the output's gradient (over the first branch's, where several arrive).
    OUTPUT_GRADIENT = "output gradient"
    #: Over the layer's output.
    OUTPUT = "output"
    #: There is none.
    NONE = "none"


@dataclass(frozen=True, slots=True)
class BackwardRule:
    """Tell what the backward of a kind of layer reads and where it writes.

    Attributes
    ----------
    reads_inputs, reads_output
        Whether it reads what forward read, and what forward wrote.
    gradient
        Where it writes the gradient of its inputs.
    has_mask
        Whether forward also makes a mask, one byte an element, that backward reads.
    """

    reads_inputs: bool
    reads_output: bool
    gradient: GradientPlace
    has_mask: bool = False


_OVER_GRADIENT = BackwardRule(False, False, GradientPlace.OUTPUT_GRADIENT)

#: The released code's rules.
RELEASED_RULES: Mapping[LayerKind, BackwardRule] = {
    LayerKind.DATA: BackwardRule(False, False, GradientPlace.NONE),
    LayerKind.CONV: BackwardRule(True, False, GradientPlace.OWN),
    LayerKind.FC: BackwardRule(True, False, GradientPlace.OWN),
    LayerKind.BN: BackwardRule(True, False, GradientPlace.OWN),
    LayerKind.POOL: BackwardRule(True, True, GradientPlace.OWN),
    LayerKind.ACT: BackwardRule(True, True, GradientPlace.OUTPUT_GRADIENT),
    LayerKind.LRN: BackwardRule(True, True, GradientPlace.OUTPUT_GRADIENT),
    LayerKind.DROPOUT: BackwardRule(False, False, GradientPlace.OWN, has_mask=True),
    LayerKind.SOFTMAX: BackwardRule(True, True, GradientPlace.OUTPUT),
    LayerKind.FORK: _OVER_GRADIENT,
    LayerKind.SUM: _OVER_GRADIENT,
    LayerKind.CONCAT: _OVER_GRADIENT,
}

#: The rules of the paper's figure 4: softmax reads its output only and has a gradient of its own.
FIGURE_4_RULES: Mapping[LayerKind, BackwardRule] = {
    **RELEASED_RULES,
    LayerKind.SOFTMAX: BackwardRule(False, True, GradientPlace.OWN),
}


class Lowering:
    """Build a trace operation by operation; the caller decides the order and what to rebuild.

    Parameters
    ----------
    network
        A well-formed network.
    rules
        What backward reads and writes, by kind of layer.

    Attributes
    ----------
    output
        Storage id that holds each layer's output now; a layer is missing before it ran and where
        its output was dropped.
    """

    def __init__(
        self, network: Network, rules: Mapping[LayerKind, BackwardRule] = RELEASED_RULES
    ) -> None:
        self._network = network
        self._rules = rules
        self.output: dict[int, int] = {}
        self._gradient: dict[int, int] = {}
        self._mask: dict[int, int] = {}
        self._forward_index: dict[int, int] = {}
        self._storages: list[Storage] = []
        self._operations: list[Operation] = []

    def forward(self, layer: int) -> None:
        """Append a layer's forward."""
        described = self._network.layers[layer]
        rule = self._rules[described.kind]
        inputs = self._inputs(layer)
        is_data = described.kind is LayerKind.DATA
        kind = StorageKind.INPUT if is_data else StorageKind.ACTIVATION
        output = self._store(described.nbytes, kind, f"{described.name}.y")
        self.output[layer] = output
        retained = (inputs if rule.reads_inputs else ()) + ((output,) if rule.reads_output else ())
        attributes: tuple[int, ...] = ()
        if rule.has_mask:
            mask_bytes = described.nbytes // ELEMENT_BYTES
            mask = self._store(mask_bytes, StorageKind.ATTRIBUTE, f"{described.name}.mask")
            self._mask[layer] = mask
            attributes = (mask,)
        self._forward_index[layer] = len(self._operations)
        self._operations.append(
            Operation(
                len(self._operations),
                described.name,
                Phase.FORWARD,
                inputs=inputs,
                outputs=(output,),
                retained=retained,
                attributes=attributes,
            )
        )

    def recompute(self, layer: int) -> None:
        """Append another forward of a layer, into a new storage that takes the output's place."""
        described = self._network.layers[layer]
        inputs = self._inputs(layer) + self._masks(layer)
        output = self._store(described.nbytes, StorageKind.ACTIVATION, f"{described.name}.y")
        self.output[layer] = output
        self._append_after_forward(layer, Phase.RECOMPUTE, inputs, (output,))

    def backward_reads(self, layer: int) -> tuple[int, ...]:
        """List the layers whose outputs a layer's backward reads: predecessors, then itself."""
        rule = self._rules[self._network.layers[layer].kind]
        inputs = self._network.predecessors[layer] if rule.reads_inputs else ()
        return inputs + ((layer,) if rule.reads_output else ())

    def backward(self, layer: int) -> None:
        """Append a layer's backward; the outputs it reads must be there."""
        reads = tuple(self._current(read) for read in self.backward_reads(layer))
        readers = self._network.successors[layer]
        arriving = tuple(dict.fromkeys(self._gradient[reader] for reader in readers))
        gradient = self._place_gradient(layer, arriving)
        inputs = reads + arriving + self._masks(layer)
        self._append_after_forward(layer, Phase.BACKWARD, inputs, gradient)

    def trace(self) -> Trace:
        """Return what has been appended so far."""
        return Trace(tuple(self._storages), tuple(self._operations))

    def _place_gradient(self, layer: int, arriving: tuple[int, ...]) -> tuple[int, ...]:
        """Find or make the storage of a layer's input gradient; empty where there is none."""
        described = self._network.layers[layer]
        place = self._rules[described.kind].gradient
        if place is GradientPlace.NONE:
            return ()
        if place is GradientPlace.OUTPUT:
            gradient = self._current(layer)
        elif place is GradientPlace.OUTPUT_GRADIENT and arriving:
            gradient = arriving[0]
        else:
            nbytes = self._network.layers[described.predecessors[0]].nbytes
            gradient = self._store(nbytes, StorageKind.GRADIENT, f"{described.name}.dx")
        self._gradient[layer] = gradient
        return (gradient,)

    def _append_after_forward(
        self, layer: int, phase: Phase, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> None:
        """Append an operation that belongs to a layer's forward."""
        self._operations.append(
            Operation(
                len(self._operations),
                self._network.layers[layer].name,
                phase,
                inputs=inputs,
                outputs=outputs,
                forward_index=self._forward_index[layer],
            )
        )

    def _inputs(self, layer: int) -> tuple[int, ...]:
        """Return the storages a layer reads."""
        return tuple(self._current(p) for p in self._network.predecessors[layer])

    def _masks(self, layer: int) -> tuple[int, ...]:
        """Return the layer's mask, if it has one."""
        return (self._mask[layer],) if layer in self._mask else ()

    def _current(self, layer: int) -> int:
        """Return the storage of a layer's output; raises InternalError if it is not there."""
        try:
            return self.output[layer]
        except KeyError:
            name = self._network.layers[layer].name
            raise InternalError(f"the output of {name!r} is read but not there") from None

    def _store(self, nbytes: int, kind: StorageKind, label: str) -> int:
        """Add a storage and return its id."""
        id = len(self._storages)
        self._storages.append(Storage(id, nbytes, kind, label))
        return id


def lower(network: Network, rules: Mapping[LayerKind, BackwardRule] = RELEASED_RULES) -> Trace:
    """Lower a network to the trace of one iteration in which every output is kept.

    Parameters
    ----------
    network
        A well-formed network.
    rules
        What backward reads and writes, by kind of layer.

    Returns
    -------
    Trace
        Forward in forward order, then backward in backward order. Storages are labelled
        ``NAME.y``, ``NAME.dx`` and ``NAME.mask``.
    """
    lowering = Lowering(network, rules)
    for layer in forward_order(network):
        lowering.forward(layer)
    for layer in backward_order(network):
        lowering.backward(layer)
    return lowering.trace()
