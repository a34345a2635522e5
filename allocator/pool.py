"""Give out the blocks of one arena within a byte budget.

Covers the budget, reclaim, streams, statistics and frees that come from finalizers. Does not cover
the libraries that use the memory (`numpy_memory`, `cupy_memory`) nor where evicted values go
(tiers).

1. Blocks in use, reservations and small blocks outside the arena never exceed the budget.
2. A live block's bytes belong to nobody else.
3. An interrupt or a finalizer in the middle of an operation leaves the pool consistent: the table
   of live blocks is the truth, and the heap is made anew from it where an operation was torn.
4. A finalizer takes no lock: it hands its block to `Pool.free_later`.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from dynamemo.allocator.arena import Arena
from dynamemo.allocator.block import Block, CountedBlock, LateFree
from dynamemo.allocator.errors import (
    AllocatorError,
    InternalError,
    NestedUseError,
    OutOfMemoryError,
)
from dynamemo.allocator.heap import BlockHeap, End
from dynamemo.allocator.pool_statistics import PoolStatistics

__all__ = ["Block", "LateFree", "Pool", "PoolStatistics", "Reclaimer"]

_IDLE, _BUSY, _TORN = 0, 1, 2


class Reclaimer(Protocol):
    """Whoever can make room: the runtime."""

    def reclaim(self, pool: Pool, requested_bytes: int) -> bool:
        """Free blocks so that `requested_bytes` fit, contiguously and in the budget.

        Called with the pool locked by this thread and consistent; may free, allocate and run
        anything.

        Returns
        -------
        bool
            Whether something was freed, so that trying again is worth it.
        """


class Pool:
    """A budgeted allocator over one arena; safe to use from several threads.

    Parameters
    ----------
    arena : Arena
        The memory; closed with the pool.
    budget_bytes : int, optional
        The limit; the arena's capacity by default. A larger one leaves room for `Pool.reserve`.

    Raises
    ------
    ValueError
        If the budget is below one byte.
    """

    def __init__(self, arena: Arena, *, budget_bytes: int | None = None) -> None:
        budget_bytes = arena.capacity_bytes if budget_bytes is None else budget_bytes
        if budget_bytes < 1:
            raise ValueError(f"the budget is {budget_bytes:,} bytes, must be at least 1")
        self._arena = arena
        self._base = arena.address
        self._heap = BlockHeap(arena.capacity_bytes)
        self._block_bytes_for = self._heap.block_bytes_for
        self._lock = threading.RLock()
        self._state = _IDLE
        self._is_reclaiming = False
        self._blocks: dict[int, Block] = {}  # by address
        self._late: deque[Block | LateFree] = deque()
        self._last_stream = 0
        self._heap_limit_bytes = budget_bytes  # the budget less what lives elsewhere
        self._peak_bytes = self._total_bytes = self._allocations = self._frees = 0
        self._reclaims = self._reserved_bytes = self._outside_bytes = 0
        #: The limit in bytes.
        self.budget_bytes = budget_bytes
        #: Where blocks go whose requester names no end.
        self.default_end = End.LOW
        #: Completes an error of this pool before it is raised (names the function, say).
        self.explain: Callable[[OutOfMemoryError], None] | None = None
        #: Makes room when a request does not fit; None: nobody does.
        self.reclaimer: Reclaimer | None = None
        #: Called before the pool is looked at or runs short: moves what finalizers left into the
        #: pool.
        self.collect_late: Callable[[], None] | None = None
        #: What the last request failed with where the caller could not be told (NumPy's callbacks).
        self.last_error: BaseException | None = None
        _pools.add(self)

    # -- taking and giving back --

    def allocate(self, requested_bytes: int, *, end: End | None = None, stream: int = 0) -> Block:
        """Take a block.

        Parameters
        ----------
        requested_bytes : int
            At least 0; 0 gives a block of one granule.
        end : End, optional
            `End.HIGH` for long-lived data; default: `default_end`.
        stream : int
            Handle of the stream that will use the block first; 0 on a host.

        Returns
        -------
        Block
            Not initialised. It stays in use until given to `free` or `free_later`, whoever holds
            it.

        Raises
        ------
        OutOfMemoryError
            If the request does not fit, also after reclaiming and one garbage collection. Nothing
            changed then beyond what was reclaimed.
        """
        block = Block(self, requested_bytes, self._block_bytes_for(requested_bytes), stream)
        try:
            with self._lock:
                end = end or self.default_end
                if not self._try_place(block, end):
                    self._place_after_reclaim(block, end)
                if stream != self._last_stream:
                    self._order(self._last_stream, stream)
                    self._last_stream = stream
                return block
        except BaseException:
            if block.address:  # an interrupt, or a full stack, which is why nothing is called here
                late = self._late
                late += (block,)
            raise

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
                    self._late.append(block)
                    return
                self._mend()
            self._release(block)

    def free_later(self, item: Block | LateFree) -> None:
        """Give a block back at the pool's next operation.

        For finalizers: takes no lock, runs no other code, may be called at any moment from any
        thread, and twice.
        """
        self._late.append(item)

    def settle(self) -> None:
        """Carry out the frees that finalizers have left."""
        if self.collect_late is not None:
            self.collect_late()
        if self._late:
            with self._lock:
                self._drain()

    def try_settle(self) -> None:
        """Do as `settle`, but never wait: nothing happens where another thread uses the pool."""
        if self._late and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    # -- bytes that live elsewhere --

    def reserve(self, nbytes: int) -> None:
        """Count bytes that live elsewhere against the budget.

        Raises
        ------
        OutOfMemoryError
            If they do not fit, also after reclaiming; nothing is reserved then.
        """
        with self._lock:
            self._make_room(nbytes)
            self._reserved_bytes += nbytes
            self._heap_limit_bytes -= nbytes

    def release(self, nbytes: int) -> None:
        """Take bytes off the reservation.

        Raises
        ------
        ValueError
            If fewer are reserved; nothing changed then.
        """
        with self._lock:
            if nbytes > self._reserved_bytes:
                raise ValueError(f"{nbytes:,} bytes to release, {self._reserved_bytes:,} reserved")
            self._reserved_bytes -= nbytes
            self._heap_limit_bytes += nbytes

    def take_outside(self, item: CountedBlock, nbytes: int) -> None:
        """Count a small block that is allocated outside the arena; errors as `reserve`."""
        with self._lock:
            if self._late:
                self._drain()
            if self._heap.used_bytes + nbytes > self._heap_limit_bytes:
                self._make_room(nbytes)
            # No call from here on: an interrupt finds all of it done, or nothing.
            item.counted_bytes = nbytes
            self._outside_bytes += nbytes
            self._heap_limit_bytes -= nbytes

    def give_outside(self, item: CountedBlock) -> None:
        """Take a small block outside the arena off the account; a second call does nothing."""
        with self._lock:
            nbytes, item.counted_bytes = item.counted_bytes, 0
            self._outside_bytes -= nbytes
            self._heap_limit_bytes += nbytes

    # -- looking --

    @property
    def lock(self) -> threading.RLock:
        """The pool's lock: held while the reclaimer runs, and free for its owner to take."""
        return self._lock

    @property
    def address(self) -> int:
        """Address of the arena's first byte."""
        return self._base

    @property
    def capacity_bytes(self) -> int:
        """Length of the arena in bytes."""
        return self._heap.capacity_bytes

    @property
    def current_bytes(self) -> int:
        """Block bytes in use in the arena."""
        self.settle()
        return self._heap.used_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that the budget still allows, in however many pieces."""
        self.settle()
        return self._heap_limit_bytes - self._heap.used_bytes

    @property
    def outside_bytes(self) -> int:
        """Bytes of small blocks outside the arena."""
        self.settle()
        return self._outside_bytes

    @property
    def live_blocks(self) -> int:
        """Number of blocks in use."""
        self.settle()
        return len(self._blocks)

    @property
    def has_blocks(self) -> bool:
        """Whether a block is in use, late frees not yet counted."""
        return bool(self._blocks)

    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks in use, in no order."""
        self.settle()
        return tuple(self._blocks.values())

    def block_at(self, address: int) -> Block | None:
        """Return the block in use that starts at `address`, if there is one."""
        return self._blocks.get(address)

    def largest_free_bytes(self) -> int:
        """Return the longest request that would fit now without reclaiming, in bytes."""
        with self._exclusive() as heap:
            left_bytes = self._heap_limit_bytes - heap.used_bytes
            return max(0, min(heap.largest_free_bytes, left_bytes))

    def cheapest_window(
        self, requested_bytes: int, costs: Mapping[int, float]
    ) -> tuple[Block, ...] | None:
        """Find the blocks whose freeing makes a request fit, contiguously and in the budget.

        Parameters
        ----------
        requested_bytes : int
            The request.
        costs : mapping of int to float
            Cost, at least 0, of freeing a block, by `Block.offset`; blocks that are missing stay.

        Returns
        -------
        tuple of Block or None
            The cheapest contiguous run, and where reservations make the budget tighter than the
            arena, more of the cheapest blocks per byte. Empty where the request fits already; None
            where it cannot.
        """
        with self._exclusive() as heap:
            block_bytes = heap.block_bytes_for(requested_bytes)
            offsets = heap.cheapest_window(block_bytes, costs)
            if offsets is None:
                return None
            left_bytes = self._heap_limit_bytes - heap.used_bytes
            window = [self._blocks[self._base + offset] for offset in offsets]
            missing_bytes = block_bytes - left_bytes - sum(b.block_bytes for b in window)
            if missing_bytes > 0 and not self._extend(window, missing_bytes, costs):
                return None
            return tuple(window)

    def statistics(self) -> PoolStatistics:
        """Return what the pool holds now."""
        with self._exclusive() as heap:
            largest_bytes, free_bytes = heap.largest_free_bytes, heap.free_bytes
            return PoolStatistics(
                budget_bytes=self.budget_bytes,
                capacity_bytes=heap.capacity_bytes,
                current_bytes=heap.used_bytes,
                peak_bytes=self._peak_bytes,
                total_bytes=self._total_bytes,
                requested_bytes=heap.requested_bytes,
                allocations=self._allocations,
                frees=self._frees,
                live_blocks=len(self._blocks),
                largest_free_bytes=largest_bytes,
                fragmentation=1 - largest_bytes / free_bytes if free_bytes else 0.0,
                reclaims=self._reclaims,
                reserved_bytes=self._reserved_bytes,
                outside_bytes=self._outside_bytes,
            )

    def reset_peak(self) -> None:
        """Start the peak anew from the bytes in use now."""
        with self._exclusive() as heap:
            self._peak_bytes = heap.used_bytes

    def validate(self) -> None:
        """Check the invariants; `InternalError` if one does not hold."""
        with self._exclusive() as heap:
            heap.validate()
            live = {block.offset: block.block_bytes for block in self._blocks.values()}
            if live != {b.offset: b.block_bytes for b in heap.blocks() if not b.is_free}:
                raise InternalError("the pool's blocks and the heap's disagree")
            elsewhere_bytes = self._reserved_bytes + self._outside_bytes
            if self._heap_limit_bytes != self.budget_bytes - elsewhere_bytes:
                raise InternalError("the heap's limit and the budget disagree")
            if heap.used_bytes + elsewhere_bytes > self.budget_bytes:
                raise InternalError("the budget is exceeded")

    def close(self) -> None:
        """Return the arena to the device.

        Raises
        ------
        AllocatorError
            If blocks are in use; nothing changed then.
        """
        with self._exclusive():
            if self._blocks:
                raise AllocatorError(f"{len(self._blocks)} blocks are in use; drop them first")
            self._arena.close()

    # -- inside --

    def _order(self, from_stream: int, to_stream: int) -> None:
        """Let `to_stream` wait for what `from_stream` has been given so far; on a host: nothing."""

    def _try_place(self, block: Block, end: End) -> bool:
        if self._state or self._late:
            self._refuse_nested()
            self._drain()
        heap = self._heap
        self._state = _BUSY
        try:
            offset = heap.allocate(block.requested_bytes, end=end)
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
        late = self._late
        while late:
            item = late[0]  # left in place until done, so that an interrupt loses nothing
            if not isinstance(item, Block):
                item.release(self)
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

    def _place_after_reclaim(self, block: Block, end: End) -> None:
        def attempt() -> bool:
            return self._try_place(block, end)

        if not self._reclaim_until(attempt, block.requested_bytes):
            raise self._out_of_memory(block.requested_bytes, block.block_bytes)

    def _make_room(self, nbytes: int) -> None:
        def attempt() -> bool:
            self._drain()
            return self._heap.used_bytes + nbytes <= self._heap_limit_bytes

        self._refuse_nested()
        if not attempt() and not self._reclaim_until(attempt, nbytes):
            raise self._out_of_memory(nbytes, nbytes)

    def _reclaim_until(self, attempt: Callable[[], bool], requested_bytes: int) -> bool:
        if self.collect_late is not None:
            self.collect_late()
            if attempt():
                return True
        if (
            self._is_reclaiming
        ):  # by this very thread, as it has the lock: a reclaimer's own request
            return False
        self._is_reclaiming = True
        try:
            return self._reclaim_and_attempt(attempt, requested_bytes)
        finally:
            self._is_reclaiming = False

    def _reclaim_and_attempt(self, attempt: Callable[[], bool], requested_bytes: int) -> bool:
        reclaimer = self.reclaimer
        while reclaimer is not None:
            frees = self._frees
            if not reclaimer.reclaim(self, requested_bytes):
                break
            self._reclaims += 1
            self.settle()
            if attempt():
                return True
            if self._frees == frees:  # it says yes and frees nothing: do not ask for ever
                break
        if not gc.isenabled():
            return False
        gc.collect()
        self.settle()
        return attempt()

    def _extend(self, window: list[Block], missing_bytes: int, costs: Mapping[int, float]) -> bool:
        taken = {block.offset for block in window}
        others = [b for b in self._blocks.values() if b.offset in costs and b.offset not in taken]
        others.sort(key=lambda b: costs[b.offset] / b.block_bytes)
        for block in others:
            if missing_bytes <= 0:
                break
            window.append(block)
            missing_bytes -= block.block_bytes
        return missing_bytes <= 0

    def _out_of_memory(self, requested_bytes: int, block_bytes: int) -> OutOfMemoryError:
        heap = self._heap
        largest_bytes = heap.largest_free_bytes
        in_use_bytes = heap.used_bytes + self.budget_bytes - self._heap_limit_bytes
        feasible_bytes = in_use_bytes + block_bytes
        if feasible_bytes <= self.budget_bytes:  # only the pieces are too short
            feasible_bytes = self.budget_bytes + block_bytes - largest_bytes
        error = OutOfMemoryError(
            requested_bytes=requested_bytes,
            budget_bytes=self.budget_bytes,
            in_use_bytes=in_use_bytes,
            feasible_bytes=feasible_bytes,
            largest_free_bytes=largest_bytes,
        )
        if self.explain is not None:
            self.explain(error)
        return error


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _renew_after_fork() -> None:
    # Another thread of the parent may have held a lock or been in the middle of an operation.
    for pool in _pools:
        pool._lock = threading.RLock()
        pool._is_reclaiming = False
        pool._state = _TORN


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
