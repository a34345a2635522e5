"""Describe a recorded iteration in plain values: storages, operations, traces.

Covers the vocabulary the whole graph part speaks. It knows no device, no array and no framework:
a tensor is the integer id of the *storage* it lives in, and views of one array share one id.

Invariants
----------
1. Every value here is immutable and hashable where its attributes are.
2. A `Trace` that passed `validate` refers only to storages that it lists.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from dynamemo.graph.errors import TraceError


class Phase(Enum):
    """Tell which pass of an iteration an operation belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"


class StorageKind(Enum):
    """Tell what role a storage plays; policies choose by it."""

    #: Training data or labels that come from outside the graph.
    INPUT = "input"
    #: Trained weights and persistent statistics.
    PARAMETER = "parameter"
    #: What a function computed in forward.
    ACTIVATION = "activation"
    #: What a function keeps for its backward beside its inputs and outputs (mask, indexes, scale).
    ATTRIBUTE = "attribute"
    #: Gradients with respect to activations or parameters.
    GRADIENT = "gradient"
    #: Scratch memory that lives for one operation.
    WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True)
class Storage:
    """Describe one piece of memory that one or several tensors share.

    Attributes
    ----------
    id
        Identity within one recorder or trace.
    nbytes
        Requested bytes, before any rounding by an allocator.
    kind
        Its role.
    label
        A name for people; may be empty.
    is_movable
        Whether it may be copied out and brought back.
    is_noise
        Whether its maker drew it: it cannot be made again, and has to be there when that is applied
        again.
    """

    id: int
    nbytes: int
    kind: StorageKind
    label: str = ""
    is_movable: bool = False
    is_noise: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """Describe one run of a function, forward or backward.

    Attributes
    ----------
    index
        Position within its trace, from 0.
    label
        The function's name.
    phase
        The pass it ran in.
    inputs, outputs
        Storage ids it read and wrote.
    retained
        Storage ids among inputs and outputs that its backward will read.
    attributes
        Storage ids of attribute tensors that its backward will read.
    transient_bytes
        Bytes that exist only while it runs (workspace, temporaries).
    elapsed_s
        Measured seconds, or None where it was not measured.
    forward_index
        For a backward operation the index of its forward, if that is in the same trace.
    own_bytes
        The most bytes in use while it ran beside what forward made and still kept: parameters,
        training data, gradients, temporaries; None where it was not measured.
    is_repeatable
        Whether it may be applied again and then gives the same.
    replay_s
        Measured seconds to apply it again; None stands for `elapsed_s`.
    """

    index: int
    label: str
    phase: Phase
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    retained: tuple[int, ...] = ()
    attributes: tuple[int, ...] = ()
    transient_bytes: int = 0
    elapsed_s: float | None = None
    forward_index: int | None = None
    own_bytes: int | None = None
    is_repeatable: bool = False
    replay_s: float | None = None

    def storage_ids(self) -> Iterator[int]:
        """Yield every storage id it names: inputs, outputs, retained, attributes; repeats kept."""
        yield from self.inputs
        yield from self.outputs
        yield from self.retained
        yield from self.attributes


@dataclass(frozen=True, slots=True)
class Trace:
    """Hold the operations of one iteration in the order they ran, with their storages.

    Attributes
    ----------
    storages
        Every storage an operation names, each once.
    operations
        In order of execution; `operations[i].index == i`.
    """

    storages: tuple[Storage, ...] = ()
    operations: tuple[Operation, ...] = ()

    def nbytes_by_id(self) -> dict[int, int]:
        """Map each storage id to its requested bytes."""
        return {storage.id: storage.nbytes for storage in self.storages}

    def validate(self) -> None:
        """Check that the trace is well formed.

        Raises
        ------
        TraceError
            If a storage is listed twice or has negative bytes, an index is out of order, an
            operation names a storage that is not listed, has negative bytes or seconds, or a
            backward operation points at something that is not an earlier forward.
        """
        known = _checked_storages(self.storages)
        for position, operation in enumerate(self.operations):
            if operation.index != position:
                raise TraceError(
                    f"operation {operation.label!r} has index {operation.index}, "
                    f"expected {position}"
                )
            _check_operation(operation, known)
            self._check_forward_index(operation)

    def _check_forward_index(self, operation: Operation) -> None:
        """Check where a backward or recompute operation points; raises TraceError."""
        target = operation.forward_index
        if target is None:
            return
        is_earlier = 0 <= target < operation.index
        if not is_earlier or self.operations[target].phase is not Phase.FORWARD:
            raise TraceError(
                f"operation {operation.index} ({operation.label!r}) names {target} as its forward, "
                "which is not an earlier forward operation"
            )


def _checked_storages(storages: tuple[Storage, ...]) -> frozenset[int]:
    """Return the ids of `storages`; raises TraceError at a repeated id or negative bytes."""
    known: set[int] = set()
    for storage in storages:
        if storage.id in known:
            raise TraceError(f"storage {storage.id} ({storage.label!r}) is listed twice")
        if storage.nbytes < 0:
            raise TraceError(f"storage {storage.id} has {storage.nbytes} bytes, expected 0 or more")
        known.add(storage.id)
    return frozenset(known)


def _check_operation(operation: Operation, known: frozenset[int]) -> None:
    """Check one operation by itself; raises TraceError."""
    unknown = sorted(set(operation.storage_ids()) - known)
    if unknown:
        raise TraceError(
            f"operation {operation.index} ({operation.label!r}) names storages {unknown} "
            "that the trace does not list"
        )
    if operation.transient_bytes < 0:
        raise TraceError(
            f"operation {operation.index} has {operation.transient_bytes} transient bytes, "
            "expected 0 or more"
        )
    if operation.own_bytes is not None and operation.own_bytes < 0:
        raise TraceError(
            f"operation {operation.index} has {operation.own_bytes} own bytes, expected 0 or more"
        )
    for seconds in (operation.elapsed_s, operation.replay_s):
        if seconds is not None and not seconds >= 0.0:
            raise TraceError(f"operation {operation.index} took {seconds} s, expected 0 or more")
