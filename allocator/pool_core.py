"""Place and free blocks so that nothing that interrupts it does harm.

Covers the table of live blocks, the lock, frees that come from finalizers, and the order of
streams. Does not cover reclaim nor statistics: `pool` adds them.

1. A live block's bytes belong to nobody else.
2. An interrupt or a finalizer in the middle of an operation leaves the pool consistent: the table
   of live blocks is the truth, and the heap is made anew from it where an operation was torn.
3. A finalizer takes no lock: it hands its block to `PoolCore.free_later`.
4. A block goes from one stream to another only through `PoolCore._order`.
5. A parked address is in one list, once; the heap counts it as live and no block has it.

The steady state does without heap and lock: a freed block's address is *parked* in the list of its
exact length, from which the next request of that length takes it. Both ends have lists of their
own. Parked addresses go to the heap where a request would otherwise fail, or where it would take
memory that was never used although much is parked; the lists are then empty and out of force. A
request looks its list up by the bytes asked for (`PoolCore._ready`): what follows from those, the
block's length and its end, is worked out once.

How it does without the lock: a *stretch* of code without a call (`PoolCore._park_freed`,
`Pool.place`) checks that the pool is idle and moves one address between its list and the table. In
CPython up to 3.13 another thread or a signal handler comes in only where a function is entered, a
call returns or a loop begins anew, and a finalizer only there or where an object is made that the
collector tracks: not in a stretch. (A trace function written in Python may, line by line: a
debugger must not step through it while other threads allocate.) Everything longer takes the lock
and marks the pool busy, which keeps stretches out. So between a look at the account and what
follows from it there must be no call, or the pool must be busy.

*Source*: exact-size lists with deferred coalescing are as in Wilson et al., "Dynamic Storage
Allocation: A Survey and Critical Review" (1995), section 3.6.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from dynamemo.allocator.arena import Arena
from dynamemo.allocator.block import UNPLACED, Block, LateFree, Parking
from dynamemo.allocator.errors import AllocatorError, InternalError, NestedUseError
from dynamemo.allocator.heap import BlockHeap, End

if TYPE_CHECKING:
    from dynamemo.allocator.pool import Pool

__all__ = ["PoolCore"]

_IDLE, _BUSY, _TORN = 0, 1, 2
#: So much may be parked before memory that was never used is spared; see also `_parked_share`.
_PARKED_BYTES = 16 << 20
#: So many lengths asked for are remembered.
_MOST_READY = 4096
_HIGH = End.HIGH


class PoolCore:
    """What `Pool` rests on; not used by itself.

    Parameters
    ----------
    arena : Arena
        The memory.
    heap_limit_bytes : int
        Most that the blocks may take at first.
    """

    # More attributes than a class can lay out for quick access without (30 in CPython 3.11).
    __slots__ = (
        "__weakref__",
        "_arena",
        "_base",
        "_blocks",
        "_default_end",
        "_freed_bytes",
        "_frees",
        "_heap",
        "_heap_limit_bytes",
        "_highest_bytes",
        "_is_reclaiming",
        "_last_stream",
        "_lock",
        "_long_lived",
        "_low_area_bytes",
        "_parked_high",
        "_parked_low",
        "_ready",
        "_ready_high",
        "_ready_low",
        "_small_block_bytes",
        "_state",
        "_used_bytes",
        "collect_late",
        "late",
    )

    #: Where more than this part of the memory in use or parked is parked, it is made free for all
    #: lengths rather than touch memory that was never used, for which a host has yet to find pages.
    _parked_share = 1 / 8

    def __init__(self, arena: Arena, heap_limit_bytes: int) -> None:
        self._arena = arena
        self._base = arena.address
        self._heap = BlockHeap(arena.capacity_bytes)
        self._heap_limit_bytes = heap_limit_bytes  # the budget less what lives elsewhere
        self._lock = threading.RLock()
        self._state = _IDLE
        self._is_reclaiming = False
        self._blocks: dict[int, Block] = {}  # by address
        self._used_bytes = 0  # of live blocks
        self._parked_low: dict[int, list[int]] = {}  # block bytes -> 0 and addresses
        self._parked_high: dict[int, list[int]] = {}  # the same for blocks that were placed high
        # Requested bytes -> where a request that names no end takes from, where `default_end` is
        # low and where it is high; and the one of the two that holds now.
        self._ready_low: dict[int, Parking] = {}
        self._ready_high: dict[int, Parking] = {}
        self._ready = self._ready_low
        self._default_end = End.LOW
        self._small_block_bytes = self._low_area_bytes = 0
        self._long_lived: frozenset[int] = frozenset()
        self._last_stream = 0
        self._frees = self._freed_bytes = 0
        self._highest_bytes = 0  # use was at most so much since `Pool._note_highest`
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
            if self._blocks.get(block.address) is not block:
                raise InternalError(f"{block!r} is not in use")
            self.late.append(block)
            self._drain()

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
        if self.late or self._state:
            with self._lock:
                self._drain()

    def try_settle(self) -> None:
        """Do as `settle`, but never wait: nothing happens where another thread uses the pool."""
        if self.late and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    @property
    def default_end(self) -> End:
        """Where blocks go whose requester names no end."""
        return self._default_end

    @default_end.setter
    def default_end(self, end: End) -> None:
        self._ready = self._ready_high if end is _HIGH else self._ready_low
        self._default_end = end

    @property
    def small_block_bytes(self) -> int:
        """Blocks shorter than this go to the high end where their requester names none.

        So that a small block that stays does not cut the space that long ones need.
        """
        return self._small_block_bytes

    @small_block_bytes.setter
    def small_block_bytes(self, nbytes: int) -> None:
        if nbytes != self._small_block_bytes:
            self._small_block_bytes = nbytes
            self._forget_ready()

    @property
    def long_lived(self) -> frozenset[int]:
        """Requested bytes of blocks that go to the high end where their requester names none.

        For who knows what comes next, and that it stays longer than the rest.
        """
        return self._long_lived

    @long_lived.setter
    def long_lived(self, lengths: frozenset[int]) -> None:
        if lengths != self._long_lived:
            for nbytes in self._long_lived ^ lengths:
                self._ready_low.pop(nbytes, None)
                self._ready_high.pop(nbytes, None)
            self._long_lived = lengths

    @property
    def low_area_bytes(self) -> int:
        """Bytes at the low end that blocks for the high end stay out of."""
        return self._low_area_bytes

    @low_area_bytes.setter
    def low_area_bytes(self, nbytes: int) -> None:
        if nbytes != self._low_area_bytes:
            self._low_area_bytes = nbytes
            self._forget_ready()

    def _order(self, from_stream: int, to_stream: int) -> None:
        """Let `to_stream` wait for what `from_stream` has been given so far; on a host: nothing."""

    def _try_place(self, block: Block, end: End) -> bool:
        """Place a block, by way of the heap; False where it does not fit."""
        self._begin()
        used_bytes = self._used_bytes + block.block_bytes
        if used_bytes > self._heap_limit_bytes:
            return False
        self._state = _BUSY
        try:
            address = self._find_place(block.block_bytes, end)
            if address is None:
                self._state = _IDLE
                return False
            parking = self._parking(block.block_bytes, end)
            self._blocks[address] = block
            block.parking = parking
            block.address = address
            self._used_bytes = used_bytes
        except BaseException:
            self._state = _TORN
            raise
        self._state = _IDLE
        if used_bytes > self._highest_bytes:
            self._highest_bytes = used_bytes
        return True

    def _find_place(self, block_bytes: int, end: End) -> int | None:
        heap, base = self._heap, self._base
        addresses, _, lowest, _ = self._parking(block_bytes, end)
        if addresses[-1] >= lowest:
            return addresses.pop()
        floor = self._low_area_bytes if end is _HIGH else 0
        offset = None
        parked_bytes = heap.used_bytes - self._used_bytes
        if parked_bytes:
            is_much = parked_bytes > max(_PARKED_BYTES, heap.used_bytes * self._parked_share)
            take = heap.allocate_used if is_much else heap.allocate
            offset = take(block_bytes, end=end, floor=floor)
            if offset is None:
                self._unpark()
        if offset is None:
            offset = heap.allocate(block_bytes, end=end, floor=floor)
        return None if offset is None else base + offset

    def _parking(self, block_bytes: int, end: End) -> Parking:
        """Return where blocks of a length wait at an end."""
        parked, lowest = self._parked_low, 1
        if end is _HIGH:
            parked, lowest = self._parked_high, self._base + self._low_area_bytes
        return parked.setdefault(block_bytes, [0]), block_bytes, lowest, end

    def _usual_end(self, requested_bytes: int) -> End:
        if requested_bytes < self._small_block_bytes or requested_bytes in self._long_lived:
            return _HIGH
        return self._default_end

    def _make_ready(self, requested_bytes: int, block_bytes: int) -> None:
        """Remember where the next such request takes from."""
        ready = self._ready
        if len(ready) >= _MOST_READY:
            ready.clear()
        # Anew, as a reclaimer may have changed what it follows from.
        ready[requested_bytes] = self._parking(block_bytes, self._usual_end(requested_bytes))

    def _forget_ready(self) -> None:
        self._ready_low.clear()
        self._ready_high.clear()

    def _unpark(self) -> None:
        """Give all parked addresses to the heap. Only while the pool is marked busy."""
        free, base = self._heap.free, self._base
        for parked in (self._parked_low, self._parked_high):
            for addresses in parked.values():
                for address in addresses[1:]:
                    free(address - base)
        self._drop_parked()

    def _drop_parked(self) -> None:
        """Put the lists out of force, also for those that have them still."""
        self._forget_ready()
        for parked in (self._parked_low, self._parked_high):
            for addresses in parked.values():
                addresses.clear()
            parked.clear()

    def _drain(self) -> None:
        if self._state:
            if self._state == _BUSY:
                return  # in a finalizer in the middle of our own work: the next operation does it
            self._mend()
        late, blocks = self.late, self._blocks
        # Whatever makes a call may run a finalizer, which may drain too: so look again after it.
        while late:
            self._park_freed()
            if not late:
                break
            item = late[0]  # left in place until done, so that an interrupt loses nothing
            if blocks.get(item.address) is not item:
                if not isinstance(item, Block):
                    item.release(cast("Pool", self))
                if late and late[0] is item:
                    del late[0]
                continue
            last_stream = self._last_stream
            if item.stream != last_stream:
                self._order(item.stream, last_stream)
                item.stream = last_stream
            addresses, block_bytes, _, end = item.parking
            if not addresses:
                item.parking = self._parking(block_bytes, end)

    def _park_freed(self) -> None:
        """Carry out late frees up to the first that takes more than parking. Takes no lock."""
        late, blocks = self.late, self._blocks
        while late:
            # No call from here on, up to the last, and no object that the collector tracks.
            item: Any = late[0]
            addresses, block_bytes, _, _ = item.parking
            # `UNPLACED` has no address, not even 0.
            if not addresses or self._state or item.stream != self._last_stream:
                return
            try:
                address = item.address
                owner, item.owner = item.owner, None
                item.parking = UNPLACED
                del blocks[address]
                del late[0]
                self._used_bytes -= block_bytes
                self._freed_bytes += block_bytes
                self._frees += 1
                addresses.append(address)
            except BaseException:
                self._state = _TORN
                raise
            del owner  # here at the earliest: its death may run anything

    def _switch_stream(self, stream: int) -> None:
        """Make all that is free safe to use on another stream."""
        self._state = _BUSY  # what is parked meanwhile would be safe on neither
        try:
            self._order(self._last_stream, stream)
            self._last_stream = stream
        finally:
            self._state = _IDLE

    def _begin(self) -> None:
        """Carry out late frees, so that the account is right; refuse where it cannot be."""
        if self._state or self.late:
            self._refuse_nested()
            self._drain()

    def _refuse_nested(self) -> None:
        if self._state == _BUSY:
            raise NestedUseError(
                "a finalizer or signal handler used the pool in the middle of the pool's own work; "
                "allocate outside of finalizers"
            )

    def _mend(self) -> None:
        self._state = _BUSY
        try:
            self._drop_parked()
            live = {b.address - self._base: b.block_bytes for b in self._blocks.values()}
            self._heap.rebuild(live)
            self._used_bytes = sum(live.values())
        except BaseException:
            self._state = _TORN
            raise
        self._state = _IDLE

    @contextmanager
    def _exclusive(self) -> Iterator[BlockHeap]:
        """Lock the pool, carry out late frees, mark the heap busy, and give it what is parked."""
        if self.collect_late is not None:
            self.collect_late()
        with self._lock:
            self._refuse_nested()
            self._drain()
            self._state = _BUSY
            try:
                self._unpark()
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
