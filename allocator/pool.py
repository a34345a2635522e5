"""Give out the blocks of one arena within a byte budget.

Covers the budget, reclaim and statistics. Does not cover how placing and freeing withstand
interrupts and finalizers (`pool_core`), the libraries that use the memory (`numpy_memory`,
`cupy_memory`), nor where evicted values go (tiers).

1. Blocks in use, reservations and small blocks outside the arena never exceed the budget.
2. A request fails only when nothing more can be reclaimed (except old garbage, inside
   `Pool.retrying`); what was taken before stays valid.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dynamemo.allocator.arena import Arena
from dynamemo.allocator.block import UNPLACED, Block, CountedBlock, Parking, PlainBlock
from dynamemo.allocator.errors import (
    AllocatorError,
    InternalError,
    OutOfMemoryError,
)
from dynamemo.allocator.heap import GRANULE_BYTES, End
from dynamemo.allocator.pool_core import _TORN, PoolCore
from dynamemo.allocator.pool_statistics import PoolStatistics
from dynamemo.allocator.reclaimer import Reclaimer
from dynamemo.allocator.window import extend_window

__all__ = ["Pool"]

_HIGH = End.HIGH
_MASK, _INVERSE = GRANULE_BYTES - 1, -GRANULE_BYTES
#: For a length that is not remembered: nothing to take.
_NOTHING_READY: Parking = ([0], 0, 1, _HIGH)


class Pool(PoolCore):
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

    __slots__ = (
        "_asker",
        "_meter_bytes",
        "_moved_out_bytes",
        "_outside_bytes",
        "_peak_bytes",
        "_reclaims",
        "_reserved_bytes",
        "budget_bytes",
        "explain",
        "last_error",
        "reclaimer",
    )

    def __init__(self, arena: Arena, *, budget_bytes: int | None = None) -> None:
        budget_bytes = arena.capacity_bytes if budget_bytes is None else budget_bytes
        if budget_bytes < 1:
            raise ValueError(f"the budget is {budget_bytes:,} bytes, must be at least 1")
        super().__init__(arena, budget_bytes)
        self._reclaims = self._reserved_bytes = self._outside_bytes = 0
        self._asker = threading.local()
        # Highest use ever; and since the innermost `start_meter`, less `_moved_out_bytes`.
        self._peak_bytes = self._meter_bytes = 0
        self._moved_out_bytes = 0  # freed by the reclaimer, less what it brought back
        #: The limit in bytes.
        self.budget_bytes = budget_bytes
        #: Completes an error of this pool before it is raised (names the function, say).
        self.explain: Callable[[OutOfMemoryError], None] | None = None
        #: Makes room when a request does not fit; None: nobody does.
        self.reclaimer: Reclaimer | None = None
        #: What the last request failed with where the caller could not be told (NumPy's callbacks).
        self.last_error: BaseException | None = None

    # -- taking and giving back --

    def allocate(self, requested_bytes: int, *, end: End | None = None, stream: int = 0) -> Block:
        """Take a block.

        Parameters
        ----------
        requested_bytes : int
            At least 0; 0 gives a block of one granule.
        end : End, optional
            `End.HIGH` for long-lived data; default: by length and `default_end`.
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
        block = PlainBlock()
        block.address = 0
        block.parking = UNPLACED
        self.place(block, requested_bytes, end, stream)
        return block

    def place(self, block: Block, requested_bytes: int, end: End | None, stream: int) -> None:
        """Give memory to a block object that has none (see `Block`); as `allocate`, which see."""
        block.pool = self
        block.owner = None
        block.stream = stream
        block.requested_bytes = requested_bytes
        late, blocks = self.late, self._blocks
        try:
            # As `_park_freed`, whose call would cost as much as what it does for one block.
            while late:
                item: Any = late[0]
                addresses, block_bytes, _, _ = item.parking
                if not addresses or self._state or item.stream != self._last_stream:
                    break
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
                del owner
            else:
                # Nothing is late. From that look on a stretch, see `pool_core`: no call, and no
                # object that the collector tracks, but for the error that leads out of here.
                try:
                    addresses, block_bytes, lowest, _ = parking = self._ready[requested_bytes]
                except KeyError:
                    addresses, block_bytes, lowest, _ = parking = _NOTHING_READY
                address = addresses[-1]
                used_bytes = self._used_bytes + block_bytes
                if (
                    address >= lowest
                    and end is None
                    and used_bytes <= self._heap_limit_bytes
                    and stream == self._last_stream
                    and not self._state
                ):
                    try:
                        del addresses[-1]
                        blocks[address] = block
                        block.block_bytes = block_bytes
                        block.parking = parking
                        block.address = address
                        self._used_bytes = used_bytes
                        if used_bytes > self._highest_bytes:
                            self._highest_bytes = used_bytes
                    except BaseException:
                        self._state = _TORN
                        raise
                    return
            with self._lock:
                self._place_locked(block, end)
        except BaseException:
            if block.address:  # an interrupt, or a full stack, which is why nothing is called here
                late += (block,)
            raise

    @contextmanager
    def retrying(self) -> Iterator[None]:
        """Promise that what fails in here, in this thread, is tried again after more was freed.

        A request then fails without a full garbage collection, which takes long (some 60 ms with
        Chainer loaded) and seldom frees what the caller is about to free. They nest; the last try
        must be made outside.
        """
        outer = getattr(self._asker, "is_retrying", False)
        self._asker.is_retrying = True
        try:
            yield
        finally:
            self._asker.is_retrying = outer

    # -- bytes that live elsewhere --

    def reserve(self, nbytes: int) -> None:
        """Count bytes that live elsewhere against the budget.

        Raises
        ------
        OutOfMemoryError
            If they do not fit, also after reclaiming; nothing is reserved then.
        """
        with self._lock:
            self._begin()
            while self._used_bytes + nbytes > self._heap_limit_bytes:
                self._make_room(nbytes)
            # No call from here on, so that nobody takes the room.
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
            self._begin()
            while self._used_bytes + nbytes > self._heap_limit_bytes:
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
        return self._used_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that the budget still allows, in however many pieces."""
        self.settle()
        return self._heap_limit_bytes - self._used_bytes

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

    def coalesce(self) -> None:
        """Merge free blocks now, so that the next ones are placed by best fit alone."""
        with self._exclusive():
            pass

    def largest_free_bytes(self) -> int:
        """Return the longest request that would fit now without reclaiming, in bytes."""
        with self._exclusive() as heap:
            left_bytes = self._heap_limit_bytes - heap.used_bytes
            return max(0, min(heap.largest_free_bytes, left_bytes))

    def cheapest_window(
        self, requested_bytes: int, costs: Mapping[int, float], *, floor: int = 0
    ) -> tuple[Block, ...] | None:
        """Find the blocks whose freeing makes a request fit, contiguously and in the budget.

        Parameters
        ----------
        requested_bytes : int
            The request.
        costs : mapping of int to float
            Cost, at least 0, of freeing a block, by `Block.offset`; blocks that are missing stay.
        floor : int
            Blocks that begin below this offset stay, and so does the free space there.

        Returns
        -------
        tuple of Block or None
            The cheapest contiguous run, and where reservations make the budget tighter than the
            arena, more of the cheapest blocks per byte. Empty where the request fits already; None
            where it cannot.
        """
        with self._exclusive() as heap:
            block_bytes = heap.block_bytes_for(requested_bytes)
            offsets = heap.cheapest_window(block_bytes, costs, floor=floor)
            if offsets is None:
                return None
            left_bytes = self._heap_limit_bytes - heap.used_bytes
            window = [self._blocks[self._base + offset] for offset in offsets]
            missing_bytes = block_bytes - left_bytes - sum(b.block_bytes for b in window)
            if not extend_window(window, self._blocks.values(), missing_bytes, costs):
                return None
            return tuple(window)

    def statistics(self) -> PoolStatistics:
        """Return what the pool holds now."""
        with self._exclusive() as heap:
            largest_bytes, free_bytes = heap.largest_free_bytes, heap.free_bytes
            self._note_highest()
            return PoolStatistics(
                budget_bytes=self.budget_bytes,
                capacity_bytes=heap.capacity_bytes,
                current_bytes=heap.used_bytes,
                peak_bytes=self._peak_bytes,
                total_bytes=self._freed_bytes + self._used_bytes,
                requested_bytes=sum(b.requested_bytes for b in self._blocks.values()),
                allocations=self._frees + len(self._blocks),
                frees=self._frees,
                live_blocks=len(self._blocks),
                largest_free_bytes=largest_bytes,
                fragmentation=1 - largest_bytes / free_bytes if free_bytes else 0.0,
                reclaims=self._reclaims,
                reserved_bytes=self._reserved_bytes,
                outside_bytes=self._outside_bytes,
            )

    def start_meter(self) -> tuple[int, int]:
        """Begin to watch the highest use; give what this returns to `stop_meter`. They nest."""
        self.settle()
        self._note_highest()
        moved_out_bytes = self._moved_out_bytes
        outer_bytes = self._meter_bytes + moved_out_bytes
        self._meter_bytes = self._used_bytes
        return outer_bytes, self._used_bytes + moved_out_bytes

    def stop_meter(self, started: tuple[int, int]) -> int:
        """Return the bytes by which use was at most above the greater of then and now.

        As if nothing had been moved out or back meanwhile (`note_moved_out`).
        """
        self.settle()
        self._note_highest()
        outer_bytes, then_bytes = started
        moved_out_bytes = self._moved_out_bytes
        highest_bytes = self._meter_bytes + moved_out_bytes
        self._meter_bytes = max(outer_bytes, highest_bytes) - moved_out_bytes
        return max(0, highest_bytes - max(then_bytes, self._used_bytes + moved_out_bytes))

    def note_moved_out(self, nbytes: int) -> None:
        """Tell that the reclaimer freed so many bytes, or brought them back (below 0)."""
        self._note_highest()
        self._moved_out_bytes += nbytes
        self._meter_bytes -= nbytes

    def reset_peak(self) -> None:
        """Start the peak anew from the bytes in use now."""
        self.settle()
        self._note_highest()
        self._peak_bytes = self._used_bytes

    def validate(self) -> None:
        """Check the invariants; `InternalError` if one does not hold."""
        with self._exclusive() as heap:
            heap.validate()
            if heap.used_bytes != self._used_bytes:
                raise InternalError("the pool's account and the heap's disagree")
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

    def _note_highest(self) -> None:
        """Enter the highest use in the peak and the meter, and watch it anew."""
        # No call, so that no thread writes over what another one has entered.
        highest_bytes, self._highest_bytes = self._highest_bytes, self._used_bytes
        if highest_bytes > self._peak_bytes:
            self._peak_bytes = highest_bytes
        if highest_bytes > self._meter_bytes:
            self._meter_bytes = highest_bytes

    def _place_locked(self, block: Block, named_end: End | None) -> None:
        requested_bytes = block.requested_bytes
        block.block_bytes = (requested_bytes + _MASK) & _INVERSE or GRANULE_BYTES
        end = named_end or self._usual_end(requested_bytes)
        self._begin()
        if block.stream != self._last_stream:
            self._switch_stream(block.stream)
        if not self._try_place(block, end):
            self._place_after_reclaim(block, end)
        if named_end is None:
            self._make_ready(requested_bytes, block.block_bytes)

    def _place_after_reclaim(self, block: Block, end: End) -> None:
        def attempt() -> bool:
            return self._try_place(block, end)

        def attempt_anywhere() -> bool:
            low_area_bytes, self._low_area_bytes = self._low_area_bytes, 0
            try:
                return attempt()
            finally:
                self._low_area_bytes = low_area_bytes

        if not self._reclaim_until(attempt, block.requested_bytes) and not attempt_anywhere():
            raise self._out_of_memory(block.requested_bytes, block.block_bytes)

    def _make_room(self, nbytes: int) -> None:
        def attempt() -> bool:
            self._begin()
            return self._used_bytes + nbytes <= self._heap_limit_bytes

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
        return self._collect_and_attempt(attempt)

    def _collect_and_attempt(self, attempt: Callable[[], bool]) -> bool:
        if not gc.isenabled():
            return False
        is_retried = getattr(self._asker, "is_retrying", False)
        for generation in (1,) if is_retried else (1, 2):  # most garbage is young, and soon found
            gc.collect(generation)
            self.settle()
            if attempt():
                return True
        return False

    def _out_of_memory(self, requested_bytes: int, block_bytes: int) -> OutOfMemoryError:
        with self._exclusive() as heap:
            largest_bytes = heap.largest_free_bytes
        in_use_bytes = self._used_bytes + self.budget_bytes - self._heap_limit_bytes
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
