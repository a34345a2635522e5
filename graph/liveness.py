"""Find when each storage of a trace is live, and how much memory is live at each step.

Covers in- and out-sets per step, first and last uses, bytes and counts per step, the peak, under
three rules of when memory is freed. Works on any trace, also one with recompute operations, as long
as a rebuilt tensor has a storage id of its own. Does not cover fragmentation or rounding.

Invariants
----------
1. One pass over the trace; no recursion; memory linear in the trace.
2. The in-set of a step is the out-set of the step before it.
3. A storage is live without a gap from its first to its last use.

Source: Wang et al., PPoPP 2018, figure 4. We differ: lives are kept as intervals
and the sets are made on demand, so ten thousand layers do not cost their square; parameters are
in the trace and never die; scratch memory of a step counts at that step.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

from dynamemo.graph.types import Operation, Phase, StorageKind, Trace

#: What the seed manages: its figures leave out weights, training data and dropout masks.
MANAGED_KINDS = frozenset({StorageKind.ACTIVATION, StorageKind.GRADIENT})


class FreeRule(Enum):
    """Tell when a storage is freed."""

    #: After the last operation that names it.
    LAST_USE = "last use"
    #: As a define-by-run framework does: what a graph node retains goes at the end of the trace,
    #: the rest after its last use.
    GRAPH_END = "graph end"
    #: At the end of the trace: every tensor has memory of its own (the seed's baseline).
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Tell what is live while one operation runs.

    Attributes
    ----------
    step
        The operation's index.
    live_bytes
        Bytes of live storages and of the operation's transients.
    live_count
        Number of live storages.
    """

    step: int
    live_bytes: int
    live_count: int


@dataclass(frozen=True, slots=True)
class Liveness:
    """Hold the life of every storage of a trace.

    Attributes
    ----------
    trace
        The trace it was made from.
    first_step
        Step that creates each storage; -1 for one that existed before the trace.
    last_step
        Last step at which each storage is live; the number of steps for one that outlives it.
    """

    trace: Trace
    first_step: dict[int, int]
    last_step: dict[int, int]

    def in_set(self, step: int) -> frozenset[int]:
        """Return the storages live before a step; O(storages)."""
        return self.out_set(step - 1)

    def out_set(self, step: int) -> frozenset[int]:
        """Return the storages live after a step: created by then and used later; O(storages)."""
        return frozenset(
            id for id, first in self.first_step.items() if first <= step < self.last_step[id]
        )

    def live_set(self, step: int) -> frozenset[int]:
        """Return the storages live while a step runs; O(storages)."""
        return frozenset(
            id for id, first in self.first_step.items() if first <= step <= self.last_step[id]
        )

    def freed_after(self) -> tuple[tuple[int, ...], ...]:
        """List, for each step, the storages that can be freed right after it."""
        freed: list[list[int]] = [[] for _ in self.trace.operations]
        for id, last in self.last_step.items():
            if last < len(freed):
                freed[last].append(id)
        return tuple(tuple(ids) for ids in freed)

    def curve(self, *, kinds: Collection[StorageKind] = frozenset(StorageKind)) -> list[StepMemory]:
        """Compute live memory at every step.

        Parameters
        ----------
        kinds
            Count only storages of these kinds; `MANAGED_KINDS` gives the seed's figures.

        Returns
        -------
        list of StepMemory
            One per operation, transients included.
        """
        steps = len(self.trace.operations)
        bytes_change = [0] * (steps + 1)
        count_change = [0] * (steps + 1)
        for storage in self.trace.storages:
            if storage.kind not in kinds or storage.id not in self.first_step:
                continue
            first = max(0, self.first_step[storage.id])
            end = min(steps, self.last_step[storage.id] + 1)
            bytes_change[first] += storage.nbytes
            bytes_change[end] -= storage.nbytes
            count_change[first] += 1
            count_change[end] -= 1
        return list(_accumulated(self.trace.operations, bytes_change, count_change))

    def peak(self, *, kinds: Collection[StorageKind] = frozenset(StorageKind)) -> StepMemory:
        """Return the first step with the most live bytes; all zero (step -1) without steps."""
        return max(
            self.curve(kinds=kinds),
            key=lambda memory: memory.live_bytes,
            default=StepMemory(-1, 0, 0),
        )


def liveness(trace: Trace, *, freed: FreeRule = FreeRule.LAST_USE) -> Liveness:
    """Find the life of every storage that an operation of a trace names.

    A storage whose first appearance is as an input existed before the trace. A parameter outlives
    the trace; everything else is freed by the rule.

    Parameters
    ----------
    trace
        A well-formed trace.
    freed
        When storages are freed.

    Returns
    -------
    Liveness
        Intervals, sets and the memory curve.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    kept: set[int] = {s.id for s in trace.storages if s.kind is StorageKind.PARAMETER}
    for step, operation in enumerate(trace.operations):
        for id in operation.inputs:
            first.setdefault(id, -1)
            last[id] = step
        for id in (*operation.outputs, *operation.retained, *operation.attributes):
            first.setdefault(id, step)
            last[id] = step
        if freed is FreeRule.GRAPH_END and operation.phase is Phase.FORWARD:
            kept.update(operation.retained)
            kept.update(operation.attributes)
    if freed is FreeRule.NEVER:
        kept.update(last)
    for id in kept & last.keys():
        last[id] = len(trace.operations)
    return Liveness(trace, first, last)


def _accumulated(
    operations: tuple[Operation, ...], bytes_change: list[int], count_change: list[int]
) -> Iterator[StepMemory]:
    """Sum changes up into levels, one per operation."""
    live_bytes = 0
    live_count = 0
    for step, operation in enumerate(operations):
        live_bytes += bytes_change[step]
        live_count += count_change[step]
        yield StepMemory(step, live_bytes + operation.transient_bytes, live_count)
