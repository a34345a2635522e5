"""Record a define-by-run computation while it runs, in integers only.

Covers: who used which storage when, what the coming backward still needs, which storages nothing
needs any more, and a `Trace` of the last complete iteration. Does not cover: arrays, devices,
derivatives, threads (the caller serialises the calls).

The *tick* of a forward operation is its id; ids only grow. The *clock* counts forward and backward
operations alike and orders uses for a least-recently-used policy.

Invariants
----------
1. The recorder refers to no object of its caller; signatures and labels are kept as given.
2. What it keeps is bounded by the storages and operations not yet forgotten, plus the records of
   two iterations of at most `MAX_OPERATIONS` entries each.
3. A storage's pending ticks are ascending and are exactly the known operations that retain it (or
   have it as an attribute) and have not run backward.
4. A storage with a pending tick is not expired.

Source: the recorder that knows no derivatives is HIPS/autograd's `tracer.py` idea; liveness by last
use is Wang et al., PPoPP 2018, where the graph is known beforehand. Here it is not:
"expired" is a prediction (a graph may be traversed again), so callers must drop recoverably.
"""

from bisect import bisect_right
from collections.abc import Hashable

from dynamemo.graph.errors import InternalError
from dynamemo.graph.records import (
    BackwardRecord,
    OperationState,
    Record,
    StorageState,
    described,
)
from dynamemo.graph.types import Storage, StorageKind, Trace

#: Operations kept of one iteration for `Recorder.trace`; later ones are followed but not kept.
MAX_OPERATIONS = 100_000


class Recorder:
    """Follow storages and operations of a running program.

    Parameters
    ----------
    max_operations
        Entries kept per iteration for `trace`.

    Notes
    -----
    Where the graph is unknown, so is the end of an iteration: it is taken to end when a forward
    runs outside any backward after a backward has run. That is provisional until the next backward
    begins. If that one continues the old graph (an operation from before the border that never
    ran backward), the forwards in between belonged to the backward (a framework that sums gradients
    between two functions) and the border is taken back.
    """

    def __init__(self, *, max_operations: int = MAX_OPERATIONS) -> None:
        self._max_operations = max_operations
        self._storages: dict[int, StorageState] = {}
        self._operations: dict[int, OperationState] = {}
        self._next_storage = 1
        self._next_operation = 1
        self._clock = 0
        self._position = 0
        #: Operations whose backward runs now, innermost last.
        self._running: list[int] = []
        self._iterations = 0
        self._backward_has_run = False
        #: First tick after the provisional border, or 0 where there is none.
        self._border_tick = 0
        #: Number of records before the provisional border.
        self._border_records = 0
        self._previous: list[Record] = []
        self._current: list[Record] = []

    @property
    def position(self) -> int:
        """Tick of the operation running now, or of the last that ran (0 before the first)."""
        return self._position

    @property
    def clock(self) -> int:
        """Count of operations begun, forward and backward; the time of `last_touch`."""
        return self._clock

    @property
    def iterations(self) -> int:
        """Iterations completed; the newest is provisional until the next backward begins."""
        return self._iterations + (1 if self._border_tick else 0)

    @property
    def is_iteration_open(self) -> bool:
        """Whether a backward has run since the last iteration ended: one more is near its end."""
        return self._backward_has_run and not self._running

    @property
    def is_in_backward(self) -> bool:
        """Whether an operation's backward is running."""
        return bool(self._running)

    def storage(self, nbytes: int, kind: StorageKind, label: str = "") -> int:
        """Begin to follow a storage.

        Parameters
        ----------
        nbytes
            Requested bytes.
        kind
            Its role.
        label
            A name for reports.

        Returns
        -------
        int
            Its id; ids grow and are never used again.
        """
        id = self._next_storage
        self._next_storage = id + 1
        self._storages[id] = StorageState(id, nbytes, kind, label, self._position, self._clock)
        return id

    def forget_storage(self, storage_id: int) -> None:
        """Stop following a storage whose memory is gone; an unknown id is ignored."""
        state = self._storages.pop(storage_id, None)
        if state is not None:
            state.is_forgotten = True

    def forward(
        self,
        label: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        *,
        retained: tuple[int, ...] = (),
        attributes: tuple[int, ...] = (),
        transient_bytes: int = 0,
        elapsed_s: float | None = None,
        signature: Hashable = None,
        is_repeatable: bool = False,
        makers: list[int] | tuple[int, ...] = (),
    ) -> int:
        """Record that a function ran forward.

        Parameters
        ----------
        label
            The function's name.
        inputs, outputs
            Ids of the storages it read and wrote; repeats are allowed.
        retained, attributes
            Ids of the storages its backward will read.
        transient_bytes
            Bytes that existed only while it ran.
        elapsed_s
            Measured seconds, if measured.
        signature
            What the caller files its seconds and traits under; see `traced_signatures`.
        is_repeatable
            Whether it may be applied again, and everything that it read is known.
        makers
            Operations whose outputs it read beside `inputs`, and its backward will not. Only
            `trace` shows them; they count as no use of those storages. One whose outputs are in
            memory that is not followed makes the operation not repeatable.

        Returns
        -------
        int
            The operation's id, which is its tick.

        Raises
        ------
        InternalError
            If a storage or a maker is unknown or forgotten. Nothing is recorded.
        """
        state_of = self._storages.__getitem__
        try:
            read = tuple(map(state_of, inputs))
            written = tuple(map(state_of, outputs))
            kept = tuple(map(state_of, retained)) if retained else ()
            own = tuple(map(state_of, attributes)) if attributes else ()
        except KeyError as error:
            raise InternalError(f"forward of {label!r} names unknown storage {error}") from None
        besides: tuple[StorageState, ...] = ()
        for maker in makers:
            made = self._operation(maker).outputs
            besides += made
            is_repeatable = is_repeatable and bool(made)
        tick = self._next_operation
        self._next_operation = tick + 1
        self._clock = clock = self._clock + 1
        needs = kept + own
        if len(needs) > 1:
            needs = tuple(dict.fromkeys(needs))
        for states in (read, written, needs):
            for state in states:
                state.last_use = tick
                state.last_touch = clock
                state.is_expired = False
        for state in needs:
            if state.pending:
                state.pending.append(tick)
            else:
                state.pending = [tick]
        operation = self._operations[tick] = OperationState(
            tick,
            label,
            read + besides,
            written,
            kept,
            own,
            needs,
            transient_bytes,
            elapsed_s,
            signature,
            is_repeatable,
        )
        if not self._running:
            self._position = tick
            if self._backward_has_run:
                self._place_border(tick)
        if len(self._current) - self._border_records < self._max_operations:
            self._current.append(operation)
        return tick

    def begin_backward(self, operation_id: int) -> None:
        """Record that the backward of an operation begins; it may be nested in another.

        Raises
        ------
        InternalError
            If the operation is unknown or forgotten. Nothing changes.
        """
        operation = self._operation(operation_id)
        if self._border_tick and not self._running:
            self._settle_border(operation)
        self._running.append(operation_id)
        self._position = operation_id
        self._clock = clock = self._clock + 1
        for state in operation.needs:
            state.last_touch = clock

    def end_backward(
        self, operation_id: int, *, transient_bytes: int = 0, elapsed_s: float | None = None
    ) -> tuple[int, ...]:
        """Record that the backward of an operation has run.

        Backwards that began inside it and never ended (an exception was caught there) are closed.

        Parameters
        ----------
        operation_id
            The operation.
        transient_bytes, elapsed_s
            As in `forward`, of the backward.

        Returns
        -------
        tuple of int
            Storages that expired by it: every operation that retained them, or has them as an
            attribute, has now run backward at least once. When a graph is traversed again they are
            reported again, after the operation that was the last to need them.

        Raises
        ------
        InternalError
            If the operation is unknown or its backward is not running. Nothing changes.
        """
        operation = self._operation(operation_id)
        self._leave_backward(operation_id)
        self._backward_has_run = True
        expired = self._expire(operation)
        if len(self._current) - self._border_records < self._max_operations:
            self._current.append(BackwardRecord(operation, transient_bytes, elapsed_s))
        return expired

    def abandon_backward(self) -> None:
        """Close every running backward: an exception left them. Nothing expires by it."""
        if self._running:
            self._running.clear()
            self._backward_has_run = True

    def forget_operation(self, operation_id: int) -> None:
        """Stop following an operation whose graph node died; an unknown id is ignored.

        Its backward can no longer run: what only it still needed counts as expired from here. If
        its backward never ended (an exception left it), it is no longer the one that runs.
        """
        operation = self._operations.pop(operation_id, None)
        if operation is None:
            return
        if operation_id in self._running:
            self._running.remove(operation_id)
        if not operation.has_run_backward:
            for state in operation.needs:
                _drop_pending(state, operation_id)
                state.is_expired = not state.pending

    def is_expired(self, storage_id: int) -> bool:
        """Tell whether nothing known will read the storage again.

        False for one that no operation ever retained, and again once a new forward uses it.

        Raises
        ------
        InternalError
            If the storage is unknown or forgotten.
        """
        return self._state(storage_id).is_expired

    def touch(self, storage_id: int) -> None:
        """Mark the storage as the most recently used; raises InternalError if it is unknown."""
        self._state(storage_id).last_touch = self._clock

    def last_touch(self, storage_id: int) -> int:
        """Return the clock of the storage's latest use; raises InternalError if it is unknown."""
        return self._state(storage_id).last_touch

    def last_use(self, storage_id: int) -> int:
        """Return the tick of the newest forward that used the storage.

        Raises
        ------
        InternalError
            If the storage is unknown or forgotten.
        """
        return self._state(storage_id).last_use

    def next_use(self, storage_id: int) -> int:
        """Return the tick of the next backward that needs the storage; 0 where none is known.

        The greatest pending one that is not ahead of the position: backward comes back that way.
        """
        state = self._storages.get(storage_id)
        if state is None:
            return 0
        ahead = bisect_right(state.pending, self._position)
        return state.pending[ahead - 1] if ahead else 0

    def distance(self, storage_id: int) -> int:
        """Predict how many operations lie before the storage's next use.

        In forward: the current position minus the storage's last forward use, since backward comes
        back the same way. In backward: the position minus the next pending operation that needs it,
        or minus its last forward use where none is ahead. At least 1.

        Raises
        ------
        InternalError
            If the storage is unknown or forgotten.
        """
        state = self._state(storage_id)
        position = self._position
        tick = state.last_use
        if self._backward_has_run or self._running:
            ahead = bisect_right(state.pending, position)
            if ahead:
                tick = state.pending[ahead - 1]
        return max(1, position - tick)

    def trace(self) -> Trace:
        """Return the last complete iteration, empty before the first has completed.

        A storage or operation forgotten since is still described. Of an iteration longer than
        `max_operations` the first ones are given.

        Returns
        -------
        Trace
            Well formed; storage ids are the recorder's own.
        """
        records = self._complete()
        indices: dict[int, int] = {}
        storages: dict[int, Storage] = {}
        operations = []
        for index, record in enumerate(records):
            is_forward = isinstance(record, OperationState)
            operation = record if isinstance(record, OperationState) else record.operation
            for state in operation.used():
                if state.id not in storages:
                    storages[state.id] = Storage(state.id, state.nbytes, state.kind, state.label)
            if is_forward:
                indices[operation.id] = index
            operations.append(described(record, index, indices.get(operation.id)))
        return Trace(tuple(storages.values()), tuple(operations))

    def traced_signatures(self) -> tuple[Hashable, ...]:
        """Return the signature of each operation of `trace`; a backward has its forward's."""
        return tuple(
            [
                record.signature
                if isinstance(record, OperationState)
                else record.operation.signature
                for record in self._complete()
            ]
        )

    def traced_operations(self) -> tuple[int, ...]:
        """Return the id of each operation of `trace`; a backward has its forward's."""
        return tuple(
            [
                record.id if isinstance(record, OperationState) else record.operation.id
                for record in self._complete()
            ]
        )

    def _complete(self) -> list[Record]:
        """Return the records of the last complete iteration."""
        return self._current[: self._border_records] if self._border_tick else self._previous

    def validate(self) -> None:
        """Check the module's invariants 2 to 4; raises InternalError where one is broken."""
        pending: dict[int, list[int]] = {}
        for tick, operation in self._operations.items():
            if not operation.has_run_backward:
                for state in operation.needs:
                    pending.setdefault(state.id, []).append(tick)
        for id, state in self._storages.items():
            if state.is_forgotten or state.id != id:
                raise InternalError(f"storage {id} is listed although it was forgotten")
            if list(state.pending) != sorted(pending.get(id, [])):
                raise InternalError(f"storage {id} has pending {state.pending}, expected {pending}")
            if state.pending and state.is_expired:
                raise InternalError(f"storage {id} is expired and pending at {state.pending}")
        if len(self._previous) > self._max_operations:
            raise InternalError(f"{len(self._previous)} records kept of the previous iteration")
        if len(self._current) - self._border_records > self._max_operations:
            raise InternalError(f"{len(self._current)} records kept of the current iteration")

    def _state(self, storage_id: int) -> StorageState:
        """Return a followed storage; raises InternalError if it is unknown."""
        try:
            return self._storages[storage_id]
        except KeyError:
            raise InternalError(f"storage {storage_id} is unknown or was forgotten") from None

    def _operation(self, operation_id: int) -> OperationState:
        """Return a followed operation; raises InternalError if it is unknown."""
        try:
            return self._operations[operation_id]
        except KeyError:
            raise InternalError(f"operation {operation_id} is unknown or was forgotten") from None

    def _leave_backward(self, operation_id: int) -> None:
        """Close the running backward of an operation and whatever is nested in it."""
        running = self._running
        if operation_id not in running:
            raise InternalError(f"the backward of operation {operation_id} is not running")
        while running.pop() != operation_id:
            pass
        self._position = running[-1] if running else operation_id

    def _expire(self, operation: OperationState) -> tuple[int, ...]:
        """Settle what an operation's backward no longer needs; returns what expired by it."""
        tick = operation.id
        expired = []
        if operation.has_run_backward:
            for state in operation.needs:
                if state.expirer == tick and not state.pending and not state.is_forgotten:
                    state.is_expired = True
                    expired.append(state.id)
            return tuple(expired)
        operation.has_run_backward = True
        for state in operation.needs:
            _drop_pending(state, tick)
            if not state.pending and not state.is_forgotten:
                state.is_expired = True
                state.expirer = tick
                expired.append(state.id)
        return tuple(expired)

    def _place_border(self, tick: int) -> None:
        """End the iteration, provisionally, before the forward that is being recorded."""
        if self._border_tick:
            self._confirm_border()
        self._border_tick = tick
        self._border_records = len(self._current)
        self._backward_has_run = False

    def _settle_border(self, operation: OperationState) -> None:
        """Confirm the provisional border, or take it back if the old backward goes on."""
        if operation.id < self._border_tick and not operation.has_run_backward:
            self._border_tick = 0
            self._border_records = 0
            self._backward_has_run = True
            del self._current[self._max_operations :]
        else:
            self._confirm_border()

    def _confirm_border(self) -> None:
        """Make the iteration before the provisional border the last complete one."""
        self._iterations += 1
        self._previous = self._current[: self._border_records]
        self._current = self._current[self._border_records :]
        self._border_tick = 0
        self._border_records = 0


def _drop_pending(state: StorageState, tick: int) -> None:
    """Remove a tick from a storage's pending ones; nearly always it is the last."""
    pending = state.pending
    if not pending:
        raise InternalError(f"storage {state.id} is not pending at {tick}")
    if len(pending) == 1:
        state.pending = ()
    elif pending[-1] == tick:
        pending.pop()
    else:
        pending.remove(tick)
