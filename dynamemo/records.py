"""The records of managed storages: who they are, where their arrays sit, what died.

The base of the memory manager. It decides nothing and moves nothing.

Invariants kept here (numbers of the design's list):
  6. Records die with blocks and slots; what died is settled at the next call (`drain`), so that
     destructors never run the manager's code.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any, cast

from dynamemo.allocator import Block, End, Pool, Ticket, TierStack
from dynamemo.counters import Counters
from dynamemo.device import Device
from dynamemo.graph import CostModel, Recorder, StorageKind
from dynamemo.storage import Array, Producer, Slot, Storage
from dynamemo.transfers import Transfers

#: Kinds that are no tensor of one graph.
_LASTING = frozenset({StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.WORKSPACE})


def _owner(block: Block) -> Storage | None:
    """Return the record that the manager left in a block of its pool."""
    return cast("Storage | None", block.owner)


class Contents:
    """The arrays of a resident storage, as found in its slots just now."""

    __slots__ = ("arrays", "is_shared", "references", "slots")

    def __init__(self) -> None:
        #: Each distinct array once.
        self.arrays: list[Array] = []
        #: How many slots refer to each.
        self.references: list[int] = []
        #: Whether some slot's container is held by somebody else.
        self.is_shared = False
        #: Slot and the position of its array.
        self.slots: list[tuple[Slot, int]] = []


class Records:
    """Know the managed storages of one device.

    Parameters
    ----------
    device : Device
        Where the arrays are.
    pool : Pool
        Where their memory comes from.
    tiers : TierStack
        Where the tickets of dead storages are given back.
    """

    def __init__(self, device: Device, pool: Pool, tiers: TierStack) -> None:
        self.device = device
        self.pool = pool
        self.recorder = Recorder()
        self.costs = CostModel()
        #: Label of the function that runs now, for the error message.
        self.current_function: str | None = None
        self.counters = Counters()
        #: The copies between the device and the tiers.
        self.transfers = Transfers(device, pool, tiers, self.counters)
        #: What the long temporaries of functions took at most, together.
        self._low_area_bytes = 0
        self._storages: weakref.WeakValueDictionary[int, Storage] = weakref.WeakValueDictionary()
        self._gone: deque[tuple[int, Ticket | None]] = deque()
        self._gone_operations: deque[int] = deque()

    def storage_of(self, array: Array) -> Storage | None:
        """Return the record of the storage under an array, if there is one."""
        block = self.device.block_of(array)
        return None if block is None else _owner(block)

    def adopt(self, array: Array, kind: StorageKind) -> Storage | None:
        """Return the record of the storage under an array, made where there is none.

        None where the array's memory does not come from the pool.
        """
        block = self.device.block_of(array)
        return None if block is None else self.adopt_block(block, kind)

    def adopt_block(self, block: Block, kind: StorageKind) -> Storage | None:
        """Return the record of a block, made where there is none; None for a foreign one."""
        if block.pool is not self.pool:
            return None
        storage: Any = block.owner
        if storage is None:
            storage_id = self.recorder.storage(block.requested_bytes, kind)
            keeper: Any = self
            storage = block.owner = self._storages[storage_id] = Storage(storage_id, block, keeper)
            storage.is_lasting = kind in _LASTING
        found: Storage = storage
        return found

    def set_producer(self, storage: Storage, producer: Producer, *, is_checkpoint: bool) -> None:
        """Note which function made a storage, if it is the first that is known to have."""
        view = producer.view
        nbytes = math.prod(view.shape) * view.dtype.itemsize
        storage.producer = producer
        storage.is_checkpoint = is_checkpoint
        storage.covered = view.offset == 0 and nbytes == storage.nbytes

    def storages(self) -> list[Storage]:
        """Return the records of all storages that are alive."""
        return list(self._storages.values())

    def nbytes_of(self, storage_id: int) -> int:
        """Return the bytes of a storage that is alive."""
        return self._storages[storage_id].nbytes

    def enter_function(self, label: str | None) -> None:
        """Note which function runs now (None: none), for messages and for placement."""
        self.current_function = label
        # What is made outside of functions (parameters, optimizer state, batches) lives long.
        self.pool.default_end = End.HIGH if label is None else End.LOW
        self.pool.low_area_bytes = self._low_area_bytes

    def forget(self, storage_id: int, ticket: Ticket | None) -> None:
        """Note that a record died. Called by its destructor: only appends."""
        self._gone.append((storage_id, ticket))

    def forget_operation(self, op_id: int) -> None:
        """Note that a function node died. Called by a destructor: only appends."""
        self._gone_operations.append(op_id)

    def drain(self) -> None:
        """Settle what died since the last call."""
        while self._gone:
            storage_id, ticket = self._gone.popleft()
            self.recorder.forget_storage(storage_id)
            if ticket is not None:
                self.transfers.discard(ticket)
        while self._gone_operations:
            self.recorder.forget_operation(self._gone_operations.popleft())

    def _contents(self, storage: Storage) -> Contents:
        contents = Contents()
        positions: dict[int, int] = {}
        for key, slot in list(storage.slots.items()):
            array = slot.get()
            if array is None or self.storage_of(array) is not storage:
                del storage.slots[key]
                continue
            position = positions.setdefault(id(array), len(contents.arrays))
            if position == len(contents.arrays):
                contents.arrays.append(array)
                contents.references.append(0)
            contents.references[position] += 1
            contents.slots.append((slot, position))
            contents.is_shared |= slot.is_shared()
        return contents

    def _is_ours_alone(self, contents: Contents) -> bool:
        if contents.is_shared:
            return False
        return self.device.is_exclusive(contents.arrays, contents.references)
