"""Hold what the recorder knows of one storage and of one operation.

Covers the recorder's own mutable state, made cheap to create since there is one per function call,
and how a record becomes a public `Operation`. Nothing outside `recorder` needs it.
"""

from collections.abc import Hashable

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

    def __init__(
        self, id: int, nbytes: int, kind: StorageKind, label: str, last_use: int, last_touch: int
    ) -> None:
        self.id = id
        self.nbytes = nbytes
        self.kind = kind
        self.label = label
        #: Tick of the newest forward operation that used it.
        self.last_use = last_use
        #: Clock of the newest use of any sort.
        self.last_touch = last_touch
        #: Ticks of the operations whose backward will still read it, ascending.
        self.pending: list[int] | tuple[()] = ()
        self.is_expired = False
        self.is_forgotten = False
        #: The operation whose backward was the last to need it in the newest traversal.
        self.expirer = 0


class OperationState:
    """Follow one forward operation; mutable, the recorder's own.

    Attributes
    ----------
    inputs, outputs, retained, attributes
        The storages it read, wrote, and keeps for its backward; repeats are possible. They stay
        known here, for `trace`, once the recorder has forgotten them.
    """

    __slots__ = (
        "attributes",
        "elapsed_s",
        "has_run_backward",
        "id",
        "inputs",
        "is_repeatable",
        "label",
        "needs",
        "outputs",
        "retained",
        "signature",
        "transient_bytes",
    )

    def __init__(
        self,
        id: int,
        label: str,
        inputs: tuple[StorageState, ...],
        outputs: tuple[StorageState, ...],
        retained: tuple[StorageState, ...],
        attributes: tuple[StorageState, ...],
        needs: tuple[StorageState, ...],
        transient_bytes: int,
        elapsed_s: float | None,
        signature: Hashable,
        is_repeatable: bool,
    ) -> None:
        self.id = id
        self.label = label
        self.inputs = inputs
        self.outputs = outputs
        self.retained = retained
        self.attributes = attributes
        #: The storages its backward reads, once each.
        self.needs = needs
        #: Of its forward.
        self.transient_bytes = transient_bytes
        self.elapsed_s = elapsed_s
        #: The caller's, as given.
        self.signature = signature
        self.is_repeatable = is_repeatable
        self.has_run_backward = False

    def used(self) -> dict[StorageState, None]:
        """Return every storage it names, once each, in the order of naming."""
        return dict.fromkeys(self.inputs + self.outputs + self.retained + self.attributes)


class BackwardRecord:
    """One run of an operation's backward, for `Recorder.trace`."""

    __slots__ = ("elapsed_s", "operation", "transient_bytes")

    def __init__(
        self, operation: OperationState, transient_bytes: int, elapsed_s: float | None
    ) -> None:
        self.operation = operation
        self.transient_bytes = transient_bytes
        self.elapsed_s = elapsed_s


#: One entry of an iteration: an operation stands for its forward.
Record = OperationState | BackwardRecord


def described(record: Record, index: int, forward_index: int | None) -> Operation:
    """Turn a record into the public description of an operation."""
    if isinstance(record, OperationState):
        return Operation(
            index,
            record.label,
            Phase.FORWARD,
            inputs=_ids(record.inputs),
            outputs=_ids(record.outputs),
            retained=_ids(record.retained),
            attributes=_ids(record.attributes),
            transient_bytes=record.transient_bytes,
            elapsed_s=record.elapsed_s,
            is_repeatable=record.is_repeatable,
        )
    operation = record.operation
    return Operation(
        index,
        operation.label,
        Phase.BACKWARD,
        inputs=tuple(dict.fromkeys(_ids(operation.retained))),
        attributes=_ids(operation.attributes),
        transient_bytes=record.transient_bytes,
        elapsed_s=record.elapsed_s,
        forward_index=forward_index,
    )


def _ids(states: tuple[StorageState, ...]) -> tuple[int, ...]:
    return tuple([state.id for state in states])
