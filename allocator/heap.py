"""Place blocks in a linear space of offsets; no memory is touched.

Covers best fit, address order, coalescing and the search for the cheapest contiguous run. Does not
cover addresses, budgets, locks, threads, nor the fast path that does without a heap: the pool adds
them.

1. The blocks, live and free, tile the space without gap or overlap.
2. No two neighbouring blocks are both free.
3. `used_bytes` is exact at every moment between calls.

*Source*: best fit with address order and immediate coalescing are as in Wilson et al., "Dynamic
Storage Allocation: A Survey and Critical Review" (1995), sections 3.4 and 3.5; two ends as in their
"two-way" placement for long-lived objects.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from enum import Enum

from dynamemo.allocator.errors import InternalError
from dynamemo.allocator.window import HeapBlock, cheapest_window

__all__ = ["GRANULE_BYTES", "BlockHeap", "End"]

#: Unit of placement where no other is given.
GRANULE_BYTES = 512
#: A free block's sort key is ``block_bytes << _SHIFT | offset``, so offsets stay below 256 TiB.
_SHIFT = 48
_OFFSET_MASK = (1 << _SHIFT) - 1


class End(Enum):
    """The end of the space a block is placed towards."""

    #: Transient blocks: the low end.
    LOW = 0
    #: Long-lived blocks: the high end.
    HIGH = 1


class BlockHeap:
    """Best-fit allocator of offsets.

    Parameters
    ----------
    capacity_bytes : int
        Length of the space; rounded down to whole granules.
    granularity_bytes : int
        Every block's offset and length are multiples of it; a power of two.

    Raises
    ------
    ValueError
        If `granularity_bytes` is no power of two or the space is shorter than one granule.
    """

    __slots__ = (
        "_free_at",
        "_free_end",
        "_high_mark",
        "_inverse",
        "_keys",
        "_live",
        "_low_mark",
        "_mask",
        "capacity_bytes",
        "granularity_bytes",
        "used_bytes",
    )

    def __init__(self, capacity_bytes: int, *, granularity_bytes: int = GRANULE_BYTES) -> None:
        if granularity_bytes < 1 or granularity_bytes & (granularity_bytes - 1):
            raise ValueError(f"granularity_bytes is {granularity_bytes}, not a power of two")
        capacity_bytes -= capacity_bytes % granularity_bytes
        if not 0 < capacity_bytes <= _OFFSET_MASK:
            raise ValueError(f"capacity_bytes must be from {granularity_bytes} to {_OFFSET_MASK}")
        #: Length of the space in bytes.
        self.capacity_bytes = capacity_bytes
        #: Unit of placement in bytes.
        self.granularity_bytes = granularity_bytes
        #: Block bytes of live blocks.
        self.used_bytes = 0
        self._mask = granularity_bytes - 1
        self._inverse = -granularity_bytes
        self._live: dict[int, int] = {}  # offset -> block bytes
        self._free_at: dict[int, int] = {0: capacity_bytes}  # offset -> block bytes
        self._free_end: dict[int, int] = {capacity_bytes: 0}  # end -> offset
        self._keys: list[int] = [capacity_bytes << _SHIFT]
        # Between the marks no block has ever been.
        self._low_mark, self._high_mark = 0, capacity_bytes

    def block_bytes_for(self, requested_bytes: int) -> int:
        """Return the length of the block that a request gets, in bytes."""
        return (requested_bytes + self._mask) & self._inverse or self.granularity_bytes

    def allocate(self, requested_bytes: int, *, end: End = End.LOW, floor: int = 0) -> int | None:
        """Take a block: at the low end the best fit, at the high end the highest.

        Parameters
        ----------
        requested_bytes : int
            At least 0; 0 takes one granule.
        end : End
            Which free block is taken, and which side of it.
        floor : int
            Lowest offset that a block for the high end may get.

        Returns
        -------
        int or None
            The offset; None where no free run is long enough (nothing changed then).
        """
        block_bytes = self.block_bytes_for(requested_bytes)
        offset = self._find(block_bytes, end, floor)
        return None if offset is None else self._take(offset, block_bytes, end)

    def allocate_used(self, requested_bytes: int, *, end: End, floor: int = 0) -> int | None:
        """Do as `allocate`, but only where blocks have been before; None otherwise.

        Memory that was never touched takes no pages of a host.
        """
        block_bytes = self.block_bytes_for(requested_bytes)
        offset = self._find(block_bytes, end, floor)
        if offset is None:
            return None
        first = offset if end is End.LOW else offset + self._free_at[offset] - block_bytes
        if first < self._high_mark and first + block_bytes > self._low_mark:
            return None
        return self._take(offset, block_bytes, end)

    def free(self, offset: int) -> None:
        """Give a block back.

        Raises
        ------
        InternalError
            If no live block starts at `offset`; nothing changed then.
        """
        block_bytes = self._live.pop(offset, None)
        if block_bytes is None:
            raise InternalError(f"no live block at offset {offset}")
        self.used_bytes -= block_bytes
        self._merge(offset, block_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes of free blocks."""
        return self.capacity_bytes - self.used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Longest free run in bytes."""
        return self._keys[-1] >> _SHIFT if self._keys else 0

    @property
    def tail_free_bytes(self) -> int:
        """Free run at the very end in bytes, which a larger space would lengthen."""
        return self.capacity_bytes - self._free_end.get(self.capacity_bytes, self.capacity_bytes)

    def block_bytes(self, offset: int) -> int:
        """Return the length of the live block at `offset`, in bytes."""
        return self._live[offset]

    def blocks(self) -> Iterator[HeapBlock]:
        """Yield all blocks in address order."""
        free_at = self._free_at
        for offset in sorted([*self._live, *free_at]):
            block_bytes = free_at.get(offset)
            if block_bytes is None:
                yield HeapBlock(offset, self._live[offset], False)
            else:
                yield HeapBlock(offset, block_bytes, True)

    def cheapest_window(
        self, nbytes: int, costs: Mapping[int, float], *, floor: int = 0
    ) -> tuple[int, ...] | None:
        """Find the run of neighbouring blocks that is cheapest to make free.

        Parameters
        ----------
        nbytes : int
            The run's least length.
        costs : mapping of int to float
            For the offset of each live block that may be freed, the cost of freeing it, at least 0.
            Blocks that are missing, or infinitely dear, may not be touched.
        floor : int
            Blocks that begin below this offset are left out.

        Returns
        -------
        tuple of int or None
            Offsets to free, in address order (empty where a free run is long enough already); None
            where no run is long enough. Among equally cheap runs the one that frees the fewest
            bytes, then the lowest.
        """
        free_at, live = self._free_at, self._live
        offered = [offset for offset in costs if offset in live]
        blocks = [
            HeapBlock(offset, free_at[offset], True)
            if offset in free_at
            else HeapBlock(offset, live[offset], False)
            for offset in sorted([*offered, *free_at])
            if offset >= floor
        ]
        return cheapest_window(blocks, nbytes, costs)

    def rebuild(self, live: Mapping[int, int]) -> None:
        """Make everything anew from the live blocks, after an operation was interrupted half-way.

        Parameters
        ----------
        live : mapping of int to int
            Block bytes by offset: the truth.
        """
        self._live = dict(live)
        self._free_at, self._free_end, self._keys = {}, {}, []
        position = 0
        for offset in sorted(live):
            if offset > position:
                self._add_free(position, offset - position)
            position = offset + live[offset]
        if position < self.capacity_bytes:
            self._add_free(position, self.capacity_bytes - position)
        self.used_bytes = sum(live.values())

    def validate(self) -> None:
        """Check the invariants.

        Raises
        ------
        InternalError
            If one does not hold.
        """
        position = used_bytes = 0
        was_free = False
        for block in self.blocks():
            if block.offset != position:
                raise InternalError(f"block at {block.offset}, expected one at {position}")
            if block.is_free and was_free:
                raise InternalError(f"free neighbours at {block.offset} are not merged")
            used_bytes += 0 if block.is_free else block.block_bytes
            position += block.block_bytes
            was_free = block.is_free
        if position != self.capacity_bytes:
            raise InternalError(f"blocks end at {position} of {self.capacity_bytes}")
        if used_bytes != self.used_bytes:
            raise InternalError(f"{self.used_bytes} bytes accounted, {used_bytes} used")
        keys = sorted(size << _SHIFT | offset for offset, size in self._free_at.items())
        ends = {offset + size: offset for offset, size in self._free_at.items()}
        if keys != self._keys or ends != self._free_end:
            raise InternalError("the indexes of free blocks disagree")

    def _find(self, block_bytes: int, end: End, floor: int) -> int | None:
        """Return the offset of the free run to take from."""
        keys = self._keys
        position = bisect_left(keys, block_bytes << _SHIFT)
        if position == len(keys):
            return None
        if end is End.LOW:
            return keys[position] & _OFFSET_MASK
        # Not the best fit but the highest: what stays long must not end up between the rest.
        offset = max(key & _OFFSET_MASK for key in keys[position:])
        return offset if offset + self._free_at[offset] - block_bytes >= floor else None

    def _take(self, offset: int, block_bytes: int, end: End) -> int:
        """Cut a block off the free run at `offset`; return the block's offset."""
        keys = self._keys
        free_bytes = self._free_at.pop(offset)
        del self._free_end[offset + free_bytes]
        del keys[bisect_left(keys, free_bytes << _SHIFT | offset)]
        left_bytes = free_bytes - block_bytes
        if end is End.HIGH:
            if left_bytes:
                self._add_free(offset, left_bytes)
            offset += left_bytes
            if offset + block_bytes > self._low_mark:
                self._high_mark = min(self._high_mark, max(offset, self._low_mark))
        else:
            if left_bytes:
                self._add_free(offset + block_bytes, left_bytes)
            if offset < self._high_mark:
                self._low_mark = max(self._low_mark, min(offset + block_bytes, self._high_mark))
        self._live[offset] = block_bytes
        self.used_bytes += block_bytes
        return offset

    def _merge(self, offset: int, block_bytes: int) -> None:
        keys = self._keys
        before = self._free_end.pop(offset, None)
        if before is not None:
            before_bytes = self._free_at.pop(before)
            del keys[bisect_left(keys, before_bytes << _SHIFT | before)]
            offset, block_bytes = before, block_bytes + before_bytes
        after = offset + block_bytes
        after_bytes = self._free_at.pop(after, None)
        if after_bytes is not None:
            del keys[bisect_left(keys, after_bytes << _SHIFT | after)]
            del self._free_end[after + after_bytes]
            block_bytes += after_bytes
        self._add_free(offset, block_bytes)

    def _add_free(self, offset: int, block_bytes: int) -> None:
        self._free_at[offset] = block_bytes
        self._free_end[offset + block_bytes] = offset
        insort(self._keys, block_bytes << _SHIFT | offset)
