"""Describe what a pool gives out.

Covers the block and what a finalizer may hand over instead of one. Does not place anything.

1. A block object serves once: the next owner of its bytes gets another one, so that a late or
   second free of it harms nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from dynamemo.allocator.heap import End

if TYPE_CHECKING:
    from dynamemo.allocator.pool import Pool

__all__ = ["BLOCK_SLOTS", "UNPLACED", "Block", "CountedBlock", "LateFree", "Parking", "PlainBlock"]

#: Where blocks of one length wait at one end: (addresses, block bytes, lowest address that may be
#: taken, end). The list begins with a 0, below which there is nothing to take, and is empty once it
#: is no longer in force.
Parking: TypeAlias = tuple[list[int], int, int, End]
#: What has no address that could be parked: it is not placed yet, free again, or not in the arena.
UNPLACED: Parking = ([], 0, 0, End.LOW)

#: What a class derived from `Block` has in its ``__slots__``.
BLOCK_SLOTS = (
    "address",
    "block_bytes",
    "owner",
    "parking",
    "pool",
    "requested_bytes",
    "stream",
)
_NONE: tuple[str, ...] = ()  # by a name, or mypy would not let the slots of derived classes be set


class Block:
    """A stretch of a pool's arena that somebody owns.

    Derived classes have the slots, so that one may be a weak reference too. Whoever makes one sets
    `address` to 0 and `parking` to `UNPLACED`; `Pool.place` does the rest.
    """

    __slots__ = _NONE

    #: Address of the first byte; 0 before it is placed.
    address: int
    #: Bytes asked for.
    requested_bytes: int
    #: Bytes taken, whole granules.
    block_bytes: int
    #: The pool it came from.
    pool: Pool
    #: Handle of the stream that used it last; set it before freeing where that changed.
    stream: int
    #: Free for the pool's user (the runtime notes its storage here).
    owner: object
    #: The pool's own: where its address goes when it is freed. Only a live block has a place there.
    parking: Parking

    @property
    def offset(self) -> int:
        """First byte, relative to the arena."""
        return self.address - self.pool.address

    def __repr__(self) -> str:
        return f"<Block of {self.block_bytes:,} bytes at {self.address:#x}>"


class PlainBlock(Block):
    """A block that is given back by calling `Pool.free` or `Pool.free_later`."""

    __slots__ = BLOCK_SLOTS


class LateFree(Protocol):
    """Something a finalizer hands over, to be freed at the pool's next operation."""

    #: Where its memory begins; 0 where it has none any more.
    address: int

    @property
    def parking(self) -> Parking:
        """`UNPLACED`."""

    def release(self, pool: Pool) -> None:
        """Free it. Called with the pool locked; a second call does nothing."""


class CountedBlock(Protocol):
    """A small block that lives outside the arena and counts against the budget."""

    #: Bytes that count; 0 before and after.
    counted_bytes: int
