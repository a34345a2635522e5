"""Schedule the seed's three recompute strategies over a layer network.

Covers segments, the largest single-layer need, and the whole iteration as a trace in which dropped
outputs are rebuilt (phase RECOMPUTE, into storages of their own), so `liveness` gives its memory.

The one rule behind every count: a backward asks for the outputs it reads; what is missing is
rebuilt from the nearest output that is there, along predecessors. Speed-centric keeps all that was
rebuilt on the way until its last use. Memory-centric keeps of it only what this backward itself
reads. So a segment of n layers costs n, or n (n + 1) / 2; a normalization that only a join reads is
never asked for; behind a fork, whose output is kept, the first demand is missing.

Cost-aware takes speed-centric for a segment where the segment's outputs together with its last
layer's backward need at most the largest need of any single layer, else memory-centric.
Interpretation: both sides count distinct storages. (The printed 886.23 MiB of AlexNet counts an
aliased gradient twice; distinct, it is 664.67, and the printed 17 extra forwards come out.)

Source: Wang et al., PPoPP 2018, cost-aware recompute and its table of extra forwards. We differ:
dropout is replayed with its mask; the walk does not recurse. Costs are by type here, as in the
paper; the planner measures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from dynamemo.graph.liveness import MANAGED_KINDS
from dynamemo.graph.lowering import RELEASED_RULES, BackwardRule, Lowering, lower
from dynamemo.graph.network import LayerKind, Network, backward_order, forward_order
from dynamemo.graph.types import Phase, Trace

#: Kinds whose outputs are dropped after their last forward use.
DROPPED_KINDS = frozenset(
    {LayerKind.POOL, LayerKind.ACT, LayerKind.LRN, LayerKind.BN, LayerKind.DROPOUT}
)


class Strategy(Enum):
    """Choose how dropped outputs are rebuilt."""

    SPEED_CENTRIC = "speed-centric"
    MEMORY_CENTRIC = "memory-centric"
    COST_AWARE = "cost-aware"


@dataclass(frozen=True, slots=True)
class Segment:
    """Hold a run of dropped layers behind a kept one.

    Attributes
    ----------
    checkpoint
        Index of the kept layer it is rebuilt from.
    layers
        Indices of its layers in forward order.
    """

    checkpoint: int
    layers: tuple[int, ...]


def segments(network: Network) -> tuple[Segment, ...]:
    """Split a network into segments, in forward order of their first layers.

    A dropped layer joins the segment of the layer it reads, or begins one behind a kept layer.
    """
    checkpoints: list[int] = []
    members: list[list[int]] = []
    segment_of: dict[int, int] = {}
    for layer in forward_order(network):
        if network.layers[layer].kind not in DROPPED_KINDS:
            continue
        source = network.predecessors[layer][0]
        if source not in segment_of:
            segment_of[layer] = len(members)
            checkpoints.append(source)
            members.append([layer])
        else:
            segment_of[layer] = segment_of[source]
            members[segment_of[source]].append(layer)
    return tuple(
        Segment(checkpoint, tuple(layers))
        for checkpoint, layers in zip(checkpoints, members, strict=True)
    )


def largest_layer_bytes(
    network: Network, rules: Mapping[LayerKind, BackwardRule] = RELEASED_RULES
) -> int:
    """Compute the largest need of one layer, forward or backward, in distinct managed storages.

    The paper calls it l_peak: no schedule of whole tensors needs less.
    """
    trace = lower(network, rules)
    nbytes = _managed_bytes(trace)
    return max(
        (
            sum(nbytes[id] for id in {*operation.inputs, *operation.outputs} if id in nbytes)
            for operation in trace.operations
        ),
        default=0,
    )


def memory_centric_layers(
    network: Network,
    strategy: Strategy,
    *,
    rules: Mapping[LayerKind, BackwardRule] = RELEASED_RULES,
) -> frozenset[int]:
    """Choose the dropped layers that are rebuilt memory-centric; the others are speed-centric."""
    if strategy is Strategy.SPEED_CENTRIC:
        return frozenset()
    parts = segments(network)
    if strategy is Strategy.COST_AWARE:
        limit_bytes = largest_layer_bytes(network, rules)
        needs = _segment_bytes(lower(network, rules), parts, network)
        parts = tuple(p for p, need in zip(parts, needs, strict=True) if need > limit_bytes)
    return frozenset(layer for part in parts for layer in part.layers)


def schedule(
    network: Network,
    strategy: Strategy,
    *,
    rules: Mapping[LayerKind, BackwardRule] = RELEASED_RULES,
) -> Trace:
    """Schedule one iteration with dropped outputs.

    Parameters
    ----------
    network
        A well-formed network.
    strategy
        How to rebuild.
    rules
        What backward reads and writes, by kind of layer.

    Returns
    -------
    Trace
        Forward, then backward with each recompute right before the backward that asked for it.
    """
    frugal = memory_centric_layers(network, strategy, rules=rules)
    lowering = Lowering(network, rules)
    for layer in forward_order(network):
        lowering.forward(layer)
    for layer, described in enumerate(network.layers):
        if described.kind in DROPPED_KINDS:
            del lowering.output[layer]
    for layer in backward_order(network):
        reads = lowering.backward_reads(layer)
        rebuilt = _missing(network, lowering, reads)
        for missing in rebuilt:
            lowering.recompute(missing)
        lowering.backward(layer)
        for done in rebuilt:
            if done in frugal and done not in reads:
                del lowering.output[done]
    return lowering.trace()


def extra_forwards(
    network: Network,
    strategy: Strategy,
    *,
    rules: Mapping[LayerKind, BackwardRule] = RELEASED_RULES,
) -> int:
    """Count the recomputed forwards of one iteration."""
    trace = schedule(network, strategy, rules=rules)
    return sum(operation.phase is Phase.RECOMPUTE for operation in trace.operations)


def _missing(network: Network, lowering: Lowering, reads: tuple[int, ...]) -> list[int]:
    """List what must be rebuilt before `reads` are there, each after what it reads itself."""
    order: dict[int, None] = {}
    stack = [layer for layer in reversed(reads) if layer not in lowering.output]
    while stack:
        layer = stack[-1]
        below = [
            source
            for source in network.predecessors[layer]
            if source not in lowering.output and source not in order
        ]
        if below:
            stack.extend(below)
            continue
        stack.pop()
        order.setdefault(layer)
    return list(order)


def _managed_bytes(trace: Trace) -> dict[int, int]:
    """Map each storage of a managed kind to its bytes."""
    return {
        storage.id: storage.nbytes for storage in trace.storages if storage.kind in MANAGED_KINDS
    }


def _segment_bytes(trace: Trace, parts: tuple[Segment, ...], network: Network) -> list[int]:
    """Compute each segment's speed-centric need: its outputs and its last layer's backward."""
    nbytes = _managed_bytes(trace)
    forward = {o.label: o for o in trace.operations if o.phase is Phase.FORWARD}
    backward = {o.label: o for o in trace.operations if o.phase is Phase.BACKWARD}
    needs = []
    for part in parts:
        names = [network.layers[layer].name for layer in part.layers]
        last = backward[names[-1]]
        ids = {*last.inputs, *last.outputs, *(id for n in names for id in forward[n].outputs)}
        needs.append(sum(nbytes[id] for id in ids if id in nbytes))
    return needs
