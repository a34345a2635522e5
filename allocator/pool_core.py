"""Place and free blocks so that nothing that interrupts it does harm.

Covers the table of live blocks, the lock, frees that come from finalizers, and the order of
streams. Does not cover reclaim nor statistics: `pool` adds them.

1. A live block's bytes belong to nobody else.
2. An interrupt or a finalizer in the middle of an operation leaves the pool consistent: the table
   of live blocks is the truth, and the heap is made anew from it where an operation was torn.
3. A finalizer takes no lock: it hands its block to `PoolCore.free_later`.
4. A block goes from one stream to another only through `PoolCore._order`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from dynamemo.allocator.arena import Arena
from dynamemo.allocator.block import Block, LateFree
from dynamemo.allocator.errors import AllocatorError, InternalError, NestedUseError
from dynamemo.allocator.heap import BlockHeap, End

if TYPE_CHECKING:
    from dynamemo.allocator.pool import Pool

__all__ = ["PoolCore"]

_IDLE, _BUSY, _TORN = 0, 1, 2


class PoolCore:
    """What `Pool` rests on; not used by itself.

    Parameters
    ----------
    arena : Arena
        The memory.
    heap_limit_bytes : int
        Most that the blocks may take at first.
    """

    def __init__(self, arena: Arena, heap_limit_bytes: int) -> None:
        self._arena = arena
        self._base = arena.address
        self._heap = BlockHeap(arena.capacity_bytes)
        self._block_bytes_for = self._heap.block_bytes_for
        self._heap_limit_bytes = heap_limit_bytes  # the budget less what lives elsewhere
        self._lock = threading.RLock()
        self._state = _IDLE
        self._is_reclaiming = False
        self._blocks: dict[int, Block] = {}  # by address
        self._last_stream = 0
        self._peak_bytes = self._total_bytes = self._allocations = self._frees = 0
        self._meter_bytes = 0  # highest use since the innermost `start_meter`
        self._moved_out_bytes = 0  # freed by the reclaimer, less what it brought back
        #: Bytes at the low end that blocks for the high end stay out of.
        self.low_area_bytes = 0
        #: What finalizers have left to be freed; for those that must not call anything.
        self.late: deque[Block | LateFree] = deque()
        #: Called before the pool is looked at or runs short: moves what finalizers left elsewhere
        #: into the pool.
        self.collect_late: Callable[[], None] | None = None
        _cores.add(self)

    def free(self, block: Block) -> None:
        """Give a block back at once.

        Raises
        ------
        InternalError
            If the block is not in use; nothing changed then.
        """
        with self._lock:
            if self._state:
                if self._state == _BUSY:  # a finalizer in the middle of our own work
                    self.late.append(block)
                    return
                self._mend()
            self._release(block)

    def free_later(self, item: Block | LateFree) -> None:
        """Give a block back at the pool's next operation.

        For finalizers: takes no lock, runs no other code, may be called at any moment from any
        thread, and twice.
        """
        self.late.append(item)

    def settle(self) -> None:
        """Carry out the frees that finalizers have left."""
        if self.collect_late is not None:
            self.collect_late()
        if self.late:
            with self._lock:
                self._drain()

    def try_settle(self) -> None:
        """Do as `settle`, but never wait: nothing happens where another thread uses the pool."""
        if self.late and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def _order(self, from_stream: int, to_stream: int) -> None:
        """Let `to_stream` wait for what `from_stream` has been given so far; on a host: nothing."""

    def _try_place(self, block: Block, end: End) -> bool:
        if self._state or self.late:
            self._refuse_nested()
            self._drain()
        heap = self._heap
        self._state = _BUSY
        try:
            offset = heap.allocate(block.requested_bytes, end=end, floor=self.low_area_bytes)
            if offset is None:
                self._state = _IDLE
                return False
            used_bytes = heap.used_bytes
            if used_bytes > self._heap_limit_bytes:
                heap.free(offset)
                self._state = _IDLE
                return False
            block.offset = offset
            block.address = address = self._base + offset
            self._blocks[address] = block
        except BaseException:
            self._state = _TORN
            raise
        self._state = _IDLE
        self._allocations += 1
        self._total_bytes += block.block_bytes
        if used_bytes > self._peak_bytes:
            self._peak_bytes = used_bytes
        used_bytes += self._moved_out_bytes
        if used_bytes > self._meter_bytes:
            self._meter_bytes = used_bytes
        return True

    def _release(self, block: Block) -> None:
        if self._blocks.get(block.address) is not block:
            raise InternalError(f"{block!r} is not in use")
        if block.stream != self._last_stream:
            self._order(block.stream, self._last_stream)
        self._state = _BUSY
        try:
            del self._blocks[block.address]
            block.owner = None
            self._heap.free(block.offset)
        except BaseException:
            self._state = _TORN
            raise
        self._state = _IDLE
        self._frees += 1

    def _drain(self) -> None:
        if self._state:
            if self._state == _BUSY:
                return  # in a finalizer in the middle of our own work: the next operation does it
            self._mend()
        late = self.late
        while late:
            item = late[0]  # left in place until done, so that an interrupt loses nothing
            if not isinstance(item, Block):
                item.release(cast("Pool", self))
            elif self._blocks.get(item.address) is item:
                self._release(item)
            # A nested drain may have taken it already.
            if late and late[0] is item:
                late.popleft()

    def _refuse_nested(self) -> None:
        if self._state == _BUSY:
            raise NestedUseError(
                "a finalizer or signal handler used the pool in the middle of the pool's own work; "
                "allocate outside of finalizers"
            )

    def _mend(self) -> None:
        self._heap.rebuild({b.offset: b.requested_bytes for b in self._blocks.values()})
        self._state = _IDLE

    @contextmanager
    def _exclusive(self) -> Iterator[BlockHeap]:
        """Lock the pool, carry out late frees, and mark the heap busy."""
        if self.collect_late is not None:
            self.collect_late()
        with self._lock:
            self._refuse_nested()
            self._drain()
            self._state = _BUSY
            try:
                yield self._heap
            except (AllocatorError, ValueError):
                self._state = _IDLE
                raise
            except BaseException:
                self._state = _TORN
                raise
            self._state = _IDLE


_cores: weakref.WeakSet[PoolCore] = weakref.WeakSet()


def _renew_after_fork() -> None:
    # Another thread of the parent may have held a lock or been in the middle of an operation.
    for core in _cores:
        core._lock = threading.RLock()
        core._is_reclaiming = False
        core._state = _TORN


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
