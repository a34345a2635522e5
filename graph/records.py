"""Hold what the recorder knows of one storage and of one operation.

Covers the recorder's own mutable state, made cheap to create since there is one per function call,
and how a record becomes a public `Operation`. Nothing outside `recorder` needs it.
"""

from dynamemo.graph.types import Operation, Phase, StorageKind


class StorageState:
    """Follow one storage; mutable, the recorder's own."""

    __slots__ = (
        "expirer",
        "id",
        "is_expired",
        "is_forgotten",
        "kind",
        "label",
        "last_touch",
        "last_use",
        "nbytes",
        "pending",
    )

    def __init__(self, id: int, nbytes: int, kind: StorageKind, label: str) -> None:
        self.id = id
        self.nbytes = nbytes
        self.kind = kind
        self.label = label
        #: Tick of the newest forward operation that used it.
        self.last_use = 0
        #: Clock of the newest use of any sort.
        self.last_touch = 0
        #: Ticks of the operations whose backward will still read it, ascending.
        self.pending: list[int] = []
        self.is_expired = False
        self.is_forgotten = False
        #: The operation whose backward was the last to need it in the newest traversal.
        self.expirer = 0


class OperationState:
    """Follow one forward operation; mutable, the recorder's own."""

    __slots__ = (
        "attributes",
        "has_run_backward",
        "id",
        "inputs",
        "label",
        "needs",
        "outputs",
        "retained",
        "used",
    )

    def __init__(
        self,
        id: int,
        label: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        retained: tuple[int, ...],
        attributes: tuple[int, ...],
        used: list[StorageState],
        needs: list[StorageState],
    ) -> None:
        self.id = id
        self.label = label
        self.inputs = inputs
        self.outputs = outputs
        self.retained = retained
        self.attributes = attributes
        #: Every storage it names, once each; keeps their sizes for `trace` once they are forgotten.
        self.used = used
        #: The storages its backward reads, once each.
        self.needs = needs
        self.has_run_backward = False


#: One entry of an iteration: the operation and, for its backward, transient bytes and seconds.
Record = tuple[OperationState, Phase, int, float | None]


def described(record: Record, index: int, forward_index: int | None) -> Operation:
    """Turn a record into the public description of an operation."""
    operation, phase, transient_bytes, elapsed_s = record
    if phase is Phase.FORWARD:
        return Operation(
            index,
            operation.label,
            phase,
            inputs=operation.inputs,
            outputs=operation.outputs,
            retained=operation.retained,
            attributes=operation.attributes,
            transient_bytes=transient_bytes,
            elapsed_s=elapsed_s,
        )
    return Operation(
        index,
        operation.label,
        phase,
        inputs=tuple(dict.fromkeys(operation.retained)),
        attributes=operation.attributes,
        transient_bytes=transient_bytes,
        elapsed_s=elapsed_s,
        forward_index=forward_index,
    )
